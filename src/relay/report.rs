//! What a relay did while it ran.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::store::verdict::Settled;

/// The same while it runs, added up by its threads.
#[derive(Default)]
pub(super) struct Totals {
    published: AtomicU64,
    retried: AtomicU64,
    dead_lettered: AtomicU64,
    released: AtomicU64,
    lease_lost: AtomicU64,
}

/// What a relay did while it ran.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunReport {
    /// Events marked as published.
    pub published: u64,
    /// Failures that will be retried.
    pub retried: u64,
    /// Events marked as dead.
    pub dead_lettered: u64,
    /// Events given back without an attempt.
    pub released: u64,
    /// Verdicts and renewals that came too late.
    pub lease_lost: u64,
}

impl Totals {
    pub(super) fn add(&self, settled: &Settled) {
        let add = |total: &AtomicU64, n| total.fetch_add(n, Ordering::Relaxed);
        add(&self.published, settled.published);
        add(&self.retried, settled.retried);
        add(&self.dead_lettered, settled.dead_lettered);
        add(&self.released, settled.released);
        add(&self.lease_lost, settled.lease_lost);
    }

    pub(super) fn report(&self) -> RunReport {
        let read = |total: &AtomicU64| total.load(Ordering::Relaxed);
        RunReport {
            published: read(&self.published),
            retried: read(&self.retried),
            dead_lettered: read(&self.dead_lettered),
            released: read(&self.released),
            lease_lost: read(&self.lease_lost),
        }
    }
}

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} published, {} to be retried, {} dead, {} released, {} leases lost",
            self.published, self.retried, self.dead_lettered, self.released, self.lease_lost
        )
    }
}
