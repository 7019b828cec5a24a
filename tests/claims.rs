//! Claims: what they cost, how much they take, and that nobody is left out.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::driver::*;
use common::{Database, eventually};
use pg_outbox::store::claim::{CLAIM, Request};
use pg_outbox::store::verdict::Verdict;
use pg_outbox::store::{Session, Statement};
use pg_outbox::{NewEvent, Schema, ScriptedBroker, append, append_all};
use postgres::types::Type;
use serde_json::Value;

/// Fills the table past `outbox_append`, which would take minutes. Ids follow the order of the series.
fn fill(db: &Database, events: usize, aggregate_id: &str, status: &str) {
    db.execute(&format!(
        "INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status, published_at, died_at)
         SELECT gen_random_uuid(), 'bulk', {aggregate_id}, 'happened', '1', '{status}',
                CASE WHEN '{status}' = 'published' THEN now() END, CASE WHEN '{status}' = 'dead' THEN now() END
           FROM generate_series(1, {events}) AS n"
    ));
}

/// The plan of a claim as the session plans it: once, for any parameters. Nothing stays claimed.
fn explain(session: &mut Session, request: &Request, analyze: bool) -> Value {
    let client = session.client();
    let types: Vec<_> = CLAIM.types.iter().map(Type::to_string).collect();
    let options = if analyze { "ANALYZE, BUFFERS, TIMING OFF, " } else { "" };
    let (only, except) = ("NULL", "'{}'");
    let parameters = format!(
        "'relay-a', 1, 30, {}, {}, {}, {}, {}, {}, {}, 0, 0, {}, {only}, {except}, {}",
        request.from_key,
        request.probes,
        request.heads,
        request.rows,
        request.bytes,
        request.newer_than,
        request.fresh,
        request.run,
        request.last_chance
    );
    let prepare = format!("PREPARE claim ({}) AS {}", types.join(", "), CLAIM.sql);
    client.batch_execute(&prepare).unwrap();
    let mut transaction = client.transaction().unwrap();
    let explain = format!("EXPLAIN ({options}FORMAT JSON) EXECUTE claim ({parameters})");
    let plan = transaction.query_one(&explain, &[]).unwrap().get(0);
    transaction.rollback().unwrap();
    client.batch_execute("DEALLOCATE claim").unwrap();
    plan
}

/// Buffers that a claim touches, once the pages' hint bits are set.
fn buffers(session: &mut Session, request: &Request) -> i64 {
    explain(session, request, true);
    let plan = explain(session, request, true);
    let of = |name: &str| plan[0]["Plan"][name].as_i64().unwrap();
    of("Shared Hit Blocks") + of("Shared Read Blocks")
}

/// As in the mode for tables where most aggregates are blocked.
fn with_fresh() -> Request {
    Request { newer_than: 0, fresh: 500, ..request() }
}

#[test]
fn no_claim_reads_the_table_from_end_to_end() {
    let db = Database::create();
    // The statistics say that there is nothing.
    db.execute("ALTER TABLE outbox.outbox SET (autovacuum_enabled = false); ANALYZE outbox.outbox");
    let mut early = session(&db);
    assert!(ids(&claim(&mut early, "relay-a", 1, &request())).is_empty());
    fill(&db, 200_000, "n::text", "published");
    db.append("order", "1", "placed", b"{}");
    db.append("order", "2", "placed", b"{}");
    for request in [request(), with_fresh()] {
        let plan = explain(&mut early, &request, false).to_string();
        assert!(!plan.contains("Seq Scan"), "{plan}");
        let touched = buffers(&mut early, &request);
        assert!(touched < 2_500, "{touched} buffers for two events beside 200,000");
    }
    // By the plan that was made when the table was empty.
    let claimed_at = Instant::now();
    assert_eq!(ids(&claim(&mut early, "relay-a", 1, &request())).len(), 2);
    assert!(claimed_at.elapsed() < Duration::from_secs(1), "{:?}", claimed_at.elapsed());
}

#[test]
fn what_is_held_behind_a_dead_event_costs_a_claim_nothing() {
    let db = Database::create();
    db.execute("ALTER TABLE outbox.outbox SET (autovacuum_enabled = false)");
    let mut session = session(&db);
    // As many events in as many pages and index levels, once with nothing in the way and once all but 500 held. The walk
    // begins where the held ones are.
    let key = "SELECT hashtextextended('dead', hashtextextended('bulk', 0))";
    let from_key: i64 = db.client().query_one(key, &[]).unwrap().get(0);
    let walk = Request { from_key, ..request() };
    let both = Request { from_key, ..with_fresh() };
    fill(&db, 100_500, "n::text", "pending");
    let clean = [buffers(&mut session, &walk), buffers(&mut session, &both)];
    db.execute("TRUNCATE outbox.outbox");
    fill(&db, 1, "'dead'", "dead");
    fill(&db, 100_000, "'dead'", "pending");
    fill(&db, 500, "n::text", "pending");
    let held = [buffers(&mut session, &walk), buffers(&mut session, &both)];
    for (clean, held) in clean.iter().zip(held) {
        assert!(held <= 2 * clean, "{held} buffers beside held events, {clean} without");
    }
    let claimed = claim(&mut session, "relay-a", 1, &Request { from_key: i64::MIN, ..walk });
    assert_eq!(claimed.events.len(), 100);
    let claimed = claim(&mut session, "relay-a", 2, &Request { from_key, ..request() });
    assert!(claimed.events.len() >= 50, "{} events", claimed.events.len());
    assert!(claimed.events.iter().all(|claimed| claimed.event.aggregate_id != "dead"));
}

fn append_sizes(db: &Database, sizes: &[usize]) {
    let event = |(n, size): (usize, &usize)| {
        NewEvent::new("order", n.to_string(), "placed", vec![b'x'; *size])
    };
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    append_all(&mut transaction, &sizes.iter().enumerate().map(event).collect::<Vec<_>>()).unwrap();
    transaction.commit().unwrap();
}

#[test]
fn a_batch_is_bounded_in_rows_and_in_bytes_before_it_leaves_the_database() {
    let db = Database::create();
    let mut session = session(&db);
    append_sizes(&db, &[1_000; 50]);
    let bytes = |claim: &pg_outbox::store::claim::Claim| -> usize {
        claim.events.iter().map(|claimed| claimed.event.payload.len()).sum()
    };
    let limited = claim(&mut session, "relay-a", 1, &Request { bytes: 10_500, ..request() });
    assert_eq!((limited.events.len(), bytes(&limited)), (10, 10_000));
    let limited = claim(&mut session, "relay-a", 2, &Request { rows: 7, heads: 7, ..request() });
    assert_eq!(limited.events.len(), 7);
    // More rows in a run than the claim may take.
    let db = Database::create();
    let mut session = common::driver::session(&db);
    db.append_many(3, 100);
    let two = claim(&mut session, "relay-a", 1, &Request { rows: 2, heads: 3, ..request() });
    assert_eq!(two.events.len(), 2, "fewer rows than aggregates");
    let released: Vec<_> = ids(&two).into_iter().map(|id| (id, false)).collect();
    settle(&mut session, "relay-a", 1, &Verdict { released, ..Verdict::default() });
    let limited = claim(&mut session, "relay-a", 2, &Request { rows: 10, ..request() });
    assert_eq!(limited.events.len(), 9, "three aggregates, three of each");
    let rest = claim(&mut session, "relay-a", 3, &request());
    assert!(rest.events.is_empty(), "leased in front of the others");
}

#[test]
fn an_event_above_the_byte_limit_travels_alone() {
    let db = Database::create();
    let mut session = session(&db);
    let small = Request { bytes: 10_000, ..request() };
    append_sizes(&db, &[100_000, 90_000]);
    for lease_id in [1, 2] {
        let claimed = ids(&claim(&mut session, "relay-a", lease_id, &small));
        assert_eq!(claimed.len(), 1);
        settle(&mut session, "relay-a", lease_id, &published(claimed));
    }
    // Among others, in one aggregate and in several: everything goes out in order, in bounded batches.
    let sizes = [10, 100_000, 10, 10, 90_000, 10];
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    for size in sizes {
        append(&mut transaction, &NewEvent::new("mixed", "1", "placed", vec![b'x'; size])).unwrap();
    }
    transaction.commit().unwrap();
    append_sizes(&db, &[10, 10, 50_000, 10]);
    let broker = ScriptedBroker::new();
    broker.on_publish(|wave| {
        let bytes: usize = wave.iter().map(|event| event.payload.len()).sum();
        assert!(wave.len() == 1 || bytes <= 10_000, "{bytes} bytes in a wave of {}", wave.len());
    });
    let relay = start(&db, config("relay-b").batch_bytes(10_000), &broker);
    assert!(broker.wait_for(10, SOON));
    assert_eq!(check_order(&broker.deliveries()), 10);
    relay.stop();
    assert_eq!(relay.join().unwrap().retried, 0, "the hook would have panicked");
}

#[test]
fn a_bulk_type_does_not_starve_the_others() {
    let db = Database::create();
    fill(&db, 12_000, "n::text", "pending");
    let broker = ScriptedBroker::new();
    // A broker that is not fast: a thousand waves a second would hide a queue.
    broker.on_publish(|_| thread::sleep(Duration::from_millis(20)));
    let _relay = start(&db, config("relay-a").workers(1), &broker);
    assert!(broker.wait_for(500, SOON));
    for n in 0..3 {
        let before = broker.published();
        db.append("order", &n.to_string(), "placed", n.to_string().as_bytes());
        eventually("the other type goes out", SOON, || payloads(&broker, "order").len() == n + 1);
        let passed = broker.published() - before;
        assert!(passed <= 2_000, "{passed} events of the bulk went first");
    }
    assert!(broker.published() < 11_000, "there was no bulk any more");
}

static ISOLATION: Statement = Statement {
    sql: "SELECT current_setting('transaction_isolation')",
    types: &[],
    doing: "asking for the isolation",
};

#[test]
fn a_database_that_is_serializable_by_default_makes_no_difference() {
    let db = Database::create();
    db.execute(&format!(
        "ALTER DATABASE {} SET default_transaction_isolation = 'serializable'",
        db.name()
    ));
    for pooled in [false, true] {
        let mut session = Session::open(db.client(), &Schema::default(), pooled).unwrap();
        assert_eq!(ask::<String>(&mut session, &ISOLATION, &[]), "read committed");
    }
    let count = db.append_many(50, 10).len();
    let broker = ScriptedBroker::new();
    let relays = ["a", "b"].map(|name| start(&db, config(name).batch_size(20), &broker));
    assert!(broker.wait_for(count, SOON));
    eventually("all verdicts are written", SOON, || {
        db.count("status = 'published'") == count as i64
    });
    assert_eq!((check_order(&broker.deliveries()), broker.published()), (count, count));
    let reports = relays.map(|relay| {
        relay.stop();
        relay.join().unwrap()
    });
    assert_eq!(reports.map(|report| report.lease_lost), [0, 0]);
}

#[test]
fn what_a_dead_relay_had_claimed_goes_out_when_the_lease_lapses() {
    let db = Database::create();
    let mut gone = session(&db);
    let count = db.append_many(100, 5).len();
    assert_eq!(ids(&claim(&mut gone, "gone", 1, &request())).len(), count);
    let broker = ScriptedBroker::new();
    let _relay = start(&db, config("relay-a"), &broker);
    // It has looked, and found nothing that it may take.
    let mark = db.append("mark", "1", "placed", b"1");
    eventually("the mark goes out", SOON, || db.status_of(mark) == "published");
    assert_eq!(broker.published(), 1);
    db.shift(Duration::from_secs(30));
    let lapsed_at = Instant::now();
    assert!(broker.wait_for(count + 1, SOON));
    assert!(lapsed_at.elapsed() < Duration::from_secs(5), "{:?}", lapsed_at.elapsed());
    let deliveries = broker.deliveries();
    assert_eq!((check_order(&deliveries), deliveries.len()), (count + 1, count + 1));
    assert!(deliveries.iter().skip(1).all(|event| event.possible_duplicate && event.attempt == 2));
    eventually("all verdicts are written", SOON, || db.count("status <> 'published'") == 0);
}

/// A transaction that appended first and commits last, while later ids were published: how long after its commit its event
/// goes out, on top of `blocked` aggregates whose heads back off.
fn late_commit(blocked: usize, poll: Duration) {
    let db = Database::create();
    fill(&db, blocked, "n::text", "pending");
    db.execute("UPDATE outbox.outbox SET attempts = 9, retry_since = now(), next_attempt_at = now() + interval '1 h'");
    let broker = ScriptedBroker::new();
    let settings = config("relay-a").poll_interval(poll).wake_ups(false);
    let _relay = start(&db, settings, &broker);
    for n in 0..3 {
        let name = n.to_string();
        let (mut first, mut second) = (db.client(), db.client());
        let mut slow = first.transaction().unwrap();
        append(
            &mut slow,
            &NewEvent::new("order", format!("slow {n}"), "placed", format!("slow {n}")),
        )
        .unwrap();
        let mut quick = second.transaction().unwrap();
        append(
            &mut quick,
            &NewEvent::new("order", format!("quick {n}"), "placed", format!("quick {n}")),
        )
        .unwrap();
        quick.commit().unwrap();
        let has = |payload: String| payloads(&broker, "order").contains(&payload);
        eventually("the later one goes out", SOON, || has(format!("quick {name}")));
        slow.commit().unwrap();
        let committed_at = Instant::now();
        eventually("the late one goes out", SOON, || has(format!("slow {name}")));
        let took = committed_at.elapsed();
        assert!(took < poll + Duration::from_millis(700), "took {took:?} beside {blocked}");
    }
}

#[test]
fn a_late_commit_goes_out_within_a_poll() {
    late_commit(0, Duration::from_millis(300));
}

#[test]
fn a_late_commit_goes_out_within_a_poll_when_most_aggregates_are_blocked() {
    // A walk past all of them takes seconds.
    late_commit(40_000, Duration::from_millis(300));
}

#[test]
fn nothing_of_many_writers_with_random_delays_is_missed() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let _relay = start(&db, config("relay-a"), &broker);
    let done = Arc::new(AtomicBool::new(false));
    let appended: usize = thread::scope(|scope| {
        let writers: Vec<_> = (0..8)
            .map(|writer| {
                let (db, done) = (&db, Arc::clone(&done));
                scope.spawn(move || {
                    let (mut client, mut count) = (db.client(), 0);
                    while !done.load(Ordering::Relaxed) {
                        let mut transaction = client.transaction().unwrap();
                        let aggregate = format!("{} {}", writer, fastrand::u8(..10));
                        append(&mut transaction, &NewEvent::new("order", aggregate, "placed", "1"))
                            .unwrap();
                        thread::sleep(Duration::from_micros(fastrand::u64(..20_000)));
                        let is_kept = fastrand::u8(..4) > 0;
                        if is_kept { transaction.commit() } else { transaction.rollback() }
                            .unwrap();
                        count += usize::from(is_kept);
                    }
                    count
                })
            })
            .collect();
        thread::sleep(Duration::from_secs(2));
        done.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).sum()
    });
    assert!(
        broker.wait_for(appended, Duration::from_secs(5)),
        "{} of {appended}",
        broker.published()
    );
    let deliveries = broker.deliveries();
    assert_eq!((check_order(&deliveries), deliveries.len()), (appended, appended));
}
