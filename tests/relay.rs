//! The relay as a whole: everything appended is published, once and in order.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::{Database, eventually};
use pg_outbox::{NewEvent, Relay, RelayConfig, ScriptedBroker, append};

#[test]
fn everything_goes_out_once_and_in_order() {
    common::log();
    let db = Database::create();
    let ids = db.append_many(500, 10);
    let broker = ScriptedBroker::new();
    let publishers = broker.clone();
    let config = RelayConfig::builder("relay-a").build().unwrap();
    let relay = Relay::new(config, db.factory(), move |_| publishers.publisher()).start();
    assert!(broker.wait_for(ids.len(), Duration::from_secs(30)));
    eventually("every verdict is written", Duration::from_secs(10), || {
        db.count("status = 'published' AND locked_by IS NULL") == ids.len() as i64
    });
    relay.stop();
    let report = relay.join().unwrap();
    assert_eq!(report.published, ids.len() as u64);
    let mut last = HashMap::new();
    for event in broker.deliveries() {
        let sequence: i64 = std::str::from_utf8(&event.payload).unwrap().parse().unwrap();
        let before = last.insert(event.aggregate_id, sequence).unwrap_or(-1);
        assert_eq!(sequence, before + 1);
    }
}

#[test]
fn bytes_that_go_in_come_out() {
    let db = Database::create();
    let every_byte: Vec<u8> = (0..=255).collect();
    let payloads: [(&str, Vec<u8>); 6] = [
        ("NUL", b"a\0b\0".to_vec()),
        ("not UTF-8", vec![0xff, 0xfe, 0xc3, 0x28, 0x80]),
        ("every byte", every_byte.clone()),
        ("1 MB", every_byte.into_iter().cycle().take(1 << 20).collect()),
        ("empty", Vec::new()),
        ("JSON that jsonb would rewrite", br#"{ "b":1.0, "a":"\u0000", "b":2 }"#.to_vec()),
    ];
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    for (name, payload) in &payloads {
        let event = NewEvent::new("blob", *name, "stored", payload.clone())
            .content_type("application/octet-stream")
            .header("traceparent", "00-é-01");
        append(&mut transaction, &event).unwrap();
    }
    transaction.commit().unwrap();
    let broker = ScriptedBroker::new();
    let publishers = broker.clone();
    let config = RelayConfig::builder("relay-a").build().unwrap();
    let _relay = Relay::new(config, db.factory(), move |_| publishers.publisher()).start();
    assert!(broker.wait_for(payloads.len(), Duration::from_secs(30)));
    for event in broker.deliveries() {
        let sent = &payloads.iter().find(|(name, _)| *name == event.aggregate_id).unwrap().1;
        assert!(event.payload == *sent, "{} has changed", event.aggregate_id);
        assert_eq!(event.content_type, "application/octet-stream");
        assert_eq!(event.headers["traceparent"], "00-é-01");
    }
}

#[test]
fn what_is_rolled_back_is_never_published() {
    let db = Database::create();
    let broker = ScriptedBroker::new();
    let publishers = broker.clone();
    let config = RelayConfig::builder("relay-a").build().unwrap();
    let _relay = Relay::new(config, db.factory(), move |_| publishers.publisher()).start();
    let event = |what: &str| NewEvent::new("order", "1", what, "{}");
    let mut client = db.client();

    let mut transaction = client.transaction().unwrap();
    append(&mut transaction, &event("rolled back")).unwrap();
    transaction.rollback().unwrap();

    let mut transaction = client.transaction().unwrap();
    append(&mut transaction, &event("before")).unwrap();
    let mut savepoint = transaction.savepoint("s").unwrap();
    append(&mut savepoint, &event("rolled back to the savepoint")).unwrap();
    savepoint.rollback().unwrap();
    append(&mut transaction, &event("after")).unwrap();
    transaction.commit().unwrap();

    // A writer that is gone without a word.
    let mut gone = db.client();
    let mut transaction = gone.transaction().unwrap();
    append(&mut transaction, &NewEvent::new("order", "2", "abandoned", "{}")).unwrap();
    let pid: i32 = transaction.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    client.query_one("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
    drop(transaction);

    let mut transaction = client.transaction().unwrap();
    append(&mut transaction, &NewEvent::new("order", "2", "last", "{}")).unwrap();
    transaction.commit().unwrap();
    assert!(broker.wait_for(3, Duration::from_secs(30)));
    eventually("all verdicts are written", Duration::from_secs(10), || {
        db.count("status = 'published'") == 3
    });
    let deliveries = broker.deliveries();
    let of = |id: &str| -> Vec<_> {
        let events = deliveries.iter().filter(|event| event.aggregate_id == id);
        events.map(|event| event.event_type.as_str()).collect()
    };
    assert_eq!((of("1"), of("2")), (vec!["before", "after"], vec!["last"]));
}
