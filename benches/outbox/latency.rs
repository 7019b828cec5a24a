//! Latency from commit to the publisher's call, and what an idle relay costs.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::costs::Meter;
use super::machine::{Others, cpu_seconds};
use super::producer::steady;
use super::relay::{RelayProcess, Settings};
use super::report::{Goal, Row};
use super::{Bench, Result};

const A_SECOND: u32 = 200;

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let poll_interval = Duration::from_millis(100);
    let without = poll_interval.as_secs_f64() * 500.0 + 2.0;
    // An event a second finds the relay asleep each time; at 200 a second it may well be awake.
    measure(bench, "latency, wake-ups", A_SECOND, Settings::default(), (0.5, 1.0))?;
    measure(bench, "latency, wake-ups, 20 events/s", 20, Settings::default(), (0.5, 1.0))?;
    let settings = Settings { wake_ups: false, poll_interval, ..Settings::default() };
    measure(bench, "latency, polling every 100 ms", A_SECOND, settings, (without, f64::INFINITY))?;
    idle(bench)
}

fn measure(
    bench: &mut Bench,
    name: &str,
    a_second: u32,
    settings: Settings,
    goals: (f64, f64),
) -> Result<()> {
    let others = Others::watch(&bench.server.pid().into_iter().collect::<Vec<_>>());
    let database = bench.server.database()?;
    let relay = RelayProcess::start(&database.url, &Settings { record: true, ..settings })?;
    wait_until_idle(&database)?;
    let events = u64::from(a_second) * bench.args.seconds.as_secs();
    let sent = steady(&database, a_second, events, &AtomicBool::new(false))?;
    std::thread::sleep(Duration::from_secs(2));
    let seen = relay.stop()?;
    let came: HashMap<u64, f64> =
        seen.record.iter().map(|&(time, aggregate, _)| (aggregate, time)).collect();
    if came.len() != sent.len() || seen.out_of_order > 0 {
        return Err(format!("{} of {} events came", came.len(), sent.len()).into());
    }
    // A publisher that was quicker than the commit's return counts as 0.
    let mut waits: Vec<f64> = sent
        .iter()
        .enumerate()
        .map(|(i, sent)| (came[&(i as u64)] - sent).max(0.0) * 1e3)
        .collect();
    waits.sort_by(f64::total_cmp);
    let share = |share: f64| waits[((waits.len() as f64 * share) as usize).min(waits.len() - 1)];
    bench.row(Row::new(format!("{name}, p50"), share(0.5), "ms").goal(Goal::AtMost(goals.0)));
    let mut row = Row::new(format!("{name}, p99"), share(0.99), "ms").notes(others.note());
    if goals.1.is_finite() {
        row = row.goal(Goal::AtMost(goals.1));
    }
    bench.row(row);
    Ok(())
}

/// A relay that has settled down asks for wake-ups, or has looked at the empty table.
fn wait_until_idle(database: &super::database::Database) -> Result<()> {
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(50));
        if database
            .count("SELECT count(*) FROM outbox.outbox_relay WHERE heartbeat_at IS NOT NULL")?
            >= 3
        {
            std::thread::sleep(Duration::from_secs(1));
            return Ok(());
        }
    }
    Err("the relay did not start within 5 s".into())
}

fn idle(bench: &mut Bench) -> Result<()> {
    let (database, settings) = (bench.server.database()?, Settings::default());
    let relay = RelayProcess::start(&database.url, &settings)?;
    wait_until_idle(&database)?;
    let span = (2 * bench.args.seconds).max(Duration::from_secs(10));
    let meter = Meter::start(&database)?;
    let before = cpu_seconds(relay.pid()).ok_or("no /proc")?;
    std::thread::sleep(span);
    let spent = cpu_seconds(relay.pid()).ok_or("no /proc")? - before;
    let costs = meter.stop(&database)?;
    relay.stop()?;
    bench.row(
        Row::new("idle relay, share of a core", spent / span.as_secs_f64() * 100.0, "%")
            .goal(Goal::AtMost(0.5)),
    );
    let Some(statements) = costs.statements else { return Ok(()) };
    // One look a poll, and three threads that beat every 10 s.
    let most = 1.0 / settings.poll_interval.as_secs_f64() + 3.0 / 10.0;
    let row = Row::new("idle relay, statements", statements / span.as_secs_f64(), "/s")
        .goal(Goal::AtMost(most));
    bench.row(row.note(format!("over {span:?}")));
    Ok(())
}
