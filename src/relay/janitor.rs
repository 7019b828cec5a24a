//! The janitor: removes published and discarded events after their retention, in small batches, on its own schedule.
//!
//! It works under constant load as well as without, keeps no session between two passes, and does nothing else. When the
//! database refuses, the pass is over and the next one tries again.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::health::Progress;
use super::link::Link;
use crate::error::Error;
use crate::store;

/// Removes old events until asked to stop.
pub(crate) fn run(shared: &Arc<Shared>, progress: &Arc<Progress>, retention: Duration) {
    while !shared.stop.is_stopping() {
        progress.note();
        let mut link = Link::new(Arc::clone(shared), Arc::clone(progress));
        match pass(shared, progress, &mut link, retention) {
            Ok(0) => {}
            Ok(deleted) => {
                log::info!("removed {deleted} events that were closed more than {retention:?} ago")
            }
            Err(error) => log::debug!("{error}"),
        }
        drop(link);
        shared.stop.wait(shared.config.prune_interval);
    }
}

fn pass(
    shared: &Shared,
    progress: &Progress,
    link: &mut Link,
    retention: Duration,
) -> Result<u64, Error> {
    let (mut deleted, mut after) = (0, Some(0));
    while let Some(after_id) = after.filter(|_| !shared.stop.is_stopping()) {
        progress.note();
        let pruned = link
            .once(|session| store::prune(session.client(), &shared.schema, retention, after_id))?;
        deleted += pruned.deleted;
        after = pruned.next_after;
    }
    Ok(deleted)
}
