//! A relay as a child process: this program once more, with a publisher that counts and checks.
//!
//! The parent starts it with its settings as JSON, reads `START <time>` when it begins to run, and closes its standard
//! input to stop it; then it says in one line of JSON what it saw. Times are those of the system's clock, since two
//! processes share no other. A child whose parent has gone stops by itself.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pg_outbox::{Event, Outcomes, Publisher, Relay, RelayConfig};
use postgres::{Client, NoTls};
use serde_json::{Value, json};

use super::{Result, machine};

/// Its first argument.
pub(crate) const VERB: &str = "relay";

/// How a relay is to run.
pub(crate) struct Settings {
    pub(crate) name: String,
    pub(crate) workers: usize,
    pub(crate) wake_ups: bool,
    pub(crate) delete_on_publish: bool,
    pub(crate) poll_interval: Duration,
    /// Publish to RabbitMQ instead of into memory.
    pub(crate) rabbitmq: Option<String>,
    /// Remember every event and its time, at 32 bytes each.
    pub(crate) record: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "bench-1".into(),
            workers: 2,
            wake_ups: true,
            delete_on_publish: false,
            poll_interval: Duration::from_secs(1),
            rabbitmq: None,
            record: false,
        }
    }
}

/// A running child.
pub(crate) struct RelayProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// When it began to run, in seconds since 1970.
    pub(crate) started: f64,
}

/// What a child saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) events: u64,
    /// Handled after a later one of the same aggregate, or again.
    pub(crate) out_of_order: u64,
    pub(crate) peak_mb: f64,
    pub(crate) cpu_seconds: f64,
    /// Time, aggregate and id of each event, when asked to.
    pub(crate) record: Vec<(f64, u64, i64)>,
}

impl RelayProcess {
    pub(crate) fn start(url: &str, settings: &Settings) -> Result<Self> {
        let spec = json!({
            "url": url, "name": settings.name, "workers": settings.workers, "wake_ups": settings.wake_ups,
            "delete": settings.delete_on_publish, "poll_ms": settings.poll_interval.as_millis() as u64,
            "rabbitmq": settings.rabbitmq, "record": settings.record,
        });
        let mut child = Command::new(std::env::current_exe()?)
            .args([VERB, &spec.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().ok_or("a child without output")?);
        let mut process = Self { child, stdin, stdout, started: 0.0 };
        process.started = process.line()?.trim_start_matches("START ").parse()?;
        Ok(process)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            return Err("the relay's process ended too early".into());
        }
        Ok(line.trim().to_owned())
    }

    /// Stops it and hears what it saw.
    pub(crate) fn stop(mut self) -> Result<Seen> {
        let peak_mb = machine::peak_mb(self.child.id()).unwrap_or(f64::NAN);
        let cpu_seconds = machine::cpu_seconds(self.child.id()).unwrap_or(f64::NAN);
        drop(self.stdin.take());
        let said: Value = serde_json::from_str(&self.line()?)?;
        self.child.wait()?;
        let record = said["record"].as_array().map_or(&[][..], Vec::as_slice);
        let entry =
            |entry: &Value| Some((entry[0].as_f64()?, entry[1].as_u64()?, entry[2].as_i64()?));
        Ok(Seen {
            events: said["events"].as_u64().unwrap_or(0),
            out_of_order: said["out_of_order"].as_u64().unwrap_or(0),
            peak_mb,
            cpu_seconds,
            record: record.iter().filter_map(entry).collect(),
        })
    }
}

impl Drop for RelayProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// The child's side.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let spec: Value = serde_json::from_str(words.first().ok_or("no settings")?)?;
    let text = |name: &str| spec[name].as_str().unwrap_or_default().to_owned();
    let flag = |name: &str| spec[name].as_bool().unwrap_or_default();
    let number = |name: &str| spec[name].as_u64().unwrap_or_default();
    let config = RelayConfig::builder(text("name"))
        .workers(number("workers") as usize)
        .wake_ups(flag("wake_ups"))
        .delete_on_publish(flag("delete"))
        .poll_interval(Duration::from_millis(number("poll_ms")))
        .retention(None)
        .build()?;
    let url = text("url");
    let seen =
        Arc::new(Mutex::new(Log { record: flag("record").then(Vec::new), ..Log::default() }));
    let (log, broker) = (Arc::clone(&seen), spec["rabbitmq"].as_str().map(str::to_owned));
    let publisher =
        move |_| Counting { log: Arc::clone(&log), inner: broker.as_deref().map(inner) };
    let relay = Relay::new(config, move || Client::connect(&url, NoTls), publisher);
    let stop = relay.stop_handle();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stop.stop();
    });
    println!("START {}", now());
    std::io::stdout().flush()?;
    relay.run()?;
    let log = seen.lock().map_err(|_| "a publisher panicked")?;
    let said =
        json!({"events": log.events, "out_of_order": log.out_of_order, "record": log.record});
    println!("{said}");
    Ok(())
}

#[cfg(feature = "rabbitmq")]
fn inner(url: &str) -> Box<dyn Publisher> {
    Box::new(super::rabbitmq::publisher(url))
}

#[cfg(not(feature = "rabbitmq"))]
fn inner(_: &str) -> Box<dyn Publisher> {
    unreachable!("the case is not compiled in")
}

/// What the publishers of one process saw.
#[derive(Default)]
struct Log {
    events: u64,
    out_of_order: u64,
    /// The last id of each aggregate.
    last: Vec<i64>,
    record: Option<Vec<(f64, u64, i64)>>,
}

/// Counts events and looks at their order; does nothing with them, or hands them on.
struct Counting {
    log: Arc<Mutex<Log>>,
    inner: Option<Box<dyn Publisher>>,
}

impl Publisher for Counting {
    fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
        if let Ok(mut log) = self.log.lock() {
            log.note(wave);
        }
        match &mut self.inner {
            Some(inner) => inner.publish(wave, deadline, outcomes),
            None => (0..wave.len()).for_each(|index| outcomes.published(index)),
        }
    }
}

impl Log {
    fn note(&mut self, wave: &[Event]) {
        let time = if self.record.is_some() { now() } else { 0.0 };
        for event in wave {
            self.events += 1;
            // Aggregates are named by a letter and a number.
            let aggregate: u64 =
                event.aggregate_id.get(1..).and_then(|n| n.parse().ok()).unwrap_or(0);
            if let Some(record) = &mut self.record {
                record.push((time, aggregate, event.id));
            }
            let index = aggregate as usize;
            if self.last.len() <= index {
                self.last.resize(index + 1, 0);
            }
            self.out_of_order += u64::from(event.id <= self.last[index]);
            self.last[index] = event.id;
        }
    }
}
