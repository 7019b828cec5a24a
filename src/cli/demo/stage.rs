//! The demo's stage: its schema, its relay, and a publisher that reports each pass and waits until it was told.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pg_outbox::http::{self, HttpServer};
use pg_outbox::store::dead_letters::{self, EventDetails};
use pg_outbox::{
    Event, EventRef, NewEvent, Outbox, Outcomes, Policy, PublishError, Publisher, Relay,
    RelayConfig, RunReport, RunningRelay, Schema, ScriptedBroker, store,
};
use postgres::{Client, Config, NoTls};
use uuid::Uuid;

use super::super::database::{connect, describe};
use super::super::failure::Failure;
use super::{STEP, WRONG};

/// Marks a schema as the demo's, which alone may be dropped.
const MARK: &str = "pg-outbox demo: dropped when the demo ends";

/// One call of the publisher.
pub(super) struct Pass {
    pub(super) number: usize,
    pub(super) events: Vec<Event>,
    pub(super) outcomes: Vec<Result<(), PublishError>>,
}

pub(super) struct Stage {
    database: Config,
    client: Client,
    schema: Schema,
    relay: Option<RunningRelay>,
    server: Option<HttpServer>,
    passes: Option<Receiver<Pass>>,
    progress: Arc<Progress>,
    interrupted: Arc<AtomicBool>,
    is_down: bool,
}

impl Stage {
    /// Makes the schema, in place of one that an earlier demo could not drop.
    pub(super) fn build(database: Config, name: &str) -> Result<Self, Failure> {
        let (mut client, schema) = (connect(&database)?, Schema::new(name)?);
        refuse_strangers(&mut client, &schema)?;
        let quoted = quote(&schema);
        let drop =
            format!("SET client_min_messages = warning; DROP SCHEMA IF EXISTS {quoted} CASCADE");
        client.batch_execute(&drop).map_err(failed)?;
        let interrupted = Arc::new(AtomicBool::new(false));
        let noticed = Arc::clone(&interrupted);
        ctrlc::set_handler(move || noticed.store(true, Ordering::SeqCst))
            .map_err(|error| Failure::failed(format!("waiting for signals: {error}")))?;
        let mut stage = Self {
            database,
            client,
            schema,
            relay: None,
            server: None,
            passes: None,
            progress: Arc::default(),
            interrupted,
            is_down: false,
        };
        store::migrate(&mut stage.client, &stage.schema)?;
        let orders = format!(
            "COMMENT ON SCHEMA {quoted} IS '{MARK}'; CREATE TABLE {quoted}.orders (name text PRIMARY KEY, total numeric NOT NULL)"
        );
        stage.client.batch_execute(&orders).map_err(failed)?;
        Ok(stage)
    }

    pub(super) fn schema(&self) -> &Schema {
        &self.schema
    }

    pub(super) fn database(&mut self) -> (&mut Client, &Schema) {
        (&mut self.client, &self.schema)
    }

    /// The order and its events, or neither.
    pub(super) fn write_order(
        &mut self,
        order: &str,
        outbox: &Outbox,
        events: &[NewEvent],
    ) -> Result<Vec<Uuid>, Failure> {
        let mut transaction = self.client.transaction().map_err(failed)?;
        let insert =
            format!("INSERT INTO {}.orders (name, total) VALUES ($1, 12.50)", quote(&self.schema));
        transaction.execute(&insert, &[&order]).map_err(failed)?;
        let ids = outbox.append_all(&mut transaction, events)?;
        transaction.commit().map_err(failed)?;
        Ok(ids)
    }

    /// Starts the relay and its endpoint. One publisher, so that passes come one after the other.
    pub(super) fn start_relay(&mut self, broker: &ScriptedBroker) -> Result<(), Failure> {
        let policy = Policy {
            backoff_base: Duration::from_secs(2),
            backoff_cap: Duration::from_secs(8),
            ..Policy::default()
        };
        let config = RelayConfig::builder("demo")
            .schema(self.schema.name())
            .workers(1)
            .policy(policy)
            .build()?;
        let (report, passes) = mpsc::channel();
        let (database, broker, progress) =
            (self.database.clone(), broker.clone(), Arc::clone(&self.progress));
        let relay = Relay::new(
            config,
            move || database.connect(NoTls),
            move |_| Narrated {
                inner: broker.publisher(),
                seen: BTreeSet::new(),
                report: report.clone(),
                progress: Arc::clone(&progress),
            },
        );
        let database = self.database.clone();
        let server = http::serve(
            "127.0.0.1:0",
            self.schema.clone(),
            move || database.connect(NoTls),
            Some(relay.health()),
        );
        self.server =
            Some(server.map_err(|error| Failure::failed(format!("serving the metrics: {error}")))?);
        self.relay = Some(relay.start());
        self.passes = Some(passes);
        Ok(())
    }

    /// The next call of the publisher.
    pub(super) fn next_pass(&mut self, deadline: Instant) -> Result<Pass, Failure> {
        let passes =
            self.passes.as_ref().ok_or_else(|| Failure::failed("the relay does not run"))?;
        loop {
            self.still_playing(deadline, "a pass of the relay")?;
            match passes.recv_timeout(Duration::from_millis(50)) {
                Ok(pass) => return Ok(pass),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::failed(format!("{WRONG}: the relay ended")));
                }
            }
        }
    }

    /// Lets the publisher try again what was told of.
    pub(super) fn go_on(&self) {
        self.progress.told(1);
    }

    /// The events of a pass once its verdict is written.
    pub(super) fn settled(
        &mut self,
        pass: &Pass,
        deadline: Instant,
    ) -> Result<Vec<EventDetails>, Failure> {
        loop {
            self.still_playing(deadline, "a verdict")?;
            let mut events = Vec::new();
            for event in &pass.events {
                events.extend(dead_letters::show(
                    &mut self.client,
                    &self.schema,
                    &EventRef::from(event.id),
                )?);
            }
            let is_settled =
                |event: &EventDetails| event.status != "pending" || event.locked_until.is_none();
            if events.len() == pass.events.len() && events.iter().all(is_settled) {
                return Ok(events);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn still_playing(&self, deadline: Instant, what: &str) -> Result<(), Failure> {
        if self.interrupted.load(Ordering::SeqCst) {
            return Err(Failure::failed("interrupted"));
        }
        if Instant::now() > deadline {
            return Err(Failure::failed(format!("{WRONG}: {what} did not come within {STEP:?}")));
        }
        Ok(())
    }

    /// The text of `/metrics` once these values are in it. An answer is served again for a second, so it may take one.
    pub(super) fn metrics(&mut self, expected: &[(&str, u64)]) -> Result<String, Failure> {
        let server =
            self.server.as_ref().ok_or_else(|| Failure::failed("nothing serves the metrics"))?;
        let (addr, deadline) = (server.local_addr(), Instant::now() + STEP);
        loop {
            let text = get(addr, "/metrics")
                .map_err(|error| Failure::failed(format!("reading /metrics: {error}")))?;
            let missing: Vec<_> = expected
                .iter()
                .map(|(name, value)| format!("{name} {value}"))
                .filter(|line| !text.lines().any(|found| found == line))
                .collect();
            if missing.is_empty() {
                return Ok(text);
            }
            self.still_playing(deadline, &format!("{missing:?} in /metrics"))?;
            thread::sleep(Duration::from_millis(200));
        }
    }

    pub(super) fn stop_relay(&mut self) -> Result<RunReport, Failure> {
        self.progress.told(usize::MAX);
        (self.passes, self.server) = (None, None);
        let Some(relay) = self.relay.take() else { return Ok(RunReport::default()) };
        relay.stop();
        Ok(relay.join()?)
    }

    /// Stops what runs and drops the schema.
    pub(super) fn tear_down(mut self) -> Result<(), Failure> {
        self.clear()
    }

    fn clear(&mut self) -> Result<(), Failure> {
        if std::mem::replace(&mut self.is_down, true) {
            return Ok(());
        }
        let stopped = self.stop_relay();
        let drop = format!("DROP SCHEMA IF EXISTS {} CASCADE", quote(&self.schema));
        let mut dropped = self.client.batch_execute(&drop);
        if dropped.is_err() {
            // The session may have been lost in the middle of the story.
            dropped =
                self.database.connect(NoTls).and_then(|mut client| client.batch_execute(&drop));
        }
        dropped.map_err(failed)?;
        stopped.map(drop_report)
    }
}

fn drop_report(_: RunReport) {}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(failure) = self.clear() {
            eprintln!("pg-outbox: the demo's schema was not dropped: {}", failure.message);
        }
    }
}

/// Refuses a schema that is there and not the demo's.
fn refuse_strangers(client: &mut Client, schema: &Schema) -> Result<(), Failure> {
    let comment =
        "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = $1";
    let found = client.query_opt(comment, &[&schema.name()]).map_err(failed)?;
    let is_strange =
        found.is_some_and(|row| row.get::<_, Option<String>>(0).as_deref() != Some(MARK));
    if is_strange {
        return Err(Failure::usage(format!(
            "the schema {:?} is there and is not the demo's, which would drop it; choose another --demo-schema",
            schema.name()
        )));
    }
    Ok(())
}

fn quote(schema: &Schema) -> String {
    format!("\"{}\"", schema.name().replace('"', "\"\""))
}

fn failed(error: postgres::Error) -> Failure {
    Failure::failed(format!("the demo's database: {}", describe(&error)))
}

/// A GET like any other client's.
fn get(addr: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(STEP))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    if head.split_whitespace().nth(1) != Some("200") {
        return Err(std::io::Error::other(body.trim().to_owned()));
    }
    Ok(body.to_owned())
}

/// How many passes there were, and how many of them the story has told.
#[derive(Default)]
struct Progress {
    counts: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl Progress {
    fn reported(&self) -> usize {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.0 += 1;
        counts.0
    }

    fn told(&self, passes: usize) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.1 = counts.1.saturating_add(passes);
        self.changed.notify_all();
    }

    fn wait_until_told(&self, patience: Duration) {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let _ =
            self.changed.wait_timeout_while(counts, patience, |(reported, told)| told < reported);
    }
}

/// Publishes and reports. What was published before is not tried again before that was told of, or the story would find
/// the later state in the table. It is in a later batch then, so the verdict that the story waits for is written.
struct Narrated<P> {
    inner: P,
    seen: BTreeSet<i64>,
    report: Sender<Pass>,
    progress: Arc<Progress>,
}

impl<P: Publisher> Publisher for Narrated<P> {
    fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
        if wave.iter().any(|event| self.seen.contains(&event.id)) {
            self.progress.wait_until_told(deadline.saturating_duration_since(Instant::now()) / 2);
        }
        self.seen.extend(wave.iter().map(|event| event.id));
        self.inner.publish(wave, deadline, outcomes);
        let unset = || Err(PublishError::unexplained("no outcome"));
        let outcomes =
            (0..wave.len()).map(|index| outcomes.get(index).cloned().unwrap_or_else(unset));
        let mut results: Vec<_> = wave.iter().cloned().zip(outcomes).collect();
        results.sort_by_key(|(event, _)| event.id);
        let (events, outcomes) = results.into_iter().unzip();
        let pass = Pass { number: self.progress.reported(), events, outcomes };
        // Nobody listens any more once the story is over.
        let _ = self.report.send(pass);
    }
}
