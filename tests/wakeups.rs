//! Wake-ups: an idle relay hears of an append at once, and costs writers nothing when it is busy, dead or not asking.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::driver::*;
use common::{Database, eventually};
use pg_outbox::{RelayConfigBuilder, ScriptedBroker};
use postgres::fallible_iterator::FallibleIterator;

const POLL: Duration = Duration::from_secs(30);

fn sleepy(relay_id: &str) -> RelayConfigBuilder {
    config(relay_id).poll_interval(POLL)
}

/// Writers that append now send a NOTIFY.
fn is_asked_for(db: &Database) -> bool {
    let sql = "SELECT count(*) FROM outbox.outbox_wakeup WHERE until > clock_timestamp()";
    db.client().query_one(sql, &[]).unwrap().get::<_, i64>(0) > 0
}

/// The process ids of sessions that listen.
fn listeners(db: &Database) -> Vec<i32> {
    let sql = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'";
    db.client().query(sql, &[]).unwrap().iter().map(|row| row.get(0)).collect()
}

fn is_idle(db: &Database) -> bool {
    is_asked_for(db) && !listeners(db).is_empty()
}

/// Appends and returns how long the event took to arrive.
fn latency(db: &Database, broker: &ScriptedBroker) -> Duration {
    let before = broker.published();
    let appended_at = Instant::now();
    db.append("order", "1", "placed", b"1");
    assert!(broker.wait_for(before + 1, 2 * POLL));
    appended_at.elapsed()
}

#[test]
fn an_idle_relay_hears_of_an_append_at_once() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let relay = start(&db, sleepy("relay-a"), &broker);
    eventually("it sleeps", SOON, || is_idle(&db));
    for _ in 0..5 {
        let took = latency(&db, &broker);
        assert!(took < Duration::from_secs(3), "{took:?}");
    }
    relay.stop();
    relay.join().unwrap();
    assert!(!is_asked_for(&db), "a relay that has ended wants none");
}

#[test]
fn wake_ups_come_back_after_the_listener_was_killed() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let _relay = start(&db, sleepy("relay-a"), &broker);
    for _ in 0..3 {
        eventually("it sleeps", SOON, || is_idle(&db));
        let old = listeners(&db);
        db.client().query("SELECT pg_terminate_backend(unnest($1::int[]))", &[&old]).unwrap();
        // While nobody listens: found by the look that follows the next LISTEN.
        let took = latency(&db, &broker);
        assert!(took < Duration::from_secs(5), "{took:?}");
        eventually("another one listens", SOON, || {
            let new = listeners(&db);
            !new.is_empty() && new.iter().all(|pid| !old.contains(pid))
        });
        let took = latency(&db, &broker);
        assert!(took < Duration::from_secs(3), "{took:?}");
    }
}

#[test]
fn polling_covers_where_nobody_can_listen() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let poll = Duration::from_millis(300);
    let _relay = start(&db, config("relay-a").poll_interval(poll), &broker);
    eventually("it sleeps", SOON, || is_idle(&db));
    // Kills every session that listens, for as long as the test looks.
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = db.client();
            while !is_over.load(Ordering::Relaxed) {
                let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                             WHERE datname = current_database() AND query LIKE 'LISTEN %' AND pid <> pg_backend_pid()";
                client.batch_execute(kill).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
        });
        for _ in 0..5 {
            let took = latency(&db, &broker);
            assert!(took < poll + Duration::from_secs(2), "{took:?}");
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Appends and says whether that sent a NOTIFY.
fn sends_notify(db: &Database) -> bool {
    let mut listener = db.client();
    let channel: String =
        listener.query_one("SELECT 'outbox_' || md5('outbox')", &[]).unwrap().get(0);
    listener.batch_execute(&format!("LISTEN \"{channel}\"; LISTEN control")).unwrap();
    db.append("order", "1", "placed", b"1");
    db.execute("NOTIFY control");
    // Notifications come in the order of commits.
    let mut heard = false;
    for notification in listener.notifications().timeout_iter(SOON).iterator() {
        match notification.unwrap().channel() {
            "control" => return heard,
            _ => heard = true,
        }
    }
    panic!("the control did not come");
}

#[test]
fn a_writer_notifies_only_when_a_relay_asks_for_it() {
    let db = Database::create();
    assert!(!sends_notify(&db), "there is no relay");
    let broker = ScriptedBroker::new();
    let relay = start(&db, sleepy("relay-a").wake_ups(false), &broker);
    assert!(broker.wait_for(1, SOON));
    assert!(!sends_notify(&db), "this one does not want it");
    relay.stop();
    relay.join().unwrap();

    let relay = start(&db, sleepy("relay-b"), &broker);
    eventually("it sleeps", SOON, || is_idle(&db));
    assert!(sends_notify(&db), "this one does");
    // A killed relay leaves its wish behind; no wish outlives its span.
    let longest =
        "SELECT max(until) - clock_timestamp() <= interval '60 s' FROM outbox.outbox_wakeup";
    assert!(db.client().query_one(longest, &[]).unwrap().get::<_, bool>(0));
    relay.stop();
    relay.join().unwrap();
    db.execute("INSERT INTO outbox.outbox_wakeup VALUES ('killed', now() + interval '60 s')");
    assert!(sends_notify(&db));
    db.shift(Duration::from_secs(61));
    assert!(!sends_notify(&db), "the wish of a relay that was killed has lapsed");
}

#[test]
fn a_busy_relay_asks_for_none() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let _relay = start(&db, sleepy("relay-a").batch_size(10).workers(1), &broker);
    eventually("it sleeps", SOON, || is_idle(&db));
    broker.on_publish(|_| thread::sleep(Duration::from_millis(5)));
    db.append_many(2_000, 1);
    eventually("it declines", SOON, || !is_asked_for(&db));
    let published = broker.published();
    assert!(published < 1_900, "after {published} of 2,000: that is no sign of being busy");
    assert!(!sends_notify(&db));
    broker.clear_hook();
    assert!(broker.wait_for(2_001, SOON));
    eventually("it sleeps again", SOON, || is_idle(&db));
}

#[test]
fn an_idle_relay_leaves_the_database_alone() {
    let db = Database::create();
    db.append_many(10, 1);
    // More aggregates that cannot go than one claim looks at.
    db.execute("SELECT outbox.outbox_append('later', n::text, 'due', '{}', not_before => now() + interval '1 day') FROM generate_series(1, 900) n");
    let broker = ScriptedBroker::new();
    let relay = start(&db, config("relay-a").poll_interval(Duration::from_secs(1)), &broker);
    assert!(broker.wait_for(10, SOON));
    eventually("it sleeps", SOON, || is_idle(&db));
    let sql = "SELECT max(query_start) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%waiting AS MATERIALIZED%' AND pid <> pg_backend_pid()";
    // Counts the claims that start within a while of idleness.
    let (mut client, mut claims, mut last) = (db.client(), 0, None);
    let began_at = Instant::now();
    while began_at.elapsed() < Duration::from_secs(3) {
        let start: Option<std::time::SystemTime> = client.query_one(sql, &[]).unwrap().get(0);
        claims += i32::from(start != last);
        last = start;
        thread::sleep(Duration::from_millis(5));
    }
    assert!((1..=16).contains(&claims), "{claims} claims in three seconds of idleness");
    drop(relay);
}
