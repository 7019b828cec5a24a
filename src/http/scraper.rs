//! Reads the metrics for everybody who asks: one scrape at a time, each answer good for a second.
//!
//! States: *idle* (with an answer or none), *running*. A scrape runs on a thread of its own, so that a database that does
//! not answer costs its askers [`SCRAPE_TIMEOUT`] and no more, and never starts a second one.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use postgres::Client;

use super::{SCRAPE_CACHE, SCRAPE_TIMEOUT};
use crate::error::{BoxError, Error};
use crate::policy::clean_reason;
use crate::store::Schema;
use crate::store::status;

type Connect = dyn Fn() -> Result<Client, BoxError> + Send + Sync;
type Answer = Result<String, String>;

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
        if let Some((at, answer)) = &state.answer
            && at.elapsed() < SCRAPE_CACHE
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
        let mut done =
            Done { scraper: self, answer: Err("reading the metrics failed".into()), client: None };
        match self.read(client) {
            Ok((text, client)) => (done.answer, done.client) = (Ok(text), Some(client)),
            // The session may be in any state: the next scrape gets a new one.
            Err(error) => done.answer = Err(clean_reason(&error.to_string())),
        }
    }

    /// Reads with the session at hand, and once more with a new one where that was lost meanwhile.
    fn read(&self, client: Option<Client>) -> Result<(String, Client), Error> {
        if let Some(mut client) = client.filter(|client| !client.is_closed()) {
            match status::scrape(&mut client, &self.schema, SCRAPE_TIMEOUT) {
                Ok(snapshot) => return Ok((snapshot.render(), client)),
                Err(error) if !error.needs_new_session() => return Err(error),
                Err(_) => {}
            }
        }
        let mut client = (self.connect)()
            .map_err(|error| Error::database("connecting to the database", error))?;
        let snapshot = status::scrape(&mut client, &self.schema, SCRAPE_TIMEOUT)?;
        Ok((snapshot.render(), client))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Done<'a> {
    scraper: &'a Scraper,
    answer: Answer,
    client: Option<Client>,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut state = self.scraper.state();
        let answer = std::mem::replace(&mut self.answer, Err(String::new()));
        state.answer = Some((Instant::now(), answer));
        state.client = self.client.take();
        state.running = false;
        state.scrapes += 1;
        self.scraper.finished.notify_all();
    }
}
