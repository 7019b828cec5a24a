//! Relays and single steps of relays, with settings that make a test quick.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use pg_outbox::store::claim::{self, Claim, Class, Request};
use pg_outbox::store::verdict::{self, Failure, Settled, Verdict};
use pg_outbox::store::{Session, Statement};
use pg_outbox::{
    BrokerHealth, Event, Policy, Relay, RelayConfig, RelayConfigBuilder, RunningRelay, Schema,
    ScriptedBroker,
};
use postgres::types::ToSql;

use super::Database;

/// Long enough for anything that is going to happen.
pub const SOON: Duration = Duration::from_secs(20);

/// Backoffs and probes of milliseconds, no retention; budgets as they are.
pub fn config(relay_id: &str) -> RelayConfigBuilder {
    let policy = Policy {
        backoff_base: Duration::from_millis(5),
        backoff_cap: Duration::from_millis(20),
        ..Policy::default()
    };
    RelayConfig::builder(relay_id)
        .policy(policy)
        .poll_interval(Duration::from_millis(200))
        .probe_interval_cap(Duration::from_millis(20))
        .retention(None)
}

/// A relay that publishes to `broker`.
pub fn start(db: &Database, config: RelayConfigBuilder, broker: &ScriptedBroker) -> RunningRelay {
    let broker = broker.clone();
    let config = config.build().expect("settings that make sense");
    Relay::new(config, db.factory(), move |_| broker.publisher()).start()
}

/// Whether the relay knows that its broker is away.
pub fn is_paused(relay: &RunningRelay) -> bool {
    matches!(relay.health().broker(), BrokerHealth::InTrouble(_))
}

/// A relay's session.
pub fn session(db: &Database) -> Session {
    Session::open(db.client(), &Schema::default(), false).expect("a session")
}

/// Whatever is clean, as the relay asks with its default settings.
pub fn request() -> Request {
    Request {
        class: Class::Clean,
        last_chance: 2,
        from_key: i64::MIN,
        probes: 400,
        heads: 100,
        rows: 500,
        bytes: 8 * 1024 * 1024,
        run: 500,
        newer_than: i64::MAX,
        fresh: 0,
        only: Vec::new(),
        except: Vec::new(),
    }
}

/// Events of these aggregate types only, at most `rows` of them.
pub fn only(aggregate_type: &str, rows: i32) -> Request {
    Request { only: vec![aggregate_type.into()], rows, ..request() }
}

pub fn claim(session: &mut Session, relay_id: &str, lease_id: i64, request: &Request) -> Claim {
    claim::claim(session, relay_id, lease_id, Duration::from_secs(30), request).expect("a claim")
}

pub fn ids(claim: &Claim) -> Vec<i64> {
    claim.events.iter().map(|claimed| claimed.event.id).collect()
}

pub fn settle(session: &mut Session, relay_id: &str, lease_id: i64, verdict: &Verdict) -> Settled {
    verdict::settle(session, relay_id, 1, lease_id, verdict, false, false).expect("a verdict")
}

pub fn published(ids: Vec<i64>) -> Verdict {
    Verdict { published: ids, ..Verdict::default() }
}

/// A failure of each; dead where there is no `retry_in`.
pub fn failed(ids: &[i64], retry_in: Option<Duration>) -> Verdict {
    let failure = |&id| Failure {
        id,
        retry_in,
        unexplained: false,
        in_doubt: false,
        reason: "refused".into(),
    };
    Verdict { failed: ids.iter().map(failure).collect(), ..Verdict::default() }
}

/// Runs a statement of the test's own the way a session runs the relay's.
pub fn ask<T: postgres::types::FromSqlOwned>(
    session: &mut Session,
    statement: &'static Statement,
    params: &[&(dyn ToSql + Sync)],
) -> T {
    session.query(statement, params).expect("an answer")[0].get(0)
}

/// Payloads of the deliveries of one aggregate type, in the order of arrival.
pub fn payloads(broker: &ScriptedBroker, aggregate_type: &str) -> Vec<String> {
    let of_type = |event: &Event| event.aggregate_type == aggregate_type;
    let text = |event: Event| String::from_utf8(event.payload).expect("text");
    broker.deliveries().into_iter().filter(of_type).map(text).collect()
}

/// Checks that first deliveries of each aggregate came in the order of their ids, and returns how many there were.
#[track_caller]
pub fn check_order(deliveries: &[Event]) -> usize {
    let (mut seen, mut last) = (HashSet::new(), HashMap::new());
    for event in deliveries.iter().filter(|event| seen.insert(event.event_id)) {
        let aggregate = (&event.aggregate_type, &event.aggregate_id);
        let before = last.insert(aggregate, event.id).unwrap_or(0);
        assert!(before < event.id, "{aggregate:?}: {} came after {before}", event.id);
    }
    last.clear();
    seen.len()
}

/// The broker takes each wave and answers only once it is told to, or once the other end is dropped.
pub fn answers_when_told(broker: &ScriptedBroker) -> (Receiver<()>, Sender<()>) {
    let (called_tx, called) = channel();
    let (answer, answer_rx) = channel();
    let ends = Mutex::new((called_tx, answer_rx));
    broker.on_publish(move |_| {
        let ends = ends.lock().expect("no panic here");
        let _ = ends.0.send(());
        let _ = ends.1.recv();
    });
    (called, answer)
}
