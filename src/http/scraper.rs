//! Reads the metrics for everybody who asks: one scrape at a time, each answer good for a second.
//!
//! A scrape reads every event that is not finished, and with a million of them that is time that the relay needs to get rid of
//! them. So an answer is good for longer where it was dear, up to [`SCRAPE_CACHE_MAX`], however often it is asked for. Dear
//! by the number of events, not by the time it took: a scrape that waited for a lock is no reason to say old things.
//!
//! States: *idle* (with an answer or none), *running*. A scrape runs on a thread of its own, so that a database that does
//! not answer costs its askers [`SCRAPE_TIMEOUT`] and no more, and never starts a second one.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use postgres::Client;

use super::{SCRAPE_CACHE, SCRAPE_CACHE_MAX, SCRAPE_TIMEOUT};
use crate::error::{BoxError, Error};
use crate::metrics::Snapshot;
use crate::policy::clean_reason;
use crate::store::Schema;
use crate::store::status;

type Connect = dyn Fn() -> Result<Client, BoxError> + Send + Sync;
type Answer = Result<String, String>;

/// For how long an answer is good for each unfinished event that it counted. Counting takes about a microsecond each.
const CACHE_PER_EVENT: Duration = Duration::from_micros(15);

pub(super) struct Scraper {
    schema: Schema,
    connect: Box<Connect>,
    state: Mutex<State>,
    finished: Condvar,
}

#[derive(Default)]
struct State {
    running: bool,
    scrapes: u64,
    /// When it is too old, and what was read.
    answer: Option<(Instant, Answer)>,
    // Kept between scrapes; away while one runs.
    client: Option<Client>,
}

impl Scraper {
    pub(super) fn new(
        schema: Schema,
        connect: impl Fn() -> Result<Client, BoxError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            schema,
            connect: Box::new(connect),
            state: Mutex::default(),
            finished: Condvar::new(),
        })
    }

    /// The metrics, at most [`SCRAPE_CACHE`] old, or why they cannot be read.
    pub(super) fn metrics(self: &Arc<Self>) -> Answer {
        let mut state = self.state();
        if let Some((until, answer)) = &state.answer
            && Instant::now() < *until
        {
            return answer.clone();
        }
        if !state.running {
            state.answer = None;
            state.running = true;
            let scraper = Arc::clone(self);
            let started =
                thread::Builder::new().name("http-scrape".into()).spawn(move || scraper.scrape());
            if let Err(error) = started {
                state.running = false;
                return Err(format!("no thread to read the metrics with: {error}"));
            }
        }
        let seen = state.scrapes;
        // A little more than the database gets, so that its own words arrive.
        let patience = SCRAPE_TIMEOUT + Duration::from_secs(1);
        let (state, _) = self
            .finished
            .wait_timeout_while(state, patience, |state| state.scrapes == seen)
            .unwrap_or_else(PoisonError::into_inner);
        match &state.answer {
            Some((_, answer)) if state.scrapes != seen => answer.clone(),
            _ => Err(format!("the database has not answered within {SCRAPE_TIMEOUT:?}")),
        }
    }

    fn scrape(&self) {
        let client = self.state().client.take();
        // The guard ends the scrape also where it panics, or nobody would ever start another.
        let mut done = Done {
            scraper: self,
            answer: Err("reading the metrics failed".into()),
            cache: SCRAPE_CACHE,
            client: None,
        };
        match self.read(client) {
            Ok((snapshot, client)) => {
                done.cache = good_for(snapshot.pending_rows + snapshot.dead_rows);
                (done.answer, done.client) = (Ok(snapshot.render()), Some(client));
            }
            // The session may be in any state: the next scrape gets a new one.
            Err(error) => done.answer = Err(clean_reason(&error.to_string())),
        }
    }

    /// Reads with the session at hand, and once more with a new one where that was lost meanwhile.
    fn read(&self, client: Option<Client>) -> Result<(Snapshot, Client), Error> {
        if let Some(mut client) = client.filter(|client| !client.is_closed()) {
            match status::scrape(&mut client, &self.schema, SCRAPE_TIMEOUT) {
                Ok(snapshot) => return Ok((snapshot, client)),
                Err(error) if !error.needs_new_session() => return Err(error),
                Err(_) => {}
            }
        }
        let mut client = (self.connect)()
            .map_err(|error| Error::database("connecting to the database", error))?;
        let snapshot = status::scrape(&mut client, &self.schema, SCRAPE_TIMEOUT)?;
        Ok((snapshot, client))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For how long an answer is served that counted this many events.
fn good_for(events: u64) -> Duration {
    let events = u32::try_from(events).unwrap_or(u32::MAX);
    CACHE_PER_EVENT.saturating_mul(events).clamp(SCRAPE_CACHE, SCRAPE_CACHE_MAX)
}

struct Done<'a> {
    scraper: &'a Scraper,
    cache: Duration,
    answer: Answer,
    client: Option<Client>,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut state = self.scraper.state();
        let answer = std::mem::replace(&mut self.answer, Err(String::new()));
        state.answer = Some((Instant::now() + self.cache, answer));
        state.client = self.client.take();
        state.running = false;
        state.scrapes += 1;
        self.scraper.finished.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dear_to_read_is_served_for_longer() {
        assert_eq!(good_for(0), SCRAPE_CACHE);
        assert_eq!(good_for(60_000), SCRAPE_CACHE);
        assert_eq!(good_for(200_000), Duration::from_secs(3));
        assert_eq!(good_for(1_000_000), SCRAPE_CACHE_MAX);
        assert_eq!(good_for(u64::MAX), SCRAPE_CACHE_MAX);
    }
}
