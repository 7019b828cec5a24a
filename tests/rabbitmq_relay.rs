//! The whole way, from the table to a real RabbitMQ: nothing is lost, reordered or buried while the broker is crashed,
//! restarted, blocked, cut off and without its exchange.
#![cfg(feature = "rabbitmq")]

mod common;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use common::driver::is_paused;
use common::{Database, Rabbit, eventually};
use pg_outbox::publisher::rabbitmq::{RabbitMqConfig, RabbitMqPublisher};
use pg_outbox::{Relay, RelayConfig, RunningRelay};
use serde_json::json;
use uuid::Uuid;

const AGGREGATES: usize = 50;
const LONG: Duration = Duration::from_secs(120);

fn start(db: &Database, rabbit: &Rabbit) -> RunningRelay {
    let broker = RabbitMqConfig::builder(rabbit.url())
        .exchange("outbox")
        .build()
        .expect("settings that make sense");
    let config = RelayConfig::builder("relay-a")
        .publish_timeout(Duration::from_secs(5))
        .poll_interval(Duration::from_millis(200))
        .probe_interval_cap(Duration::from_millis(500))
        .batch_size(50)
        .build()
        .expect("settings that make sense");
    Relay::new(config, db.factory(), move |_| RabbitMqPublisher::new(broker.clone())).start()
}

/// Appends five events for each aggregate, their numbers going on from `first`.
fn append(db: &Database, first: usize) -> Vec<Uuid> {
    let mut client = db.client();
    let events: Vec<_> = (first..first + 5)
        .flat_map(|n| {
            (0..AGGREGATES).map(move |key| {
                pg_outbox::NewEvent::new("order", format!("k{key}"), "placed", format!("{key} {n}"))
            })
        })
        .collect();
    let mut transaction = client.transaction().expect("a transaction");
    let ids = pg_outbox::append_all(&mut transaction, &events).expect("events can be appended");
    transaction.commit().expect("events can be appended");
    ids
}

fn all_published(db: &Database) {
    eventually("everything is published", LONG, || db.count("status <> 'published'") == 0);
}

#[test]
fn nothing_is_lost_whatever_happens_to_the_broker() {
    common::log();
    let db = Database::create();
    let mut rabbit = Rabbit::start();
    rabbit.declare_exchange("outbox", "topic");
    rabbit.declare_queue("all", json!({ "durable": true }));
    rabbit.bind("outbox", "all", "#");
    let relay = start(&db, &rabbit);
    let mut appended: HashSet<Uuid> = append(&db, 0).into_iter().collect();
    all_published(&db);

    appended.extend(append(&db, 5));
    rabbit.kill();
    appended.extend(append(&db, 10));
    eventually("the relay pauses", LONG, || is_paused(&relay));
    rabbit.start_again();
    all_published(&db);

    rabbit.block();
    appended.extend(append(&db, 15));
    eventually("the relay pauses", LONG, || is_paused(&relay));
    log::info!("while blocked: {:?}", relay.health().broker());
    assert_eq!(db.count("status = 'dead'"), 0);
    rabbit.unblock();
    all_published(&db);

    appended.extend(append(&db, 20));
    rabbit.close_all_connections("maintenance");
    all_published(&db);

    rabbit.delete_exchange("outbox");
    appended.extend(append(&db, 25));
    eventually("the relay pauses", LONG, || is_paused(&relay));
    rabbit.declare_exchange("outbox", "topic");
    rabbit.bind("outbox", "all", "#");
    all_published(&db);

    relay.stop();
    relay.join().expect("a clean stop");
    assert_eq!(db.count("status = 'published'"), appended.len() as i64);

    let mut first_deliveries: HashMap<String, Vec<u64>> = HashMap::new();
    let mut seen = HashSet::new();
    for delivery in rabbit.get("all", 10 * appended.len()) {
        let event_id: Uuid =
            delivery.properties["message_id"].as_str().expect("an id").parse().expect("an id");
        if seen.insert(event_id) {
            let text = String::from_utf8(delivery.payload).expect("text");
            let (key, number) = text.split_once(' ').expect("key and number");
            first_deliveries.entry(key.into()).or_default().push(number.parse().expect("a number"));
        }
    }
    assert_eq!(seen, appended, "what arrived is what was appended");
    assert_eq!(first_deliveries.len(), AGGREGATES);
    for (key, numbers) in first_deliveries {
        assert!(numbers.is_sorted(), "k{key} arrived as {numbers:?}");
    }
}

#[test]
fn an_unroutable_event_is_dead_until_its_queue_is_there() {
    let db = Database::create();
    let rabbit = Rabbit::start();
    rabbit.declare_exchange("outbox", "topic");
    let relay = start(&db, &rabbit);
    let id = db.append("order", "1", "placed", b"{}");
    eventually("it is dead", LONG, || db.status_of(id) == "dead");
    assert_eq!(db.count("last_error ILIKE '%unroutable%' OR last_error ILIKE '%NO_ROUTE%'"), 1);
    rabbit.declare_queue("all", json!({ "durable": true }));
    rabbit.bind("outbox", "all", "#");
    let filter = pg_outbox::store::dead_letters::Filter::everything();
    let schema = pg_outbox::Schema::default();
    pg_outbox::store::dead_letters::requeue(&mut db.client(), &schema, &filter, None)
        .expect("a requeue");
    eventually("it is published", LONG, || db.status_of(id) == "published");
    assert_eq!(rabbit.get("all", 10).len(), 1);
    relay.stop();
    relay.join().expect("a clean stop");
}
