//! The examples are whole programs: each is run against a database and does what it says.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::path::PathBuf;
use std::process::Command;

use common::Database;

/// Beside the test itself, where cargo builds examples: `target/<profile>/examples`.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    let program = profile.join("examples").join(name);
    assert!(
        program.exists(),
        "{} is not there; build it with `cargo build --examples`",
        program.display()
    );
    program
}

/// Places two orders, twice, since a program that is started again finds its tables there.
fn embeds(name: &str) {
    let db = Database::create_empty();
    for run in 1..=2 {
        let output = Command::new(example(name)).env("DATABASE_URL", db.url()).output().unwrap();
        let says = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{says}");
        assert!(says.contains("2 published, 0 to be retried"), "{says}");
        let lines = String::from_utf8(output.stdout).unwrap();
        let mut totals = Vec::new();
        for line in lines.lines() {
            let event: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(event["event_type"], "order.placed");
            let payload: serde_json::Value =
                serde_json::from_str(event["payload"].as_str().unwrap()).unwrap();
            assert_eq!(payload["id"].to_string(), event["aggregate_id"].as_str().unwrap());
            totals.push(payload["total"].as_i64().unwrap());
        }
        totals.sort_unstable();
        assert_eq!(totals, [12, 30]);
        assert_eq!(db.count("status = 'published'"), 2 * run);
    }
    let orders: i64 = db.client().query_one("SELECT count(*) FROM orders", &[]).unwrap().get(0);
    assert_eq!(orders, 4);
}

#[test]
fn embed_postgres() {
    embeds("embed_postgres");
}

#[cfg(feature = "diesel")]
#[test]
fn embed_diesel() {
    embeds("embed_diesel");
}
