//! Starting the relay's threads, and hearing of their ends.
//!
//! A thread that panics asks the others to stop, so that a relay never goes on with a part of itself missing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::Shared;
use super::health::Progress;
use super::worker::panic_text;
use crate::error::Error;

/// The relay's threads, and the news of their ends.
pub(super) struct Threads<'a> {
    shared: &'a Arc<Shared>,
    running: usize,
    ends_tx: Sender<(String, Option<String>)>,
    ends: Receiver<(String, Option<String>)>,
}

impl<'a> Threads<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        let (ends_tx, ends) = unbounded();
        Self { shared, running: 0, ends_tx, ends }
    }

    pub(super) fn spawn(
        &mut self,
        name: &str,
        body: impl FnOnce(&Arc<Shared>, &Arc<Progress>) + Send + 'static,
    ) {
        let config = &self.shared.config;
        // A publish, a statement, a wait: no step takes longer, unless something hangs.
        let patience = config.publish_timeout + config.heartbeat_interval + Duration::from_secs(30);
        let patience = if name == "janitor" { patience + config.prune_interval } else { patience };
        let progress = self.shared.health.thread(name, patience);
        let (shared, ends, thread_name) =
            (Arc::clone(self.shared), self.ends_tx.clone(), name.to_owned());
        let run = move || {
            let result = catch_unwind(AssertUnwindSafe(|| body(&shared, &progress)));
            progress.ended();
            let panic = result.err().map(|panic| panic_text(panic.as_ref()));
            let _ = ends.send((thread_name, panic));
        };
        match thread::Builder::new().name(name.into()).spawn(run) {
            Ok(_) => self.running += 1,
            Err(error) => {
                let _ = self
                    .ends_tx
                    .send((name.into(), Some(format!("it could not be started: {error}"))));
                self.running += 1;
            }
        }
    }

    /// Waits until all have ended, or until a stop has taken too long. The first panic stops the others.
    pub(super) fn wait(mut self) -> Option<Error> {
        let mut died = None;
        while self.running > 0 {
            let deadline = self.shared.stop.deadline(self.shared.config.shutdown_timeout);
            let end = match deadline {
                None => crossbeam_channel::select! {
                    recv(self.ends) -> end => end.ok(),
                    recv(self.shared.stop.channel()) -> _ => continue,
                },
                Some(deadline) => {
                    self.ends.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
                }
            };
            let Some((name, panic)) = end else {
                log::error!(
                    "{} threads did not end in time; their events come back when the leases lapse",
                    self.running
                );
                break;
            };
            self.running -= 1;
            if let Some(panic) = panic {
                log::error!("the {name} thread panicked: {panic}");
                died = died.or_else(|| Some(Error::thread_died(&name, &panic)));
                self.shared.stop.stop();
            }
        }
        died
    }
}
