//! A broker or a destination that is down: nothing dies of it, hardly anything is written, and everything resumes at once.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::driver::*;
use common::{Database, eventually};
use pg_outbox::{
    BrokerHealth, Event, NewEvent, Outcomes, Policy, PublishError, Publisher, Relay,
    ScriptedBroker, ScriptedPublisher, append_all,
};

fn refused() -> PublishError {
    PublishError::transient("connection refused").broker()
}

/// Counts every write to a row of the outbox from now on, see [`writes`].
fn count_writes(db: &Database) {
    db.execute(
        "CREATE SEQUENCE writes;
         CREATE FUNCTION count_write() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM nextval('public.writes'); RETURN NULL; END $$;
         CREATE TRIGGER count_write AFTER UPDATE ON outbox.outbox FOR EACH ROW EXECUTE FUNCTION count_write();",
    );
}

fn writes(db: &Database) -> i64 {
    let row = db
        .client()
        .query_one("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM writes", &[]);
    row.unwrap().get(0)
}

/// What `outbox_relay` says of pauses: types, reason, whether since when is known.
fn pause(db: &Database) -> (Vec<String>, Option<String>, bool) {
    let row = db.client().query_one(
        "SELECT paused_types, paused_reason, paused_since IS NOT NULL FROM outbox.outbox_relay WHERE worker = 0",
        &[],
    );
    row.map(|row| (row.get(0), row.get(1), row.get(2))).unwrap_or_default()
}

/// Plays an outage of a quarter of an hour and returns how many row writes it took.
///
/// At its longest a probe comes every 7.5 to 15 s, which makes 60 to 120 in that time; here they come faster, and the table's
/// times are moved instead.
fn outage(backlog: usize) -> i64 {
    const PROBES: usize = 60;
    let db = Database::create();
    count_writes(&db);
    db.append_many(250, backlog / 250);
    let broker = ScriptedBroker::new();
    broker.take_down(refused());
    let (watching, in_flight) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (watch, most) = (Arc::clone(&watching), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&most);
    broker.on_publish(move |wave| {
        let now = in_flight.fetch_add(wave.len(), Ordering::SeqCst) + wave.len();
        thread::sleep(Duration::from_millis(2));
        if watch.load(Ordering::SeqCst) {
            seen.fetch_max(now, Ordering::SeqCst);
        }
        in_flight.fetch_sub(wave.len(), Ordering::SeqCst);
    });
    let relay = start(&db, config("relay-a").batch_size(100), &broker);
    eventually("the pause is recorded", SOON, || {
        pause(&db) == (vec!["*".into()], Some("connection refused".into()), true)
    });
    assert_eq!(relay.health().broker(), BrokerHealth::InTrouble("connection refused".into()));
    // The batches that were on their way when it began are over.
    assert!(broker.wait_for_calls(10, SOON));
    watching.store(true, Ordering::SeqCst);
    let calls = broker.calls();
    assert!(broker.wait_for_calls(calls + PROBES / 2, SOON));
    db.shift(Duration::from_secs(15 * 60));
    assert!(broker.wait_for_calls(calls + PROBES, SOON));
    watching.store(false, Ordering::SeqCst);
    assert_eq!(most.load(Ordering::SeqCst), 1, "one probe at a time");
    // A shift writes every row once.
    let written = writes(&db) - backlog as i64;
    assert_eq!(db.count("status <> 'pending' OR unexplained_failures > 0"), 0);
    assert_eq!(broker.published(), 0);

    broker.clear_hook();
    broker.mend();
    let mended_at = Instant::now();
    assert!(broker.wait_for(1, SOON));
    assert!(mended_at.elapsed() < Duration::from_secs(2), "{:?}", mended_at.elapsed());
    assert!(broker.wait_for(backlog, SOON));
    assert!(mended_at.elapsed() < Duration::from_secs(12), "{:?}", mended_at.elapsed());
    let deliveries = broker.deliveries();
    assert_eq!((check_order(&deliveries), deliveries.len()), (backlog, backlog));
    eventually("the pause is cleared", SOON, || pause(&db) == (vec![], None, false));
    eventually("all verdicts are written", SOON, || {
        db.count("status = 'published'") == backlog as i64
    });
    assert_eq!(relay.health().broker(), BrokerHealth::Answers);
    written
}

#[test]
fn an_outage_kills_nothing_and_writes_no_more_for_a_larger_backlog() {
    let (small, large) = thread::scope(|scope| {
        let small = scope.spawn(|| outage(1_000));
        (small.join().unwrap(), outage(10_000))
    });
    // Two writes a probe, and two for each event of the batches that were claimed when it began.
    assert!(small < 1_000 && large < 1_000, "{small} and {large} writes");
}

/// Events of aggregates of their own.
fn append_each(db: &Database, aggregate_type: &str, count: usize) {
    let event = |n: usize| NewEvent::new(aggregate_type, n.to_string(), "happened", n.to_string());
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    append_all(&mut transaction, &(0..count).map(event).collect::<Vec<_>>()).unwrap();
    transaction.commit().unwrap();
}

/// Appends to healthy aggregates and returns how long they took.
fn time_healthy(db: &Database, broker: &ScriptedBroker, count: usize) -> Duration {
    let before = payloads(broker, "healthy").len();
    append_each(db, "healthy", count);
    let appended_at = Instant::now();
    eventually("the healthy ones go out", SOON, || {
        payloads(broker, "healthy").len() - before == count
    });
    appended_at.elapsed()
}

#[test]
fn a_dead_destination_pauses_alone() {
    let db = Database::create();
    count_writes(&db);
    append_each(&db, "dead", 500);
    let broker = ScriptedBroker::new();
    let gone = PublishError::transient("no route").destination();
    broker.fail_always(|event| event.aggregate_type == "dead", gone);
    let poll = Duration::from_millis(500);
    let settings = || config("relay-a").batch_size(50).poll_interval(poll).wake_ups(false);
    let _relay = start(&db, settings(), &broker);
    eventually("the pause is recorded", SOON, || {
        pause(&db) == (vec!["dead".into()], Some("no route".into()), true)
    });
    assert!(broker.wait_for_calls(broker.calls() + 20, SOON));
    for _ in 0..2 {
        let took = time_healthy(&db, &broker, 100);
        assert!(took < 2 * poll, "healthy events took {took:?}");
    }
    assert_eq!(db.count("status = 'dead'"), 0);
    broker.mend();
    assert!(broker.wait_for(700, SOON));
    eventually("the pause is cleared", SOON, || pause(&db) == (vec![], None, false));
}

#[test]
fn old_failing_events_do_not_starve_new_ones() {
    let db = Database::create();
    append_each(&db, "failing", 500);
    let broker = ScriptedBroker::new();
    broker.fail_always(|event| event.aggregate_type == "failing", PublishError::transient("500"));
    let poll = Duration::from_millis(500);
    let settings = config("relay-a").policy(Policy::default()).batch_size(50);
    let _relay = start(&db, settings.poll_interval(poll).wake_ups(false), &broker);
    eventually("all have failed", SOON, || db.count("retry_since IS NULL") == 0);
    for _ in 0..2 {
        let took = time_healthy(&db, &broker, 100);
        assert!(took < 2 * poll, "healthy events took {took:?}");
    }
}

#[test]
fn a_slow_destination_does_not_slow_the_others() {
    let db = Database::create();
    append_each(&db, "slow", 20);
    let broker = ScriptedBroker::new();
    broker.on_publish(|wave| {
        if wave.iter().any(|event| event.aggregate_type == "slow") {
            thread::sleep(Duration::from_millis(500));
        }
    });
    let timeout = PublishError::transient("timeout").destination().in_doubt();
    broker.fail_always(|event| event.aggregate_type == "slow", timeout);
    let _relay = start(&db, config("relay-a"), &broker);
    eventually("it is paused", SOON, || pause(&db).0 == ["slow"]);
    for _ in 0..20 {
        let took = time_healthy(&db, &broker, 5);
        assert!(took < Duration::from_millis(400), "healthy events took {took:?}");
    }
}

#[test]
fn a_probe_that_finds_no_event_does_not_wait_for_a_busy_worker() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let gone = PublishError::transient("no route").destination();
    broker.fail_always(|event| event.aggregate_type == "gone", gone);
    append_each(&db, "gone", 1);
    let (gate, closed) = crossbeam_channel::bounded::<()>(0);
    broker.on_publish(move |wave| {
        if wave.iter().any(|event| event.aggregate_type == "slow") {
            let _ = closed.recv();
        }
    });
    let _relay = start(&db, config("relay-a").workers(2), &broker);
    eventually("it is paused", SOON, || pause(&db).0 == ["gone"]);
    let put_off =
        "UPDATE outbox.outbox SET next_attempt_at = now() + interval '1 h' WHERE locked_by IS NULL";
    eventually("its event is put off", SOON, || db.client().execute(put_off, &[]).unwrap() == 1);
    append_each(&db, "slow", 1);
    eventually("a worker is busy", SOON, || {
        db.count("aggregate_type = 'slow' AND locked_by IS NOT NULL") == 1
    });
    for _ in 0..3 {
        time_healthy(&db, &broker, 5);
    }
    assert!(payloads(&broker, "slow").is_empty());
    drop(gate);
}

#[test]
fn a_broker_that_asks_for_time_gets_it() {
    const ASKED: Duration = Duration::from_secs(120);
    let db = Database::create();
    append_each(&db, "throttled", 20);
    let broker = ScriptedBroker::new();
    let error = PublishError::transient("429").destination().retry_after(ASKED);
    broker.fail_always(|event| event.aggregate_type == "throttled", error);
    let relay = start(&db, config("relay-a").workers(1), &broker);
    eventually("it is paused", SOON, || pause(&db).0 == ["throttled"]);
    let calls = broker.calls();
    for _ in 0..5 {
        time_healthy(&db, &broker, 10);
    }
    let healthy_calls = broker.calls() - calls;
    assert!(healthy_calls <= 50);
    eventually("leases are given back", SOON, || db.count("locked_by IS NOT NULL") == 0);
    // One event failed, and waits for as long; no other was blamed.
    let failed = "retry_since IS NOT NULL AND attempts = 1 AND next_attempt_at - retry_since >= interval '120 s'";
    assert_eq!(db.count(failed), 1);
    assert_eq!(db.count("status = 'pending' AND attempts = 0 AND retry_since IS NULL"), 19);
    relay.stop();
    assert_eq!(relay.join().unwrap().retried, 1);
}

#[test]
fn a_broker_is_asked_at_the_start_and_while_idle() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    broker.take_down(refused());
    let settings = config("relay-a").heartbeat_interval(Duration::from_millis(100));
    let relay = start(&db, settings, &broker);
    for _ in 0..2 {
        eventually("it is known that the broker is away", SOON, || {
            relay.health().broker() == BrokerHealth::InTrouble("connection refused".into())
                && pause(&db).0 == ["*"]
        });
        broker.mend();
        eventually("it is known that the broker answers", SOON, || {
            relay.health().broker() == BrokerHealth::Answers && pause(&db).0.is_empty()
        });
        broker.take_down(refused());
    }
    assert_eq!(broker.calls(), 0, "without any event");
}

#[test]
fn a_relay_resumes_although_another_takes_every_event() {
    let db = Database::create();
    let (broken, sound) = (ScriptedBroker::new(), ScriptedBroker::new());
    broken.take_down(refused());
    append_each(&db, "order", 20);
    let relay_a = start(&db, config("relay-a"), &broken);
    eventually("the first relay pauses", SOON, || is_paused(&relay_a));
    let _relay_b = start(&db, config("relay-b"), &sound);
    eventually("the second publishes all", SOON, || db.count("status = 'published'") == 20);
    broken.mend();
    eventually("the first resumes", SOON, || relay_a.health().broker() == BrokerHealth::Answers);
    assert_eq!(broken.published(), 0);
}

/// Publishes to a scripted broker, and has no way to ask it without an event.
struct Mute(ScriptedPublisher);

impl Publisher for Mute {
    fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
        self.0.publish(wave, deadline, outcomes);
    }
}

#[test]
fn a_pause_that_no_event_is_left_to_end_is_forgotten() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let mute = broker.clone();
    let settings = config("relay-a").build().unwrap();
    let relay = Relay::new(settings, db.factory(), move |_| Mute(mute.publisher())).start();
    let known = || relay.health().broker();
    eventually("nothing is known", SOON, || known() == BrokerHealth::OnlyAnEventCanTell);
    for (error, types) in
        [(refused(), ["*"]), (PublishError::transient("no route").destination(), ["order"])]
    {
        broker.fail_always(|_| true, error);
        append_each(&db, "order", 1);
        eventually("it pauses", SOON, || pause(&db).0 == types);
        // As another relay would.
        eventually("others take the event", SOON, || {
            let published = "UPDATE outbox.outbox SET status = 'published', published_at = now()
                              WHERE status = 'pending' AND locked_by IS NULL";
            db.client().execute(published, &[]).unwrap() == 1
        });
        broker.mend();
        eventually("it resumes", SOON, || pause(&db) == (vec![], None, false));
        assert!(known().is_ready());
    }
}
