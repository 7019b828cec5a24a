//! Sends events to RabbitMQ (feature `rabbitmq`): AMQP 0-9-1 with publisher confirms.
//!
//! An event is *published* when the broker has confirmed it, and, where `mandatory` is on, has not sent it back. Until
//! then it is in doubt, and its next delivery says so in `outbox-possible-duplicate`.
//!
//! # The message
//!
//! | property | value |
//! |---|---|
//! | exchange, routing key | [`exchange`](RabbitMqConfigBuilder::exchange), [`routing_key`](RabbitMqConfigBuilder::routing_key) |
//! | body | the payload, unchanged |
//! | `message_id` | the event id |
//! | `type`, `content_type` | those of the event |
//! | `timestamp` | when the event was appended, in seconds |
//! | `delivery_mode` | 2, persistent |
//! | `headers` | [`Event::message_headers`], as strings |
//!
//! # What a failure is
//!
//! | what happens | kind, scope | in doubt |
//! |---|---|---|
//! | came back unroutable (312) | permanent, event; transient, event, with [`retry_unroutable`](RabbitMqConfigBuilder::retry_unroutable) | no |
//! | `basic.nack`: queue full with `reject-publish`, or not stored | transient, destination | no |
//! | payload over `max_message_size` (406), or over [`max_body_bytes`](RabbitMqConfigBuilder::max_body_bytes) | permanent, event | no |
//! | routing key, type or header name over 255 bytes; headers over one frame | permanent, event, nothing sent | no |
//! | topic permission refused for the routing key (403) | transient, destination | no |
//! | exchange missing (404), no write permission (403), disk short (406) | transient, broker | if others were in flight |
//! | connection refused, name not found, TLS or login refused, vhost missing | transient, broker | no |
//! | connection lost, no heartbeat, closed by the operator (320) | transient, broker | yes |
//! | blocked: the broker is short of memory or disk | transient, broker | if it was in flight |
//! | no confirm by the deadline | transient, broker | yes |
//! | channel or connection closed for another reason, one event in flight | unexplained, event | yes |
//! | the same with several in flight, and not known which | transient, event, then one by one | yes |
//! | in flight before an event that closed the channel | transient, event | yes |
//!
//! Why not otherwise: every event goes to one exchange, so a missing exchange or a missing grant says nothing about an
//! event; it pauses the relay, which goes on by itself once it is mended. An unroutable event is about that event's
//! key, and others may be fine; it is dead at once, so that a person sees it, unless consumers are known to bind late.
//! A full queue is met by what is routed to it, hence the destination.
//!
//! # How it is kept apart
//!
//! A refusal that closes the channel takes the confirms of all that is in flight along. So the first event of a
//! connection goes ahead alone, and so does one that is larger than any that the connection has taken: what they find
//! (no exchange, no permission, a limit) meets nothing else, and the limit is known from then on. All others of a wave
//! are in flight together.
//!
//! There is one connection and one channel a publisher, made at the first publish and again after a loss. A publish
//! that runs into its deadline cuts the connection, so that nothing goes out late and no late confirm is taken for
//! another's. A blocked connection is kept: publishes fail at once, without sending, until the broker unblocks it.

mod classify;
mod config;
mod connection;
mod flight;

use std::fmt;
use std::time::Instant;

use lapin::Confirmation;

pub use config::{RabbitMqConfig, RabbitMqConfigBuilder};

use super::{Outcomes, Publisher};
use crate::event::Event;
use crate::policy::PublishError;
use classify::Fault;
use connection::{Halt, Link};
use flight::{Flight, Slot};

/// How many events go one by one after something unknown closed the channel under several.
const ONE_BY_ONE: u32 = 1_000;

/// Sends events to RabbitMQ. See the [module](self) for what it sends and how it judges.
pub struct RabbitMqPublisher {
    config: RabbitMqConfig,
    link: Option<Link>,
    one_by_one: u32,
}

impl RabbitMqPublisher {
    /// A publisher that connects when it is first used.
    pub fn new(config: RabbitMqConfig) -> Self {
        Self { config, link: None, one_by_one: 0 }
    }

    /// A link that can publish now, to be put back.
    fn take_link(&mut self, deadline: Instant) -> Result<Link, PublishError> {
        if let Some(reason) = self.link.as_mut().and_then(Link::blocked) {
            return Err(classify::blocked(&reason));
        }
        let link = self.link.take().filter(Link::is_connected);
        match link.and_then(|mut link| link.ensure_channel(deadline).then_some(link)) {
            Some(link) => Ok(link),
            None => Link::open(&self.config, deadline),
        }
    }

    /// Publishes what has no outcome yet. An error is for all that is left, and nothing of that was sent.
    fn publish_rest(
        &mut self,
        wave: &[Event],
        deadline: Instant,
        outcomes: &mut Outcomes,
    ) -> Result<(), PublishError> {
        loop {
            let mut waiting: Vec<_> =
                (0..wave.len()).filter(|&index| outcomes.get(index).is_none()).collect();
            if waiting.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(classify::unsent());
            }
            let mut link = self.take_link(deadline)?;
            let limit = link.limit.into_iter().chain(self.config.max_body_bytes).min();
            waiting.retain(|&index| match check(&wave[index], limit, link.frame_max()) {
                Ok(()) => true,
                Err(error) => {
                    outcomes.failed(index, error);
                    false
                }
            });
            let batch = next_batch(wave, waiting, link.proven, self.one_by_one > 0);
            let flight = flight::fly(&mut link, &self.config, wave, &batch, deadline);
            let settled = self.settle(wave, flight, &mut link, outcomes);
            self.link = Some(link);
            settled?;
        }
    }

    /// Turns the answers of a flight into outcomes. What the broker cannot have is left unset, to be sent again. An error
    /// is for all that is left.
    fn settle(
        &mut self,
        wave: &[Event],
        flight: Flight,
        link: &mut Link,
        outcomes: &mut Outcomes,
    ) -> Result<(), PublishError> {
        let (returned, complete) = (flight.returned(), flight.is_complete());
        for slot in &flight.slots {
            let Some(Ok(answer)) = &slot.answer else { continue };
            let event = &wave[slot.index];
            link.proven = link.proven.max(Some(event.payload.len()));
            self.one_by_one = self.one_by_one.saturating_sub(1);
            let outcome = if let Some((code, text)) = returned.get(&event.event_id.to_string()) {
                Err(classify::unroutable(&self.config, &slot.key, *code, text))
            } else if flight::carried(answer).is_some() && !complete {
                Err(classify::return_unknown())
            } else {
                match answer {
                    Confirmation::Ack(_) => Ok(()),
                    Confirmation::Nack(_) => Err(classify::nack()),
                    Confirmation::NotRequested => {
                        Err(PublishError::unexplained("the channel is not in confirm mode")
                            .in_doubt())
                    }
                }
            };
            match outcome {
                Ok(()) => outcomes.published(slot.index),
                Err(error) => outcomes.failed(slot.index, error),
            }
        }
        let open: Vec<_> = flight
            .slots
            .iter()
            .filter(|slot| slot.handed && !matches!(slot.answer, Some(Ok(_))))
            .collect();
        let for_all = |outcomes: &mut Outcomes, error: PublishError| {
            open.iter().for_each(|slot| outcomes.failed(slot.index, error.clone()));
        };
        match (flight.halt, classify::cause(flight.errors())) {
            (_, Some(error)) => {
                let fault = classify::fault(&self.config, error);
                if !error.is_amqp_soft_error() {
                    link.break_off();
                }
                self.settle_fault(wave, fault, error.is_amqp_soft_error(), link, &open, outcomes)
            }
            (Halt::Finished, None) => Ok(()),
            (Halt::Blocked, None) => {
                let error =
                    classify::blocked(&link.blocked().unwrap_or_else(|| "for a moment".into()));
                if !open.is_empty() {
                    link.spend();
                }
                for_all(outcomes, error.clone().in_doubt());
                Err(error)
            }
            (Halt::Deadline, None) => {
                link.break_off();
                for_all(outcomes, classify::unconfirmed());
                Err(classify::unsent())
            }
        }
    }

    /// Lays a closed channel or connection at the right event's door. `open` are those without an answer, in the order in
    /// which they were sent: the broker may have taken what went before the culprit, and has ignored what came after.
    fn settle_fault(
        &mut self,
        wave: &[Event],
        fault: Fault,
        channel_only: bool,
        link: &mut Link,
        open: &[&Slot],
        outcomes: &mut Outcomes,
    ) -> Result<(), PublishError> {
        let alone = open.len() == 1;
        match fault {
            Fault::TooLarge { limit } => {
                link.limit = Some(limit);
                blame(open, outcomes, "a payload over the broker's limit", |slot| {
                    let event = &wave[slot.index];
                    let over = alone || event.payload.len() > limit;
                    over.then(|| classify::too_large(event, limit))
                });
            }
            Fault::RoutingKey(key, error) => {
                blame(open, outcomes, error.reason(), |slot| {
                    (slot.key == key).then(|| error.clone())
                });
            }
            Fault::Everyone(error) => {
                let certain = alone && channel_only;
                for slot in open {
                    let error = error.clone();
                    outcomes.failed(slot.index, if certain { error } else { error.in_doubt() });
                }
                return Err(error);
            }
            Fault::Unknown(reason) if alone => {
                outcomes.failed(open[0].index, PublishError::unexplained(reason).in_doubt());
            }
            Fault::Unknown(reason) => {
                self.one_by_one = ONE_BY_ONE;
                blame(open, outcomes, &reason, |_| None);
            }
        }
        Ok(())
    }

    /// Whether the exchange is there, and publishers are not blocked.
    fn find_exchange(&mut self, deadline: Instant) -> Result<(), PublishError> {
        let mut link = self.take_link(deadline)?;
        // The default exchange is always there, and may not be asked about.
        let found = if self.config.exchange.is_empty() {
            Some(Ok(()))
        } else {
            link.find_exchange(&self.config.exchange, deadline)
        };
        if found.is_none() {
            link.break_off();
        }
        self.link = Some(link);
        match found {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(match classify::fault(&self.config, &error) {
                Fault::Everyone(error) | Fault::RoutingKey(_, error) => error,
                Fault::Unknown(reason) => PublishError::transient(reason).broker(),
                Fault::TooLarge { .. } => PublishError::transient(error.to_string()).broker(),
            }),
            None => {
                Err(PublishError::transient("no answer from RabbitMQ before the deadline").broker())
            }
        }
    }
}

/// Fails the culprits, and puts in doubt what was sent before the first of them (everything, if there is none).
fn blame(
    open: &[&Slot],
    outcomes: &mut Outcomes,
    cause: &str,
    error: impl Fn(&Slot) -> Option<PublishError>,
) {
    let mut found = false;
    for slot in open {
        if let Some(error) = error(slot) {
            found = true;
            outcomes.failed(slot.index, error);
        } else if !found {
            outcomes.failed(slot.index, classify::bystander(cause).in_doubt());
        }
    }
}

impl Publisher for RabbitMqPublisher {
    fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
        for (index, event) in wave.iter().enumerate() {
            if let Err(error) = flight::check(&self.config, event) {
                outcomes.failed(index, error);
            }
        }
        if let Err(error) = self.publish_rest(wave, deadline, outcomes) {
            outcomes.fail_unset(&error);
        }
    }

    fn check(&mut self, deadline: Instant) -> Option<Result<(), PublishError>> {
        Some(self.find_exchange(deadline))
    }
}

impl fmt::Debug for RabbitMqPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqPublisher")
            .field("config", &self.config)
            .field("connected", &self.link.as_ref().is_some_and(Link::is_connected))
            .finish()
    }
}

fn check(event: &Event, limit: Option<usize>, frame_max: usize) -> Result<(), PublishError> {
    if let Some(limit) = limit.filter(|&limit| event.payload.len() > limit) {
        return Err(classify::too_large(event, limit));
    }
    flight::check_frame(event, frame_max)
}

/// What may be in flight together: everything, or the largest alone while the connection has not taken its like.
fn next_batch(
    wave: &[Event],
    waiting: Vec<usize>,
    proven: Option<usize>,
    one_by_one: bool,
) -> Vec<usize> {
    let size = |index: &usize| wave[*index].payload.len();
    match waiting.iter().rev().copied().max_by_key(size) {
        Some(largest) if Some(size(&largest)) > proven => vec![largest],
        _ if one_by_one => waiting.into_iter().take(1).collect(),
        _ => waiting,
    }
}
