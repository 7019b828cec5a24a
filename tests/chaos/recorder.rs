//! The recorder: what really arrived in the queue, each message once.
//!
//! The queue is a stream: a log that keeps every message under an offset. The recorder reads on from the offset that it
//! has, over as many connections as it takes, so a message that is handed to it twice is not taken for two, and
//! nothing that the broker has lets it lose one. Only a few numbers of each message are kept.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use futures_lite::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Confirmation, Connection, ConnectionProperties};
use uuid::Uuid;

use super::history::{Arrival, Clock, Hash, content};
use crate::common::Rabbit;

pub const EXCHANGE: &str = "chaos";
const QUEUE: &str = "arrived";
/// What is routed to the queue; nothing else is.
const BINDING: &str = "chaos.#";
const LAST: &str = "the end";
/// Each message is acknowledged once it is recorded, and so many may be on their way.
const PREFETCH: u16 = 500;

/// A connection that says nothing for so long is given up for another.
const SILENCE: Duration = Duration::from_secs(8);

/// Headers of the relay that may change from one delivery to the next.
const CHANGING: [&str; 2] = ["outbox-attempt", "outbox-possible-duplicate"];

#[derive(Clone)]
pub struct Recorder {
    url: String,
    clock: Clock,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    arrivals: Mutex<Vec<Arrival>>,
    /// Milliseconds of the run; the longest time without an arrival so far, and when the last one came.
    longest_gap: AtomicU64,
    connections: AtomicU64,
    has_ended: AtomicBool,
    broken: Mutex<Vec<String>>,
}

/// Where messages go: an exchange, and a stream that gets everything.
pub fn declare(rabbit: &Rabbit) {
    rabbit.declare_exchange(EXCHANGE, "topic");
    rabbit.declare_queue(QUEUE, serde_json::json!({"x-queue-type": "stream"}));
    rabbit.bind(EXCHANGE, QUEUE, BINDING);
}

impl Recorder {
    pub fn start(rabbit: &Rabbit, clock: Clock) -> Self {
        let recorder = Self { url: rabbit.url(), clock, state: Arc::default() };
        let recording = recorder.clone();
        thread::spawn(move || {
            let mut next = 0;
            while !recording.state.has_ended.load(Ordering::Relaxed) {
                recording.state.connections.fetch_add(1, Ordering::Relaxed);
                if let Err(error) = recording.record(&mut next) {
                    log::info!("the recorder connects again: {error}");
                }
                thread::sleep(Duration::from_millis(100));
            }
        });
        recorder
    }

    pub fn arrived(&self) -> usize {
        self.arrivals().len()
    }

    pub fn longest_gap(&self) -> Duration {
        Duration::from_millis(self.state.longest_gap.load(Ordering::Relaxed))
    }

    pub fn connections(&self) -> u64 {
        self.state.connections.load(Ordering::Relaxed)
    }

    fn arrivals(&self) -> MutexGuard<'_, Vec<Arrival>> {
        self.state.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a last message of its own, waits until it comes back, and returns everything before it, with what was
    /// strange about it.
    pub fn finish(&self, patience: Duration) -> (Vec<Arrival>, Vec<String>) {
        let deadline = Instant::now() + patience;
        let (mut is_sent, mut broken) = (false, Vec::new());
        while !self.state.has_ended.load(Ordering::Relaxed) {
            is_sent = is_sent || within(SILENCE, self.send_last()).is_ok_and(|sent| sent.is_ok());
            if Instant::now() >= deadline {
                broken.push(format!("the queue was not read to its end within {patience:?}"));
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        broken.append(&mut self.state.broken.lock().expect("no panic there"));
        (std::mem::take(&mut *self.arrivals()), broken)
    }

    async fn send_last(&self) -> Result<(), Box<dyn std::error::Error>> {
        let connection = Connection::connect(&self.url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let properties =
            BasicProperties::default().with_message_id(LAST.into()).with_delivery_mode(2);
        let confirm = channel
            .basic_publish(
                EXCHANGE.into(),
                BINDING.replace('#', "end").into(),
                options,
                b"",
                properties,
            )
            .await?
            .await?;
        if matches!(confirm, Confirmation::Ack(None)) { Ok(()) } else { Err("no confirm".into()) }
    }

    /// Reads from the offset on until the connection is lost or silent, or the last message has come.
    fn record(&self, next: &mut i64) -> Result<(), Box<dyn std::error::Error>> {
        let opening = async {
            let connection =
                Connection::connect(&self.url, ConnectionProperties::default()).await?;
            let channel = connection.create_channel().await?;
            channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
            let mut from = FieldTable::default();
            from.insert("x-stream-offset".into(), AMQPValue::LongLongInt(*next));
            let (queue, tag) = (ShortString::from(QUEUE), ShortString::from("recorder"));
            let options = BasicConsumeOptions::default();
            let consumer = channel.basic_consume(queue, tag, options, from).await?;
            lapin::Result::Ok((connection, consumer))
        };
        let (connection, mut consumer) = within(SILENCE, opening)??;
        while !self.state.has_ended.load(Ordering::Relaxed) {
            // A stream that was just recovered may take a consumer and never send it anything.
            let Ok(delivery) = within(SILENCE, consumer.next()) else { break };
            let delivery = delivery.ok_or("the consumer was cancelled")??;
            let offset = offset(&delivery);
            if offset >= *next {
                *next = offset + 1;
                self.take(&delivery);
            }
            within(SILENCE, delivery.ack(BasicAckOptions::default()))??;
        }
        Ok(within(SILENCE, connection.close(200, "".into()))??)
    }

    fn take(&self, delivery: &Delivery) {
        if delivery.properties.message_id().as_ref().is_some_and(|id| id.as_str() == LAST) {
            self.state.has_ended.store(true, Ordering::Relaxed);
            return;
        }
        match arrival(delivery, self.clock.now()) {
            Ok(arrival) => {
                let mut arrivals = self.arrivals();
                let gap = arrival.at - arrivals.last().map_or(0, |last| last.at);
                self.state.longest_gap.fetch_max(gap, Ordering::Relaxed);
                arrivals.push(arrival);
            }
            Err(strange) => {
                let mut broken = self.state.broken.lock().expect("no panic there");
                if broken.len() < 20 {
                    broken.push(format!("a strange message arrived: {strange}"));
                }
            }
        }
    }
}

/// Drives a future on this thread, for so long at most.
fn within<T>(time: Duration, future: impl Future<Output = T>) -> Result<T, &'static str> {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let (waker, deadline) =
        (Waker::from(Arc::new(Unpark(thread::current()))), Instant::now() + time);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Ok(value);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("no answer in time");
        }
        thread::park_timeout(left);
    }
}

/// The stream's number of a message. It comes as a header, beside those of the publisher.
fn offset(delivery: &Delivery) -> i64 {
    let headers = delivery.properties.headers().as_ref();
    match headers.and_then(|headers| headers.inner().get("x-stream-offset")) {
        Some(AMQPValue::LongLongInt(offset)) => *offset,
        other => panic!("a stream's message has an offset, and not {other:?}"),
    }
}

/// What is kept of a message. The error says what a message must have and this one has not.
fn arrival(delivery: &Delivery, at: u64) -> Result<Arrival, String> {
    let properties = &delivery.properties;
    let text = |value: &Option<ShortString>| value.as_ref().map(ToString::to_string);
    let mut headers: Vec<(&str, &str)> = Vec::new();
    for (name, value) in properties.headers().as_ref().ok_or("no headers")?.inner() {
        match value {
            AMQPValue::LongString(value) => {
                let value = std::str::from_utf8(value.as_bytes()).map_err(|e| e.to_string())?;
                headers.push((name.as_str(), value));
            }
            _ if name.as_str() == "x-stream-offset" => {}
            other => return Err(format!("header {name} is {other:?}")),
        }
    }
    headers.sort_unstable();
    let header = |wanted: &str| headers.iter().find(|(name, _)| *name == wanted).map(|(_, v)| *v);
    let message_id = text(properties.message_id()).ok_or("no message id")?;
    if header("outbox-event-id") != Some(&message_id) {
        return Err(format!("message id {message_id} is not the event id"));
    }
    let number = |name| header(name).map(|text| text.parse::<u32>().map_err(|e| e.to_string()));
    let claims = match (number("chaos-aggregate"), number("chaos-sequence")) {
        (Some(aggregate), Some(sequence)) => Some((aggregate?, sequence?)),
        _ => None,
    };
    let is_own = |name: &str| name.starts_with("outbox-");
    let content = content(
        &text(properties.kind()).ok_or("no type")?,
        &text(properties.content_type()).ok_or("no content type")?,
        headers.iter().copied().filter(|(name, _)| !is_own(name)),
        &delivery.data,
    );
    let fixed = headers.iter().filter(|(name, _)| is_own(name) && !CHANGING.contains(name));
    let envelope = fixed
        .fold(Hash::new(), |hash, (name, value)| hash.part(name.as_bytes()).part(value.as_bytes()));
    Ok(Arrival {
        event_id: message_id.parse::<Uuid>().map_err(|error| error.to_string())?.as_u128(),
        claims,
        content,
        envelope: envelope.value(),
        possible_duplicate: header("outbox-possible-duplicate") == Some("true"),
        at,
    })
}
