//! The recorder: what really arrived in the queue, each message once.
//!
//! The queue is a stream: a log that keeps every message under an offset. The recorder reads on from the offset that it
//! has, over as many connections as it takes, so a message that is handed to it twice is not taken for two, and
//! nothing that the broker has lets it lose one. Only a few numbers of each message are kept.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use futures_lite::StreamExt;
use futures_lite::future::block_on;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Confirmation, Connection, ConnectionProperties};
use uuid::Uuid;

use super::history::{Arrival, Clock, Hash, content};
use crate::common::{Rabbit, eventually};

pub const EXCHANGE: &str = "chaos";
const QUEUE: &str = "arrived";
/// What is routed to the queue; nothing else is.
const BINDING: &str = "chaos.#";
const LAST: &str = "the end";
/// Each message is acknowledged once it is recorded, and so many may be on their way.
const PREFETCH: u16 = 500;

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

/// Where messages go: an exchange, and a stream that gets all of what can be routed.
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
                if let Err(error) = block_on(recording.record(&mut next)) {
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
        while let Err(error) = block_on(self.send_last()) {
            assert!(Instant::now() < deadline, "the last message cannot be sent: {error}");
            thread::sleep(Duration::from_millis(200));
        }
        let has_ended = || self.state.has_ended.load(Ordering::Relaxed);
        eventually("the recorder has read everything", patience, has_ended);
        let broken = std::mem::take(&mut *self.state.broken.lock().expect("no panic there"));
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

    /// Reads from the offset on until the connection is lost or the last message has come.
    async fn record(&self, next: &mut i64) -> lapin::Result<()> {
        let connection = Connection::connect(&self.url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
        let mut from = FieldTable::default();
        from.insert("x-stream-offset".into(), AMQPValue::LongLongInt(*next));
        let (queue, tag) = (ShortString::from(QUEUE), ShortString::from("recorder"));
        let mut consumer =
            channel.basic_consume(queue, tag, BasicConsumeOptions::default(), from).await?;
        while let Some(delivery) = consumer.next().await {
            let delivery = delivery?;
            let offset = offset(&delivery);
            if offset >= *next {
                *next = offset + 1;
                self.take(&delivery);
            }
            delivery.ack(BasicAckOptions::default()).await?;
            if self.state.has_ended.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(())
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
