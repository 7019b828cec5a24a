//! What the process knows of its own threads, for `/healthz` and `/readyz`.
//!
//! The heartbeats in the table say to others whether this relay makes progress; this says it to those who ask the
//! process itself, also while the database is away.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The state of a relay's threads, its database and its broker. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Health(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    started: Instant,
    threads: Mutex<Vec<Arc<Progress>>>,
    database: Mutex<Option<String>>,
    broker: Mutex<BrokerHealth>,
}

/// What a relay knows of its broker.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BrokerHealth {
    /// Nothing yet: the relay asks as soon as it runs.
    NotAsked,
    /// Nothing: the publisher has no way to ask without an event, and none was sent since the relay started or resumed.
    OnlyAnEventCanTell,
    /// The last word of it was good.
    Answers,
    /// The relay has paused, for this reason.
    InTrouble(String),
}

impl BrokerHealth {
    /// Whether nothing speaks against sending events.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Answers | Self::OnlyAnEventCanTell)
    }
}

impl fmt::Display for BrokerHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked => f.write_str("not asked yet"),
            Self::OnlyAnEventCanTell => f.write_str("unknown until an event is sent"),
            Self::Answers => f.write_str("ok"),
            Self::InTrouble(reason) => f.write_str(reason),
        }
    }
}

/// One thread's progress.
#[derive(Debug)]
pub(crate) struct Progress {
    name: String,
    patience: Duration,
    started: Instant,
    last: AtomicU64,
    alive: AtomicBool,
}

/// What is known of one thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadHealth {
    /// Its name, such as `claimer` or `publisher-1`.
    pub name: String,
    /// False once it has ended.
    pub alive: bool,
    /// Time since it last made progress.
    pub since_progress: Duration,
    /// Whether that is longer than any step of it may take.
    pub late: bool,
}

impl Health {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Inner {
            started: Instant::now(),
            threads: Mutex::default(),
            database: Mutex::new(Some("not connected yet".into())),
            broker: Mutex::new(BrokerHealth::NotAsked),
        }))
    }

    /// Registers a thread that makes progress at least every `patience`.
    pub(crate) fn thread(&self, name: &str, patience: Duration) -> Arc<Progress> {
        let progress = Arc::new(Progress {
            name: name.into(),
            patience,
            started: self.0.started,
            last: AtomicU64::new(self.0.started.elapsed().as_millis() as u64),
            alive: AtomicBool::new(true),
        });
        self.0.threads.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&progress));
        progress
    }

    pub(crate) fn set_database(&self, trouble: Option<String>) {
        *self.0.database.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    pub(crate) fn set_broker(&self, state: BrokerHealth) {
        *self.0.broker.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Every thread of the relay.
    pub fn threads(&self) -> Vec<ThreadHealth> {
        let now = self.0.started.elapsed();
        let threads = self.0.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads
            .iter()
            .map(|thread| {
                let last = Duration::from_millis(thread.last.load(Ordering::Relaxed));
                let since_progress = now.saturating_sub(last);
                ThreadHealth {
                    name: thread.name.clone(),
                    alive: thread.alive.load(Ordering::Relaxed),
                    since_progress,
                    late: since_progress > thread.patience,
                }
            })
            .collect()
    }

    /// Whether the relay has a database that it can write to.
    ///
    /// # Errors
    /// Says why not.
    pub fn database(&self) -> Result<(), String> {
        self.0.database.lock().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), Err)
    }

    /// Whether the broker takes events, as far as the relay knows.
    pub fn broker(&self) -> BrokerHealth {
        self.0.broker.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Progress {
    /// Of a thread that nobody watches, because it lives for one call.
    pub(crate) fn detached() -> Self {
        Self {
            name: String::new(),
            patience: Duration::MAX,
            started: Instant::now(),
            last: AtomicU64::new(0),
            alive: AtomicBool::new(true),
        }
    }

    pub(crate) fn note(&self) {
        self.last.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self) {
        self.alive.store(false, Ordering::Relaxed);
    }
}
