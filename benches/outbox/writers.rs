//! What the outbox costs those who write.

use super::machine::Others;
use super::producer::{Writing, rate};
use super::relay::{RelayProcess, Settings};
use super::report::{Goal, Row};
use super::{Bench, Result};

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    append(bench)?;
    wake_ups(bench)
}

/// `append` against an insert of the same row, nobody else there.
fn append(bench: &mut Bench) -> Result<()> {
    let others = Others::watch(&bench.server.pid().into_iter().collect::<Vec<_>>());
    let mut rates = Vec::new();
    for writing in [Writing::Insert, Writing::Append] {
        let database = bench.server.database()?;
        rates.push(rate(&database, 16, writing, bench.args.seconds)?);
    }
    bench.row(Row::new("16 writers, bare insert", rates[0], "commits/s"));
    let row = Row::new("16 writers, append", rates[1], "commits/s")
        .ratio(rates[0] / rates[1], "the time of a bare insert");
    bench.row(row.goal(Goal::AtMost(1.5)).notes(others.note()));
    Ok(())
}

/// 64 writers beside a busy relay.
fn wake_ups(bench: &mut Bench) -> Result<()> {
    let others = Others::watch(&bench.server.pid().into_iter().collect::<Vec<_>>());
    let mut base = f64::NAN;
    for (name, wake_ups, writing, goal) in [
        ("64 writers, wake-ups off", false, Writing::Append, None),
        ("64 writers, wake-ups on", true, Writing::Append, Some(Goal::AtLeast(0.95))),
        ("64 writers, NOTIFY in every commit", false, Writing::AppendAndNotify, None),
    ] {
        let database = bench.server.database()?;
        let relay =
            RelayProcess::start(&database.url, &Settings { wake_ups, ..Settings::default() })?;
        let commits = rate(&database, 64, writing, bench.args.seconds)?;
        let seen = relay.stop()?;
        let mut row = Row::new(name, commits, "commits/s")
            .note(format!("{} events published meanwhile", seen.events));
        if base.is_nan() {
            base = commits;
        } else {
            row = row.ratio(commits / base, "wake-ups off");
        }
        row.goal = goal;
        bench.row(row.notes(others.note()));
    }
    Ok(())
}
