//! Drains: from the start of the relay's loop until every event is handled and none is left unmarked.
//!
//! The end is read from the relays' own counters, which are written with the verdicts, every few milliseconds; connecting
//! is inside the clock, loading the program is not. Afterwards the table is counted: a drain that left, repeated or
//! reordered anything is an error and has no figure.

use std::time::{Duration, Instant};

use super::costs::{Costs, Meter, OWN};
use super::database::{Database, Fill};
use super::machine::Others;
use super::relay::{RelayProcess, Seen, Settings, now};
use super::report::{Goal, Row, median};
use super::{Bench, Result};

/// Between two looks at the counters, at first. Later a part of the time so far, so that looking costs a long drain no
/// more than a short one.
const LOOK: Duration = Duration::from_millis(4);
const PART: u32 = 250;

/// The settings of each process, by its number from 1.
pub(crate) type ForEach = fn(usize) -> Settings;

/// What is to be drained by whom.
pub(crate) struct Drain {
    pub(crate) events: u32,
    pub(crate) processes: usize,
    pub(crate) settings: ForEach,
    /// A drain that takes longer than this is an error.
    pub(crate) patience: Duration,
}

pub(crate) struct Drained {
    pub(crate) rate: f64,
    pub(crate) costs: Costs,
    pub(crate) peak_mb: f64,
    /// Processor time of the relays.
    pub(crate) relay_seconds: f64,
}

pub(crate) fn settings(index: usize) -> Settings {
    Settings { name: format!("bench-{index}"), ..Settings::default() }
}

fn recording(index: usize) -> Settings {
    Settings { record: true, ..settings(index) }
}

fn deleting(index: usize) -> Settings {
    Settings { delete_on_publish: true, ..settings(index) }
}

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let limit = bench.limit()?;
    let kinds: [(&str, usize, ForEach); 4] = [
        ("drain, 1 relay", 1, settings),
        ("drain, 2 relays", 2, recording),
        ("drain, 4 relays", 4, recording),
        ("drain, delete on publish", 1, deleting),
    ];
    for (name, processes, settings) in kinds {
        let events = bench.args.events;
        let drain = Drain { events, processes, settings, patience: Duration::from_secs(300) };
        let fill = Fill { events, aggregates: bench.args.aggregates, ..Fill::default() };
        let row = measure(bench, name, &drain, &fill)?;
        let ratio = row.value / limit;
        let row = row.ratio(ratio, "limit");
        bench.row(if processes == 1 { row.goal(Goal::AtLeast(0.8)) } else { row });
    }
    Ok(())
}

pub(crate) fn hot(bench: &mut Bench) -> Result<()> {
    let events = bench.args.events * 2;
    let drain = Drain { events, processes: 1, settings, patience: Duration::from_secs(300) };
    let row = measure(bench, "one hot aggregate", &drain, &Fill { events, ..Fill::default() })?;
    bench.row(row.goal(Goal::AtLeast(20_000.0)));
    Ok(())
}

/// The median of several drains, each of a new database.
fn measure(bench: &Bench, name: &str, drain: &Drain, fill: &Fill<'_>) -> Result<Row> {
    let others = Others::watch(&bench.server.pid().into_iter().collect::<Vec<_>>());
    let (mut rates, mut last) = (Vec::new(), None);
    for _ in 0..bench.args.repeat {
        let database = bench.server.database()?;
        database.fill(fill)?;
        database.settle()?;
        let drained = drain.run(&database)?;
        rates.push(drained.rate);
        last = Some(drained);
    }
    let (rate, spread) = median(rates);
    let drained = last.ok_or("no drain")?;
    let mut row = Row::new(name, rate, "events/s").notes(spread);
    if drain.processes == 1 {
        row = row.note(format!("peak {:.1} MB", drained.peak_mb));
    }
    let each = |seconds: f64| seconds * 1e6 / f64::from(drain.events);
    row = row.note(format!(
        "{:.1} us of processor time an event in the server, {:.1} in the relay",
        each(drained.costs.server_seconds),
        each(drained.relay_seconds)
    ));
    Ok(row.notes(drained.costs.notes(drain.events)).notes(others.note()))
}

impl Drain {
    pub(crate) fn run(&self, database: &Database) -> Result<Drained> {
        let meter = Meter::start(database)?;
        let processes = (1..=self.processes)
            .map(|index| RelayProcess::start(&database.url, &(self.settings)(index)))
            .collect::<Result<Vec<_>>>()?;
        let started = processes.iter().map(|process| process.started).fold(f64::MAX, f64::min);
        let ended = self.wait(database)?;
        let seen = processes.into_iter().map(RelayProcess::stop).collect::<Result<Vec<_>>>()?;
        let costs = meter.stop(database)?;
        self.check(&seen)?;
        let peak_mb = seen.iter().map(|seen| seen.peak_mb).fold(0.0, f64::max);
        let relay_seconds = seen.iter().map(|seen| seen.cpu_seconds).sum();
        let rate = f64::from(self.events) / (ended - started);
        Ok(Drained { rate, costs, peak_mb, relay_seconds })
    }

    fn wait(&self, database: &Database) -> Result<f64> {
        let mut client = database.connect()?;
        let sql =
            format!("SELECT coalesce(sum(published), 0)::bigint FROM outbox.outbox_relay {OWN}");
        let look = client.prepare(&sql)?;
        let begun = Instant::now();
        loop {
            let published: i64 = client.query_one(&look, &[])?.get(0);
            if published >= i64::from(self.events) {
                return Ok(now());
            }
            if begun.elapsed() > self.patience {
                return Err(format!(
                    "{published} of {} events after {:?}",
                    self.events, self.patience
                )
                .into());
            }
            std::thread::sleep(LOOK.max(begun.elapsed() / PART));
        }
    }

    /// Every event once, and each aggregate's in order: within a process as it saw them, across processes by the clock.
    fn check(&self, seen: &[Seen]) -> Result<()> {
        let events: u64 = seen.iter().map(|seen| seen.events).sum();
        let mut wrong: u64 = seen.iter().map(|seen| seen.out_of_order).sum();
        let mut record: Vec<_> = seen.iter().flat_map(|seen| &seen.record).collect();
        record.sort_by(|a, b| {
            (a.1, a.0).partial_cmp(&(b.1, b.0)).unwrap_or(std::cmp::Ordering::Equal)
        });
        wrong += record
            .windows(2)
            .filter(|pair| pair[0].1 == pair[1].1 && pair[0].2 >= pair[1].2)
            .count() as u64;
        if events != u64::from(self.events) || wrong > 0 {
            return Err(format!(
                "{events} of {} events were handled, {wrong} out of order",
                self.events
            )
            .into());
        }
        Ok(())
    }
}
