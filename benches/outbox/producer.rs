//! Writers: threads that append for a while, each in transactions of one event.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use pg_outbox::NewEvent;
use postgres::{Client, Statement};

use super::database::Database;
use super::{Result, relay::now};

/// What each transaction does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Writing {
    /// An insert of the same row, past the library.
    Insert,
    /// [`pg_outbox::append`].
    Append,
    /// The same with a NOTIFY in every transaction.
    AppendAndNotify,
}

const INSERT: &str =
    "INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                      VALUES (gen_random_uuid(), 'order', $1, 'order.placed', $2)";

pub(crate) fn payload(seq: u64) -> Vec<u8> {
    format!(r#"{{"seq":{seq},"key":"k{seq}","pad":"{}"}}"#, "x".repeat(215)).into_bytes()
}

struct Writer {
    client: Client,
    insert: Statement,
    writing: Writing,
}

impl Writer {
    fn open(database: &Database, writing: Writing) -> Result<Self> {
        let mut client = database.connect()?;
        let insert = client.prepare(INSERT)?;
        Ok(Self { client, insert, writing })
    }

    fn write(&mut self, aggregate: u64) -> Result<()> {
        let (name, payload) = (format!("k{aggregate}"), payload(aggregate));
        let mut transaction = self.client.transaction()?;
        if self.writing == Writing::Insert {
            transaction.execute(&self.insert, &[&name, &payload])?;
        } else {
            pg_outbox::append(
                &mut transaction,
                &NewEvent::new("order", name, "order.placed", payload),
            )?;
        }
        if self.writing == Writing::AppendAndNotify {
            transaction.batch_execute("NOTIFY bench")?;
        }
        Ok(transaction.commit()?)
    }
}

/// Commits a second of so many writers over so long.
pub(crate) fn rate(
    database: &Database,
    writers: u64,
    writing: Writing,
    span: Duration,
) -> Result<f64> {
    let (barrier, stop) =
        (Arc::new(Barrier::new(writers as usize + 1)), Arc::new(AtomicBool::new(false)));
    let mut threads = Vec::new();
    for index in 0..writers {
        let mut writer = Writer::open(database, writing)?;
        let (barrier, stop) = (Arc::clone(&barrier), Arc::clone(&stop));
        threads.push(std::thread::spawn(move || -> Result<u64> {
            let mut commits = 0;
            barrier.wait();
            while !stop.load(Ordering::Relaxed) {
                // Aggregates of its own, a thousand of them: writers of one aggregate would wait for each other.
                writer.write(index * 1_000 + commits % 1_000)?;
                commits += 1;
            }
            Ok(commits)
        }));
    }
    barrier.wait();
    let started = Instant::now();
    std::thread::sleep(span);
    stop.store(true, Ordering::Relaxed);
    let mut commits = 0;
    for thread in threads {
        commits += thread.join().map_err(|_| "a writer panicked")??;
    }
    Ok(commits as f64 / started.elapsed().as_secs_f64())
}

/// Appends at a steady rate, event `i` for aggregate `i`, until told to stop or all are written. Returns when each
/// commit had returned, in seconds since 1970.
pub(crate) fn steady(
    database: &Database,
    a_second: u32,
    events: u64,
    stop: &AtomicBool,
) -> Result<Vec<f64>> {
    let mut writer = Writer::open(database, Writing::Append)?;
    let (started, mut sent) = (Instant::now(), Vec::new());
    for event in 0..events {
        let due = started + Duration::from_secs_f64(event as f64 / f64::from(a_second));
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if stop.load(Ordering::Relaxed) {
            break;
        }
        writer.write(event)?;
        sent.push(now());
    }
    Ok(sent)
}
