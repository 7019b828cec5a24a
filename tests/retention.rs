//! Retention: what is closed goes after its time, in batches; what is not closed stays for ever.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::thread;
use std::time::Duration;

use common::driver::*;
use common::{Database, eventually};
use pg_outbox::store::{PRUNE_BATCH, prune};
use pg_outbox::{PublishError, Schema, ScriptedBroker};

const DAY: Duration = Duration::from_secs(86_400);

/// Rows of every status, all appended and closed `age` ago.
fn fill(db: &Database, of_each: i64, age: &str) {
    db.execute(&format!(
        "INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status, created_at,
                                    next_attempt_at, published_at, died_at, discarded_at, locked_by, lease_id, locked_until)
         SELECT gen_random_uuid(), 'old', n || s.status || s.is_leased, 'happened', '1', s.status, t.then, t.then,
                CASE s.status WHEN 'published' THEN t.then END, CASE s.status WHEN 'dead' THEN t.then END,
                CASE s.status WHEN 'discarded' THEN t.then END, CASE WHEN s.is_leased THEN 'other' END,
                CASE WHEN s.is_leased THEN 7 END, CASE WHEN s.is_leased THEN now() + interval '1 h' END
           FROM generate_series(1, {of_each}) AS n, (SELECT now() - interval '{age}' AS then) AS t,
                (VALUES ('pending', false), ('pending', true), ('dead', false), ('published', false), ('discarded', false))
                AS s (status, is_leased)"
    ));
}

#[test]
fn only_what_is_closed_goes_and_only_after_the_retention() {
    let db = Database::create();
    fill(&db, 20, "365 days");
    fill(&db, 20, "6 days");
    let (mut client, schema) = (db.client(), Schema::default());
    let pruned = prune(&mut client, &schema, 7 * DAY, 0).unwrap();
    assert_eq!(pruned.deleted, 40);
    assert_eq!(db.count("status IN ('published', 'discarded')"), 40);
    assert_eq!(db.count("status IN ('pending', 'dead')"), 120);
    // By the time of the verdict, not of the append: an event that waited a year stays a week.
    db.execute("UPDATE outbox.outbox SET status = 'published', published_at = now() WHERE status = 'pending' AND lease_id IS NULL");
    assert_eq!(prune(&mut client, &schema, 7 * DAY, 0).unwrap().deleted, 0);
    db.shift(8 * DAY);
    assert_eq!(prune(&mut client, &schema, 7 * DAY, 0).unwrap().deleted, 80);
}

#[test]
fn each_batch_is_a_transaction_and_a_row_that_is_locked_is_left_for_the_next_pass() {
    let db = Database::create();
    fill(&db, 1_000, "30 days");
    let (mut client, mut other, schema) = (db.client(), db.client(), Schema::default());
    let mut transaction = other.transaction().unwrap();
    let locked = transaction
        .query_one(
            "SELECT id FROM outbox.outbox WHERE status = 'published' LIMIT 1 FOR UPDATE",
            &[],
        )
        .unwrap()
        .get::<_, i64>(0);
    let (mut after, mut deleted, mut batches) = (Some(0), 0, 0);
    while let Some(id) = after {
        let pruned = prune(&mut client, &schema, 7 * DAY, id).unwrap();
        assert!(pruned.deleted <= PRUNE_BATCH.unsigned_abs());
        deleted += pruned.deleted;
        batches += 1;
        after = pruned.next_after;
    }
    assert_eq!(deleted, 1_999);
    assert!(batches >= 5, "{batches} batches for 5,000 rows");
    transaction.rollback().unwrap();
    assert_eq!(prune(&mut client, &schema, 7 * DAY, locked - 1).unwrap().deleted, 1);
}

#[test]
fn several_relays_prune_side_by_side_while_events_come() {
    let db = Database::create();
    fill(&db, 2_000, "30 days");
    // Dead heads, so that the old ones that are pending are not sent.
    db.execute(
        "UPDATE outbox.outbox SET status = 'dead', died_at = now() WHERE status = 'pending'",
    );
    let broker = ScriptedBroker::new();
    let settings = |name| {
        config(name).retention(Some(7 * DAY)).prune_interval(Duration::from_millis(50)).workers(1)
    };
    let relays = ["a", "b", "c", "d", "e"].map(|name| start(&db, settings(name), &broker));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = db.client();
            for n in 0..100 {
                let append = "SELECT outbox.outbox_append('new', $1, 'happened', '1'::bytea)";
                client.query_one(append, &[&n.to_string()]).unwrap();
            }
        });
        eventually("the old ones are gone", SOON, || {
            db.count("aggregate_type = 'old' AND status IN ('published', 'discarded')") == 0
        });
    });
    assert!(broker.wait_for(100, SOON));
    eventually("the new ones are kept", SOON, || {
        db.count("aggregate_type = 'new' AND status = 'published'") == 100
    });
    assert_eq!(db.count("status = 'dead'"), 6_000);
    for relay in relays {
        relay.stop();
        relay.join().unwrap();
    }
}

#[test]
fn published_events_can_go_with_their_verdict() {
    let db = Database::create();
    let count = db.append_many(50, 4).len();
    let broker = ScriptedBroker::new();
    broker.fail_next(|event| event.aggregate_id == "k0", PublishError::permanent("too large"));
    let relay = start(&db, config("relay-a").delete_on_publish(true), &broker);
    assert!(broker.wait_for(count - 4, SOON));
    eventually("they are gone", SOON, || db.count("true") == 4);
    assert_eq!(db.count("status = 'dead'"), 1, "and hold the three behind");
    assert_eq!(check_order(&broker.deliveries()), count - 4);
    relay.stop();
    let report = relay.join().unwrap();
    assert_eq!((report.published, report.dead_lettered), (count as u64 - 4, 1));
    let counted = "SELECT sum(published)::bigint FROM outbox.outbox_relay";
    assert_eq!(db.client().query_one(counted, &[]).unwrap().get::<_, i64>(0), count as i64 - 4);
}
