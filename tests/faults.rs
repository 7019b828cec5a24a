//! Faults: publishers that panic or forget, and databases that restart, cut sessions off or cannot be written to.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::driver::answers_when_told;
use common::{Database, Server, eventually};
use pg_outbox::{
    Event, Outcomes, Policy, PublishError, Publisher, Relay, RelayConfig, RelayConfigBuilder,
    RunningRelay, ScriptedBroker,
};
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(60);

fn config(relay_id: &str) -> RelayConfigBuilder {
    let policy = Policy { backoff_base: Duration::from_millis(20), ..Policy::default() };
    RelayConfig::builder(relay_id).poll_interval(Duration::from_millis(20)).policy(policy)
}

fn start(db: &Database, broker: &ScriptedBroker, config: RelayConfigBuilder) -> RunningRelay {
    let broker = broker.clone();
    Relay::new(config.build().unwrap(), db.factory(), move |_| broker.publisher()).start()
}

/// Panics, or forgets an event, the first few times that it meets one called `bad`.
struct Faulty {
    broker: ScriptedBroker,
    left: Arc<AtomicUsize>,
    panics: bool,
}

impl Faulty {
    fn is_bad(&self, event: &Event) -> bool {
        let take = |left: usize| left.checked_sub(1);
        event.event_type == "bad"
            && self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }
}

impl Publisher for Faulty {
    fn publish(&mut self, wave: &[Event], deadline: Instant, outcomes: &mut Outcomes) {
        let mut publisher = self.broker.publisher();
        for (index, event) in wave.iter().enumerate() {
            if self.is_bad(event) {
                assert!(!self.panics, "boom");
                continue;
            }
            let mut outcome = Outcomes::new(1);
            publisher.publish(std::slice::from_ref(event), deadline, &mut outcome);
            outcomes.published(index);
        }
    }
}

/// Runs until a `bad` event and its neighbours are settled. Returns how many publishers were made.
fn with_faults(db: &Database, faults: usize, panics: bool) -> usize {
    let (broker, made) = (ScriptedBroker::new(), Arc::new(AtomicUsize::new(0)));
    let (counter, left) = (Arc::clone(&made), Arc::new(AtomicUsize::new(faults)));
    let make = move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        Faulty { broker: broker.clone(), left: Arc::clone(&left), panics }
    };
    let relay = Relay::new(config("relay-a").workers(1).build().unwrap(), db.factory(), make);
    let relay = relay.start();
    eventually("all are settled", SOON, || db.count("status = 'pending'") == 0);
    relay.stop();
    relay.join().expect("a broken publisher is no reason to end");
    made.load(Ordering::SeqCst)
}

fn column(db: &Database, name: &str, event_id: Uuid) -> String {
    let sql = format!("SELECT {name}::text FROM outbox.outbox WHERE event_id = $1");
    db.client().query_one(&sql, &[&event_id]).unwrap().get(0)
}

#[test]
fn a_panic_in_a_publisher_is_unexplained_and_the_relay_goes_on() {
    let db = Database::create();
    db.append_many(3, 1);
    let bad = db.append("order", "bad", "bad", b"{}");
    db.append_many(3, 1);
    assert_eq!(with_faults(&db, 1, true), 2, "the publisher is replaced once");
    assert_eq!(db.count("status = 'published'"), 7);
    assert_eq!(column(&db, "last_error", bad), "the publisher panicked: boom");
    assert_eq!(column(&db, "unexplained_failures", bad), "1");
    assert_eq!(column(&db, "in_doubt", bad), "true");
    assert_eq!(column(&db, "attempts", bad), "2");
}

#[test]
fn an_event_that_panics_each_time_is_dead_and_alone() {
    let db = Database::create();
    db.append_many(3, 1);
    let bad = db.append("order", "bad", "bad", b"{}");
    db.append_many(3, 1);
    let made = with_faults(&db, 100, true);
    assert!(
        (3..=4).contains(&made),
        "{made}: one for each panic, and one more if anything came after"
    );
    assert_eq!(db.count("status = 'published'"), 6);
    let reason = "3 unexplained failures; the last: the publisher panicked: boom";
    assert_eq!(column(&db, "last_error", bad), reason);
    assert_eq!(db.status_of(bad), "dead");
}

#[test]
fn an_outcome_that_was_forgotten_is_unexplained() {
    let db = Database::create();
    db.append_many(3, 1);
    let bad = db.append("order", "bad", "bad", b"{}");
    assert_eq!(with_faults(&db, 1, false), 1, "the publisher is not replaced");
    assert_eq!(db.count("status = 'published'"), 4);
    assert_eq!(db.count("unexplained_failures > 0"), 1, "only what was forgotten");
    assert!(column(&db, "last_error", bad).contains("without an outcome"));
    assert_eq!(column(&db, "in_doubt", bad), "true");
}

#[test]
fn a_panic_in_the_factory_is_unexplained_and_the_relay_goes_on() {
    let db = Database::create();
    db.append("order", "1", "placed", b"{}");
    let (broker, made) = (ScriptedBroker::new(), AtomicUsize::new(0));
    let make = move |_| {
        assert!(made.fetch_add(1, Ordering::SeqCst) > 0, "no broker yet");
        broker.publisher()
    };
    let relay = Relay::new(config("relay-a").workers(1).build().unwrap(), db.factory(), make);
    let relay = relay.start();
    eventually("it is published", SOON, || db.count("status = 'published'") == 1);
    relay.stop();
    relay.join().unwrap();
    assert_eq!(db.count("unexplained_failures = 1 AND last_error LIKE '%no broker yet'"), 1);
}

/// All published, no budget spent, and the first deliveries of each aggregate in order.
fn nothing_is_lost_or_spent(db: &Database, broker: &ScriptedBroker, ids: &[Uuid]) {
    let all = ids.len() as i64;
    eventually("all are published", SOON, || db.count("status = 'published'") == all);
    assert_eq!(db.count("unexplained_failures > 0 OR retry_since IS NOT NULL"), 0);
    assert_eq!(db.count("locked_by IS NOT NULL"), 0);
    let (mut first, mut next) = (HashMap::new(), HashMap::new());
    for event in broker.deliveries() {
        if first.insert(event.event_id, ()).is_none() {
            let sequence: usize = std::str::from_utf8(&event.payload).unwrap().parse().unwrap();
            let expected: &mut usize = next.entry(event.aggregate_id).or_default();
            assert_eq!(sequence, *expected, "reordered");
            *expected += 1;
        }
    }
    assert_eq!(first.len(), ids.len());
    assert!(ids.iter().all(|id| first.contains_key(id)));
}

#[test]
fn restarts_of_the_database_lose_reorder_and_spend_nothing() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    let ids = db.append_many(20, 60);
    let broker = ScriptedBroker::new();
    broker.on_publish(|_| std::thread::sleep(Duration::from_millis(5)));
    let relay = start(&db, &broker, config("relay-a").batch_size(100));
    for round in 1..=5 {
        assert!(broker.wait_for(round * ids.len() / 8, SOON));
        eventually("a batch is being worked", SOON, || db.count("locked_by IS NOT NULL") > 0);
        server.restart_immediate();
    }
    nothing_is_lost_or_spent(&db, &broker, &ids);
    relay.stop();
    relay.join().unwrap();
}

#[test]
fn sessions_that_are_cut_off_lose_reorder_and_spend_nothing() {
    let db = Database::create();
    let ids = db.append_many(20, 60);
    let broker = ScriptedBroker::new();
    broker.on_publish(|_| std::thread::sleep(Duration::from_millis(2)));
    let relay = start(&db, &broker, config("relay-a").batch_size(50));
    let mut client = db.client();
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
    let mut cuts = 0;
    for round in 1..=30 {
        assert!(broker.wait_for(round * ids.len() / 40, SOON));
        let killed: i64 = client.query_one(cut, &[]).unwrap().get(0);
        cuts += killed;
    }
    assert!(cuts >= 30, "{cuts}");
    nothing_is_lost_or_spent(&db, &broker, &ids);
    relay.stop();
    relay.join().unwrap();
}

#[test]
fn a_database_that_turns_read_only_is_waited_for() {
    let server = Server::start();
    let db = Database::create_on(&server);
    let ids = db.append_many(10, 30);
    let broker = ScriptedBroker::new();
    broker.on_publish(|_| std::thread::sleep(Duration::from_millis(5)));
    let relay = start(&db, &broker, config("relay-a").batch_size(20));
    assert!(broker.wait_for(50, SOON));
    server.set("default_transaction_read_only = on");
    eventually("it is not ready", SOON, || relay.health().database().is_err());
    let reason = relay.health().database().unwrap_err();
    assert!(reason.contains("read-only"), "{reason}");
    server.set("default_transaction_read_only = off");
    nothing_is_lost_or_spent(&db, &broker, &ids);
    eventually("it is ready", SOON, || relay.health().database().is_ok());
    relay.stop();
    relay.join().unwrap();
}

/// What a lost verdict leaves is no failure of the event: after a broker's refusal the budget counts what it should.
#[test]
fn a_verdict_that_meets_a_restart_is_written_once() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    let id = db.append("order", "1", "placed", b"{}");
    let broker = ScriptedBroker::new();
    broker.fail_next(|_| true, PublishError::unexplained("odd"));
    let (called, answer) = answers_when_told(&broker);
    let relay = start(&db, &broker, config("relay-a"));
    called.recv_timeout(SOON).unwrap();
    server.stop();
    answer.send(()).unwrap();
    drop(answer);
    server.start_again();
    eventually("it is published", SOON, || db.status_of(id) == "published");
    assert_eq!(column(&db, "unexplained_failures", id), "1");
    assert_eq!(column(&db, "attempts", id), "2");
    relay.stop();
    let report = relay.join().unwrap();
    assert_eq!((report.published, report.retried, report.lease_lost), (1, 1, 0));
}

/// The claimer must not take back what a worker still has the verdict of, although the lease has lapsed meanwhile.
#[test]
fn an_outage_longer_than_the_lease_spends_nothing() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    let ids = db.append_many(20, 1);
    let broker = ScriptedBroker::new();
    let (called, answer) = answers_when_told(&broker);
    let lease = Duration::from_secs(1);
    let short = config("relay-a")
        .lease(lease)
        .publish_timeout(Duration::from_millis(400))
        .lease_margin(Duration::from_millis(100));
    let relay = start(&db, &broker, short);
    called.recv_timeout(SOON).unwrap();
    server.stop();
    answer.send(()).unwrap();
    drop(answer);
    // No clock can be shifted while the database is away: the lease has to lapse.
    std::thread::sleep(lease * 3);
    server.start_again();
    nothing_is_lost_or_spent(&db, &broker, &ids);
    assert_eq!(broker.deliveries().len(), ids.len(), "each was sent once");
    relay.stop();
    assert_eq!(relay.join().unwrap().lease_lost, 0);
}

#[test]
fn headers_that_cannot_be_read_stop_nothing() {
    let db = Database::create();
    let id = db.append("order", "1", "placed", b"{}");
    db.execute(r#"UPDATE outbox.outbox SET headers = '{"x": 1e400}'"#);
    let broker = ScriptedBroker::new();
    let relay = start(&db, &broker, config("relay-a"));
    eventually("it is published", SOON, || db.status_of(id) == "published");
    relay.stop();
    relay.join().unwrap();
}

#[test]
fn nothing_is_claimed_by_a_relay_that_may_not_write_verdicts() {
    let db = Database::create();
    let id = db.append("order", "1", "placed", b"{}");
    // As a role without the right to insert would find it.
    db.execute(
        "ALTER TABLE outbox.outbox_relay ADD CONSTRAINT nobody CHECK (relay_id <> 'relay-a')",
    );
    let broker = ScriptedBroker::new();
    let relay = start(&db, &broker, config("relay-a"));
    eventually("it has tried", SOON, || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%started_at%'
                      AND pid <> pg_backend_pid()";
        db.client().query_one(sql, &[]).unwrap().get::<_, i64>(0) > 1
    });
    assert_eq!((column(&db, "attempts", id).as_str(), broker.calls()), ("0", 0));
    db.execute("ALTER TABLE outbox.outbox_relay DROP CONSTRAINT nobody");
    eventually("it is published", SOON, || db.status_of(id) == "published");
    assert_eq!(column(&db, "unexplained_failures", id), "0");
    relay.stop();
    relay.join().unwrap();
}
