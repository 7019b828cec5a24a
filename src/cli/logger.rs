//! The log: one line a record on standard error, `RUST_LOG` or `--log-level` says how much.

use std::io::Write;
use std::time::SystemTime;

use env_logger::{Builder, Env};
use log::{Level, Record};

use super::output;

/// Crates of the broker's client, whose finest records hold what is sent at login.
const BROKER_CLIENTS: [&str; 3] = ["lapin", "amq_protocol", "async_rs"];

/// Starts the log at `level`, unless `RUST_LOG` says otherwise.
pub(crate) fn start(level: &str) {
    let mut builder = Builder::from_env(Env::default().default_filter_or(level));
    builder.format(|out, record| {
        // Here and not by a filter, which a directive for a module of theirs would override.
        if may_hold_a_login(record) {
            return Ok(());
        }
        let time = humantime::format_rfc3339_millis(SystemTime::now());
        let text = output::line(&record.args().to_string());
        writeln!(out, "{time} {:<5} {}: {text}", record.level(), record.target())
    });
    // A second call, in the same process, keeps the first.
    let _ = builder.try_init();
}

fn may_hold_a_login(record: &Record<'_>) -> bool {
    record.level() > Level::Info
        && BROKER_CLIENTS.iter().any(|client| record.target().starts_with(client))
}
