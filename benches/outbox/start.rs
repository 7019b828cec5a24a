//! From exec of the shipped command to its first claim, and the command's size.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::database::Fill;
use super::report::{Goal, Row, median};
use super::{Bench, Result};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pg-outbox");
const RUNS: usize = 5;

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..RUNS {
        times.push(once(bench)?);
    }
    let (time, spread) = median(times);
    bench.row(
        Row::new("start, exec to first claim", time, "ms").goal(Goal::AtMost(50.0)).notes(spread),
    );
    let bytes = std::fs::metadata(PROGRAM)?.len() as f64;
    let row = Row::new("size of the command", bytes / 1e6, "MB").goal(Goal::AtMost(6.0));
    let brokers = if cfg!(feature = "rabbitmq") { "stdout and RabbitMQ" } else { "stdout" };
    bench.row(row.note(format!("stripped, linked to libc, with {brokers}")));
    Ok(())
}

/// The claim is seen in the table, so the figure includes up to a millisecond of looking.
fn once(bench: &Bench) -> Result<f64> {
    let database = bench.server.database()?;
    database.fill(&Fill { events: 1, ..Fill::default() })?;
    database.settle()?;
    let mut client = database.connect()?;
    let look = client.prepare("SELECT attempts FROM outbox.outbox")?;
    client.query_one(&look, &[])?;
    let started = Instant::now();
    let mut command = Command::new(PROGRAM)
        .args(["run", "--broker", "stdout", "--listen", "off", "--log-level", "error"])
        .env("DATABASE_URL", &database.url)
        // The command refuses variables of its prefix that it does not know.
        .env_remove("PG_OUTBOX_BENCH_DATABASE_URL")
        .env_remove("PG_OUTBOX_BENCH_RABBITMQ_URL")
        .stdout(Stdio::null())
        .spawn()?;
    let mut time = None;
    while time.is_none() && started.elapsed() < Duration::from_secs(10) {
        if client.query_one(&look, &[])?.get::<_, i32>(0) > 0 {
            time = Some(started.elapsed().as_secs_f64() * 1e3);
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    command.kill()?;
    command.wait()?;
    time.ok_or_else(|| "nothing was claimed within 10 s".into())
}
