//! `append`: one event from the arguments, or many from standard input, in one transaction.

use std::io::{BufRead, Read};

use pg_outbox::{NewEvent, Outbox};
use serde_json::{Map, Value};
use uuid::Uuid;

use super::args::AppendArgs;
use super::database::{Target, describe};
use super::failure::{Code, Failure};
use super::{output, values};

/// Events that are sent at a time.
const CHUNK: usize = 500;
/// Bytes of input that are gathered before they are sent.
const CHUNK_BYTES: usize = 8 * 1024 * 1024;

pub(crate) fn append(target: &Target, args: &AppendArgs) -> Result<Code, Failure> {
    let outbox = Outbox::in_schema(target.schema()?);
    // Before connecting: what is wrong with the arguments needs no database.
    let single = if args.stdin { None } else { Some(event(args)?) };
    let mut client = target.connect()?;
    let lost = |error: postgres::Error| Failure::failed(format!("appending: {}", describe(&error)));
    let mut transaction = client.transaction().map_err(lost)?;
    let mut ids = Vec::new();
    match single {
        Some(event) => ids
            .push(outbox.append(&mut transaction, &event).map_err(|error| missing(target, error))?),
        None => {
            let mut lines = Lines::new(std::io::stdin().lock());
            while let Some(events) = lines.next_chunk()? {
                ids.extend(
                    outbox
                        .append_all(&mut transaction, &events)
                        .map_err(|error| missing(target, error))?,
                );
            }
        }
    }
    if args.dry_run {
        transaction.rollback().map_err(lost)?;
        let appended = output::count(ids.len() as u64);
        output::print(&format!("would have appended {appended}; nothing was changed\n"))?;
        return Ok(Code::Ok);
    }
    transaction.commit().map_err(lost)?;
    output::print(&ids.iter().map(|id: &Uuid| format!("{id}\n")).collect::<String>())?;
    Ok(Code::Ok)
}

/// A missing function is a missing outbox.
fn missing(target: &Target, error: pg_outbox::Error) -> Failure {
    match error.sqlstate() {
        Some("3F000" | "42P01" | "42883") => Failure::failed(format!(
            "there is no outbox in schema {:?} of this database; create it with `pg-outbox migrate`",
            target.connection.schema
        )),
        _ => error.into(),
    }
}

fn event(args: &AppendArgs) -> Result<NewEvent, Failure> {
    let (Some(aggregate_type), Some(aggregate_id), Some(event_type)) =
        (&args.aggregate_type, &args.aggregate_id, &args.event_type)
    else {
        return Err(Failure::usage(
            "an event has an aggregate type, an aggregate id and an event type",
        ));
    };
    let mut event = NewEvent::new(aggregate_type, aggregate_id, event_type, payload(args)?)
        .content_type(&args.content_type);
    for (name, value) in &args.header {
        event = event.header(name, value);
    }
    if let Some(id) = args.event_id {
        event = event.event_id(id);
    }
    if let Some(time) = args.not_before {
        event = event.not_before(time);
    }
    event.check()?;
    Ok(event)
}

fn payload(args: &AppendArgs) -> Result<Vec<u8>, Failure> {
    let Some(file) = &args.payload_file else {
        let text = args.payload.as_ref().ok_or_else(|| {
            Failure::usage("the payload is missing; give it after the event type (it may be empty: ''), or with --payload-file")
        })?;
        return Ok(text.clone().into_bytes());
    };
    // One byte more than is allowed, so that the check can tell.
    let most = pg_outbox::MAX_PAYLOAD_BYTES as u64 + 1;
    let mut bytes = Vec::new();
    let read = if file.as_os_str() == "-" {
        std::io::stdin().lock().take(most).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(most).read_to_end(&mut bytes))
    };
    read.map_err(|error| {
        Failure::usage(format!("the payload in {} cannot be read: {error}", file.display()))
    })?;
    Ok(bytes)
}

/// Events from JSON lines. An error names the line.
struct Lines<R> {
    input: R,
    number: usize,
}

impl<R: BufRead> Lines<R> {
    fn new(input: R) -> Self {
        Self { input, number: 0 }
    }

    fn next_chunk(&mut self) -> Result<Option<Vec<NewEvent>>, Failure> {
        let (mut events, mut bytes, mut line) = (Vec::new(), 0, Vec::new());
        while events.len() < CHUNK && bytes < CHUNK_BYTES {
            line.clear();
            let read = self.input.read_until(b'\n', &mut line);
            let read = read.map_err(|error| Failure::failed(format!("standard input: {error}")))?;
            if read == 0 {
                break;
            }
            self.number += 1;
            bytes += read;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let event = from_json(&line);
            events.push(event.map_err(|why| {
                Failure::usage(format!("line {}: {why}; nothing was appended", self.number))
            })?);
        }
        Ok((!events.is_empty()).then_some(events))
    }
}

fn from_json(line: &[u8]) -> Result<NewEvent, String> {
    let value: Value =
        serde_json::from_slice(line).map_err(|error| format!("this is no JSON: {error}"))?;
    let Value::Object(mut fields) = value else { return Err("this is no JSON object".into()) };
    let mut required = |name: &str| text(&mut fields, name)?.ok_or(format!("{name} is missing"));
    let (aggregate_type, aggregate_id, event_type) =
        (required("aggregate_type")?, required("aggregate_id")?, required("event_type")?);
    let payload = match (text(&mut fields, "payload")?, text(&mut fields, "payload_hex")?) {
        (Some(text), None) => text.into_bytes(),
        (None, Some(hex)) => output::unhex(&hex)
            .ok_or("payload_hex has something else than pairs of hexadecimal digits")?,
        (Some(_), Some(_)) => return Err("payload and payload_hex exclude each other".into()),
        (None, None) => return Err("payload is missing".into()),
    };
    let mut event = NewEvent::new(aggregate_type, aggregate_id, event_type, payload);
    if let Some(content_type) = text(&mut fields, "content_type")? {
        event = event.content_type(content_type);
    }
    if let Some(id) = text(&mut fields, "event_id")? {
        event = event.event_id(id.parse().map_err(|_| "event_id is no UUID")?);
    }
    if let Some(time) = text(&mut fields, "not_before")? {
        event =
            event.not_before(values::time(&time).map_err(|form| format!("not_before: {form}"))?);
    }
    if let Some(headers) = fields.remove("headers") {
        for (name, value) in headers.as_object().ok_or("headers is no object")? {
            let value =
                value.as_str().ok_or_else(|| format!("the value of header {name:?} is no text"))?;
            event = event.header(name, value);
        }
    }
    if let Some(name) = fields.keys().next() {
        return Err(format!("the field {name:?} is not known"));
    }
    event.check().map_err(|error| error.to_string())?;
    Ok(event)
}

/// Takes a field of text; `None` where it is missing or null.
fn text(fields: &mut Map<String, Value>, name: &str) -> Result<Option<String>, String> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => {
            Err(format!("{name} is no text; JSON goes into a string, so that its bytes are kept"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_events() {
        let line = br#"{"aggregate_type":"order","aggregate_id":"1","event_type":"placed","payload":"{\"b\":1.0}",
            "headers":{"a":"b"},"event_id":"01936f5e-8a2b-7c3d-9e4f-5a6b7c8d9e0f","content_type":"text/plain"}"#;
        let expected = NewEvent::new("order", "1", "placed", r#"{"b":1.0}"#)
            .header("a", "b")
            .content_type("text/plain")
            .event_id(Uuid::from_u128(0x01936f5e_8a2b_7c3d_9e4f_5a6b7c8d9e0f));
        assert_eq!(from_json(line), Ok(expected));
    }

    #[test]
    fn what_is_wrong_with_a_line_is_named() {
        for (line, expected) in [
            ("", "this is no JSON"),
            ("[]", "no JSON object"),
            ("{}", "aggregate_type is missing"),
            (r#"{"aggregate_type":"a","aggregate_id":"b","event_type":"c"}"#, "payload is missing"),
            (
                r#"{"aggregate_type":"a","aggregate_id":"b","event_type":"c","payload":{}}"#,
                "payload is no text",
            ),
            (
                r#"{"aggregate_type":"a","aggregate_id":"b","event_type":"c","payload_hex":"f"}"#,
                "payload_hex has",
            ),
            (
                r#"{"aggregate_type":"a","aggregate_id":"b","event_type":"c","payload":"","x":1}"#,
                "field \"x\" is not known",
            ),
            (
                r#"{"aggregate_type":"a","aggregate_id":"","event_type":"c","payload":""}"#,
                "aggregate id is empty",
            ),
        ] {
            let text = from_json(line.as_bytes()).expect_err(line);
            assert!(text.contains(expected), "{line}: {text}");
        }
        let mut lines = Lines::new(b"\n{}\n".as_slice());
        assert!(lines.next_chunk().expect_err("line 2").message.starts_with("line 2: "));
    }
}
