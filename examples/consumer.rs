//! A consumer that applies each event once, although it may be delivered twice: it remembers event ids in the transaction
//! that does the work. Reads the JSON lines of `pg-outbox run --broker stdout`:
//!
//! `pg-outbox run --broker stdout | DATABASE_URL=postgres://... cargo run --example consumer`

use std::io::{self, BufRead};

use postgres::{Client, NoTls};
use serde_json::Value;
use uuid::Uuid;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut client = Client::connect(&std::env::var("DATABASE_URL")?, NoTls)?;
    client.batch_execute(
        "CREATE TABLE IF NOT EXISTS inbox (event_id uuid PRIMARY KEY, received_at timestamptz NOT NULL DEFAULT now());
         CREATE TABLE IF NOT EXISTS order_events (order_id text NOT NULL, event_type text NOT NULL, payload text);",
    )?;
    for line in io::stdin().lock().lines() {
        let event: Value = serde_json::from_str(&line?)?;
        let text = |name: &str| event[name].as_str().unwrap_or_default();
        let event_id: Uuid = text("event_id").parse()?;

        let mut tx = client.transaction()?;
        let is_new = tx.execute(
            "INSERT INTO inbox (event_id) VALUES ($1) ON CONFLICT DO NOTHING",
            &[&event_id],
        )? == 1;
        if is_new {
            tx.execute(
                "INSERT INTO order_events (order_id, event_type, payload) VALUES ($1, $2, $3)",
                &[&text("aggregate_id"), &text("event_type"), &text("payload")],
            )?;
        }
        // The work and the memory of it, or neither: killed before this line, the event is applied by its next delivery.
        tx.commit()?;
        let what = if is_new { "applied" } else { "dropped, seen before" };
        println!("{what}: {event_id} {} {}", text("event_type"), text("aggregate_id"));
    }
    Ok(())
}
