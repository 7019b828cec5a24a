//! The claimer: takes leases on what is due and hands batches to workers that are free.
//!
//! It claims no more than it can hand over: the channel has no buffer, and the one batch in hand is renewed here until a
//! worker takes it, so no event grows old between the two. With nothing to claim it has the broker asked how it is, and
//! sleeps, at most `poll_interval`; a settled batch, a wake-up or a probe that is due ends the sleep. When the database is lost it waits for it; a claim
//! whose answer was lost is released by its lease id.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, select};

use super::Shared;
use super::batch::Batch;
use super::cursor::Cursors;
use super::health::Progress;
use super::link::Link;
use super::pause::{Allowed, Target};
use super::worker::Task;
use crate::error::Error;
use crate::store::claim::{self, Claim, Class, Request};
use crate::store::verdict::Verdict;
use crate::store::{Session, lease, relays};

/// How long writers are asked for wake-ups at a time; a killed relay costs them no more than this.
const WAKE_UP_SPAN: Duration = Duration::from_secs(60);
/// After so many good claims in a row a NOTIFY in each commit would slow writers for nothing.
const BUSY: u32 = 16;
const SLICE: Duration = Duration::from_millis(100);
/// Longer than the longest wait between two tries to connect, and a verdict.
const VERDICT_GRACE: Duration = Duration::from_secs(7);

pub(crate) struct Claimer {
    shared: Arc<Shared>,
    link: Link,
    progress: Arc<Progress>,
    tasks: Sender<Task>,
    settled: Receiver<()>,
    /// Wake-ups; never anything where they cannot work.
    wake_ups: Receiver<()>,
    cursors: Cursors,
    last_beat: Instant,
    wanted_until: Option<Instant>,
    good_claims: u32,
    refusals: u32,
    /// Pauses and their reason as the table has them, and when the table last refused them.
    known_pauses: (Vec<String>, Option<String>),
    pauses_refused: Option<Instant>,
    rng: fastrand::Rng,
}

impl Claimer {
    pub(crate) fn new(
        shared: Arc<Shared>,
        progress: Arc<Progress>,
        tasks: Sender<Task>,
        settled: Receiver<()>,
        wake_ups: Receiver<()>,
    ) -> Self {
        Self {
            link: Link::new(Arc::clone(&shared), Arc::clone(&progress)),
            cursors: Cursors::new(&shared.config),
            shared,
            progress,
            tasks,
            settled,
            wake_ups,
            last_beat: Instant::now(),
            wanted_until: None,
            good_claims: 0,
            refusals: 0,
            known_pauses: (Vec::new(), None),
            pauses_refused: None,
            rng: fastrand::Rng::new(),
        }
    }

    /// Claims until asked to stop.
    pub(crate) fn run(mut self) {
        let (shared, workers) = (Arc::clone(&self.shared), self.shared.config.workers as i32);
        // Nothing is claimed before the relay may write what it says of itself: verdicts go the same way.
        while !self.patiently(|session, relay| {
            relays::started(session, relay, 0)?;
            relays::introduced(session, relay, &shared.config)?;
            relays::ended(session, relay, workers + 1)
        }) && !self.shared.stop.wait(self.shared.config.poll_interval)
        {}
        while !self.shared.stop.is_stopping() {
            self.progress.note();
            self.beat_if_due();
            self.record_pauses();
            match self.pass() {
                Ok(Pass::Claimed) => self.refusals = 0,
                Ok(Pass::Sleep(longest)) => {
                    self.refusals = 0;
                    self.sleep(longest);
                }
                Err(error) => self.wait_after(&error),
            }
        }
    }

    /// One look for events.
    fn pass(&mut self) -> Result<Pass, Error> {
        let paused = match self.shared.pauses.allowed(Instant::now()) {
            Allowed::AllBut(destinations) => destinations,
            Allowed::Probe(target) => return self.probe(target),
            Allowed::NothingUntil(then) => {
                return Ok(Pass::Sleep(then.saturating_duration_since(Instant::now())));
            }
        };
        let class = self.cursors.next_class();
        if class == Class::LastChance && !self.wait_until_alone() {
            return Ok(Pass::Claimed);
        }
        let mut request = self.cursors.request(class);
        request.except.extend(paused);
        let (batch, claim_size) = self.claim(&request)?;
        if let Some(batch) = batch {
            self.hand_over(batch);
            if class == Class::LastChance {
                self.wait_until_alone();
            }
        }
        self.note_load(claim_size, request.heads as usize);
        if claim_size > 0 || self.cursors.go_on_at_once() {
            return Ok(Pass::Claimed);
        }
        Ok(Pass::Sleep(self.cursors.longest_sleep(self.shared.config.poll_interval)))
    }

    /// Finds out whether the target answers again by one event: a clean one, or a suspect where there is no other. Without
    /// any (another relay may have taken them all), the broker is asked.
    fn probe(&mut self, target: Target) -> Result<Pass, Error> {
        for class in [Class::Clean, Class::Suspect, Class::LastChance] {
            // Only for one that is there: a probe without an event must not wait for what others are publishing.
            let is_last = class == Class::LastChance;
            if is_last && !(self.cursors.has_last_chance() && self.wait_until_alone()) {
                break;
            }
            let mut request = self.cursors.probe_request(class);
            if let Target::Destination(name) = &target {
                request.only = vec![name.clone()];
            }
            if let (Some(mut batch), _) = self.claim(&request)? {
                self.shared.pauses.probing(&target);
                batch.probe = Some(target);
                self.hand_over(batch);
                if class == Class::LastChance {
                    self.wait_until_alone();
                }
                return Ok(Pass::Claimed);
            }
        }
        match target {
            Target::Broker if self.ask_broker() => self.shared.pauses.probing(&target),
            Target::Broker => self.shared.pauses.not_probed(&target, SLICE),
            Target::Destination(_) => self.shared.nothing_to_probe_with(&target),
        }
        Ok(Pass::Claimed)
    }

    /// Has a worker ask the broker how it is. False when none is free.
    fn ask_broker(&self) -> bool {
        let asked = self.tasks.send_timeout(Task::AskBroker, SLICE).is_ok();
        if asked {
            self.shared.broker_asked();
        }
        asked
    }

    /// Whether the broker should be asked, since nothing was heard of it for as long as a heartbeat. What is being
    /// published will tell by itself.
    fn broker_is_silent(&self) -> bool {
        let silence = self.shared.broker_silence();
        let is_idle = self.shared.in_flight.load(Ordering::Acquire) == 0;
        is_idle && silence.is_none_or(|silence| silence >= self.shared.config.heartbeat_interval)
    }

    fn claim(&mut self, request: &Request) -> Result<(Option<Batch>, usize), Error> {
        let config = &self.shared.config;
        // Made up here, so that it is known even when the answer is lost. Zero is nobody's.
        let lease_id = self.rng.i64(1..);
        self.link.once(|_| Ok(()))?;
        let asked_at = Instant::now();
        let result = self.link.once(|session| {
            claim::claim(session, &config.relay_id, lease_id, config.lease, request)
        });
        let claim: Claim = match result {
            Ok(claim) => claim,
            Err(error) => {
                // With an answer of the server's, nothing was claimed.
                if error.sqlstate().is_none() {
                    self.release_unknown(lease_id);
                }
                return Err(error);
            }
        };
        self.cursors.learn(request, &claim);
        let size = claim.events.len();
        let batch = Batch::new(lease_id, asked_at, config.lease, claim);
        Ok(((size > 0).then_some(batch), size))
    }

    /// The claim may have been committed although its answer was lost. Nobody has seen those events.
    fn release_unknown(&mut self, lease_id: i64) {
        self.patiently(|session, _| {
            let released = lease::release_lease(session, lease_id)?;
            if released > 0 {
                log::info!("released {released} events of a claim whose answer was lost");
            }
            Ok(())
        });
    }

    /// Gives the batch to the next free worker, renewing it meanwhile; releases it when asked to stop.
    fn hand_over(&mut self, mut batch: Batch) {
        self.shared.in_flight.fetch_add(1, Ordering::AcqRel);
        loop {
            let (SendTimeoutError::Timeout(task) | SendTimeoutError::Disconnected(task)) =
                match self.tasks.send_timeout(Task::Publish(batch), SLICE) {
                    Ok(()) => return,
                    Err(error) => error,
                };
            let Task::Publish(unsent) = task else { return };
            batch = unsent;
            self.progress.note();
            let mut verdict = Verdict::default();
            let is_stopping = self.shared.stop.is_stopping();
            if is_stopping
                || batch.remaining() < self.shared.config.lease / 2
                    && !self.shared.renew(&mut self.link, 0, &mut batch, &mut verdict)
            {
                batch.release_all(&mut verdict);
            } else {
                self.beat_if_due();
            }
            self.shared.settle(&mut self.link, 0, batch.lease_id, &verdict);
            if batch.is_empty() {
                if let Some(target) = &batch.probe {
                    self.shared.pauses.not_probed(target, Duration::ZERO);
                }
                self.shared.batch_is_settled();
                return;
            }
        }
    }

    /// Waits until no batch is in flight in this process. False when asked to stop.
    fn wait_until_alone(&mut self) -> bool {
        while self.shared.in_flight.load(Ordering::Acquire) > 0 {
            if self.shared.stop.is_stopping() {
                return false;
            }
            let _ = self.settled.recv_timeout(SLICE);
            self.progress.note();
            self.beat_if_due();
        }
        true
    }

    /// After a loss of the database the workers may have verdicts in hand of leases that have lapsed meanwhile. They need
    /// a moment to connect again; a claim before that would take those events from them.
    fn wait_for_verdicts(&mut self) {
        let deadline = Instant::now() + VERDICT_GRACE;
        while self.shared.in_flight.load(Ordering::Acquire) > 0
            && Instant::now() < deadline
            && !self.shared.stop.is_stopping()
        {
            let _ = self.settled.recv_timeout(SLICE);
            self.progress.note();
        }
    }

    /// Sleeps until there may be something to do. Writers are asked for a wake-up first, and then the table is looked
    /// at once more: an event that was committed in between would otherwise wait for the poll.
    fn sleep(&mut self, longest: Duration) {
        if self.shared.listens()
            && self.wanted_until.is_none_or(|until| until < Instant::now() + WAKE_UP_SPAN / 2)
        {
            let relay_id = self.shared.config.relay_id.clone();
            match self.link.once(|session| relays::want_wake_up(session, &relay_id, WAKE_UP_SPAN)) {
                Ok(()) => {
                    let is_renewal =
                        self.wanted_until.replace(Instant::now() + WAKE_UP_SPAN).is_some();
                    if !is_renewal {
                        return;
                    }
                }
                Err(error) => return self.wait_after(&error),
            }
        }
        // Soon again when no worker is free yet; the answer ends the sleep.
        let longest = if self.broker_is_silent() && !self.ask_broker() { SLICE } else { longest };
        let probe = self.shared.pauses.next_probe();
        let probe = probe.map(|then| then.saturating_duration_since(Instant::now()));
        let longest =
            longest.min(probe.unwrap_or(longest)).min(self.shared.config.heartbeat_interval);
        select! {
            recv(self.shared.stop.channel()) -> _ => {}
            recv(self.settled) -> _ => {}
            recv(self.wake_ups) -> _ => {}
            default(longest) => {}
        }
    }

    /// While the relay is busy it finds events anyway, and writers are spared the NOTIFY.
    fn note_load(&mut self, claimed: usize, heads: usize) {
        self.good_claims = if claimed * 2 >= heads.max(2) { self.good_claims + 1 } else { 0 };
        if self.good_claims >= BUSY && self.wanted_until.take().is_some() {
            let relay_id = self.shared.config.relay_id.clone();
            if let Err(error) = self.link.once(|session| relays::no_wake_up(session, &relay_id)) {
                log::debug!("{error}");
            }
        }
    }

    fn beat_if_due(&mut self) {
        if self.last_beat.elapsed() >= self.shared.config.heartbeat_interval {
            self.beat();
        }
    }

    fn beat(&mut self) {
        self.patiently(|session, relay| relays::beat(session, relay, 0));
        self.last_beat = Instant::now();
    }

    /// Writes pauses into the table, where other processes and people see them.
    fn record_pauses(&mut self) {
        let now = self.shared.pauses.describe();
        let may_try = self
            .pauses_refused
            .is_none_or(|then| then.elapsed() >= self.shared.config.heartbeat_interval);
        if now == self.known_pauses || !may_try {
            return;
        }
        let written = self
            .patiently(|session, relay| relays::paused(session, relay, &now.0, now.1.as_deref()));
        if written {
            self.known_pauses = now;
        }
        self.pauses_refused = (!written).then(Instant::now);
    }

    /// Runs a call until it succeeds, is refused or a stop is asked for. True when it succeeded.
    fn patiently(&mut self, mut call: impl FnMut(&mut Session, &str) -> Result<(), Error>) -> bool {
        let shared = Arc::clone(&self.shared);
        let gave_up = |error: &Error| shared.stop.is_stopping() || !error.needs_new_session();
        let done = self.link.until(gave_up, |session| call(session, &shared.config.relay_id));
        if let Err(error) = &done {
            log::warn!("{error}");
        }
        done.is_ok()
    }

    /// A lost session is opened again by the next call, with backoff; anything else would only repeat itself.
    fn wait_after(&mut self, error: &Error) {
        self.refusals = self.refusals.saturating_add(1);
        self.wanted_until = None;
        if error.needs_new_session() {
            self.beat();
            self.wait_for_verdicts();
        } else {
            if self.refusals.is_power_of_two() {
                log::error!("{error} ({} times)", self.refusals);
            }
            self.shared.stop.wait(self.shared.config.poll_interval.max(SLICE));
        }
    }
}

enum Pass {
    /// Look again at once.
    Claimed,
    /// Nothing to do for so long, unless something happens.
    Sleep(Duration),
}
