//! Growth: what cannot be claimed must not make slower what can.
//!
//! Each shape fills a database with rows that are no work (or not yet), then a clean backlog beside them; the drain of
//! that backlog, and its mean claim, are compared with the same drain alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postgres::{Client, IsolationLevel};

use super::database::{Database, Fill};
use super::drain::{Drain, Drained, settings};
use super::machine::Others;
use super::producer::steady;
use super::relay::{RelayProcess, Settings};
use super::report::{Goal, Row, amount};
use super::{Bench, Result};

/// Columns of a published row, of one that backs off for longer than the case takes, of one whose relay died.
const PUBLISHED: (&str, &str) = ("status, attempts, published_at", "'published', 1, now()");
const BACKING_OFF: (&str, &str) = (
    "attempts, retry_since, next_attempt_at, last_error",
    "3, now(), now() + interval '1 hour', 'refused'",
);
const LEASED: (&str, &str) =
    ("attempts, locked_by, lease_id, locked_until", "1, 'gone', 1, now() + interval '1 hour'");

/// What is in the table beside the backlog.
struct Shape {
    name: &'static str,
    fill: fn(&Bench, &Database) -> Result<()>,
    /// Whether to keep a transaction open that sees the old versions of rows.
    pins: bool,
    /// What to do after the backlog is there, instead of VACUUM ANALYZE.
    unsettled: Option<&'static str>,
}

impl Shape {
    const fn new(name: &'static str, fill: fn(&Bench, &Database) -> Result<()>) -> Self {
        Self { name, fill, pins: false, unsettled: None }
    }
}

/// Fills with `events` (in full size) of `aggregates`, as these columns say.
fn beside(
    bench: &Bench,
    database: &Database,
    events: u32,
    each: u32,
    columns: (&str, &str),
) -> Result<()> {
    let events = bench.args.scaled(events);
    let aggregates = (events / each).max(1);
    database.fill(&Fill {
        events,
        aggregates,
        prefix: "b",
        columns: columns.0,
        values: columns.1,
        ..Fill::default()
    })
}

/// Aggregates whose first event is dead and holds the rest.
fn held(bench: &Bench, database: &Database, events: u32, aggregates: u32) -> Result<()> {
    let events = bench.args.scaled(events);
    let aggregates = if aggregates > 1 { bench.args.scaled(aggregates) } else { 1 };
    let dead = format!(
        "CASE WHEN i < {aggregates} THEN 'dead' ELSE 'pending' END, CASE WHEN i < {aggregates} THEN now() END"
    );
    let (prefix, columns) = ("b", "status, died_at");
    database.fill(&Fill { events, aggregates, prefix, columns, values: &dead, ..Fill::default() })
}

fn shapes() -> Vec<Shape> {
    let none = |_: &Bench, _: &Database| Ok(());
    vec![
        Shape::new("10,000,000 published", |b, d| beside(b, d, 10_000_000, 10, PUBLISHED)),
        Shape::new("100,000 held behind one dead event", |b, d| held(b, d, 100_000, 1)),
        Shape::new("10,000 dead aggregates, 10 held each", |b, d| held(b, d, 110_000, 10_000)),
        Shape::new("100,000 aggregates backing off", |b, d| beside(b, d, 100_000, 1, BACKING_OFF)),
        Shape::new("10,000 rows leased by dead relays", |b, d| beside(b, d, 10_000, 1, LEASED)),
        Shape { pins: true, ..Shape::new("an old transaction that pins row versions", none) },
        Shape {
            // As if ANALYZE had looked while the table was empty and nothing had cleaned up since.
            unsettled: Some("CHECKPOINT"),
            ..Shape::new("statistics of an empty table, autovacuum off", |_, database| {
                database.execute("ALTER TABLE outbox.outbox SET (autovacuum_enabled = off); ANALYZE outbox.outbox")
            })
        },
    ]
}

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let events = bench.args.events;
    let clean = drain(bench, &Shape::new("", |_, _| Ok(())), events)?;
    let base = Row::new("growth, nothing beside", clean.rate, "events/s");
    let scale = if bench.args.full { 1.0 } else { bench.args.scale };
    let scale = format!("what is beside is {} of the size named", amount(scale));
    bench.row(base.note(format!("claims of {} ms", amount(clean.costs.claim_ms))).note(scale));
    for shape in shapes() {
        let others = Others::watch(&bench.server.pid().into_iter().collect::<Vec<_>>());
        let drained = drain(bench, &shape, events)?;
        bench.row(against(&clean, &drained, shape.name).notes(others.note()));
    }
    many_pending(bench, &clean)?;
    fresh_beside_backoff(bench)
}

fn against(clean: &Drained, drained: &Drained, name: &str) -> Row {
    let claim = drained.costs.claim_ms / clean.costs.claim_ms;
    Row::new(format!("growth, {name}"), drained.rate, "events/s")
        .ratio(clean.rate / drained.rate, "the clean time")
        .goal(Goal::AtMost(1.5))
        .note(format!("claims of {} ms, {claim:.2} x", amount(drained.costs.claim_ms)))
}

fn drain(bench: &Bench, shape: &Shape, events: u32) -> Result<Drained> {
    let database = bench.server.database()?;
    (shape.fill)(bench, &database)?;
    let mut client = database.connect()?;
    let pin = shape.pins.then(|| pin(&mut client)).transpose()?;
    database.fill(&Fill { events, aggregates: bench.args.aggregates, ..Fill::default() })?;
    match shape.unsettled {
        Some(sql) => database.execute(sql)?,
        None => database.settle()?,
    }
    let drain = Drain { events, processes: 1, settings, patience: Duration::from_secs(600) };
    let drained = drain.run(&database);
    drop(pin);
    drained
}

/// A transaction that has looked, and so keeps every version that was current then.
fn pin(client: &mut Client) -> Result<postgres::Transaction<'_>> {
    let mut transaction =
        client.build_transaction().isolation_level(IsolationLevel::RepeatableRead).start()?;
    transaction.query_one("SELECT count(*) FROM outbox.outbox_relay", &[])?;
    Ok(transaction)
}

/// A backlog twenty times as long.
fn many_pending(bench: &mut Bench, clean: &Drained) -> Result<()> {
    let database = bench.server.database()?;
    let events = bench.args.scaled(1_000_000).max(bench.args.events * 2);
    database.fill(&Fill { events, aggregates: (events / 5).max(1), ..Fill::default() })?;
    database.settle()?;
    let drain = Drain { events, processes: 1, settings, patience: Duration::from_secs(600) };
    let drained = drain.run(&database)?;
    bench.row(against(clean, &drained, &format!("{} pending", amount(f64::from(events)))));
    Ok(())
}

/// Fresh events that arrive one by one beside aggregates that back off: how long the slowest of them wait.
fn fresh_beside_backoff(bench: &mut Bench) -> Result<()> {
    let database = bench.server.database()?;
    beside(bench, &database, 100_000, 1, BACKING_OFF)?;
    database.settle()?;
    let relay =
        RelayProcess::start(&database.url, &Settings { record: true, ..Settings::default() })?;
    std::thread::sleep(Duration::from_secs(1));
    let stop = Arc::new(AtomicBool::new(false));
    let events = 200 * bench.args.seconds.as_secs();
    let sent = steady(&database, 200, events, &stop)?;
    std::thread::sleep(Duration::from_secs(3));
    stop.store(true, Ordering::Relaxed);
    let seen = relay.stop()?;
    let mut waits: Vec<f64> = seen
        .record
        .iter()
        .filter_map(|&(time, aggregate, _)| Some((time - sent.get(aggregate as usize)?) * 1e3))
        .collect();
    waits.sort_by(f64::total_cmp);
    if waits.len() != sent.len() {
        return Err(format!("{} of {} fresh events came", waits.len(), sent.len()).into());
    }
    let row = Row::new(
        "growth, 200 fresh events/s beside aggregates backing off, p50",
        waits[waits.len() / 2],
        "ms",
    );
    bench.row(row.note(format!("p99 {} ms", amount(waits[waits.len() * 99 / 100]))));
    Ok(())
}
