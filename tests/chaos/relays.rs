//! Real relay processes of the built binary, each behind two proxies of its own: one to PostgreSQL, one to RabbitMQ.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::recorder::EXCHANGE;
use crate::common::process::{Nest, signal};
use crate::common::proxy::Proxy;
use crate::common::{Database, Rabbit, Server};

/// A lease that lapses within a freeze of a few seconds.
pub const LEASE: Duration = Duration::from_secs(6);
pub const WORKERS: usize = 2;
pub const BATCH: usize = 50;
/// Larger payloads are refused for good.
pub const MOST_BYTES: usize = 200_000;
/// Longer than the relay's own `shutdown_timeout` and the watch over it.
const STOP: Duration = Duration::from_secs(12);

const SETTINGS: &[&str] = &[
    "--lease=6s",
    "--publish-timeout=2s",
    "--lease-margin=1s",
    "--batch-size=50",
    "--workers=2",
    "--poll-interval=500ms",
    "--heartbeat-interval=2s",
    "--backoff-base=100ms",
    "--backoff-cap=2s",
    "--probe-interval-cap=1s",
    "--broker-connect-timeout=2s",
    "--broker-heartbeat=4s",
    "--shutdown-timeout=8s",
    "--retention=forever",
    "--transient-window=24h",
    "--listen=off",
    "--log-level=info",
    "--wake-ups=true",
    // While RabbitMQ comes back, it says of a stream for seconds that it is not there.
    "--retry-unroutable=true",
    "--exchange",
    EXCHANGE,
    "--routing-key",
    "{event_type}",
];

/// Ends the relays whose process ids are in the files `relay-*`, frozen or not.
const ENDING: &str = "cat relay-* | while read -r pid; do kill -s KILL \"$pid\"; done";

/// A relay's ways to its servers.
pub struct Paths {
    pub relay: usize,
    pub database: Proxy,
    pub broker: Proxy,
}

impl Paths {
    pub fn new(relay: usize, server: &Server, rabbit: &Rabbit) -> Self {
        Self { relay, database: Proxy::start(server.port()), broker: Proxy::start(rabbit.port()) }
    }
}

pub struct Relay {
    pub number: usize,
    database_url: String,
    broker_url: String,
    nest: Nest,
    process: Option<Child>,
}

impl Relay {
    /// A relay that is not running yet.
    pub fn new(paths: &Paths, db: &Database) -> Self {
        let (number, port) = (paths.relay, paths.database.port());
        let (name, application) = (db.name(), Self::application(number));
        let database_url = format!(
            "postgres://postgres@127.0.0.1:{port}/{name}?application_name={application}&connect_timeout=3"
        );
        let broker_url = format!("amqp://guest:guest@127.0.0.1:{}/%2f", paths.broker.port());
        let nest = Nest::new("relay", ENDING);
        Self { number, database_url, broker_url, nest, process: None }
    }

    /// What its sessions are called.
    pub fn application(number: usize) -> String {
        format!("chaos-relay-{number}")
    }

    pub fn spawn(&mut self) {
        assert!(self.process.is_none(), "relay {} is running", self.number);
        let log = self.nest.log();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pg-outbox"));
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("PG") || name == "RUST_LOG" {
                command.env_remove(&name);
            }
        }
        command
            .arg("run")
            .arg(format!("--relay-id={}", Self::application(self.number)))
            .arg(format!("--max-body-bytes={MOST_BYTES}"))
            .args(SETTINGS)
            .env("DATABASE_URL", &self.database_url)
            .env("PG_OUTBOX_BROKER", &self.broker_url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let process = command.spawn().expect("the relay can be started");
        self.nest.write("relay-pid", &format!("{}\n", process.id()));
        self.process = Some(process);
    }

    fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            signal(process.id(), name);
        }
    }

    pub fn freeze(&self) {
        self.signal("STOP");
    }

    pub fn thaw(&self) {
        self.signal("CONT");
    }

    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
            self.nest.write("relay-pid", "");
        }
    }

    /// Asks it to stop. The error says that it did not, or not in the right way.
    pub fn stop(&mut self) -> Result<(), String> {
        self.signal("TERM");
        let Some(process) = &mut self.process else { return Ok(()) };
        let deadline = Instant::now() + STOP;
        loop {
            if let Some(status) = process.try_wait().expect("a child") {
                self.process = None;
                self.nest.write("relay-pid", "");
                return if status.success() {
                    Ok(())
                } else {
                    Err(format!("relay {} was asked to stop and ended with {status}", self.number))
                };
            }
            if Instant::now() >= deadline {
                self.kill();
                return Err(format!("relay {} did not stop within {STOP:?}", self.number));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What is wrong with a process that should be running.
    pub fn look(&mut self) -> Result<(), String> {
        let ended = self.process.as_mut().and_then(|process| process.try_wait().expect("a child"));
        match ended {
            Some(status) => {
                self.process = None;
                Err(format!(
                    "relay {} ended by itself, with {status}: {}",
                    self.number,
                    self.nest.log_tail()
                ))
            }
            None => Ok(()),
        }
    }

    /// Lines of its log that tell of a panic.
    pub fn panics(&self) -> Vec<String> {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        log.lines().filter(|line| line.contains("panicked")).take(5).map(str::to_owned).collect()
    }

    pub fn log(&self) -> PathBuf {
        self.nest.folder().join("log")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.kill();
    }
}
