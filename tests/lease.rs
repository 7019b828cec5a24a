//! Leases: nothing is locked while the broker is called, a late write changes nothing, and a long batch stays held.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::driver::answers_when_told;
use common::{Database, eventually};
use pg_outbox::store::claim::{self, Claimed, Class, Request};
use pg_outbox::store::verdict::{Failure, Verdict, settle};
use pg_outbox::store::{Session, lease, status};
use pg_outbox::{
    PublishError, Relay, RelayConfig, RelayConfigBuilder, RunningRelay, Schema, ScriptedBroker,
};

const LEASE: Duration = Duration::from_secs(30);
const LAPSE: Duration = Duration::from_secs(31);
const SOON: Duration = Duration::from_secs(20);

fn config(relay_id: &str) -> RelayConfigBuilder {
    let poll = Duration::from_millis(20);
    RelayConfig::builder(relay_id).workers(1).poll_interval(poll).wake_ups(false).retention(None)
}

fn start(db: &Database, broker: &ScriptedBroker, config: RelayConfigBuilder) -> RunningRelay {
    let broker = broker.clone();
    Relay::new(config.build().unwrap(), db.factory(), move |_| broker.publisher()).start()
}

fn session(db: &Database) -> Session {
    Session::open(db.client(), &Schema::default(), false).unwrap()
}

/// Whatever is claimable, clean or suspect.
fn claim_all(session: &mut Session, relay_id: &str, lease_id: i64) -> Vec<Claimed> {
    let mut events = Vec::new();
    for class in [Class::Clean, Class::Suspect, Class::LastChance] {
        let request = Request {
            class,
            last_chance: 2,
            from_key: i64::MIN,
            probes: 100,
            heads: 100,
            rows: 100,
            bytes: 1 << 20,
            run: 100,
            newer_than: i64::MAX,
            fresh: 0,
            only: vec![],
            except: vec![],
        };
        events.extend(claim::claim(session, relay_id, lease_id, LEASE, &request).unwrap().events);
    }
    events
}

/// Every row with every column.
fn rows(db: &Database) -> Vec<String> {
    let rows = db.client().query("SELECT o::text FROM outbox.outbox o ORDER BY id", &[]);
    rows.unwrap().iter().map(|row| row.get(0)).collect()
}

fn number(db: &Database, sql: &str) -> i64 {
    db.client().query_one(sql, &[]).unwrap().get(0)
}

fn alive(db: &Database) -> u64 {
    status::scrape(&mut db.client(), &Schema::default(), SOON).unwrap().relays_alive
}

#[test]
fn nothing_is_locked_or_open_while_the_broker_is_called() {
    let db = Database::create();
    db.execute(&format!(
        "ALTER DATABASE {} SET idle_in_transaction_session_timeout = '100ms'",
        db.name()
    ));
    let ids = db.append_many(2, 3);
    let broker = ScriptedBroker::new();
    let (connect, opened) = (db.factory(), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (client, counter, notes) =
        (Mutex::new(db.client()), Arc::clone(&opened), Arc::clone(&seen));
    broker.on_publish(move |wave| {
        // Longer than a session may be idle in a transaction.
        std::thread::sleep(Duration::from_millis(250));
        let mut client = client.lock().unwrap();
        let ids: Vec<i64> = wave.iter().map(|event| event.id).collect();
        let locked = client
            .query("SELECT id FROM outbox.outbox WHERE id = ANY ($1) FOR UPDATE NOWAIT", &[&ids]);
        let open = client.query_one(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                AND (state LIKE 'idle in transaction%' OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()",
            &[],
        );
        let locked = locked.map(|rows| rows.len() == ids.len()).map_err(|e| e.to_string());
        let open: i64 = open.unwrap().get(0);
        notes.lock().unwrap().push((locked, open, counter.load(Ordering::SeqCst)));
    });
    let publishers = broker.clone();
    let counter = Arc::clone(&opened);
    let connect = move || {
        counter.fetch_add(1, Ordering::SeqCst);
        connect()
    };
    // Without heartbeats in between, which are transactions of their own.
    let config = config("relay-a").heartbeat_interval(SOON).poll_interval(SOON).build().unwrap();
    let relay = Relay::new(config, connect, move |_| publishers.publisher()).start();
    assert!(broker.wait_for(ids.len(), SOON));
    eventually("all are published", SOON, || db.count("status = 'published'") == 6);
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.len(), 3);
    let connections = seen[0].2;
    assert!(seen.iter().all(|note| *note == (Ok(true), 0, connections)), "{seen:?}");
    assert_eq!(opened.load(Ordering::SeqCst), connections, "no session was lost");
    relay.stop();
    relay.join().unwrap();
}

fn late(successor: &str, answer: Option<PublishError>) {
    let db = Database::create();
    db.append("order", "1", "placed", b"{}");
    let broker = ScriptedBroker::new();
    let (called, go_on) = answers_when_told(&broker);
    if let Some(error) = answer {
        broker.fail_next(|_| true, error);
    }
    let relay = start(&db, &broker, config("relay-a").poll_interval(SOON));
    called.recv_timeout(SOON).expect("relay-a publishes");
    // Its claimer must not be the one that takes the lapsed event.
    eventually("the claimer of relay-a sleeps", SOON, || {
        number(
            &db,
            "SELECT count(*) FROM pg_stat_activity
              WHERE datname = current_database() AND query LIKE '%WITH RECURSIVE waiting%'
                AND pid <> pg_backend_pid() AND state = 'idle' AND state_change < clock_timestamp() - interval '0.3 s'",
        ) == 1
    });
    db.shift(LAPSE);
    claim_lapsed(&db, successor, 77);
    let before = rows(&db);
    go_on.send(()).unwrap();
    eventually("the late verdict is counted", SOON, || {
        number(&db, "SELECT sum(lease_lost)::bigint FROM outbox.outbox_relay") == 1
    });
    assert_eq!(rows(&db), before, "a late verdict changes nothing");
    assert!(claim_all(&mut session(&db), "relay-c", 78).is_empty(), "it is still leased");
    let done = Verdict { published: vec![1], ..Verdict::default() };
    let settled = settle(&mut session(&db), successor, 1, 77, &done, false, false).unwrap();
    assert_eq!((settled.published, settled.lease_lost), (1, 0));
    relay.stop();
    assert_eq!(relay.join().unwrap().lease_lost, 1);
    let metrics = status::scrape(&mut db.client(), &Schema::default(), SOON).unwrap();
    assert_eq!((metrics.lease_lost_total, metrics.published_total), (1, 1));
}

fn claim_lapsed(db: &Database, relay_id: &str, lease_id: i64) {
    let claimed = claim_all(&mut session(db), relay_id, lease_id);
    assert_eq!(claimed.len(), 1, "{relay_id} gets the lapsed event");
    let event = &claimed[0].event;
    assert_eq!((event.attempt, event.possible_duplicate), (2, true));
    assert_eq!(claimed[0].unexplained_failures, 1);
}

#[test]
fn a_late_failure_changes_nothing() {
    late("relay-b", Some(PublishError::transient("timeout")));
    late("relay-b", Some(PublishError::permanent("rejected")));
}

#[test]
fn a_late_success_changes_nothing() {
    late("relay-b", None);
}

#[test]
fn a_late_verdict_changes_nothing_though_the_relay_id_is_the_same() {
    late("relay-a", Some(PublishError::unexplained("?")));
    late("relay-a", None);
}

#[test]
fn every_write_after_the_claim_names_its_lease() {
    let db = Database::create();
    db.append("order", "1", "placed", b"{}");
    let mut session = session(&db);
    assert_eq!(claim_all(&mut session, "relay-a", 1).len(), 1);
    db.shift(LAPSE);
    assert_eq!(claim_all(&mut session, "relay-a", 2).len(), 1);
    let before = rows(&db);
    let failure = |retry_in| Failure {
        id: 1,
        retry_in,
        unexplained: true,
        in_doubt: true,
        reason: "late".into(),
    };
    let verdicts = [
        Verdict { published: vec![1], ..Verdict::default() },
        Verdict { failed: vec![failure(None)], ..Verdict::default() },
        Verdict { failed: vec![failure(Some(SOON))], ..Verdict::default() },
        Verdict { released: vec![(1, true)], ..Verdict::default() },
    ];
    for verdict in &verdicts {
        for delete in [false, true] {
            let settled = settle(&mut session, "relay-a", 1, 1, verdict, delete, false).unwrap();
            assert_eq!(settled.lease_lost, 1, "{verdict:?}");
            assert_eq!(rows(&db), before, "{verdict:?}");
        }
    }
    let renewed = lease::renew(&mut session, "relay-a", 1, 1, &[1], LEASE).unwrap();
    assert!(renewed.is_empty(), "another lease cannot be renewed");
    assert_eq!(lease::release_lease(&mut session, 1).unwrap(), 0);
    assert_eq!(rows(&db), before);
    let lost = number(&db, "SELECT sum(lease_lost)::bigint FROM outbox.outbox_relay");
    assert_eq!(lost, 9, "each is counted once");
}

/// In one transaction, so that they are claimed together.
fn append_three(db: &Database, aggregate_id: &str) {
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    let event = pg_outbox::NewEvent::new("order", aggregate_id, "placed", "{}");
    pg_outbox::append_all(&mut transaction, &vec![event; 3]).unwrap();
    transaction.commit().unwrap();
}

/// Three publishes of two thirds of a lease each: the events that wait for their turn are renewed, those of a batch in
/// the worker's hands and those of one that no worker has taken yet.
#[test]
fn a_second_relay_gets_nothing_of_a_long_batch() {
    const PUBLISH: Duration = Duration::from_secs(2);
    let db = Database::create();
    let (slow, quick) = (ScriptedBroker::new(), ScriptedBroker::new());
    slow.on_publish(|_| std::thread::sleep(PUBLISH));
    let config = |relay_id| {
        config(relay_id)
            .lease(Duration::from_secs(3))
            .publish_timeout(PUBLISH + Duration::from_millis(200))
            .lease_margin(Duration::from_millis(300))
            .heartbeat_interval(SOON) // so that it is the lease that asks for the renewal
    };
    append_three(&db, "long");
    let relay_a = start(&db, &slow, config("relay-a"));
    assert!(slow.wait_for_calls(1, SOON));
    append_three(&db, "waiting");
    eventually("the second batch waits for the worker", SOON, || {
        db.count("locked_by = 'relay-a'") == 6
    });
    let relay_b = start(&db, &quick, config("relay-b"));
    assert!(slow.wait_for_calls(4, SOON), "the second batch has its turn");
    assert_eq!(quick.calls(), 0, "relay-b got something");
    slow.clear_hook();
    eventually("all are published", SOON, || db.count("status = 'published'") == 6);
    assert_eq!((slow.published(), quick.published()), (6, 0));
    assert_eq!(db.count("attempts = 1 AND unexplained_failures = 0"), 6);
    relay_b.stop();
    relay_a.stop();
    assert_eq!(relay_a.join().unwrap().lease_lost, 0);
}

#[test]
fn a_long_batch_keeps_the_relay_alive() {
    let db = Arc::new(Database::create());
    for _ in 0..4 {
        db.append("order", "long", "placed", b"{}");
    }
    let broker = ScriptedBroker::new();
    let (samples, inner) = (Arc::new(Mutex::new(Vec::new())), Arc::clone(&db));
    let notes = Arc::clone(&samples);
    // Each publish lasts 20 s for the database. The claimer has nothing to do meanwhile, and says so often enough.
    broker.on_publish(move |_| {
        std::thread::sleep(Duration::from_millis(150));
        eventually("the claimer beats", SOON, || beats(&inner, "worker = 0") == 1);
        inner.shift(Duration::from_secs(20));
        notes.lock().unwrap().push(alive(&inner));
    });
    let config = config("relay-a")
        .lease(Duration::from_secs(3600))
        .heartbeat_interval(Duration::from_millis(100));
    let relay = start(&db, &broker, config);
    assert!(broker.wait_for(4, SOON));
    assert_eq!(*samples.lock().unwrap(), [1, 1, 1, 1]);
    relay.stop();
    relay.join().unwrap();
    broker.clear_hook(); // it holds the database
}

/// How many threads of relays said a moment ago that they are alive.
fn beats(db: &Database, condition: &str) -> i64 {
    let fresh = "heartbeat_at > clock_timestamp() - interval '10 s'";
    number(db, &format!("SELECT count(*) FROM outbox.outbox_relay WHERE {fresh} AND {condition}"))
}

#[test]
fn a_relay_whose_worker_hangs_is_not_alive() {
    let db = Database::create();
    db.append("order", "1", "placed", b"{}");
    let broker = ScriptedBroker::new();
    let (called, go_on) = answers_when_told(&broker);
    let config = config("relay-a")
        .workers(2)
        .lease(Duration::from_secs(3600))
        .heartbeat_interval(Duration::from_millis(100));
    let relay = start(&db, &broker, config);
    called.recv_timeout(SOON).expect("a worker publishes");
    eventually("every thread has started", SOON, || beats(&db, "true") == 3);
    assert_eq!(alive(&db), 1);
    db.shift(LAPSE);
    eventually("the other threads go on", SOON, || beats(&db, "true") == 2);
    assert_eq!(alive(&db), 0, "but one hangs");
    go_on.send(()).unwrap();
    eventually("it is back", SOON, || alive(&db) == 1);
    relay.stop();
    relay.join().unwrap();
}
