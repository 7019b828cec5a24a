//! A claimed batch on its way through one worker: runs of events, sent in waves.
//!
//! A wave takes the first event of each run, so that a later event of an aggregate is never in flight before the earlier
//! one is confirmed, and everything inside a wave may be. Whatever leaves the batch does so into the verdict, or because
//! the lease on it was lost.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pause::Target;
use crate::event::Event;
use crate::policy::History;
use crate::store::claim::{Claim, Claimed};
use crate::store::verdict::Verdict;

/// Events of one lease.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) lease_id: i64,
    /// The event was claimed to find out whether this answers again.
    pub(crate) probe: Option<Target>,
    claimed_at: Instant,
    /// Until when the lease holds for sure: counted from before it was asked for, on this process's steady clock.
    held_until: Instant,
    runs: Vec<VecDeque<Claimed>>,
}

/// Events that may be in flight together, none of the same aggregate.
#[derive(Debug, Default)]
pub(crate) struct Wave {
    pub(crate) events: Vec<Event>,
    /// For each event: its run, and what its verdict needs to know.
    pub(crate) origins: Vec<(usize, History)>,
}

impl Batch {
    pub(crate) fn new(lease_id: i64, asked_at: Instant, lease: Duration, claim: Claim) -> Self {
        let mut runs: Vec<VecDeque<Claimed>> = Vec::new();
        for claimed in claim.events {
            match runs.last_mut() {
                Some(run)
                    if run
                        .back()
                        .is_some_and(|last| last.aggregate_key == claimed.aggregate_key) =>
                {
                    run.push_back(claimed);
                }
                _ => runs.push(VecDeque::from([claimed])),
            }
        }
        Self { lease_id, probe: None, claimed_at: asked_at, held_until: asked_at + lease, runs }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.iter().all(VecDeque::is_empty)
    }

    pub(crate) fn ids(&self) -> Vec<i64> {
        self.runs.iter().flatten().map(|claimed| claimed.event.id).collect()
    }

    /// How long the lease still holds for sure.
    pub(crate) fn remaining(&self) -> Duration {
        self.held_until.saturating_duration_since(Instant::now())
    }

    /// When the lease ends, for a publish that must be over before.
    pub(crate) fn held_until(&self) -> Instant {
        self.held_until
    }

    /// The lease was renewed on these rows by a statement sent at `asked_at`. What is not among them is lost; a run
    /// ends before the first lost event, and what is still held behind it is released.
    pub(crate) fn renewed(
        &mut self,
        held: &[i64],
        asked_at: Instant,
        lease: Duration,
        verdict: &mut Verdict,
    ) {
        self.held_until = asked_at + lease;
        for run in &mut self.runs {
            let Some(gap) = run.iter().position(|claimed| !held.contains(&claimed.event.id)) else {
                continue;
            };
            let behind = run.split_off(gap).into_iter().map(|claimed| claimed.event.id);
            verdict.released.extend(behind.filter(|id| held.contains(id)).map(|id| (id, false)));
        }
    }

    /// Takes out the events for which `hopeless` is true; what is behind them in their run is released.
    pub(crate) fn take_hopeless(
        &mut self,
        hopeless: impl Fn(&History) -> bool,
        verdict: &mut Verdict,
    ) -> Vec<(Event, History)> {
        let claimed_at = self.claimed_at;
        let mut taken = Vec::new();
        for run in &mut self.runs {
            if let Some(at) = run.iter().position(|claimed| hopeless(&history(claimed, claimed_at)))
            {
                let mut rest = run.split_off(at);
                taken.extend(rest.pop_front().map(|claimed| {
                    let past = history(&claimed, claimed_at);
                    (claimed.event, past)
                }));
                verdict.released.extend(rest.iter().map(|claimed| (claimed.event.id, false)));
            }
        }
        taken
    }

    /// The next event of each run. Runs whose destination is paused are released instead.
    pub(crate) fn next_wave(
        &mut self,
        is_paused: impl Fn(&str) -> bool,
        verdict: &mut Verdict,
    ) -> Wave {
        let mut wave = Wave::default();
        for index in 0..self.runs.len() {
            let paused =
                self.runs[index].front().is_some_and(|next| is_paused(&next.event.aggregate_type));
            if paused {
                self.release_run(index, verdict);
            } else if let Some(next) = self.runs[index].pop_front() {
                wave.origins.push((index, history(&next, self.claimed_at)));
                wave.events.push(next.event);
            }
        }
        wave
    }

    /// Releases what is left of a run, with the attempts given back.
    pub(crate) fn release_run(&mut self, run: usize, verdict: &mut Verdict) {
        verdict.released.extend(self.runs[run].drain(..).map(|claimed| (claimed.event.id, false)));
    }

    /// Releases everything that is left, with the attempts given back.
    pub(crate) fn release_all(&mut self, verdict: &mut Verdict) {
        (0..self.runs.len()).for_each(|run| self.release_run(run, verdict));
    }
}

/// What the row knew at the claim, and the time since.
fn history(claimed: &Claimed, claimed_at: Instant) -> History {
    History {
        attempts: claimed.event.attempt,
        unexplained_failures: claimed.unexplained_failures,
        failing_for: claimed.failing_for.map(|time| time + claimed_at.elapsed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    /// Events as (aggregate key, id).
    fn batch(events: &[(i64, i64)]) -> Batch {
        let claimed = |&(aggregate_key, id): &(i64, i64)| Claimed {
            event: Event::for_test(id, &aggregate_key.to_string(), "t", b""),
            aggregate_key,
            unexplained_failures: u32::from(id == 99),
            failing_for: None,
        };
        let events = events.iter().map(claimed).collect();
        let claim = Claim {
            events,
            next_key: None,
            probes: 0,
            suspect_key: None,
            last_chance_key: None,
            newest_id: None,
            table_end: None,
        };
        Batch::new(1, Instant::now(), LEASE, claim)
    }

    fn wave_ids(batch: &mut Batch) -> Vec<i64> {
        let wave = batch.next_wave(|_| false, &mut Verdict::default());
        wave.events.iter().map(|event| event.id).collect()
    }

    #[test]
    fn a_wave_has_one_event_of_each_aggregate_and_keeps_their_order() {
        let mut batch = batch(&[(1, 10), (1, 11), (1, 12), (2, 5), (3, 6), (3, 9)]);
        assert_eq!(wave_ids(&mut batch), [10, 5, 6]);
        assert_eq!(wave_ids(&mut batch), [11, 9]);
        assert_eq!(wave_ids(&mut batch), [12]);
        assert!(batch.is_empty());
    }

    #[test]
    fn a_failed_run_is_given_back() {
        let mut batch = batch(&[(1, 10), (1, 11), (2, 5), (2, 6)]);
        let mut verdict = Verdict::default();
        wave_ids(&mut batch);
        batch.release_run(0, &mut verdict);
        assert_eq!(verdict.released, [(11, false)]);
        assert_eq!(wave_ids(&mut batch), [6]);
    }

    #[test]
    fn nothing_passes_a_lost_event() {
        let mut batch = batch(&[(1, 10), (1, 11), (1, 12), (2, 5)]);
        let mut verdict = Verdict::default();
        batch.renewed(&[10, 12, 5], Instant::now(), LEASE, &mut verdict);
        assert_eq!(verdict.released, [(12, false)]);
        assert_eq!(batch.ids(), [10, 5]);
    }

    #[test]
    fn the_hopeless_are_taken_out_and_hold_what_is_behind_them() {
        let mut batch = batch(&[(1, 10), (1, 99), (1, 100), (2, 5)]);
        let mut verdict = Verdict::default();
        let taken = batch.take_hopeless(|past| past.unexplained_failures > 0, &mut verdict);
        assert_eq!(taken.len(), 1);
        assert_eq!(verdict.released, [(100, false)]);
        assert_eq!(batch.ids(), [10, 5]);
    }
}
