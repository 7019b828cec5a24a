//! The same as `embed_postgres`, for an application that uses Diesel: it appends through its own connection.
//!
//! `DATABASE_URL=postgres://localhost/shop cargo run --features diesel --example embed_diesel`

#![allow(missing_docs)] // of what table! writes

use std::error::Error;

use diesel::prelude::*;
use pg_outbox::{NewEvent, Relay, RelayConfig, Schema, StdoutPublisher, append, store};
use postgres::{Client, NoTls};

diesel::table! {
    orders (id) {
        id -> BigInt,
        total -> BigInt,
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL")?;
    // The relay and the migration bring their own driver.
    let mut client = Client::connect(&url, NoTls)?;
    store::migrate(&mut client, &Schema::default())?;

    let mut conn = PgConnection::establish(&url)?;
    diesel::sql_query(
        "CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, total bigint NOT NULL)",
    )
    .execute(&mut conn)?;

    let config = RelayConfig::builder("embed-diesel").build()?;
    let connect = move || Client::connect(&url, NoTls);
    let relay = Relay::new(config, connect, |_worker| StdoutPublisher::new()).start();

    for total in [12, 30] {
        let id = place_order(&mut conn, total)?;
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

/// The order and its event, or neither.
fn place_order(conn: &mut PgConnection, total: i64) -> Result<i64, pg_outbox::Error> {
    conn.transaction(|conn| {
        let id: i64 = diesel::insert_into(orders::table)
            .values(orders::total.eq(total))
            .returning(orders::id)
            .get_result(conn)?;
        let payload = format!(r#"{{"id":{id},"total":{total}}}"#);
        let placed = NewEvent::new("order", id.to_string(), "order.placed", payload);
        append::diesel::append(conn, &placed)?;
        Ok(id)
    })
}
