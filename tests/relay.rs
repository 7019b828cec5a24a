//! The relay as a whole: everything appended is published, once and in order.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::{Database, eventually};
use pg_outbox::{Relay, RelayConfig, ScriptedBroker};

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
