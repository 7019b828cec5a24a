//! The door to a broker: the [`Publisher`] trait, and one file for each broker that is compiled in.
//!
//! A publisher is used by one thread at a time and blocks. It does three things: it hands each event to the broker, it
//! waits until the broker has *confirmed* it, and it says of each failure what it is evidence of. It never retries,
//! never sleeps past its deadline and never decides an event's fate; the relay does.

#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
mod scripted;
mod stdout;

use std::time::Instant;

pub use scripted::{ScriptedBroker, ScriptedPublisher};
pub use stdout::StdoutPublisher;

use crate::event::Event;
use crate::policy::PublishError;

/// Sends events to a broker.
pub trait Publisher: Send {
    /// Sends every event of the wave and returns once the broker has confirmed or refused each, or at `deadline`,
    /// whichever comes first. No two events of a wave belong to one aggregate, so they may be in flight together.
    ///
    /// Say what became of each with [`Outcomes::published`] and [`Outcomes::failed`]. A slot left unset counts as an
    /// *unexplained* failure, so that forgetting one can never mark an event as published. A panic is caught: it
    /// leaves the unset slots unexplained, and the publisher is replaced by a new one.
    ///
    /// An event whose confirm did not come in time is `transient(..).in_doubt()`, not published.
    fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes);

    /// Whether the broker would take events now, found out without sending one. Bounded by `deadline`.
    ///
    /// The relay asks at its start, while it is idle and while it is paused with no event at hand to probe with; an error
    /// pauses it. `None`, the default, says that only an event can tell.
    fn check(&mut self, deadline: Instant) -> Option<Result<(), PublishError>> {
        let _ = deadline;
        None
    }
}

impl<P: Publisher + ?Sized> Publisher for Box<P> {
    fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
        (**self).publish(wave, deadline, outcomes);
    }

    fn check(&mut self, deadline: Instant) -> Option<Result<(), PublishError>> {
        (**self).check(deadline)
    }
}

/// A publisher made of a function that sends one event and returns once it is confirmed.
///
/// ```
/// use pg_outbox::{publish_each, Event, PublishError};
/// use std::time::Instant;
/// let publisher = publish_each(|event: &Event, _deadline: Instant| {
///     if event.payload.len() > 1_000_000 {
///         return Err(PublishError::permanent("over the broker's limit of 1 MB"));
///     }
///     Ok(()) // the broker has confirmed it
/// });
/// # let _ = publisher;
/// ```
pub fn publish_each<F>(send: F) -> impl Publisher
where
    F: FnMut(&Event, Instant) -> Result<(), PublishError> + Send,
{
    struct Each<F>(F);
    impl<F: FnMut(&Event, Instant) -> Result<(), PublishError> + Send> Publisher for Each<F> {
        fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
            for (index, event) in wave.iter().enumerate() {
                match (self.0)(event, deadline) {
                    Ok(()) => outcomes.published(index),
                    Err(error) => outcomes.failed(index, error),
                }
            }
        }
    }
    Each(send)
}

/// One slot for each event of a wave, filled by the publisher.
#[derive(Debug)]
pub struct Outcomes {
    slots: Vec<Option<Result<(), PublishError>>>,
}

impl Outcomes {
    /// Empty slots for `len` events.
    pub fn new(len: usize) -> Self {
        Self { slots: vec![None; len] }
    }

    /// The broker has confirmed event `index` of the wave.
    ///
    /// # Panics
    /// When the wave has no such event.
    pub fn published(&mut self, index: usize) {
        self.slots[index] = Some(Ok(()));
    }

    /// The broker does not have event `index` of the wave, or may not have it.
    ///
    /// # Panics
    /// When the wave has no such event.
    pub fn failed(&mut self, index: usize, error: PublishError) {
        self.slots[index] = Some(Err(error));
    }

    /// Fails every event that has no outcome yet, for trouble that meets all of them.
    pub fn fail_unset(&mut self, error: &PublishError) {
        for slot in self.slots.iter_mut().filter(|slot| slot.is_none()) {
            *slot = Some(Err(error.clone()));
        }
    }

    /// What was said of event `index`; `None` while nothing was.
    pub fn get(&self, index: usize) -> Option<&Result<(), PublishError>> {
        self.slots.get(index).and_then(Option::as_ref)
    }

    /// Every outcome in wave order, unset ones as unexplained.
    pub(crate) fn into_results(self) -> impl Iterator<Item = Result<(), PublishError>> {
        self.slots.into_iter().map(|slot| {
            slot.unwrap_or_else(|| {
                Err(PublishError::unexplained(
                    "the publisher returned without an outcome for this event",
                )
                .in_doubt())
            })
        })
    }
}
