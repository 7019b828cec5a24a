//! The resident peak of a relay's process. Its publisher remembers the last id of each aggregate and nothing else.

use std::time::Duration;

use super::database::Fill;
use super::drain::{Drain, settings};
use super::report::{Goal, Row};
use super::{Bench, Result};

/// `batch_bytes` by default.
const BATCH_MB: f64 = 8.0;

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let small = Fill { events: 50_000, aggregates: 10_000, ..Fill::default() };
    measure(bench, "memory, 50,000 events of 250 bytes", &small, 16.0)?;
    let large = Fill { events: 1_000, aggregates: 100, padding: 1_000_000, ..Fill::default() };
    measure(bench, "memory, 1,000 events of 1 MB", &large, 32.0 + 2.0 * BATCH_MB)?;
    if bench.args.full {
        let many = Fill { events: 1_000_000, aggregates: 100_000, ..Fill::default() };
        measure(bench, "memory, 1,000,000 pending", &many, 32.0)?;
    }
    Ok(())
}

fn measure(bench: &mut Bench, name: &str, fill: &Fill<'_>, most: f64) -> Result<()> {
    let database = bench.server.database()?;
    database.fill(fill)?;
    database.settle()?;
    let drain =
        Drain { events: fill.events, processes: 1, settings, patience: Duration::from_secs(600) };
    let drained = drain.run(&database)?;
    let row = Row::new(name, drained.peak_mb, "MB").goal(Goal::AtMost(most));
    bench.row(row.note(format!("at {:.0} events/s", drained.rate)));
    Ok(())
}
