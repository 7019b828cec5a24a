//! The writer's door: appending events in the caller's own transaction.
//!
//! An event belongs to the change that it tells of: it is there when the transaction commits, and never was when it rolls
//! back. The call serialises the writers of the event's aggregate until then, so that within an aggregate the order of
//! events is the order of commits. All of this is done by SQL functions (see `schema.sql`), so that a writer in any language has
//! the same rules; here is their typed face, in one round trip a call.

#[cfg(feature = "diesel")]
pub mod diesel;

use std::time::SystemTime;

use postgres::Transaction;
use postgres::types::{ToSql, Type};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::Error;
use crate::event::NewEvent;
use crate::store::Schema;

/// `$1` aggregate types, `$2` aggregate ids, `$3` event types, `$4` payloads, `$5` content types, `$6` headers, `$7` event ids
/// (NULL: made by the database), `$8` times before which they must not go out (NULL: none). Returns the event ids.
const APPEND: &str =
    r#"SELECT "outbox".outbox_append_all($1, $2, $3, $4, $5, $6, $7, $8) AS event_ids"#;

/// Appends one event to the outbox in the schema `outbox` and returns its event id. Other schemas: [`Outbox`].
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut client = postgres::Client::connect("host=localhost", postgres::NoTls)?;
/// use pg_outbox::{NewEvent, append};
/// let mut tx = client.transaction()?;
/// tx.execute("INSERT INTO orders (id, total) VALUES (42, 12)", &[])?;
/// append(&mut tx, &NewEvent::new("order", "42", "order.placed", r#"{"total":12}"#))?;
/// tx.commit()?; // the order and its event, or neither
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// A limit that the event breaks ([`is_invalid_event`](Error::is_invalid_event)), an event id that is there already
/// ([`is_duplicate_event_id`](Error::is_duplicate_event_id)), or the database's. After the last two PostgreSQL refuses
/// everything but a rollback, as after any error.
pub fn append(transaction: &mut Transaction<'_>, event: &NewEvent) -> Result<Uuid, Error> {
    Outbox::default().append(transaction, event)
}

/// Appends events in their order, in one round trip, and returns their event ids in the same order. See [`append`].
///
/// # Errors
/// As [`append`]; a broken limit is named with the event's index. Nothing is appended then.
pub fn append_all(
    transaction: &mut Transaction<'_>,
    events: &[NewEvent],
) -> Result<Vec<Uuid>, Error> {
    Outbox::default().append_all(transaction, events)
}

/// The outbox of one schema, for appending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outbox {
    schema: Schema,
}

impl Outbox {
    /// The outbox of this schema.
    pub fn in_schema(schema: Schema) -> Self {
        Self { schema }
    }

    /// See [`append`].
    ///
    /// # Errors
    /// As there.
    pub fn append(
        &self,
        transaction: &mut Transaction<'_>,
        event: &NewEvent,
    ) -> Result<Uuid, Error> {
        let ids = self.append_all(transaction, std::slice::from_ref(event))?;
        ids.first().copied().ok_or_else(no_answer)
    }

    /// See [`append_all`].
    ///
    /// # Errors
    /// As there.
    pub fn append_all(
        &self,
        transaction: &mut Transaction<'_>,
        events: &[NewEvent],
    ) -> Result<Vec<Uuid>, Error> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let columns = Columns::of(events)?;
        let rows = transaction.query_typed(&self.schema.sql(APPEND), &columns.params());
        let rows = rows.map_err(|error| {
            let code = error.code().map(|code| code.code().to_owned());
            let constraint =
                error.as_db_error().and_then(|error| error.constraint()).map(str::to_owned);
            Error::append(error, code.as_deref(), constraint.as_deref())
        })?;
        rows.first().map(|row| row.get(0)).ok_or_else(no_answer)
    }
}

fn no_answer() -> Error {
    Error::append("the database returned no event id", None, None)
}

/// Events as the arrays that the SQL function takes.
struct Columns<'a> {
    aggregate_types: Vec<&'a str>,
    aggregate_ids: Vec<&'a str>,
    event_types: Vec<&'a str>,
    payloads: Vec<&'a [u8]>,
    content_types: Vec<&'a str>,
    headers: Vec<Value>,
    event_ids: Vec<Option<Uuid>>,
    not_befores: Vec<Option<SystemTime>>,
}

impl<'a> Columns<'a> {
    /// Checks every event first, so that nothing is sent when one of them breaks a limit.
    fn of(events: &'a [NewEvent]) -> Result<Self, Error> {
        for (index, event) in events.iter().enumerate() {
            event.check().map_err(|error| {
                if events.len() == 1 {
                    error
                } else {
                    Error::invalid_event(format!("event {index}: {error}"))
                }
            })?;
        }
        Ok(Self {
            aggregate_types: events.iter().map(|e| e.aggregate_type.as_str()).collect(),
            aggregate_ids: events.iter().map(|e| e.aggregate_id.as_str()).collect(),
            event_types: events.iter().map(|e| e.event_type.as_str()).collect(),
            payloads: events.iter().map(|e| e.payload.as_slice()).collect(),
            content_types: events.iter().map(|e| e.content_type.as_str()).collect(),
            headers: events.iter().map(headers).collect(),
            event_ids: events.iter().map(|e| e.event_id).collect(),
            not_befores: events.iter().map(|e| e.not_before).collect(),
        })
    }

    fn params(&self) -> [(&(dyn ToSql + Sync), Type); 8] {
        [
            (&self.aggregate_types, Type::TEXT_ARRAY),
            (&self.aggregate_ids, Type::TEXT_ARRAY),
            (&self.event_types, Type::TEXT_ARRAY),
            (&self.payloads, Type::BYTEA_ARRAY),
            (&self.content_types, Type::TEXT_ARRAY),
            (&self.headers, Type::JSONB_ARRAY),
            (&self.event_ids, Type::UUID_ARRAY),
            (&self.not_befores, Type::TIMESTAMPTZ_ARRAY),
        ]
    }
}

fn headers(event: &NewEvent) -> Value {
    let copy = |(name, value): (&String, &String)| (name.clone(), Value::from(value.as_str()));
    Value::Object(event.headers.iter().map(copy).collect::<Map<_, _>>())
}
