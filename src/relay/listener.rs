//! The listener: turns a writer's NOTIFY into a wake-up of the claimer.
//!
//! It has a session of its own, because a session that waits cannot do anything else. When the session is lost it opens another
//! one; until then, and wherever LISTEN cannot work, polling covers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use postgres::fallible_iterator::FallibleIterator;

use super::Shared;
use super::health::Progress;
use super::link::Link;
use crate::error::Error;
use crate::store::{Session, relays};

/// How long a stop may go unnoticed here.
const SLICE: Duration = Duration::from_millis(250);
/// A session over which nothing has come for so long is asked whether it is still there.
const DOUBT: Duration = Duration::from_secs(30);

/// Listens until asked to stop.
pub(crate) fn run(shared: &Arc<Shared>, progress: &Arc<Progress>, wake_ups: &Sender<()>) {
    let mut link = Link::new(Arc::clone(shared), Arc::clone(progress));
    while !shared.stop.is_stopping() {
        let heard = link.until(|_| shared.stop.is_stopping(), relays::listen);
        if heard.is_ok() {
            shared.is_listening.store(true, Ordering::Release);
            // Whatever was sent while nobody listened.
            let _ = wake_ups.try_send(());
            if let Err(error) = link.once(|session| listen(shared, progress, session, wake_ups)) {
                log::debug!("{error}");
            }
            shared.is_listening.store(false, Ordering::Release);
        }
    }
}

fn listen(
    shared: &Shared,
    progress: &Progress,
    session: &mut Session,
    wake_ups: &Sender<()>,
) -> Result<(), Error> {
    let mut last_sign = Instant::now();
    while !shared.stop.is_stopping() {
        progress.note();
        let mut notifications = session.client().notifications();
        let next = notifications.timeout_iter(SLICE).next();
        drop(notifications);
        if next.map_err(|error| Error::database("listening for wake-ups", error))?.is_some() {
            last_sign = Instant::now();
            let _ = wake_ups.try_send(());
        } else if last_sign.elapsed() >= DOUBT {
            relays::listen(session)?;
            last_sign = Instant::now();
        }
    }
    Ok(())
}
