//! Pauses: while the broker, or one destination, is in trouble, nothing is sent there but one probe at a time.
//!
//! States of the broker and of each destination (an aggregate type): *running*; *paused* until the next probe is due;
//! *probing*, while one event is out. A probe that meets the same trouble goes back to paused with a longer wait; any
//! other answer means that the broker is there, and everything resumes at once. Where there is no event to probe with, the
//! broker is asked without one; where that cannot be done either, the pause is forgotten after the longest backoff, since
//! by then others have sent whatever met the trouble here. The state lives in this process: another relay finds out for
//! itself, which costs one event's failure.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::policy::Policy;

/// What is paused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    Broker,
    Destination(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker => f.write_str("the broker"),
            Self::Destination(name) => write!(f, "destination {name:?}"),
        }
    }
}

/// What may be claimed now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Allowed {
    /// Anything but these destinations.
    AllBut(Vec<String>),
    /// One event, to find out.
    Probe(Target),
    /// Nothing before then.
    NothingUntil(Instant),
}

#[derive(Debug)]
struct Trouble {
    reason: String,
    probes: u32,
    next_probe: Instant,
    probing: bool,
    /// When an event last met the trouble.
    met_at: Instant,
}

#[derive(Debug, Default)]
pub(crate) struct Pauses(Mutex<BTreeMap<Target, Trouble>>);

impl Pauses {
    fn state(&self) -> MutexGuard<'_, BTreeMap<Target, Trouble>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records trouble. True when the target was running until now.
    pub(crate) fn trip(
        &self,
        target: &Target,
        reason: &str,
        asked_wait: Option<Duration>,
        was_probe: bool,
        longest: Duration,
        rng: &mut fastrand::Rng,
    ) -> bool {
        let mut state = self.state();
        let is_new = !state.contains_key(target);
        let trouble = state.entry(target.clone()).or_insert_with(|| Trouble {
            reason: String::new(),
            probes: 0,
            next_probe: Instant::now(),
            probing: false,
            met_at: Instant::now(),
        });
        // Batches that were in flight when the trouble began meet it as well; they say nothing about later.
        if !is_new && !was_probe {
            return false;
        }
        trouble.reason = reason.into();
        trouble.probing = false;
        trouble.met_at = Instant::now();
        trouble.probes = trouble.probes.saturating_add(1);
        let pace = Policy { backoff_cap: longest, ..Policy::default() };
        // Not full jitter: a probe a moment after the failure would find out nothing.
        let wait = pace.backoff_ceiling(trouble.probes).mul_f64(0.5 + 0.5 * rng.f64());
        trouble.next_probe = Instant::now() + asked_wait.unwrap_or_default().max(wait);
        is_new
    }

    /// The target answers. True when it was paused until now.
    pub(crate) fn clear(&self, target: &Target) -> bool {
        self.state().remove(target).is_some()
    }

    /// A probe was claimed for the target.
    pub(crate) fn probing(&self, target: &Target) {
        if let Some(trouble) = self.state().get_mut(target) {
            trouble.probing = true;
        }
    }

    /// A probe found no event to send, or was not sent: the next one is due after `wait`.
    pub(crate) fn not_probed(&self, target: &Target, wait: Duration) {
        if let Some(trouble) = self.state().get_mut(target) {
            trouble.probing = false;
            trouble.next_probe = Instant::now() + wait;
        }
    }

    /// There was no event to probe with, and no other way to ask. True when the pause is forgotten: it has been like this
    /// for `patience`. Otherwise the next probe is due after `wait`.
    pub(crate) fn nothing_to_probe_with(
        &self,
        target: &Target,
        wait: Duration,
        patience: Duration,
    ) -> bool {
        if self.state().get(target).is_some_and(|trouble| trouble.met_at.elapsed() >= patience) {
            return self.clear(target);
        }
        self.not_probed(target, wait);
        false
    }

    /// Whether nothing may be sent to the destination now.
    pub(crate) fn is_paused(&self, destination: &str) -> bool {
        let state = self.state();
        !state.is_empty()
            && (state.contains_key(&Target::Broker)
                || state.contains_key(&Target::Destination(destination.into())))
    }

    /// What may be claimed at `now`. One destination is probed at a time, the one that has waited longest, and everything
    /// else is claimed meanwhile: many destinations that time out must not keep every worker busy.
    pub(crate) fn allowed(&self, now: Instant) -> Allowed {
        let state = self.state();
        if let Some(trouble) = state.get(&Target::Broker) {
            return if trouble.probing {
                // The end of the probe wakes the claimer.
                Allowed::NothingUntil(now + Duration::from_secs(1))
            } else if trouble.next_probe > now {
                Allowed::NothingUntil(trouble.next_probe)
            } else {
                Allowed::Probe(Target::Broker)
            };
        }
        if let Some((target, trouble)) = next_destination(&state)
            && trouble.next_probe <= now
        {
            return Allowed::Probe(target.clone());
        }
        let destinations = state.keys().filter_map(|target| match target {
            Target::Destination(name) => Some(name.clone()),
            Target::Broker => None,
        });
        Allowed::AllBut(destinations.collect())
    }

    /// When the next probe is due. While the broker is in trouble no destination is probed, however long that is due.
    pub(crate) fn next_probe(&self) -> Option<Instant> {
        let state = self.state();
        match state.get(&Target::Broker) {
            Some(trouble) => (!trouble.probing).then_some(trouble.next_probe),
            None => next_destination(&state).map(|(_, trouble)| trouble.next_probe),
        }
    }

    /// Paused aggregate types (`*` for all) and why, for the table.
    pub(crate) fn describe(&self) -> (Vec<String>, Option<String>) {
        let state = self.state();
        let names = state.keys().map(|target| match target {
            Target::Broker => "*".into(),
            Target::Destination(name) => name.clone(),
        });
        let reasons: Vec<_> = state.values().map(|trouble| trouble.reason.as_str()).collect();
        (names.collect(), (!reasons.is_empty()).then(|| reasons.join("; ")))
    }

    /// Why the whole broker is paused.
    pub(crate) fn broker_trouble(&self) -> Option<String> {
        self.state().get(&Target::Broker).map(|trouble| trouble.reason.clone())
    }
}

/// The destination to probe next, unless one is being probed.
fn next_destination(state: &BTreeMap<Target, Trouble>) -> Option<(&Target, &Trouble)> {
    if state.values().any(|trouble| trouble.probing) {
        return None;
    }
    state.iter().min_by_key(|(_, trouble)| trouble.next_probe)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: Duration = Duration::from_secs(15);

    fn trip(pauses: &Pauses, target: &Target, was_probe: bool) -> bool {
        pauses.trip(target, "refused", None, was_probe, CAP, &mut fastrand::Rng::with_seed(1))
    }

    #[test]
    fn one_probe_at_a_time_until_the_broker_answers() {
        let pauses = Pauses::default();
        assert_eq!(pauses.allowed(Instant::now()), Allowed::AllBut(vec![]));
        assert!(trip(&pauses, &Target::Broker, false));
        assert!(!trip(&pauses, &Target::Broker, false), "a batch in flight is no news");
        assert!(matches!(pauses.allowed(Instant::now()), Allowed::NothingUntil(_)));
        let later = Instant::now() + Duration::from_secs(2);
        assert_eq!(pauses.allowed(later), Allowed::Probe(Target::Broker));
        pauses.probing(&Target::Broker);
        assert!(matches!(pauses.allowed(later), Allowed::NothingUntil(_)));
        trip(&pauses, &Target::Broker, true);
        assert!(matches!(pauses.allowed(Instant::now()), Allowed::NothingUntil(_)));
        assert!(pauses.clear(&Target::Broker));
        assert_eq!(pauses.allowed(Instant::now()), Allowed::AllBut(vec![]));
    }

    #[test]
    fn a_destination_pauses_alone() {
        let pauses = Pauses::default();
        let invoices = Target::Destination("invoice".into());
        trip(&pauses, &invoices, false);
        assert!(pauses.is_paused("invoice") && !pauses.is_paused("order"));
        assert_eq!(pauses.allowed(Instant::now()), Allowed::AllBut(vec!["invoice".into()]));
        assert_eq!(pauses.describe(), (vec!["invoice".into()], Some("refused".into())));
        let later = Instant::now() + Duration::from_secs(2);
        assert_eq!(pauses.allowed(later), Allowed::Probe(invoices));
    }

    #[test]
    fn a_destination_is_not_probed_while_the_broker_is_away() {
        let pauses = Pauses::default();
        trip(&pauses, &Target::Destination("invoice".into()), false);
        for _ in 0..10 {
            trip(&pauses, &Target::Broker, true);
        }
        let next = pauses.next_probe().expect("paused");
        assert_eq!(pauses.allowed(Instant::now()), Allowed::NothingUntil(next));
        pauses.probing(&Target::Broker);
        assert_eq!(pauses.next_probe(), None, "or the claimer would not sleep");
    }

    #[test]
    fn one_destination_is_probed_at_a_time_and_the_others_go_on() {
        let pauses = Pauses::default();
        let targets = ["a", "b", "c"].map(|name| Target::Destination(name.into()));
        for target in &targets {
            trip(&pauses, target, false);
        }
        pauses.not_probed(&targets[1], Duration::ZERO);
        let later = Instant::now() + Duration::from_secs(2);
        assert_eq!(pauses.allowed(later), Allowed::Probe(targets[1].clone()), "the longest due");
        pauses.probing(&targets[1]);
        assert!(matches!(pauses.allowed(later), Allowed::AllBut(names) if names.len() == 3));
        assert_eq!(pauses.next_probe(), None, "or the claimer would not sleep");
        trip(&pauses, &targets[1], true);
        assert!(matches!(pauses.allowed(later), Allowed::Probe(_)));
    }

    #[test]
    fn a_pause_that_nothing_can_end_is_forgotten() {
        let pauses = Pauses::default();
        let invoices = Target::Destination("invoice".into());
        trip(&pauses, &invoices, false);
        let hour = Duration::from_secs(3600);
        assert!(!pauses.nothing_to_probe_with(&invoices, CAP, hour));
        let next = pauses.next_probe().expect("paused");
        assert!(next.duration_since(Instant::now()) > CAP / 2);
        assert!(pauses.nothing_to_probe_with(&invoices, CAP, Duration::ZERO));
        assert!(!pauses.is_paused("invoice"));
        assert!(!pauses.nothing_to_probe_with(&invoices, CAP, Duration::ZERO), "no news");
    }

    #[test]
    fn probes_back_off_to_the_cap_and_respect_the_broker() {
        let pauses = Pauses::default();
        for _ in 0..40 {
            trip(&pauses, &Target::Broker, true);
        }
        let wait = pauses.next_probe().expect("paused").duration_since(Instant::now());
        assert!(wait <= CAP && wait >= CAP / 3, "{wait:?}");
        let asked = Some(Duration::from_secs(120));
        pauses.trip(&Target::Broker, "503", asked, true, CAP, &mut fastrand::Rng::with_seed(1));
        let wait = pauses.next_probe().expect("paused").duration_since(Instant::now());
        assert!(wait > Duration::from_secs(119), "{wait:?}");
    }
}
