//! Orders and their events in one transaction, and the relay beside them in the same process.
//!
//! `DATABASE_URL=postgres://localhost/shop cargo run --example embed_postgres`

use std::error::Error;

use pg_outbox::{NewEvent, Relay, RelayConfig, Schema, StdoutPublisher, append, store};
use postgres::{Client, NoTls};

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL")?;
    let mut client = Client::connect(&url, NoTls)?;
    client.batch_execute(
        "CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, total bigint NOT NULL)",
    )?;
    store::migrate(&mut client, &Schema::default())?;

    let config = RelayConfig::builder("embed-postgres").build()?;
    let connect = move || Client::connect(&url, NoTls);
    let relay = Relay::new(config, connect, |_worker| StdoutPublisher::new()).start();

    for total in [12, 30] {
        let id = place_order(&mut client, total)?;
        eprintln!("order {id} is placed");
    }

    // A service stops its relay when it is told to stop; this program, once nothing waits any more.
    let waits = "SELECT FROM outbox.outbox WHERE status = 'pending' LIMIT 1";
    while !client.query(waits, &[])?.is_empty() && !relay.is_finished() {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    relay.stop();
    eprintln!("{}", relay.join()?);
    Ok(())
}

/// The order and its event, or neither: a transaction that is dropped without a commit is rolled back.
fn place_order(client: &mut Client, total: i64) -> Result<i64, Box<dyn Error>> {
    let mut tx = client.transaction()?;
    let row = tx.query_one("INSERT INTO orders (total) VALUES ($1) RETURNING id", &[&total])?;
    let id: i64 = row.get(0);
    let payload = format!(r#"{{"id":{id},"total":{total}}}"#);
    append(&mut tx, &NewEvent::new("order", id.to_string(), "order.placed", payload))?;
    tx.commit()?;
    Ok(id)
}
