//! One JSON line an event on standard output, for trials and for pipes.

use std::io::{self, Write};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::{Outcomes, Publisher};
use crate::event::{Event, rfc3339};
use crate::policy::PublishError;

/// Writes JSON lines. An event is confirmed when its wave was flushed; a closed pipe or a full disk is the broker's
/// trouble, so the relay pauses and no event is lost.
///
/// The payload stands in `payload` as text where it is UTF-8, so that no number or key order is changed; otherwise
/// in `payload_hex`.
#[derive(Debug)]
pub struct StdoutPublisher<W = io::Stdout>(W);

impl StdoutPublisher {
    /// Writes to this process's standard output.
    pub fn new() -> Self {
        Self(io::stdout())
    }
}

impl Default for StdoutPublisher {
    fn default() -> Self {
        Self::new()
    }
}

impl<W: Write + Send> StdoutPublisher<W> {
    /// Writes to something else.
    pub fn to(writer: W) -> Self {
        Self(writer)
    }
}

impl<W: Write + Send> Publisher for StdoutPublisher<W> {
    fn publish(&mut self, wave: &[Event], _deadline: Instant, outcomes: &mut Outcomes) {
        // The whole wave in one write, so that lines of two workers never mix.
        let mut lines = Vec::new();
        for event in wave {
            lines.extend_from_slice(line(event).to_string().as_bytes());
            lines.push(b'\n');
        }
        match self.0.write_all(&lines).and_then(|()| self.0.flush()) {
            Ok(()) => (0..wave.len()).for_each(|index| outcomes.published(index)),
            Err(error) => outcomes.fail_unset(
                &PublishError::transient(format!("standard output: {error}")).broker().in_doubt(),
            ),
        }
    }
}

fn line(event: &Event) -> Value {
    let headers: Map<_, _> =
        event.headers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let mut line = json!({
        "id": event.id,
        "event_id": event.event_id.to_string(),
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "event_type": event.event_type,
        "content_type": event.content_type,
        "created_at": rfc3339(event.created_at),
        "attempt": event.attempt,
        "possible_duplicate": event.possible_duplicate,
        "headers": headers,
    });
    match std::str::from_utf8(&event.payload) {
        Ok(text) => line["payload"] = json!(text),
        Err(_) => {
            line["payload_hex"] =
                json!(event.payload.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish<W: Write + Send>(writer: W, wave: &[Event]) -> (StdoutPublisher<W>, Outcomes) {
        let mut publisher = StdoutPublisher::to(writer);
        let mut outcomes = Outcomes::new(wave.len());
        publisher.publish(wave, Instant::now(), &mut outcomes);
        (publisher, outcomes)
    }

    #[test]
    fn a_line_an_event_with_the_payload_untouched() {
        let text = r#"{"b":1.0, "a":820982911946154508}"#;
        let wave = [
            Event::for_test(1, "a\u{2028}", "t", text.as_bytes()),
            Event::for_test(2, "b", "t", b"\xff\0"),
        ];
        let (publisher, outcomes) = publish(Vec::new(), &wave);
        let lines: Vec<Value> = String::from_utf8(publisher.0)
            .expect("UTF-8")
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["payload"], text);
        assert_eq!(lines[1]["payload_hex"], "ff00");
        assert!(outcomes.get(1).is_some_and(Result::is_ok));
    }

    #[test]
    fn a_closed_pipe_is_the_brokers_trouble() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (_, outcomes) = publish(Closed, &[Event::for_test(1, "a", "t", b"")]);
        let error = outcomes.get(0).cloned().expect("an outcome").expect_err("not published");
        assert_eq!(error.kind(), crate::FailureKind::Transient);
        assert_eq!(error.scope(), crate::FailureScope::Broker);
    }
}
