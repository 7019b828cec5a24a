//! A thread's link to the database: opened when it is needed, opened again after any loss, with backoff.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::health::Progress;
use crate::error::Error;
use crate::store::Session;

const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// One thread's session, or the lack of one.
pub(crate) struct Link {
    shared: Arc<Shared>,
    session: Option<Session>,
    progress: Arc<Progress>,
    rng: fastrand::Rng,
}

impl Link {
    pub(crate) fn new(shared: Arc<Shared>, progress: Arc<Progress>) -> Self {
        Self { shared, session: None, progress, rng: fastrand::Rng::new() }
    }

    /// Runs one call. A session that is lost on the way is dropped, and the error returned: only the caller knows
    /// whether the call may be repeated.
    pub(crate) fn once<T>(
        &mut self,
        call: impl FnOnce(&mut Session) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let session = match &mut self.session {
            Some(session) => session,
            empty => empty.insert(self.shared.open_session()?),
        };
        let result = call(session);
        if result.as_ref().is_err_and(Error::needs_new_session) {
            self.session = None;
        }
        result
    }

    /// Runs a call that may be repeated until it succeeds or `give_up` says so. The first repetition after a loss comes
    /// at once, since a session that was idle may have been closed long ago; the others back off with jitter.
    ///
    /// # Errors
    /// The last one, once `give_up` is true.
    pub(crate) fn until<T>(
        &mut self,
        mut give_up: impl FnMut(&Error) -> bool,
        mut call: impl FnMut(&mut Session) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let had_session = self.session.is_some();
        let (mut failures, lost_at) = (0u32, Instant::now());
        loop {
            self.progress.note();
            match self.once(&mut call) {
                Ok(value) => {
                    if failures > 0 {
                        log::info!("the database answers again after {:.1?}", lost_at.elapsed());
                    }
                    if had_session || failures > 0 {
                        self.shared.health.set_database(None);
                    }
                    return Ok(value);
                }
                Err(error) => {
                    failures = failures.saturating_add(1);
                    if error.needs_new_session() {
                        self.report(&error, failures, lost_at);
                    } else if failures.is_power_of_two() {
                        log::warn!("{error} (refused {failures} times)");
                    }
                    if give_up(&error) {
                        return Err(error);
                    }
                    if !(failures == 1 && had_session) {
                        self.pause(failures);
                    }
                }
            }
        }
    }

    /// One line when it starts and one at each doubling, so that an outage of hours does not fill a disk.
    fn report(&self, error: &Error, failures: u32, lost_at: Instant) {
        self.shared.health.set_database(Some(error.to_string()));
        if failures == 1 {
            log::info!("{error}; connecting again");
        } else if failures.is_power_of_two() {
            log::warn!("{error}; {failures} tries in {:.0?}", lost_at.elapsed());
        }
    }

    fn pause(&mut self, failures: u32) {
        let ceiling = FIRST_WAIT.saturating_mul(1 << failures.min(10)).min(LONGEST_WAIT);
        let wait = ceiling.mul_f64(0.5 + 0.5 * self.rng.f64());
        if self.shared.stop.is_stopping() {
            // Verdicts are still wanted: short steps until the caller gives up.
            std::thread::sleep(wait.min(Duration::from_millis(100)));
        } else {
            self.shared.stop.wait(wait);
        }
    }
}
