//! Order within an aggregate: whatever an earlier event waits for, the later ones wait behind it, and nothing else does.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use common::driver::*;
use common::{Database, eventually};
use pg_outbox::store::dead_letters::{self, Filter};
use pg_outbox::store::verdict::Verdict;
use pg_outbox::{NewEvent, PublishError, Schema, ScriptedBroker, append, append_all};

const HOUR: Duration = Duration::from_secs(3600);

fn append_to(db: &Database, aggregate_type: &str, payloads: &[&str]) {
    for payload in payloads {
        db.append(aggregate_type, "x", "happened", payload.as_bytes());
    }
}

/// Waits until the relay has looked at everything that was there before the call.
fn let_it_look(db: &Database, broker: &ScriptedBroker, mark: &str) {
    for half in ["a", "b"] {
        let mark = format!("{mark}-{half}");
        db.append("free", "marks", "happened", mark.as_bytes());
        eventually("the mark goes out", SOON, || payloads(broker, "free").contains(&mark));
    }
}

#[test]
fn an_event_waits_behind_every_unfinished_one_of_its_aggregate() {
    let db = Database::create();
    let mut session = session(&db);
    let later = SystemTime::now() + 2 * HOUR;
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    append(&mut transaction, &NewEvent::new("delayed", "x", "happened", "1").not_before(later))
        .unwrap();
    transaction.commit().unwrap();
    append_to(&db, "delayed", &["2", "3"]);
    for state in ["leased", "retrying", "requeued", "discarded"] {
        append_to(&db, state, &["1", "2", "3"]);
    }
    // The first of each is in the hands of another relay; what became of three of them is decided.
    let mut first = |state, lease_id| ids(&claim(&mut session, "other", lease_id, &only(state, 1)));
    let (leased, retrying) = (first("leased", 1), first("retrying", 2));
    let (requeued, discarded) = (first("requeued", 3), first("discarded", 4));
    assert_eq!(settle(&mut session, "other", 2, &failed(&retrying, Some(HOUR))).retried, 1);
    assert_eq!(settle(&mut session, "other", 3, &failed(&requeued, None)).dead_lettered, 1);
    assert_eq!(settle(&mut session, "other", 4, &failed(&discarded, None)).dead_lettered, 1);
    append_to(&db, "discarded", &["4"]);
    append_to(&db, "free", &["1", "2", "3"]);

    let broker = ScriptedBroker::new();
    let _relay = start(&db, config("relay-a"), &broker);
    let_it_look(&db, &broker, "first");
    assert!(broker.deliveries().iter().all(|event| event.aggregate_type == "free"));

    assert_eq!(settle(&mut session, "other", 1, &published(leased)).published, 1);
    eventually("the leased one was published", SOON, || payloads(&broker, "leased") == ["2", "3"]);
    let (schema, by_id) = (Schema::default(), |id: i64| Filter::events([id.into()]));
    dead_letters::requeue(&mut client, &schema, &by_id(requeued[0]), None).unwrap();
    eventually("requeued", SOON, || payloads(&broker, "requeued") == ["1", "2", "3"]);
    dead_letters::discard(&mut client, &schema, &by_id(discarded[0]), "ann", "obsolete").unwrap();
    eventually("discarded", SOON, || payloads(&broker, "discarded") == ["2", "3", "4"]);
    let_it_look(&db, &broker, "second");
    assert!(payloads(&broker, "retrying").is_empty() && payloads(&broker, "delayed").is_empty());

    db.shift(HOUR);
    eventually("the retry is due", SOON, || payloads(&broker, "retrying") == ["1", "2", "3"]);
    assert!(payloads(&broker, "delayed").is_empty());
    db.shift(HOUR + Duration::from_secs(60));
    eventually("the time has come", SOON, || payloads(&broker, "delayed") == ["1", "2", "3"]);
}

#[test]
fn a_run_stops_at_its_first_failure_and_the_rest_is_given_back() {
    let db = Database::create();
    append_to(&db, "failing", &["1", "2", "3", "4", "5"]);
    append_to(&db, "healthy", &["1", "2", "3", "4", "5"]);
    let broker = ScriptedBroker::new();
    let is_second =
        |event: &pg_outbox::Event| event.aggregate_type == "failing" && event.payload == b"2";
    broker.fail_next(is_second, PublishError::transient("429").retry_after(HOUR));
    let relay = start(&db, config("relay-a"), &broker);
    eventually("everything is decided", SOON, || {
        db.count("status = 'published'") == 6 && db.count("locked_by IS NOT NULL") == 0
    });
    let rows = db.client().query(
        "SELECT status, attempts, retry_since IS NULL FROM outbox.outbox WHERE aggregate_type = 'failing' ORDER BY id",
        &[],
    );
    let rows: Vec<(String, i32, bool)> =
        rows.unwrap().iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let expect = |status: &str, attempts, never_failed| (status.to_owned(), attempts, never_failed);
    let untouched = expect("pending", 0, true);
    let expected = [
        expect("published", 1, true),
        expect("pending", 1, false),
        untouched.clone(),
        untouched.clone(),
        untouched,
    ];
    assert_eq!(rows, expected);
    assert_eq!(payloads(&broker, "healthy"), ["1", "2", "3", "4", "5"]);
    db.shift(HOUR + Duration::from_secs(1));
    assert!(broker.wait_for(10, SOON));
    assert_eq!(payloads(&broker, "failing"), ["1", "2", "3", "4", "5"]);
    relay.stop();
    let report = relay.join().unwrap();
    assert_eq!((report.published, report.retried, report.lease_lost), (10, 1, 0));
}

#[test]
fn three_relays_and_a_broker_that_fails_at_random_keep_order_and_send_once() {
    let db = Database::create();
    let count = db.append_many(40, 25).len();
    let broker = ScriptedBroker::new();
    let one_in = |n: u8| move |_: &pg_outbox::Event| fastrand::u8(..).is_multiple_of(n);
    broker.fail_always(one_in(8), PublishError::transient("leader election"));
    broker.fail_always(one_in(100), PublishError::transient("throttled").destination());
    broker.fail_always(one_in(200), PublishError::transient("refused").broker());
    let relays: Vec<_> = ["a", "b", "c"]
        .map(|name| start(&db, config(name).batch_size(40), &broker))
        .into_iter()
        .collect();
    assert!(broker.wait_for(count, Duration::from_secs(60)), "{} came", broker.published());
    eventually("every verdict is written", SOON, || {
        db.count("status = 'published'") == count as i64
    });
    let deliveries = broker.deliveries();
    assert_eq!((check_order(&deliveries), deliveries.len()), (count, count));
    relays.iter().for_each(|relay| relay.stop());
    let reports = relays.into_iter().map(|relay| relay.join().unwrap());
    assert_eq!(reports.map(|report| report.published).sum::<u64>(), count as u64);
}

#[test]
fn relays_that_start_leave_the_leases_of_one_that_is_slow_alone() {
    let db = Database::create();
    let numbers: Vec<String> = (1..=10).map(|n| n.to_string()).collect();
    append_to(&db, "slow", &numbers.iter().map(String::as_str).collect::<Vec<_>>());
    let broker = ScriptedBroker::new();
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let held = Arc::clone(&gate);
    broker.on_publish(move |wave| {
        if wave.iter().any(|event| event.aggregate_type == "slow") {
            let (open, opened) = &*held;
            drop(opened.wait_while(open.lock().unwrap(), |open| !*open).unwrap());
        }
    });
    let first = start(&db, config("a").batch_size(5), &broker);
    assert!(broker.wait_for_calls(1, SOON));
    let leases = || -> Vec<(i64, Option<i64>, i32)> {
        let rows = db.client().query(
            "SELECT id, lease_id, attempts FROM outbox.outbox WHERE aggregate_type = 'slow' ORDER BY id",
            &[],
        );
        rows.unwrap().iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
    };
    let before = leases();
    assert_eq!(before.iter().filter(|row| row.1.is_some()).count(), 5);
    let others = ["b", "c", "d"].map(|name| start(&db, config(name).batch_size(5), &broker));
    // Thirty aggregates, so that each of the others has had something to do.
    for n in 0..30 {
        db.append("free", &n.to_string(), "happened", b"1");
    }
    eventually("other aggregates pass", SOON, || payloads(&broker, "free").len() == 30);
    let_it_look(&db, &broker, "mark");
    assert_eq!(leases(), before);
    assert!(payloads(&broker, "slow").is_empty());
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    eventually("the slow ones are through", SOON, || payloads(&broker, "slow").len() >= 10);
    assert_eq!(payloads(&broker, "slow"), numbers);
    drop((first, others));
}

#[test]
fn order_is_that_of_the_appends_and_not_of_any_clock() {
    let db = Database::create();
    // One transaction, one call: created_at is the same, and version 7 UUIDs do not grow within a millisecond.
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    let event = |n: usize| NewEvent::new("bulk", "x", "happened", n.to_string());
    append_all(&mut transaction, &(0..500).map(event).collect::<Vec<_>>()).unwrap();
    for n in 0..5 {
        append(&mut transaction, &NewEvent::new("single", "x", "happened", n.to_string())).unwrap();
    }
    transaction.commit().unwrap();
    thread::scope(|scope| {
        for writer in 0..8 {
            let db = &db;
            scope.spawn(move || {
                let mut client = db.client();
                for n in 0..20 {
                    let mut transaction = client.transaction().unwrap();
                    let event =
                        NewEvent::new("shared", "x", "happened", format!("{writer} {n:02}"));
                    append(&mut transaction, &event).unwrap();
                    transaction.commit().unwrap();
                }
            });
        }
    });
    // Clocks that run backwards.
    db.execute("UPDATE outbox.outbox SET created_at = created_at - id * interval '1 s', next_attempt_at = created_at - id * interval '1 s'");
    let broker = ScriptedBroker::new();
    let _relay = start(&db, config("relay-a").workers(4).batch_size(30), &broker);
    assert!(broker.wait_for(500 + 5 + 160, SOON));
    assert_eq!(check_order(&broker.deliveries()), 665);
    assert_eq!(payloads(&broker, "bulk"), (0..500).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(payloads(&broker, "single"), ["0", "1", "2", "3", "4"]);
    let shared = payloads(&broker, "shared");
    for writer in 0..8 {
        let own: Vec<_> = shared.iter().filter(|p| p.starts_with(&format!("{writer} "))).collect();
        assert!(own.len() == 20 && own.is_sorted(), "{own:?}");
    }
}

#[test]
fn a_row_that_somebody_has_locked_ends_the_run_and_blocks_no_claim() {
    let db = Database::create();
    append_to(&db, "first", &["1", "2", "3"]);
    append_to(&db, "middle", &["1", "2", "3", "4", "5"]);
    append_to(&db, "free", &["1", "2", "3"]);
    let (mut session, mut other) = (session(&db), db.client());
    let mut transaction = other.transaction().unwrap();
    transaction
        .execute(
            "SELECT FROM outbox.outbox WHERE (aggregate_type, payload) IN (('first', '1'), ('middle', '3')) FOR UPDATE",
            &[],
        )
        .unwrap();
    let asked_at = Instant::now();
    let claimed = claim(&mut session, "relay-a", 1, &request());
    assert!(asked_at.elapsed() < Duration::from_secs(5), "the claim waited");
    let of = |kind: &str| -> Vec<String> {
        let events = claimed.events.iter().map(|claimed| &claimed.event);
        let of_kind = events.filter(|event| event.aggregate_type == kind);
        of_kind.map(|event| String::from_utf8_lossy(&event.payload).into_owned()).collect()
    };
    assert!(of("first").is_empty());
    assert_eq!(of("middle"), ["1", "2"]);
    assert_eq!(of("free"), ["1", "2", "3"]);
    transaction.rollback().unwrap();
    // Still leased in front of it.
    assert_eq!(ids(&claim(&mut session, "relay-b", 2, &only("middle", 5))), Vec::<i64>::new());
    let released: Vec<_> = ids(&claimed).into_iter().map(|id| (id, false)).collect();
    let verdict = Verdict { released, ..Verdict::default() };
    assert_eq!(settle(&mut session, "relay-a", 1, &verdict).released, 5);
    assert_eq!(ids(&claim(&mut session, "relay-b", 2, &request())).len(), 11);
}
