//! The relay: the only room with threads and channels.
//!
//! ```text
//!                      leases                     tasks, no buffer
//!  PostgreSQL <------ claimer -----------------------------+----------------+
//!      ^  ^  |           ^  wake-ups                        v                v
//!      |  |  +--NOTIFY--> listener                      worker 1 ...     worker N ---> broker
//!      |  +---- renew, verdict ----------------------------+----------------+
//!      +------- janitor (retention)
//! ```
//!
//! Each thread has a session of its own. States: *starting* (waiting for a database with the right schema), *running*,
//! *stopping* (no more claims; publishes in progress end, verdicts are written, the rest is released), *ended*. A
//! thread that panics stops the others and makes [`Relay::run`] return an error.

mod batch;
mod claimer;
mod cursor;
mod health;
mod janitor;
mod link;
mod listener;
mod pause;
mod report;
mod settle;
mod stop;
mod threads;
mod worker;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use postgres::Client;

pub use health::{BrokerHealth, Health, ThreadHealth};
pub use report::RunReport;
pub use stop::StopHandle;

use crate::config::RelayConfig;
use crate::error::{BoxError, Error};
use crate::publisher::Publisher;
use crate::store::{self, Schema, Session, relays};
use health::Progress;
use link::Link;
use pause::Target;
use report::Totals;
use threads::Threads;
use worker::{Worker, panic_text};

type Connect = dyn Fn() -> Result<Client, BoxError> + Send + Sync;
type MakePublisher = dyn Fn(usize) -> Box<dyn Publisher> + Send + Sync;

/// What the threads share.
struct Shared {
    config: RelayConfig,
    schema: Schema,
    connect: Box<Connect>,
    stop: StopHandle,
    health: Health,
    pauses: pause::Pauses,
    /// Whether there is a transaction pooler in between; found out by the first session.
    is_pooled: OnceLock<bool>,
    is_listening: AtomicBool,
    in_flight: AtomicUsize,
    /// When the broker last said anything, or was last asked; `None` before the first time.
    broker_heard: Mutex<Option<Instant>>,
    settled: Sender<()>,
    totals: Totals,
}

impl Shared {
    fn open_session(&self) -> Result<Session, Error> {
        let mut client = (self.connect)().map_err(Error::connect)?;
        let is_pooled = match self.is_pooled.get() {
            Some(known) => *known,
            None => {
                let mut other = (self.connect)().map_err(Error::connect)?;
                let found = store::is_pooled(&mut client, &mut other)?;
                *self.is_pooled.get_or_init(|| found)
            }
        };
        Session::open(client, &self.schema, is_pooled)
    }

    fn listens(&self) -> bool {
        self.is_listening.load(Ordering::Acquire)
    }

    /// Notes what is known of the broker now: `otherwise`, unless it is paused.
    fn heard_of_broker(&self, otherwise: BrokerHealth) {
        self.broker_asked();
        let trouble = self.pauses.broker_trouble();
        self.health.set_broker(trouble.map_or(otherwise, BrokerHealth::InTrouble));
    }

    /// Something has changed that may let the claimer claim.
    fn wake_claimer(&self) {
        let _ = self.settled.try_send(());
    }

    /// A probe found no event, and the broker cannot be asked without one.
    fn nothing_to_probe_with(&self, target: &Target) {
        let (wait, patience) = (self.config.poll_interval, self.config.policy.backoff_cap);
        let forgotten = self.pauses.nothing_to_probe_with(target, wait, patience);
        if forgotten {
            log::info!("no event is left to probe {target} with; resuming");
        }
        let known = self.health.broker();
        let is_unknown = forgotten || known == BrokerHealth::NotAsked;
        self.heard_of_broker(if is_unknown { BrokerHealth::OnlyAnEventCanTell } else { known });
    }

    fn broker_asked(&self) {
        *self.broker_heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// How long ago the broker last said anything, or was asked.
    fn broker_silence(&self) -> Option<Duration> {
        let heard = self.broker_heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.map(|then| then.elapsed())
    }
}

/// A relay that is ready to run. See the crate's front page for an example.
pub struct Relay {
    shared: Arc<Shared>,
    make_publisher: Arc<MakePublisher>,
    settled: Receiver<()>,
}

impl Relay {
    /// A relay that gets its connections from `connect` (TLS, pools and credentials are the caller's) and a publisher
    /// for each worker from `publisher`, which gets the worker's number, from 0, and should not do I/O yet.
    ///
    /// It holds a connection a worker and one for the claimer, one for wake-ups while they are on, and one more while
    /// it removes old events: with the defaults 4, at times 5.
    pub fn new<C, E, F, P>(config: RelayConfig, connect: C, publisher: F) -> Self
    where
        C: Fn() -> Result<Client, E> + Send + Sync + 'static,
        E: Into<BoxError>,
        F: Fn(usize) -> P + Send + Sync + 'static,
        P: Publisher + 'static,
    {
        let (settled_tx, settled) = bounded(1);
        let shared = Shared {
            schema: Schema::unchecked(&config.schema),
            connect: Box::new(move || connect().map_err(Into::into)),
            stop: StopHandle::new(),
            health: Health::new(),
            pauses: pause::Pauses::default(),
            is_pooled: OnceLock::new(),
            is_listening: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            broker_heard: Mutex::new(None),
            settled: settled_tx,
            totals: Totals::default(),
            config,
        };
        let make_publisher = move |index| Box::new(publisher(index)) as Box<dyn Publisher>;
        Self { shared: Arc::new(shared), make_publisher: Arc::new(make_publisher), settled }
    }

    /// Asks the relay to stop, from anywhere.
    pub fn stop_handle(&self) -> StopHandle {
        self.shared.stop.clone()
    }

    /// The state of its threads, database and broker, for health checks.
    pub fn health(&self) -> Health {
        self.shared.health.clone()
    }

    /// Runs until it is asked to stop, on this thread and its own.
    ///
    /// # Errors
    /// When the database has no outbox of this version, or a thread of the relay panicked. The loss of the database or
    /// the broker is no error: the relay waits for them.
    pub fn run(self) -> Result<RunReport, Error> {
        match in_time(&self.shared, prepare) {
            Some(Ok(true)) => self.supervise(),
            Some(Ok(false)) | None => Ok(RunReport::default()),
            Some(Err(error)) => Err(error),
        }
    }

    /// Runs on a thread of its own.
    pub fn start(self) -> RunningRelay {
        let (stop, health) = (self.stop_handle(), self.health());
        let thread = thread::spawn(move || self.run());
        RunningRelay { stop, health, thread: Some(thread) }
    }

    fn supervise(self) -> Result<RunReport, Error> {
        let Self { shared, make_publisher, settled } = self;
        let config = &shared.config;
        let serves = match (config.only.is_empty(), config.except.is_empty()) {
            (true, true) => "all aggregate types".into(),
            (true, false) => format!("all aggregate types but {:?}", config.except),
            (false, _) => format!("only the aggregate types {:?}", config.only),
        };
        let (relay_id, workers) = (&config.relay_id, config.workers);
        log::info!("relay {relay_id:?} started with {workers} publishers and serves {serves}");
        let mut threads = Threads::new(&shared);
        let (tasks_tx, tasks_rx) = bounded(0);
        let (wake_tx, wake_rx) = bounded(1);
        let is_pooled = shared.is_pooled.get() == Some(&true);
        if config.wake_ups && is_pooled {
            let every = config.poll_interval;
            log::warn!(
                "the database is behind a transaction pooler, where LISTEN cannot work: polling every {every:?}"
            );
        } else if config.wake_ups {
            threads.spawn("listener", move |shared, progress| {
                listener::run(shared, progress, &wake_tx)
            });
        }
        if let Some(retention) = config.retention {
            threads.spawn("janitor", move |shared, progress| {
                janitor::run(shared, progress, retention)
            });
        }
        for index in 0..config.workers {
            let (tasks, make) = (tasks_rx.clone(), Arc::clone(&make_publisher));
            let number = index as i32 + 1;
            threads.spawn(&format!("publisher-{number}"), move |shared, progress| {
                Worker::new(Arc::clone(shared), number, Arc::clone(progress), make).run(&tasks);
            });
        }
        drop(tasks_rx);
        threads.spawn("claimer", move |shared, progress| {
            claimer::Claimer::new(
                Arc::clone(shared),
                Arc::clone(progress),
                tasks_tx,
                settled,
                wake_rx,
            )
            .run();
        });
        let died = threads.wait();
        sign_off(&shared);
        let report = shared.totals.report();
        log::info!("relay {:?} stopped: {report}", shared.config.relay_id);
        died.map_or(Ok(report), Err)
    }
}

/// Waits for a database with the right schema. False when asked to stop meanwhile.
fn prepare(shared: &Arc<Shared>) -> Result<bool, Error> {
    let mut link = Link::new(Arc::clone(shared), Arc::new(Progress::detached()));
    let gave_up = |error: &Error| shared.stop.is_stopping() || !error.needs_new_session();
    match link.until(gave_up, |session| store::check_schema(session.client(), &shared.schema)) {
        Ok(()) => {
            shared.health.set_database(None);
            Ok(true)
        }
        Err(_) if shared.stop.is_stopping() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Tells the table that this relay has ended, so that it does not look dead. Best effort: the database may be away.
fn sign_off(shared: &Arc<Shared>) {
    if shared.health.database().is_err() {
        return;
    }
    let signed_off = in_time(shared, |shared| {
        let mut link = Link::new(Arc::clone(shared), Arc::new(Progress::detached()));
        link.once(|session| {
            relays::no_wake_up(session, &shared.config.relay_id)?;
            relays::ended(session, &shared.config.relay_id, 0)
        })
    });
    if let Some(Err(error)) = signed_off {
        log::debug!("{error}");
    }
}

/// Runs a call on a thread of its own, since a database that hangs would keep it past any stop. `None` when the time to
/// stop is over first.
fn in_time<T: Send + 'static>(
    shared: &Arc<Shared>,
    call: impl FnOnce(&Arc<Shared>) -> Result<T, Error> + Send + 'static,
) -> Option<Result<T, Error>> {
    let (done_tx, done) = bounded(1);
    let inner = Arc::clone(shared);
    thread::spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(|| call(&inner)));
        let died = |panic: Box<dyn Any + Send>| {
            Err(Error::thread_died("supervisor", &panic_text(panic.as_ref())))
        };
        let _ = done_tx.send(result.unwrap_or_else(died));
    });
    crossbeam_channel::select! {
        recv(done) -> result => return result.ok(),
        recv(shared.stop.channel()) -> _ => {}
    }
    let deadline =
        shared.stop.deadline(shared.config.shutdown_timeout).unwrap_or_else(Instant::now);
    done.recv_deadline(deadline.max(Instant::now() + Duration::from_millis(100))).ok()
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

/// A relay on a thread of its own. Dropping it asks it to stop and waits.
#[derive(Debug)]
pub struct RunningRelay {
    stop: StopHandle,
    health: Health,
    thread: Option<JoinHandle<Result<RunReport, Error>>>,
}

impl RunningRelay {
    /// Asks it to stop. Returns at once.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Asks it to stop, from anywhere.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// The state of its threads, database and broker.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it has ended. Ask it to [`stop`](Self::stop) first, or this waits for somebody who does.
    ///
    /// # Errors
    /// See [`Relay::run`].
    pub fn join(mut self) -> Result<RunReport, Error> {
        self.join_thread()
    }

    fn join_thread(&mut self) -> Result<RunReport, Error> {
        let Some(thread) = self.thread.take() else { return Ok(RunReport::default()) };
        thread.join().unwrap_or_else(|panic| {
            Err(Error::thread_died("supervisor", &panic_text(panic.as_ref())))
        })
    }
}

impl Drop for RunningRelay {
    fn drop(&mut self) {
        self.stop.stop();
        if let Err(error) = self.join_thread() {
            log::error!("{error}");
        }
    }
}
