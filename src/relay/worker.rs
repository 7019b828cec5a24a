//! Workers: each takes a batch at a time, sends it in waves, and writes what became of it.
//!
//! Between two waves nothing is open: no transaction, no row lock. Before each wave the worker makes sure that the lease
//! will outlast it, and that nobody has asked for a stop or a pause. Every event of a batch ends in the verdict; when
//! the verdict cannot be written, the leases lapse and the events come back. Between two batches a worker may be told to ask
//! the broker how it is, without an event.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::batch::{Batch, Wave};
use super::health::{BrokerHealth, Progress};
use super::link::Link;
use super::pause::Target;
use super::{MakePublisher, Shared};
use crate::config::LONGEST_PUBLISH;
use crate::error::Error;
use crate::policy::{Decision, FailureKind, FailureScope, History, PublishError};
use crate::publisher::{Outcomes, Publisher};
use crate::store::relays;
use crate::store::verdict::{Failure, Verdict};

/// What the claimer hands to a worker.
pub(crate) enum Task {
    /// Send these events and write what became of them.
    Publish(Batch),
    /// Ask the broker whether it would take events.
    AskBroker,
}

pub(crate) struct Worker {
    shared: Arc<Shared>,
    number: i32,
    link: Link,
    progress: Arc<Progress>,
    make_publisher: Arc<MakePublisher>,
    publisher: Option<Box<dyn Publisher>>,
    last_beat: Instant,
    rng: fastrand::Rng,
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        number: i32,
        progress: Arc<Progress>,
        make_publisher: Arc<MakePublisher>,
    ) -> Self {
        let link = Link::new(Arc::clone(&shared), Arc::clone(&progress));
        let (last_beat, rng) = (Instant::now(), fastrand::Rng::new());
        Self { shared, number, link, progress, make_publisher, publisher: None, last_beat, rng }
    }

    /// Works until the claimer has gone.
    pub(crate) fn run(mut self, tasks: &Receiver<Task>) {
        self.tell(relays::started);
        loop {
            match tasks.recv_timeout(self.shared.config.heartbeat_interval) {
                Ok(Task::Publish(batch)) => {
                    self.work(batch);
                    self.shared.batch_is_settled();
                }
                Ok(Task::AskBroker) => self.ask_broker(),
                Err(RecvTimeoutError::Timeout) => self.tell(relays::beat),
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.progress.note();
        }
    }

    fn tell(&mut self, what: fn(&mut crate::store::Session, &str, i32) -> Result<(), Error>) {
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        let gave_up = |_: &Error| shared.stop.is_stopping();
        if let Err(error) =
            self.link.until(gave_up, |session| what(session, &shared.config.relay_id, number))
        {
            log::debug!("{error}");
        }
        self.last_beat = Instant::now();
    }

    fn work(&mut self, mut batch: Batch) {
        let mut verdict = Verdict::default();
        self.bury_hopeless(&mut batch, &mut verdict);
        while !batch.is_empty() {
            if self.shared.stop.is_stopping() || !self.secure_lease(&mut batch, &mut verdict) {
                batch.release_all(&mut verdict);
                break;
            }
            let is_probe = batch.probe.is_some();
            let pauses = &self.shared.pauses;
            let wave = batch.next_wave(|kind| !is_probe && pauses.is_paused(kind), &mut verdict);
            if !wave.events.is_empty() {
                let deadline = Instant::now() + self.shared.config.publish_timeout;
                let latest = batch.held_until() - self.shared.config.lease_margin;
                let outcomes = self.publish(&wave, deadline.min(latest));
                self.judge(&mut batch, &wave, outcomes, &mut verdict);
                self.progress.note();
            }
        }
        if let Some(target) = &batch.probe {
            // Nothing was sent after all (a stop, a lost lease): not an answer.
            self.shared.pauses.not_probed(target, Duration::ZERO);
        }
        self.settle(batch.lease_id, &mut verdict);
    }

    /// The budget of unexplained failures is looked at *before* publishing: an event that kills its process is
    /// buried by the relay that would have been the next victim.
    fn bury_hopeless(&self, batch: &mut Batch, verdict: &mut Verdict) {
        let policy = &self.shared.config.policy;
        let hopeless = |past: &History| policy.is_out_of_chances(past.unexplained_failures);
        for (event, past) in batch.take_hopeless(hopeless, verdict) {
            let reason = format!(
                "{} unexplained failures; no verdict was written for its last claim (the relay crashed, hung, was killed or lost its database)",
                past.unexplained_failures
            );
            log::error!("event {} ({}) is dead: {reason}", event.event_id, event.event_type);
            let id = event.id;
            verdict.failed.push(Failure {
                id,
                retry_in: None,
                unexplained: false,
                in_doubt: true,
                reason,
            });
        }
    }

    /// Makes sure that the lease outlasts the next publish. What is decided is written at the same time, so that a crash
    /// in a long batch repeats little. False when the lease cannot be renewed.
    fn secure_lease(&mut self, batch: &mut Batch, verdict: &mut Verdict) -> bool {
        let config = &self.shared.config;
        let needed = (config.lease / 2).max(config.publish_timeout + config.lease_margin);
        let silence = self.last_beat.elapsed();
        let must_beat = silence > config.heartbeat_interval
            || silence + config.publish_timeout > LONGEST_PUBLISH;
        if batch.remaining() >= needed && !must_beat {
            return true;
        }
        self.settle(batch.lease_id, verdict);
        let secured = self.shared.renew(&mut self.link, self.number, batch, verdict);
        self.last_beat = Instant::now();
        secured
    }

    /// Calls the publisher. A panic in it is an unexplained failure of what had no outcome yet.
    fn publish(&mut self, wave: &Wave, deadline: Instant) -> Outcomes {
        let mut outcomes = Outcomes::new(wave.events.len());
        let called = self
            .call_publisher(|publisher| publisher.publish(&wave.events, deadline, &mut outcomes));
        if let Err(reason) = called {
            outcomes.fail_unset(&PublishError::unexplained(reason).in_doubt());
        }
        outcomes
    }

    /// Calls the publisher, made when it is first needed. A panic in it is caught and told.
    fn call_publisher<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Publisher) -> T,
    ) -> Result<T, String> {
        let (make, index) = (&self.make_publisher, self.number as usize - 1);
        let publisher = &mut self.publisher;
        catch_unwind(AssertUnwindSafe(|| {
            call(publisher.get_or_insert_with(|| make(index)).as_mut())
        }))
        .map_err(|panic| {
            // Its state may be broken; the next call gets a new one. Dropping it may panic, too.
            let broken = self.publisher.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
            let reason = format!("the publisher panicked: {}", panic_text(panic.as_ref()));
            log::error!("{reason}");
            reason
        })
    }

    /// Finds out without an event whether the broker would take one: at the start, while idle, or as a probe.
    fn ask_broker(&mut self) {
        let deadline = Instant::now() + self.shared.config.publish_timeout;
        let answer = self.call_publisher(|publisher| publisher.check(deadline));
        match answer {
            Ok(Some(Ok(()))) => self.answers(&Target::Broker),
            Ok(Some(Err(error))) => self.trip(&Target::Broker, &error, true),
            Err(reason) => self.trip(&Target::Broker, &PublishError::unexplained(reason), true),
            Ok(None) => self.shared.nothing_to_probe_with(&Target::Broker),
        }
        self.shared.wake_claimer();
    }

    fn answers(&self, target: &Target) {
        if self.shared.pauses.clear(target) {
            log::info!("{target} answers again; everything resumes");
            self.shared.wake_claimer();
        }
        self.shared.heard_of_broker(BrokerHealth::Answers);
    }

    fn judge(&mut self, batch: &mut Batch, wave: &Wave, outcomes: Outcomes, verdict: &mut Verdict) {
        let (mut tripped, mut confirmed) = (BTreeSet::new(), false);
        for ((event, &(run, past)), result) in
            wave.events.iter().zip(&wave.origins).zip(outcomes.into_results())
        {
            let Err(error) = result else {
                verdict.published.push(event.id);
                confirmed = true;
                continue;
            };
            batch.release_run(run, verdict);
            let target = match error.scope() {
                FailureScope::Event => None,
                FailureScope::Destination => {
                    Some(Target::Destination(event.aggregate_type.clone()))
                }
                FailureScope::Broker => Some(Target::Broker),
            };
            // Of those that met the same trouble, one is recorded; the others are not to be blamed for it.
            let is_first = target.as_ref().is_none_or(|target| tripped.insert(target.clone()));
            if let (Some(target), true) = (&target, is_first) {
                self.trip(target, &error, batch.probe.as_ref() == Some(target));
            }
            if is_first {
                verdict.failed.push(self.fail(event, &error, past));
            } else {
                verdict.released.push((event.id, error.is_in_doubt()));
            }
        }
        if let Some(target) = batch.probe.take() {
            if tripped.contains(&target) {
                return;
            }
            if tripped.contains(&Target::Broker) {
                self.shared.pauses.not_probed(&target, Duration::ZERO);
            } else {
                self.answers(&target);
            }
        } else if confirmed {
            self.shared.heard_of_broker(BrokerHealth::Answers);
        }
    }

    fn trip(&mut self, target: &Target, error: &PublishError, was_probe: bool) {
        let longest = self.shared.config.probe_interval_cap;
        let is_new = self.shared.pauses.trip(
            target,
            error.reason(),
            error.wait(),
            was_probe,
            longest,
            &mut self.rng,
        );
        if is_new {
            log::warn!(
                "{target} is in trouble: {}; pausing, with one probe at a time",
                error.reason()
            );
        }
        self.shared.heard_of_broker(BrokerHealth::Answers);
        self.shared.wake_claimer();
    }

    fn fail(
        &mut self,
        event: &crate::event::Event,
        error: &PublishError,
        past: History,
    ) -> Failure {
        let policy = &self.shared.config.policy;
        let unexplained = error.kind() == FailureKind::Unexplained;
        let decision = policy.decide(error, past, &mut self.rng);
        let (retry_in, reason) = match decision {
            Decision::Retry(wait) => (Some(wait), error.reason().to_owned()),
            Decision::Dead => {
                let reason = match error.kind() {
                    FailureKind::Permanent => error.reason().to_owned(),
                    FailureKind::Transient => {
                        format!(
                            "still failing after {:?}; the last: {}",
                            policy.transient_window,
                            error.reason()
                        )
                    }
                    FailureKind::Unexplained => format!(
                        "{} unexplained failures; the last: {}",
                        past.unexplained_failures + 1,
                        error.reason()
                    ),
                };
                log::error!("event {} ({}) is dead: {reason}", event.event_id, event.event_type);
                (None, crate::policy::clean_reason(&reason))
            }
        };
        log::debug!(
            "event {} attempt {}: {decision:?}: {}",
            event.event_id,
            event.attempt,
            error.reason()
        );
        Failure { id: event.id, retry_in, unexplained, in_doubt: error.is_in_doubt(), reason }
    }

    /// Writes a verdict and empties it.
    fn settle(&mut self, lease_id: i64, verdict: &mut Verdict) {
        self.shared.settle(&mut self.link, self.number, lease_id, verdict);
        self.last_beat = Instant::now();
        *verdict = Verdict::default();
    }
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "with something that is no text".to_owned()
    }
}
