//! Budgets: what a failure of each kind costs an event.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::{Duration, Instant};

use common::driver::*;
use common::{Database, eventually};
use pg_outbox::store::dead_letters::{self, Filter};
use pg_outbox::{
    Event, Outcomes, Policy, PublishError, Publisher, Relay, RelayConfigBuilder, Schema,
    ScriptedBroker,
};
use uuid::Uuid;

const HOUR: Duration = Duration::from_secs(3600);

/// What the table says of an event.
struct Row {
    status: String,
    attempts: i32,
    unexplained: i32,
    last_error: String,
    /// Since its first failure.
    failing_for: Option<Duration>,
    is_dead_since: bool,
}

fn row(db: &Database, event_id: Uuid) -> Row {
    let row = db.client().query_one(
        "SELECT status, attempts, unexplained_failures, coalesce(last_error, ''),
                extract(epoch FROM clock_timestamp() - retry_since)::float8, died_at IS NOT NULL
           FROM outbox.outbox WHERE event_id = $1",
        &[&event_id],
    );
    let row = row.unwrap();
    let failing_for: Option<f64> = row.get(4);
    Row {
        status: row.get(0),
        attempts: row.get(1),
        unexplained: row.get(2),
        last_error: row.get(3),
        failing_for: failing_for.map(Duration::from_secs_f64),
        is_dead_since: row.get(5),
    }
}

/// Waits for the verdict on an attempt and returns what it left.
fn after_attempt(db: &Database, event_id: Uuid, attempt: i32) -> Row {
    let free = format!("event_id = '{event_id}' AND attempts >= {attempt} AND locked_by IS NULL");
    eventually("the attempt is over", SOON, || db.count(&free) == 1);
    row(db, event_id)
}

fn always(error: PublishError) -> ScriptedBroker {
    let broker = ScriptedBroker::new();
    broker.fail_always(|_| true, error);
    broker
}

/// A failure after which only a shift of time brings the next attempt.
fn throttled() -> PublishError {
    PublishError::transient("503").retry_after(Duration::from_secs(20 * 60))
}

fn within(window: Duration) -> RelayConfigBuilder {
    config("relay-a").policy(Policy { transient_window: window, ..Policy::default() })
}

#[test]
fn a_permanent_failure_is_dead_at_once() {
    let db = Database::create();
    let event = db.append("order", "1", "placed", b"{}");
    let broker = always(PublishError::permanent("schema rejected: \u{0}no total"));
    let _relay = start(&db, config("relay-a"), &broker);
    let row = after_attempt(&db, event, 1);
    assert_eq!((row.status.as_str(), row.attempts, row.unexplained), ("dead", 1, 0));
    assert_eq!(row.last_error, "schema rejected:  no total");
    assert!(row.is_dead_since);
    assert_eq!(broker.calls(), 1);
}

#[test]
fn a_transient_failure_is_bounded_by_time_and_not_by_count() {
    let db = Database::create();
    let [often, long, old] =
        ["often", "long", "old"].map(|id| db.append("order", id, "placed", b"{}"));
    // All of them have waited for a day and an hour; two have failed before.
    db.shift(25 * HOUR);
    let mut client = db.client();
    for (event, attempts, hours) in [(often, 39, 1.0), (long, 1, 24.0)] {
        client
            .execute(
                "UPDATE outbox.outbox SET attempts = $2, retry_since = clock_timestamp() - $3 * interval '1 hour'
                  WHERE event_id = $1",
                &[&event, &attempts, &hours],
            )
            .unwrap();
    }
    let _relay = start(&db, within(24 * HOUR), &always(throttled()));
    let row = after_attempt(&db, often, 40);
    assert_eq!((row.status.as_str(), row.attempts), ("pending", 40));
    assert!(row.failing_for.unwrap() >= HOUR);
    let row = after_attempt(&db, long, 2);
    assert_eq!((row.status.as_str(), row.attempts), ("dead", 2));
    assert!(row.last_error.contains("still failing after") && row.last_error.contains("503"));
    let row = after_attempt(&db, old, 1);
    assert_eq!((row.status.as_str(), row.attempts), ("pending", 1));
    assert!(row.failing_for.unwrap() < HOUR, "the window opens with the first failure");
}

#[test]
fn the_window_is_counted_from_the_first_failure_and_a_requeue_opens_another() {
    let db = Database::create();
    let event = db.append("order", "1", "placed", b"{}");
    let _relay = start(&db, within(HOUR), &always(throttled()));
    for series in 0..2 {
        for (attempt, status) in [(1, "pending"), (2, "pending"), (3, "dead")] {
            let row = after_attempt(&db, event, attempt);
            assert_eq!((row.status.as_str(), row.attempts), (status, attempt), "series {series}");
            assert_eq!(row.is_dead_since, status == "dead");
            if attempt == 1 {
                assert!(row.failing_for.unwrap() < HOUR / 2, "a window of its own");
            }
            if status == "pending" {
                db.shift(HOUR / 2);
            }
        }
        let filter = Filter::events([event.into()]);
        let requeued =
            dead_letters::requeue(&mut db.client(), &Schema::default(), &filter, None).unwrap();
        assert_eq!(requeued, [event]);
    }
}

/// Says nothing about what it was given.
struct Silent;

impl Publisher for Silent {
    fn publish(&mut self, _: &[Event], _: Instant, _: &mut Outcomes) {}
}

#[test]
fn the_third_unexplained_failure_kills() {
    let db = Database::create();
    let event = db.append("order", "1", "placed", b"{}");
    let broker = always(PublishError::unexplained("FooError"));
    let relay = start(&db, config("relay-a"), &broker);
    let row = after_attempt(&db, event, 3);
    assert_eq!((row.status.as_str(), row.attempts, row.unexplained), ("dead", 3, 3));
    assert_eq!(row.last_error, "3 unexplained failures; the last: FooError");
    assert_eq!(broker.calls(), 3);
    drop(relay);

    let silent = db.append("order", "2", "placed", b"{}");
    let config = config("relay-b").build().unwrap();
    let _relay = Relay::new(config, db.factory(), |_| Silent).start();
    let row = after_attempt(&db, silent, 3);
    assert_eq!((row.status.as_str(), row.unexplained), ("dead", 3));
}
