//! Counters: written with what they count, so they equal the table's history whoever ran and however often.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::Duration;

use common::driver::*;
use common::{Database, eventually};
use pg_outbox::{Event, PublishError, ScriptedBroker};

/// Published, retried, dead-lettered and lease-lost, summed over all threads of all relays.
fn counters(db: &Database) -> [i64; 4] {
    let row = db.client().query_one(
        "SELECT published_total, retried_total, dead_lettered_total, lease_lost_total FROM outbox.outbox_metrics",
        &[],
    );
    let row = row.unwrap();
    [0, 1, 2, 3].map(|column| row.get(column))
}

#[test]
fn counters_are_the_tables_history_after_restarts_and_with_several_relays() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    // Every change of a status or of a failing row, as the table saw it.
    db.execute(
        "CREATE TABLE history (what text);
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO public.history VALUES (CASE WHEN new.status <> old.status THEN new.status ELSE 'retried' END);
            RETURN NULL; END $$;
         CREATE TRIGGER note AFTER UPDATE ON outbox.outbox FOR EACH ROW
            WHEN (new.status <> old.status OR new.next_attempt_at <> old.next_attempt_at) EXECUTE FUNCTION note();",
    );
    broker.fail_always(
        |event: &Event| event.payload == b"7",
        PublishError::permanent("schema rejected"),
    );
    broker.fail_always(|_| fastrand::u8(..) < 40, PublishError::transient("timeout"));
    let mut total = [0; 3];
    for _ in 0..3 {
        let before = db.count("status = 'published'");
        db.execute(
            "SELECT outbox.outbox_append('order', n::text, 'placed', convert_to((n % 20)::text, 'UTF8'))
               FROM generate_series(1, 200) AS n",
        );
        let relays = ["a", "b"].map(|name| start(&db, config(name).batch_size(20), &broker));
        eventually("some are published", SOON, || db.count("status = 'published'") >= before + 60);
        for relay in relays {
            relay.stop();
            let report = relay.join().unwrap();
            for (total, part) in
                total.iter_mut().zip([report.published, report.retried, report.dead_lettered])
            {
                *total += part as i64;
            }
        }
    }
    let history = |what: &str| -> i64 {
        let sql = "SELECT count(*) FROM history WHERE what = $1";
        db.client().query_one(sql, &[&what]).unwrap().get(0)
    };
    let expected = [history("published"), history("retried"), history("dead"), 0];
    assert_eq!(counters(&db), expected);
    assert_eq!(total[..], expected[..3], "the relays' own reports");
    assert_eq!(expected[0], db.count("status = 'published'"));
    assert_eq!(expected[0], broker.published() as i64);
    assert!(expected[1] > 0 && expected[2] > 0, "{expected:?}");
}

#[test]
fn a_relay_counts_before_its_first_heartbeat() {
    let db = Database::create();
    let mut session = session(&db);
    db.append_many(4, 1);
    let claimed = ids(&claim(&mut session, "new", 1, &request()));
    let registered = |db: &Database| -> i64 {
        db.client().query_one("SELECT count(*) FROM outbox.outbox_relay", &[]).unwrap().get(0)
    };
    assert_eq!(registered(&db), 0);
    let mut verdict = published(claimed[..2].to_vec());
    verdict.failed = failed(&claimed[2..3], None).failed;
    verdict.failed.extend(failed(&claimed[3..], Some(Duration::from_secs(1))).failed);
    let settled = settle(&mut session, "new", 1, &verdict);
    assert_eq!((settled.published, settled.retried, settled.dead_lettered), (2, 1, 1));
    assert_eq!(counters(&db), [2, 1, 1, 0]);
    // Late: nothing of that is held any more, and nothing but the loss is counted.
    assert_eq!(settle(&mut session, "new", 1, &verdict).lease_lost, 4);
    assert_eq!(counters(&db), [2, 1, 1, 4]);
    assert_eq!(registered(&db), 1);
}

#[test]
fn a_drain_takes_few_statements_and_few_transactions() {
    const EVENTS: i64 = 10_000;
    let db = Database::create();
    db.append_many(2_000, 5);
    let transactions = || -> i64 {
        let mut client = db.client();
        client.batch_execute("SELECT pg_stat_force_next_flush()").ok();
        let sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
        client.query_one(sql, &[]).unwrap().get(0)
    };
    let before = transactions();
    let broker = ScriptedBroker::new();
    broker.keep_nothing();
    // Slow to poll and to look, so that what is counted is the drain.
    let relay = start(&db, config("relay-a").poll_interval(Duration::from_secs(5)), &broker);
    assert!(broker.wait_for(EVENTS as usize, SOON));
    relay.stop();
    assert_eq!(relay.join().unwrap().published, EVENTS as u64);
    // A session reports what it did when it ends, at the latest.
    eventually("its sessions have ended", SOON, || {
        let sql = "SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        db.client().query_one(sql, &[]).unwrap().get::<_, i64>(0) == 0
    });
    // A statement of the relay is a transaction of its own.
    let taken = transactions() - before;
    let each = taken as f64 / EVENTS as f64;
    assert!(each < 0.05, "{taken} transactions for {EVENTS} events");
    assert!(taken > 20, "{taken}: were they counted at all?");
}
