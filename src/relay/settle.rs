//! The two writes that follow a claim, for whoever holds the batch: its verdicts, and a longer lease.
//!
//! Both are tried for as long as they make sense, since the fence makes a late one harmless, and both count what others
//! have by then. What cannot be written is logged; those events come back when their leases lapse.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Shared;
use super::batch::Batch;
use super::link::Link;
use crate::error::Error;
use crate::store::lease;
use crate::store::verdict::{self, Settled, Verdict};

/// How often the database may refuse a verdict for a reason that a new session would not mend.
const MOST_REFUSALS: u32 = 5;

impl Shared {
    /// Writes a verdict, unless there is nothing in it.
    pub(super) fn settle(&self, link: &mut Link, worker: i32, lease_id: i64, verdict: &Verdict) {
        if verdict.is_empty() {
            return;
        }
        let (mut refusals, mut is_unsure) = (0, false);
        let gave_up = |error: &Error| {
            refusals += u32::from(!error.needs_new_session() && !error.passes_by_itself());
            // A little earlier than the whole, so that the thread has ended when the time is up.
            let deadline = self.stop.deadline(self.config.shutdown_timeout.mul_f64(0.9));
            refusals >= MOST_REFUSALS || deadline.is_some_and(|deadline| Instant::now() >= deadline)
        };
        let written = link.until(gave_up, |session| {
            // When an answer was lost, rows that no longer match were most likely settled by that try.
            let (relay_id, delete) = (&self.config.relay_id, self.config.delete_on_publish);
            let written =
                verdict::settle(session, relay_id, worker, lease_id, verdict, delete, is_unsure);
            is_unsure |= written.as_ref().is_err_and(|error| error.sqlstate().is_none());
            written
        });
        match written {
            Ok(settled) => {
                self.totals.add(&settled);
                if settled.lease_lost > 0 {
                    log::warn!(
                        "{} verdicts came too late: others have those events now",
                        settled.lease_lost
                    );
                }
            }
            Err(error) => {
                let events = verdict.len();
                log::error!(
                    "{error}; the verdicts of {events} events are lost, and they come back when their leases lapse"
                );
            }
        }
    }

    /// Renews the lease on what is left of a batch, for as long as it holds. What is held behind a lost event goes into
    /// the verdict. False when the lease could not be renewed: nothing of the batch may be published then.
    pub(super) fn renew(
        &self,
        link: &mut Link,
        worker: i32,
        batch: &mut Batch,
        verdict: &mut Verdict,
    ) -> bool {
        let (ids, held_until, span) = (batch.ids(), batch.held_until(), self.config.lease);
        let mut asked_at = Instant::now();
        let gave_up = |_: &Error| self.stop.is_stopping() || Instant::now() >= held_until;
        let renewed = link.until(gave_up, |session| {
            asked_at = Instant::now();
            lease::renew(session, &self.config.relay_id, worker, batch.lease_id, &ids, span)
        });
        match renewed {
            Ok(held) => {
                let lost = ids.len() - held.len();
                if lost > 0 {
                    self.totals.add(&Settled { lease_lost: lost as u64, ..Settled::default() });
                    log::warn!(
                        "{lost} leases were lost before publishing; others have those events now"
                    );
                }
                batch.renewed(&held, asked_at, span, verdict);
                true
            }
            Err(error) => {
                log::warn!(
                    "{error}; {} events are released without having been published",
                    ids.len()
                );
                false
            }
        }
    }

    /// A batch has left the process.
    pub(super) fn batch_is_settled(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.wake_claimer();
    }
}
