//! Writers: threads that append events over connections of their own, in transactions of every shape.
//!
//! A transaction appends for one to a few aggregates and ends in a commit, a rollback, or the loss of its connection; parts
//! of it stand in savepoints, of which some are rolled back; some stay open for seconds. In half of the transactions the
//! writer takes the outbox's lock on the aggregates first, so that each event can carry its sequence; in the other half
//! `append` has to lock, and the sequence is given after it. When the server is away, the writer tries again until it is
//! back or the run is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fastrand::Rng;
use pg_outbox::{NewEvent, append_all};
use postgres::{Client, NoTls, Transaction};
use uuid::Uuid;

use super::history::content;
use super::relays::MOST_BYTES;

pub const TYPES: [&str; 3] = ["order", "invoice", "parcel"];
/// Of so many aggregates one gets events that are too large for the broker.
const POISONED: u32 = 40;
pub const POISON: &str = "chaos.poison";

/// What writers did, as they saw it.
#[derive(Debug, Default)]
pub struct Tally {
    pub appended: AtomicU64,
    pub commits: AtomicU64,
    pub rollbacks: AtomicU64,
    pub savepoints_rolled_back: AtomicU64,
    pub long_transactions: AtomicU64,
    /// Transactions that the server refused or lost, some of which may have committed all the same.
    pub failures: AtomicU64,
    /// Two writers had one aggregate at once.
    pub clashes: AtomicU64,
}

pub struct Writers {
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    pub tally: Arc<Tally>,
}

impl Writers {
    /// Starts `count` writers that together append about `rate` events a second.
    pub fn start(url: &str, seed: u64, count: u32, rate: u32, aggregates: u32) -> Self {
        let (stop, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::default()));
        let writer = |number: u32| {
            let mut writer = Writer {
                url: url.to_owned(),
                rng: Rng::with_seed(seed ^ (u64::from(number) + 1) << 32),
                aggregates,
                tally: Arc::clone(&tally),
            };
            let (stop, pace) = (Arc::clone(&stop), f64::from(rate) / f64::from(count));
            thread::spawn(move || writer.run(&stop, pace))
        };
        let threads = (0..count).map(writer).collect();
        Self { threads, stop, tally }
    }

    /// Lets every writer end its transaction.
    pub fn stop(self) -> Arc<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a writer that did not panic");
        }
        self.tally
    }
}

struct Writer {
    url: String,
    rng: Rng,
    aggregates: u32,
    tally: Arc<Tally>,
}

/// An event before it has its sequence.
struct Draft {
    aggregate: u32,
    event_id: Uuid,
    is_poison: bool,
    size: usize,
}

impl Writer {
    fn run(&mut self, stop: &AtomicBool, pace: f64) {
        let mut client = None;
        let mut next = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if client.is_none() {
                client = self.connect();
            }
            let Some(open) = &mut client else {
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            let events = match self.transaction(open) {
                Ok(events) => events,
                Err(error) => {
                    self.note(&error);
                    // The session may be of no use, as after a crash, or refuse to write.
                    client = None;
                    thread::sleep(Duration::from_millis(50));
                    1
                }
            };
            // What an outage took is not made up for, or it would end in a flood.
            next = next.max(Instant::now() - Duration::from_secs(2))
                + Duration::from_secs_f64(events as f64 / pace);
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }

    fn connect(&self) -> Option<Client> {
        let mut client = Client::connect(&self.url, NoTls).ok()?;
        client.batch_execute("SET statement_timeout = '20s'").ok()?;
        Some(client)
    }

    fn note(&self, error: &Error) {
        let code = match error {
            Error::Append(error) => error.sqlstate(),
            Error::Database(error) => error.code().map(|code| code.code()),
        };
        let count = if code == Some("23505") { &self.tally.clashes } else { &self.tally.failures };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// One transaction. Returns how many events it tried to append.
    fn transaction(&mut self, client: &mut Client) -> Result<usize, Error> {
        let is_long = self.rng.u32(..200) == 0;
        let drafts = self.drafts(is_long);
        let mut transaction = client.transaction()?;
        let parts = self.rng.usize(1..=3).min(drafts.len());
        for part in drafts.chunks(drafts.len().div_ceil(parts)) {
            match self.rng.u32(..10) {
                0 => {
                    let mut savepoint = transaction.transaction()?;
                    self.append(&mut savepoint, part)?;
                    savepoint.rollback()?;
                    self.tally.savepoints_rolled_back.fetch_add(1, Ordering::Relaxed);
                }
                1..=3 => {
                    let mut savepoint = transaction.transaction()?;
                    self.append(&mut savepoint, part)?;
                    savepoint.commit()?;
                }
                _ => self.append(&mut transaction, part)?,
            }
        }
        if is_long {
            self.tally.long_transactions.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(self.rng.u64(500..4_000)));
        }
        if self.rng.u32(..8) == 0 {
            transaction.rollback()?;
            self.tally.rollbacks.fetch_add(1, Ordering::Relaxed);
        } else {
            transaction.commit()?;
            self.tally.commits.fetch_add(1, Ordering::Relaxed);
        }
        Ok(drafts.len())
    }

    /// A few aggregates are busy, most are not, and some have poison. In one transaction they come in one order, so that
    /// writers wait for each other in a circle only where the hash of two aggregates is in another order.
    fn drafts(&mut self, is_long: bool) -> Vec<Draft> {
        let mut drafts = Vec::new();
        let mut aggregates: Vec<u32> = (0..self.rng.u32(1..=3))
            .map(|_| match self.rng.u32(..4) {
                0 if !is_long => self.rng.u32(..self.aggregates.min(8)),
                _ => self.rng.u32(..self.aggregates),
            })
            .collect();
        aggregates.sort_unstable();
        aggregates.dedup();
        for aggregate in aggregates {
            for _ in 0..self.rng.u32(1..=4) {
                let is_poisoned = aggregate % POISONED == POISONED - 1;
                let is_poison = is_poisoned && self.rng.u32(..15) == 0;
                let event_id = Uuid::from_u128(self.rng.u128(..));
                let size = if is_poison { MOST_BYTES + 1 } else { self.size() };
                drafts.push(Draft { aggregate, event_id, is_poison, size });
            }
        }
        drafts
    }

    fn size(&mut self) -> usize {
        match self.rng.u32(..1_000) {
            0 => self.rng.usize(50_000..MOST_BYTES),
            1..=20 => self.rng.usize(2_000..30_000),
            21..=40 => 0,
            _ => self.rng.usize(1..600),
        }
    }

    fn append(&mut self, transaction: &mut Transaction<'_>, drafts: &[Draft]) -> Result<(), Error> {
        let is_carried = self.rng.bool();
        let sequences = if is_carried {
            lock(transaction, drafts)?;
            Some(next_sequences(transaction, drafts)?)
        } else {
            None
        };
        let made = drafts.iter().enumerate();
        let made = made.map(|(n, draft)| self.event(draft, sequences.as_ref().map(|all| all[n])));
        let (events, contents): (Vec<NewEvent>, Vec<i64>) = made.unzip();
        append_all(transaction, &events).map_err(Error::Append)?;
        self.tally.appended.fetch_add(events.len() as u64, Ordering::Relaxed);
        let sequences = match sequences {
            Some(sequences) => sequences,
            None => next_sequences(transaction, drafts)?,
        };
        write(transaction, drafts, &sequences, &contents)?;
        Ok(())
    }

    /// The event, and the hash of what is in it.
    fn event(&mut self, draft: &Draft, sequence: Option<i32>) -> (NewEvent, i64) {
        const CONTENT_TYPE: &str = "application/octet-stream";
        let (kind, id) = name(draft.aggregate);
        let event_type = if draft.is_poison { POISON } else { "chaos.happened" };
        let mut payload = vec![0; draft.size];
        self.rng.fill(&mut payload);
        // Sorted by name, as the hash wants them.
        let mut headers = Vec::new();
        if let Some(sequence) = sequence {
            headers.push(("chaos-aggregate", draft.aggregate.to_string()));
            headers.push(("chaos-sequence", sequence.to_string()));
        }
        headers.push(("traceparent", format!("00-{:032x}-01", self.rng.u128(..))));
        let hashed = headers.iter().map(|(name, value)| (*name, value.as_str()));
        let content = content(event_type, CONTENT_TYPE, hashed, &payload);
        let event = NewEvent::new(kind, id, event_type, payload)
            .event_id(draft.event_id)
            .content_type(CONTENT_TYPE);
        let event =
            headers.into_iter().fold(event, |event, (name, value)| event.header(name, value));
        (event, content as i64)
    }
}

/// Type and id of an aggregate.
fn name(aggregate: u32) -> (&'static str, String) {
    (TYPES[aggregate as usize % TYPES.len()], format!("a{aggregate}"))
}

/// What `append` does first. After it, nobody else gives a sequence in these aggregates until the transaction ends.
fn lock(transaction: &mut Transaction<'_>, drafts: &[Draft]) -> Result<(), postgres::Error> {
    let (kinds, ids): (Vec<_>, Vec<_>) = drafts.iter().map(|draft| name(draft.aggregate)).unzip();
    transaction.execute("SELECT outbox.outbox_lock_aggregates($1, $2)", &[&kinds, &ids])?;
    Ok(())
}

/// The next sequences, from what this transaction sees of its aggregates, which it has locked.
fn next_sequences(
    transaction: &mut Transaction<'_>,
    drafts: &[Draft],
) -> Result<Vec<i32>, postgres::Error> {
    let mut sequences = Vec::with_capacity(drafts.len());
    let (mut aggregate, mut last) = (None, 0);
    for draft in drafts {
        if aggregate != Some(draft.aggregate) {
            aggregate = Some(draft.aggregate);
            last = transaction
                .query_one(
                    "SELECT coalesce(max(sequence), 0) FROM chaos.written WHERE aggregate = $1",
                    &[&(draft.aggregate as i32)],
                )?
                .get(0);
        }
        last += 1;
        sequences.push(last);
    }
    Ok(sequences)
}

fn write(
    transaction: &mut Transaction<'_>,
    drafts: &[Draft],
    sequences: &[i32],
    contents: &[i64],
) -> Result<(), postgres::Error> {
    let aggregates: Vec<i32> = drafts.iter().map(|draft| draft.aggregate as i32).collect();
    let ids: Vec<Uuid> = drafts.iter().map(|draft| draft.event_id).collect();
    let poison: Vec<bool> = drafts.iter().map(|draft| draft.is_poison).collect();
    transaction.execute(
        "INSERT INTO chaos.written (aggregate, sequence, event_id, content, is_poison)
         SELECT * FROM unnest($1::int[], $2::int[], $3::uuid[], $4::bigint[], $5::bool[])",
        &[&aggregates, &sequences, &ids, &contents, &poison],
    )?;
    Ok(())
}

enum Error {
    Append(pg_outbox::Error),
    Database(postgres::Error),
}

impl From<postgres::Error> for Error {
    fn from(error: postgres::Error) -> Self {
        Self::Database(error)
    }
}
