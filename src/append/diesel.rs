//! The writer's door for Diesel: the same SQL functions, through any connection of Diesel's to PostgreSQL.
//!
//! Diesel's transactions are closures on a connection, not a type, so what the `postgres` face does not compile, this one
//! refuses when it runs: a call outside [`Connection::transaction`] sends nothing.
//! A transaction that was begun by hand, with `BEGIN` as a query, is one that Diesel does not know of.
//!
//! # Errors and `?`
//!
//! The closure's error type must take Diesel's errors, and `?` on an append must give that type as well:
//! - `E = `[`pg_outbox::Error`](Error): keeps every predicate. Diesel's errors become database errors.
//! - `E = `[`::diesel::result::Error`], or `QueryResult`: an error of the database is handed on as
//!   Diesel's own, so that a retry on `SerializationFailure` goes on working; any other, such as a broken limit, becomes
//!   `SerializationError` with the [`Error`] in it, and `Error::from` takes it out again.
//! - `E = Box<dyn Error + Send + Sync>` or `anyhow::Error`: takes both; downcast to [`Error`] for the predicates.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use pg_outbox::{Error, NewEvent, append};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut conn = PgConnection::establish("postgres://localhost")?;
//! conn.transaction(|conn| {
//!     diesel::sql_query("INSERT INTO orders (id, total) VALUES (42, 12)").execute(conn)?;
//!     append::diesel::append(conn, &NewEvent::new("order", "42", "order.placed", r#"{"total":12}"#))?;
//!     Ok::<_, Error>(()) // the order and its event, or neither
//! })?;
//! # Ok(())
//! # }
//! ```

use ::diesel::connection::{LoadConnection, TransactionManager};
use ::diesel::data_types::PgTimestamp;
use ::diesel::pg::Pg;
use ::diesel::result::{DatabaseErrorKind, Error as DieselError};
use ::diesel::sql_types::{Array, Binary, Jsonb, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use ::diesel::{Connection, QueryableByName, RunQueryDsl, sql_query};
use uuid::Uuid;

use super::{APPEND, Columns, Outbox, no_answer};
use crate::error::Error;
use crate::event::NewEvent;

/// PostgreSQL counts its microseconds from the year 2000.
const PG_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// Appends one event to the outbox in the schema `outbox` and returns its event id. Other schemas:
/// [`Outbox::append_diesel`].
///
/// # Errors
/// A call outside a transaction ([`is_not_in_transaction`](Error::is_not_in_transaction)), and what
/// [`append`](crate::append()) says. After an error of the database PostgreSQL refuses everything but a rollback; to go on,
/// append inside a nested `transaction`, which is a savepoint.
pub fn append<C>(conn: &mut C, event: &NewEvent) -> Result<Uuid, Error>
where
    C: LoadConnection<Backend = Pg>,
{
    Outbox::default().append_diesel(conn, event)
}

/// Appends events in their order, in one round trip, and returns their event ids in the same order. See [`append`].
///
/// # Errors
/// As [`append`]; a broken limit is named with the event's index. Nothing is appended then.
pub fn append_all<C>(conn: &mut C, events: &[NewEvent]) -> Result<Vec<Uuid>, Error>
where
    C: LoadConnection<Backend = Pg>,
{
    Outbox::default().append_all_diesel(conn, events)
}

impl Outbox {
    /// See [`diesel::append`](append).
    ///
    /// # Errors
    /// As there.
    pub fn append_diesel<C>(&self, conn: &mut C, event: &NewEvent) -> Result<Uuid, Error>
    where
        C: LoadConnection<Backend = Pg>,
    {
        let ids = self.append_all_diesel(conn, std::slice::from_ref(event))?;
        ids.first().copied().ok_or_else(no_answer)
    }

    /// See [`diesel::append_all`](append_all).
    ///
    /// # Errors
    /// As there.
    pub fn append_all_diesel<C>(
        &self,
        conn: &mut C,
        events: &[NewEvent],
    ) -> Result<Vec<Uuid>, Error>
    where
        C: LoadConnection<Backend = Pg>,
    {
        refuse_outside_transaction(conn)?;
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let columns = Columns::of(events)?;
        let not_befores: Vec<_> = columns.not_befores.iter().map(|at| at.map(timestamp)).collect();
        let appended: Appended = sql_query(self.schema.sql(APPEND))
            .bind::<Array<Text>, _>(&columns.aggregate_types)
            .bind::<Array<Text>, _>(&columns.aggregate_ids)
            .bind::<Array<Text>, _>(&columns.event_types)
            .bind::<Array<Binary>, _>(&columns.payloads)
            .bind::<Array<Text>, _>(&columns.content_types)
            .bind::<Array<Jsonb>, _>(&columns.headers)
            .bind::<Array<Nullable<SqlUuid>>, _>(&columns.event_ids)
            .bind::<Array<Nullable<Timestamptz>>, _>(&not_befores)
            .get_result(conn)
            .map_err(append_error)?;
        Ok(appended.event_ids)
    }
}

#[derive(QueryableByName)]
struct Appended {
    #[diesel(sql_type = Array<SqlUuid>)]
    event_ids: Vec<Uuid>,
}

fn refuse_outside_transaction<C: Connection>(conn: &mut C) -> Result<(), Error> {
    let depth = C::TransactionManager::transaction_manager_status_mut(conn).transaction_depth();
    match depth {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(Error::not_in_transaction()),
        Err(broken) => Err(append_error(broken)),
    }
}

/// Times that PostgreSQL cannot hold are the database's to refuse.
fn timestamp(time: std::time::SystemTime) -> PgTimestamp {
    let micros = match time.duration_since(std::time::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => {
            i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |micros| -micros)
        }
    };
    PgTimestamp(micros.saturating_sub(PG_EPOCH_MICROS))
}

fn append_error(error: DieselError) -> Error {
    // Diesel keeps a kind of the SQLSTATE.
    let code = match &error {
        DieselError::DatabaseError(DatabaseErrorKind::UniqueViolation, _) => Some("23505"),
        DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, _) => Some("23514"),
        DieselError::DatabaseError(DatabaseErrorKind::NotNullViolation, _) => Some("23502"),
        _ => None,
    };
    let constraint = match &error {
        DieselError::DatabaseError(_, information) => {
            information.constraint_name().map(str::to_owned)
        }
        _ => None,
    };
    Error::append(error, code, constraint.as_deref())
}

/// For `conn.transaction::<_, pg_outbox::Error, _>(...)`. An [`Error`] that Diesel's carries comes out as it was.
impl From<DieselError> for Error {
    fn from(error: DieselError) -> Self {
        match error {
            DieselError::SerializationError(inner) => match inner.downcast::<Self>() {
                Ok(ours) => *ours,
                Err(inner) => Self::database("diesel", DieselError::SerializationError(inner)),
            },
            other => Self::database("diesel", other),
        }
    }
}

/// For `conn.transaction::<_, diesel::result::Error, _>(...)`.
impl From<Error> for DieselError {
    fn from(error: Error) -> Self {
        error.into_cause::<Self>().unwrap_or_else(|error| Self::SerializationError(Box::new(error)))
    }
}
