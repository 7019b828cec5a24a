//! Stopping: bounded in every state, and nothing is held against an event because its relay was stopped.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use common::driver::{answers_when_told, is_paused};
use common::{Database, Server, eventually};
use pg_outbox::{
    Event, Outcomes, PublishError, Publisher, Relay, RelayConfig, RelayConfigBuilder, RunReport,
    RunningRelay, ScriptedBroker,
};

const LAPSE: Duration = Duration::from_secs(31);
const SOON: Duration = Duration::from_secs(30);
const SHUTDOWN: Duration = Duration::from_secs(6);
const PUBLISH: Duration = Duration::from_secs(1);
/// For a machine with more to do than this test: threads are joined, and a connection is closed.
const GRACE: Duration = Duration::from_secs(2);

fn config(relay_id: &str) -> RelayConfigBuilder {
    RelayConfig::builder(relay_id)
        .workers(1)
        .poll_interval(Duration::from_millis(20))
        .publish_timeout(PUBLISH)
        .shutdown_timeout(SHUTDOWN)
}

fn start(db: &Database, broker: &ScriptedBroker, config: RelayConfigBuilder) -> RunningRelay {
    let broker = broker.clone();
    Relay::new(config.build().unwrap(), db.factory(), move |_| broker.publisher()).start()
}

/// Stops the relay, does what else happens meanwhile, and checks that it ends well and in time.
fn stop_within(relay: RunningRelay, limit: Duration, meanwhile: impl FnOnce()) -> RunReport {
    let asked_at = Instant::now();
    relay.stop();
    meanwhile();
    while !relay.is_finished() && asked_at.elapsed() < limit + GRACE {
        std::thread::sleep(Duration::from_millis(5));
    }
    if !relay.is_finished() {
        std::mem::forget(relay); // dropping it would wait
        panic!("it did not end within {limit:?}");
    }
    relay.join().expect("a stop is no error")
}

/// Nothing is leased, and whatever was not published has its attempt back.
fn nothing_is_held_against(db: &Database, attempts_of_pending: i64) {
    assert_eq!(db.count("locked_by IS NOT NULL OR lease_id IS NOT NULL"), 0);
    assert_eq!(db.count("unexplained_failures > 0 OR status = 'dead'"), 0);
    let used = "status = 'pending' AND attempts > 0";
    assert_eq!(db.count(used), attempts_of_pending);
}

#[test]
fn three_relays_stopped_in_a_row_spend_nothing() {
    let db = Database::create();
    let ids = db.append_many(30, 20);
    let broker = ScriptedBroker::new();
    broker.on_publish(|_| std::thread::sleep(Duration::from_millis(5)));
    let config = |id| config(id).workers(2).batch_size(100);
    for (number, id) in ["relay-a", "relay-b", "relay-c"].into_iter().enumerate() {
        let relay = start(&db, &broker, config(id));
        assert!(broker.wait_for(100 * (number + 1), SOON));
        stop_within(relay, SHUTDOWN, || {});
        nothing_is_held_against(&db, 0);
        assert!(db.count("status = 'pending'") > 0, "{id} was stopped too late to tell");
        db.shift(LAPSE);
    }
    let relay = start(&db, &broker, config("relay-a"));
    let all = ids.len() as i64;
    eventually("all are published", SOON, || db.count("status = 'published'") == all);
    stop_within(relay, SHUTDOWN, || {});
    assert_eq!(db.count("attempts = 1 AND unexplained_failures = 0 AND NOT in_doubt"), all);
    assert_eq!(broker.published(), ids.len(), "no duplicates");
}

#[test]
fn an_idle_relay_stops_at_once() {
    let db = Database::create();
    let relay = start(&db, &ScriptedBroker::new(), config("relay-a").poll_interval(SOON));
    eventually("it runs", SOON, || relay.health().database().is_ok());
    stop_within(relay, Duration::ZERO, || {});
}

#[test]
fn a_publish_in_progress_ends_and_the_rest_is_given_back() {
    let db = Database::create();
    db.append_many(1, 3);
    let broker = ScriptedBroker::new();
    let (called, answer) = answers_when_told(&broker);
    let relay = start(&db, &broker, config("relay-a").batch_size(3));
    called.recv_timeout(SOON).expect("it publishes");
    db.append("order", "waits for the worker", "placed", b"{}");
    eventually("it is claimed, too", SOON, || db.count("locked_by = 'relay-a'") == 4);
    let report = stop_within(relay, SHUTDOWN, || answer.send(()).unwrap());
    assert_eq!((report.published, report.released), (1, 3));
    assert_eq!(db.count("status = 'published'"), 1);
    nothing_is_held_against(&db, 0);
}

/// Waits until its deadline, as a client does whose broker takes nothing.
struct Blocked(Sender<()>);

impl Publisher for Blocked {
    fn publish(&mut self, _: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
        let _ = self.0.send(());
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        outcomes.fail_unset(&PublishError::transient("blocked").broker().in_doubt());
    }
}

#[test]
fn a_blocked_broker_delays_a_stop_by_one_publish() {
    let db = Database::create();
    db.append_many(3, 2);
    let (called_tx, called) = channel();
    let make = move |_| Blocked(called_tx.clone());
    let relay = Relay::new(config("relay-a").build().unwrap(), db.factory(), make).start();
    called.recv_timeout(SOON).expect("it publishes");
    let report = stop_within(relay, PUBLISH, || {});
    assert_eq!((report.retried, report.released), (1, 5));
    nothing_is_held_against(&db, 1);
}

#[test]
fn a_paused_relay_stops_at_once() {
    let db = Database::create();
    db.append_many(3, 2);
    let broker = ScriptedBroker::new();
    broker.take_down(PublishError::transient("refused").broker());
    let relay = start(&db, &broker, config("relay-a"));
    eventually("it pauses", SOON, || is_paused(&relay));
    stop_within(relay, Duration::ZERO, || {});
    nothing_is_held_against(&db, 1);
}

/// Ignores its deadline until the other end is dropped.
struct Deaf(Sender<()>, std::sync::Arc<Mutex<Receiver<()>>>);

impl Publisher for Deaf {
    fn publish(&mut self, _: &[Event], _: Instant, _: &mut Outcomes) {
        let _ = self.0.send(());
        let _ = self.1.lock().unwrap().recv();
    }
}

#[test]
fn a_publisher_that_ignores_its_deadline_cannot_prevent_a_stop() {
    let db = Database::create();
    db.append_many(3, 2);
    let (called_tx, called) = channel();
    let (end, end_rx) = channel();
    let end_rx = std::sync::Arc::new(Mutex::new(end_rx));
    let make = move |_| Deaf(called_tx.clone(), end_rx.clone());
    let config = config("relay-a").shutdown_timeout(2 * PUBLISH).build().unwrap();
    let relay = Relay::new(config, db.factory(), make).start();
    called.recv_timeout(SOON).expect("it publishes");
    stop_within(relay, 2 * PUBLISH, || {});
    drop(end);
    eventually("its late verdict is written", SOON, || db.count("locked_by IS NOT NULL") == 0);
}

#[test]
fn a_relay_without_a_database_stops() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    let relay = start(&db, &ScriptedBroker::new(), config("relay-a"));
    eventually("it runs", SOON, || relay.health().database().is_ok());
    db.append_many(3, 2);
    eventually("all are published", SOON, || db.count("status = 'published'") == 6);
    server.stop();
    eventually("it notices", SOON, || relay.health().database().is_err());
    stop_within(relay, Duration::ZERO, || {});
    // And one that never had a database.
    let relay = start(&db, &ScriptedBroker::new(), config("relay-a"));
    stop_within(relay, Duration::ZERO, || {});
    server.start_again();
    nothing_is_held_against(&db, 0);
}

#[test]
fn verdicts_are_written_when_the_database_is_back_in_time() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    db.append_many(1, 3);
    let broker = ScriptedBroker::new();
    let (called, answer) = answers_when_told(&broker);
    let relay = start(&db, &broker, config("relay-a").shutdown_timeout(SOON));
    called.recv_timeout(SOON).expect("it publishes");
    server.stop();
    stop_within(relay, SOON, || {
        answer.send(()).unwrap();
        server.start_again();
    });
    assert_eq!(db.count("status = 'published'"), 1);
    nothing_is_held_against(&db, 0);
    assert_eq!(broker.published(), 1);
}

#[test]
fn a_database_that_stays_away_bounds_the_stop_and_loses_nothing() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    db.append_many(1, 3);
    let broker = ScriptedBroker::new();
    let (called, answer) = answers_when_told(&broker);
    let relay = start(&db, &broker, config("relay-a").shutdown_timeout(2 * PUBLISH));
    called.recv_timeout(SOON).expect("it publishes");
    server.stop();
    stop_within(relay, 2 * PUBLISH, || answer.send(()).unwrap());
    broker.clear_hook();
    server.start_again();
    db.shift(LAPSE);
    let relay = start(&db, &broker, config("relay-a"));
    eventually("all are published", SOON, || db.count("status = 'published'") == 3);
    stop_within(relay, SHUTDOWN, || {});
    let order: Vec<_> = broker.deliveries().iter().map(|event| event.payload.clone()).collect();
    assert_eq!(order, [b"0", b"0", b"1", b"2"], "the verdict of the first was lost");
}

/// A host that hangs answers nothing, and refuses nothing either.
#[test]
fn a_database_that_hangs_cannot_prevent_a_stop() {
    let server = Server::start();
    let db = Database::create_on(&server);
    let config = || config("relay-a").shutdown_timeout(2 * PUBLISH);
    let relay = start(&db, &ScriptedBroker::new(), config());
    eventually("it runs", SOON, || db.count("true") == 0 && relay.health().database().is_ok());
    server.freeze();
    stop_within(relay, 2 * PUBLISH, || {});
    let relay = start(&db, &ScriptedBroker::new(), config());
    stop_within(relay, 2 * PUBLISH, || {});
    server.thaw();
}
