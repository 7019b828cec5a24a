//! Events in flight: handed to the channel one after the other, answered in any order.
//!
//! A confirm says less than it seems: the broker confirms an unroutable event too, after sending it back. The client
//! library hangs whatever came back on the *next* confirm, which may be that of another event, so what came back is
//! matched here by its message id, over the whole flight.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, UNIX_EPOCH};

use lapin::message::BasicReturnMessage;
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, PublisherConfirm};

use super::config::{MAX_SHORT_STRING_BYTES, RabbitMqConfig};
use super::connection::{Halt, Link, until};
use crate::event::Event;
use crate::policy::PublishError;

/// How long confirms are awaited after the broker has blocked the connection. It still answers what it has read.
const AFTER_BLOCK: Duration = Duration::from_millis(250);

/// AMQP's persistent delivery mode.
const PERSISTENT: u8 = 2;

/// One event in flight.
pub(super) struct Slot {
    /// Its place in the wave.
    pub(super) index: usize,
    pub(super) key: String,
    /// Whether it was given to the channel, so that the broker may have it.
    pub(super) handed: bool,
    confirm: Option<PublisherConfirm>,
    /// What the broker or the end of the channel said; `None` if neither came in time.
    pub(super) answer: Option<lapin::Result<Confirmation>>,
}

/// A flight that has ended.
pub(super) struct Flight {
    pub(super) slots: Vec<Slot>,
    pub(super) halt: Halt,
}

/// Sends these events of the wave and waits for what becomes of them.
pub(super) fn fly(
    link: &mut Link,
    config: &RabbitMqConfig,
    wave: &[Event],
    batch: &[usize],
    deadline: Instant,
) -> Flight {
    let slot = |&index: &usize| {
        let key = config.routing_key.of(&wave[index]);
        Slot { index, key, handed: false, confirm: None, answer: None }
    };
    let mut slots: Vec<_> = batch.iter().map(slot).collect();
    let channel = link.channel.clone();
    let work = async {
        send(&channel, config, wave, &mut slots).await;
        collect(&mut slots).await;
    };
    let halt = link.drive(work, deadline);
    if halt == Halt::Blocked {
        until(deadline.min(Instant::now() + AFTER_BLOCK), collect(&mut slots));
    }
    sweep(&mut slots);
    Flight { slots, halt }
}

async fn send(channel: &Channel, config: &RabbitMqConfig, wave: &[Event], slots: &mut [Slot]) {
    let options = BasicPublishOptions { mandatory: config.mandatory, immediate: false };
    for slot in slots {
        let event = &wave[slot.index];
        let (exchange, key) = (config.exchange.as_str().into(), slot.key.as_str().into());
        slot.handed = true;
        match channel.basic_publish(exchange, key, options, &event.payload, properties(event)).await
        {
            Ok(confirm) => slot.confirm = Some(confirm),
            Err(error) => {
                slot.answer = Some(Err(error));
                return;
            }
        }
    }
}

async fn collect(slots: &mut [Slot]) {
    for slot in slots {
        if let Some(confirm) = &mut slot.confirm {
            slot.answer = Some(confirm.await);
            slot.confirm = None;
        }
    }
}

/// Takes every answer that is there already. Without it, an event that came back could be missed although the confirm
/// that carries it has arrived.
fn sweep(slots: &mut [Slot]) {
    let mut context = Context::from_waker(Waker::noop());
    for slot in slots {
        if let Some(confirm) = &mut slot.confirm
            && let Poll::Ready(answer) = Pin::new(confirm).poll(&mut context)
        {
            slot.answer = Some(answer);
            slot.confirm = None;
        }
    }
}

impl Flight {
    /// What came back, by message id.
    pub(super) fn returned(&self) -> HashMap<String, (u16, String)> {
        let carried = |slot: &Slot| {
            let message = carried(slot.answer.as_ref()?.as_ref().ok()?)?;
            let id = message.delivery.properties.message_id().as_ref()?.to_string();
            Some((id, (message.reply_code, message.reply_text.to_string())))
        };
        self.slots.iter().filter_map(carried).collect()
    }

    /// Whether everything that was handed over has the broker's own answer. Only then is the list of what came back
    /// known to be whole.
    pub(super) fn is_complete(&self) -> bool {
        self.slots.iter().all(|slot| !slot.handed || matches!(slot.answer, Some(Ok(_))))
    }

    /// The errors that ended it.
    pub(super) fn errors(&self) -> impl Iterator<Item = &lapin::Error> {
        self.slots.iter().filter_map(|slot| slot.answer.as_ref()?.as_ref().err())
    }
}

/// What a confirm carries: an event that came back, its own or another's.
pub(super) fn carried(confirmation: &Confirmation) -> Option<&BasicReturnMessage> {
    match confirmation {
        Confirmation::Ack(message) | Confirmation::Nack(message) => message.as_ref(),
        Confirmation::NotRequested => None,
    }
}

/// Checks what AMQP cannot carry. A longer routing key must not be cut or wrapped: it would go elsewhere.
pub(super) fn check(config: &RabbitMqConfig, event: &Event) -> Result<(), PublishError> {
    let key = config.routing_key.of(event);
    let names = [
        ("routing key", &key),
        ("event type", &event.event_type),
        ("content type", &event.content_type),
    ];
    let headers = event.headers.keys().map(|name| ("header name", name));
    for (what, value) in names.into_iter().chain(headers) {
        if value.len() > MAX_SHORT_STRING_BYTES {
            return Err(PublishError::permanent(format!(
                "the {what} has {} bytes; AMQP carries at most {MAX_SHORT_STRING_BYTES}",
                value.len()
            )));
        }
    }
    Ok(())
}

/// Checks that the event's headers fit a frame, which is as much as AMQP can carry of them.
pub(super) fn check_frame(event: &Event, frame_max: usize) -> Result<(), PublishError> {
    // Frame 8, content header 14, table 4, timestamp 8, mode 1, message id 37, two short strings 2.
    let fixed = 74 + event.content_type.len() + event.event_type.len();
    // A name has 1 byte of length, a value 1 of type and 4 of length.
    let headers = event
        .message_headers()
        .iter()
        .map(|(name, value)| name.len() + value.len() + 6)
        .sum::<usize>();
    let size = fixed + headers;
    if size > frame_max {
        return Err(PublishError::permanent(format!(
            "the headers take {size} bytes in one frame; the broker's frame_max is {frame_max}"
        )));
    }
    Ok(())
}

fn properties(event: &Event) -> BasicProperties {
    let mut headers = FieldTable::default();
    for (name, value) in event.message_headers() {
        headers.insert(ShortString::from(name), AMQPValue::LongString(value.into()));
    }
    let seconds = event.created_at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    BasicProperties::default()
        .with_message_id(event.event_id.to_string().into())
        .with_type(event.event_type.as_str().into())
        .with_content_type(event.content_type.as_str().into())
        .with_timestamp(seconds)
        .with_delivery_mode(PERSISTENT)
        .with_headers(headers)
}
