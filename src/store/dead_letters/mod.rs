//! Dead letters: look, put back, or close. A dead event holds its aggregate until a person does one of the last two.
//!
//! dead → [`requeue`] → pending, with a new window and budget; dead → [`discard`] → discarded, for good. Both take the
//! rows in the order of their ids and look at the status once more under the row lock, so of two operators at once one
//! wins and the other gets an empty list. Inside a caller's transaction, all of it happens with that transaction.

mod canary;
mod filter;

use std::collections::BTreeMap;
use std::time::SystemTime;

use postgres::types::{ToSql, Type};
use postgres::{GenericClient, Row};
use uuid::Uuid;

use super::{EventRef, Schema};
use crate::error::Error;
use crate::moment::Moment;

pub use canary::{UNSETTLED, Unsettled, matching_ids, unsettled};
pub use filter::{Filter, FilterBuilder};

/// Longest `by` and longest `note` of a discard, in bytes each.
pub const MAX_NOTE_BYTES: usize = 2_000;

/// Which dead letters: the parameters $1 to $8 of [`Filter::parameters`]. The server plans with their values, so what
/// is NULL falls away. Finds its rows by `outbox_dead`, or by the ids.
macro_rules! matching {
    () => {
        "d.status = 'dead'
   AND ($1::bigint[] IS NULL OR d.id = ANY ($1) OR d.event_id = ANY ($2::uuid[]))
   AND ($3::text IS NULL OR d.aggregate_type = $3)
   AND ($4::text IS NULL OR (d.aggregate_id = $4 AND d.aggregate_key = hashtextextended($4, hashtextextended($3, 0))))
   AND ($5::text IS NULL OR d.event_type = $5)
   AND ($6::text IS NULL OR strpos(d.last_error, $6) > 0)
   AND ($7::float8 IS NULL OR d.died_at <= statement_timestamp() - make_interval(secs => $7))
   AND ($8::float8 IS NULL OR d.died_at > statement_timestamp() - make_interval(secs => $8))"
    };
}

/// A page of dead letters by id. Takes the filter, $9 the last id seen, $10 the most rows. Sorted by `id + 0`, or a plan
/// might walk the primary key past everything that is published to find the first few that are dead. What is held is
/// counted for the rows of the page only, by `outbox_unfinished`.
pub const LIST: &str = concat!(
    r#"
WITH page AS MATERIALIZED (
    SELECT d.id, d.event_id, d.aggregate_type, d.aggregate_id, d.aggregate_key, d.event_type, d.last_error, d.attempts,
           d.died_at, d.created_at
      FROM "outbox".outbox AS d
     WHERE "#,
    matching!(),
    r#" AND d.id + 0 > $9
     ORDER BY d.id + 0 LIMIT $10)
SELECT page.*, held.count AS held, held.since AS held_since, statement_timestamp() AS now
  FROM page CROSS JOIN LATERAL (
       SELECT count(*) AS count, min(greatest(later.not_before, later.created_at)) AS since
         FROM "outbox".outbox AS later
        WHERE later.aggregate_key = page.aggregate_key AND later.id > page.id AND later.status = 'pending') AS held
 ORDER BY page.id"#
);

/// Dead letters by what their reasons have in common. Takes the filter. UUIDs and hexadecimal numbers become `…`, other
/// numbers `#`. What is held is counted once for each aggregate of a group, by `outbox_unfinished`.
pub const GROUPS: &str = concat!(
    r#"
WITH dead AS MATERIALIZED (
    SELECT d.id, d.aggregate_key, d.died_at,
           regexp_replace(regexp_replace(coalesce(d.last_error, ''),
               '\m(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|0x[0-9a-f]+|(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,})\M',
               '…', 'gi'), '[0-9]+(?:\.[0-9]+)*', '#', 'g') AS reason
      FROM "outbox".outbox AS d
     WHERE "#,
    matching!(),
    r#"), heads AS MATERIALIZED (
    SELECT reason, aggregate_key, count(*) AS count, min(id) AS id, min(died_at) AS died_at
      FROM dead GROUP BY reason, aggregate_key)
SELECT reason, sum(count)::bigint AS count, min(id) AS example, min(died_at) AS oldest, statement_timestamp() AS now,
       sum((SELECT count(*) FROM "outbox".outbox AS later
             WHERE later.aggregate_key = heads.aggregate_key AND later.id > heads.id
               AND later.status = 'pending'))::bigint AS held
  FROM heads GROUP BY reason ORDER BY count DESC, held DESC, reason"#
);

/// Outbox ids of dead letters. Takes the filter and $9 the most rows (NULL: all).
pub const MATCHING_IDS: &str = concat!(
    r#"SELECT d.id FROM "outbox".outbox AS d WHERE "#,
    matching!(),
    " ORDER BY d.id + 0 LIMIT $9"
);

/// Before [`LIST`] and [`GROUPS`]; ends with their transaction.
pub const READ_SETTINGS: &str = "SET TRANSACTION READ ONLY; SET LOCAL enable_seqscan = off";

/// One event, whatever its status. Takes $1 its id or NULL, $2 its event id or NULL. By one of the two unique indexes.
pub const SHOW: &str = r#"
SELECT e.*, statement_timestamp() AS now FROM "outbox".outbox AS e WHERE e.id = $1 OR e.event_id = $2"#;

/// Dead → pending. Takes the filter and $9 the most rows (NULL: all). Clears the window, the budget and what is left of a
/// lease (a holder that is still named would count as one that never came back); keeps `last_error` and `in_doubt`. The
/// new time is later than `created_at` even in an old transaction or after a step of the clock, which is what puts the
/// row into `outbox_waiting`. Locks in the order of the ids, and a row that another operator took meanwhile is passed
/// over, for a locked row is checked again.
pub const REQUEUE: &str = concat!(
    r#"
WITH picked AS MATERIALIZED (
    SELECT d.id FROM "outbox".outbox AS d
     WHERE "#,
    matching!(),
    r#" ORDER BY d.id + 0 LIMIT $9 FOR NO KEY UPDATE),
requeued AS (
    UPDATE "outbox".outbox AS o
       SET status = 'pending', next_attempt_at = greatest(clock_timestamp(), o.created_at + interval '1 microsecond'),
           retry_since = NULL, attempts = 0, unexplained_failures = 0, died_at = NULL,
           lease_id = NULL, locked_by = NULL, locked_until = NULL
      FROM picked WHERE o.id = picked.id
 RETURNING o.id, o.event_id)
SELECT event_id FROM requeued ORDER BY id"#
);

/// Dead → discarded. Takes the filter and $9 the note. Locks as [`REQUEUE`] does.
pub const DISCARD: &str = concat!(
    r#"
WITH picked AS MATERIALIZED (
    SELECT d.id FROM "outbox".outbox AS d
     WHERE "#,
    matching!(),
    r#" ORDER BY d.id + 0 FOR NO KEY UPDATE),
discarded AS (
    UPDATE "outbox".outbox AS o
       SET status = 'discarded', discarded_at = clock_timestamp(), discard_note = $9,
           lease_id = NULL, locked_by = NULL, locked_until = NULL
      FROM picked WHERE o.id = picked.id
 RETURNING o.id, o.event_id)
SELECT event_id FROM discarded ORDER BY id"#
);

/// Wakes the relays that sleep, as `outbox_append_all` does. Takes nothing. A relay that falls asleep right after it looks
/// once more by itself.
pub const WAKE: &str = r#"
SELECT pg_notify('outbox_' || md5('outbox'), '')
 WHERE EXISTS (SELECT FROM "outbox".outbox_wakeup WHERE until > clock_timestamp())"#;

/// A dead event and what it holds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The outbox id; give the last one of a page as `after` of the next.
    pub id: i64,
    /// The id that every delivery carries.
    pub event_id: Uuid,
    /// Kind of aggregate.
    pub aggregate_type: String,
    /// Which one.
    pub aggregate_id: String,
    /// What happened.
    pub event_type: String,
    /// Why it died.
    pub reason: String,
    /// Attempts until it died.
    pub attempts: u32,
    /// When it died.
    pub died: Moment,
    /// When it was appended.
    pub created: Moment,
    /// Pending events of its aggregate that wait behind it.
    pub held: u64,
    /// Since when the oldest of those waits.
    pub held_since: Option<Moment>,
}

/// Dead letters with the same reason but for its numbers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ReasonGroup {
    /// The reason with `#` for numbers and `…` for UUIDs and hexadecimal numbers.
    pub reason: String,
    /// How many.
    pub count: u64,
    /// Pending events that wait behind them.
    pub held: u64,
    /// When the first of them died.
    pub oldest: Moment,
    /// The outbox id of one of them.
    pub example: i64,
}

/// Everything the outbox knows of an event.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the columns, which schema.sql explains")]
pub struct EventDetails {
    pub id: i64,
    pub event_id: Uuid,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub event_type: String,
    pub status: String,
    pub content_type: String,
    pub headers: BTreeMap<String, String>,
    pub payload: Vec<u8>,
    pub attempts: u32,
    pub unexplained_failures: u32,
    pub in_doubt: bool,
    pub last_error: Option<String>,
    pub discard_note: Option<String>,
    pub locked_by: Option<String>,
    pub lease_id: Option<i64>,
    pub locked_until: Option<Moment>,
    pub created: Moment,
    pub not_before: Option<Moment>,
    pub next_attempt: Moment,
    pub retry_since: Option<Moment>,
    pub published: Option<Moment>,
    pub died: Option<Moment>,
    pub discarded: Option<Moment>,
}

/// A page of at most `limit` dead letters in the order of their ids, after the id `after`.
///
/// # Errors
/// When there is no outbox in this schema, or the database refused or was lost.
pub fn list(
    client: &mut impl GenericClient,
    schema: &Schema,
    filter: &Filter,
    after: Option<i64>,
    limit: u32,
) -> Result<Vec<DeadLetter>, Error> {
    let (after, limit) = (after.unwrap_or(0), i64::from(limit));
    let mut parameters = filter.parameters();
    parameters.extend([(&after as &(dyn ToSql + Sync), Type::INT8), (&limit, Type::INT8)]);
    let rows = read(client, schema, LIST, &parameters, "listing dead letters")?;
    let letter = |row: &Row| DeadLetter {
        id: row.get("id"),
        event_id: row.get("event_id"),
        aggregate_type: row.get("aggregate_type"),
        aggregate_id: row.get("aggregate_id"),
        event_type: row.get("event_type"),
        reason: row.get::<_, Option<String>>("last_error").unwrap_or_default(),
        attempts: count32(row, "attempts"),
        // A row that was made dead by hand may have no time; its append is the best that is known.
        died: moment(row, "died_at").unwrap_or_else(|| required(row, "created_at")),
        created: required(row, "created_at"),
        held: count(row, "held"),
        held_since: moment(row, "held_since"),
    };
    Ok(rows.iter().map(letter).collect())
}

/// Dead letters by reason, the most frequent first.
///
/// # Errors
/// As [`list`].
pub fn groups(
    client: &mut impl GenericClient,
    schema: &Schema,
    filter: &Filter,
) -> Result<Vec<ReasonGroup>, Error> {
    let rows = read(client, schema, GROUPS, &filter.parameters(), "grouping dead letters")?;
    let group = |row: &Row| ReasonGroup {
        reason: row.get("reason"),
        count: count(row, "count"),
        held: count(row, "held"),
        oldest: moment(row, "oldest").unwrap_or_else(|| required(row, "now")),
        example: row.get("example"),
    };
    Ok(rows.iter().map(group).collect())
}

/// Everything of one event of any status; `None` where there is none (it may have been pruned).
///
/// # Errors
/// As [`list`].
pub fn show(
    client: &mut impl GenericClient,
    schema: &Schema,
    event: &EventRef,
) -> Result<Option<EventDetails>, Error> {
    let (id, event_id) = (event.id(), event.event_id());
    let row = client
        .query_typed_opt(&schema.sql(SHOW), &[(&id, Type::INT8), (&event_id, Type::UUID)])
        .map_err(|error| schema.error("reading an event", error))?;
    Ok(row.as_ref().map(details))
}

/// Makes dead letters pending again, at most `limit` of them in the order of their ids, due at once, and returns their
/// event ids. Each gets a new window and budget and keeps its last error. What another operator took first is not
/// among them.
///
/// # Errors
/// As [`list`]. Nothing was changed then.
pub fn requeue(
    client: &mut impl GenericClient,
    schema: &Schema,
    filter: &Filter,
    limit: Option<u32>,
) -> Result<Vec<Uuid>, Error> {
    let limit = limit.map(i64::from);
    settle(client, schema, REQUEUE, filter, (&limit, Type::INT8), "requeueing dead letters")
}

/// Closes dead letters for good, noting who (`by`) and why (`note`), and returns their event ids. What they held goes out.
///
/// # Errors
/// When `by` or `note` is empty or too long; otherwise as [`list`]. Nothing was changed then.
pub fn discard(
    client: &mut impl GenericClient,
    schema: &Schema,
    filter: &Filter,
    by: &str,
    note: &str,
) -> Result<Vec<Uuid>, Error> {
    for (what, text) in [("by", by), ("note", note)] {
        if text.trim().is_empty() || text.len() > MAX_NOTE_BYTES || text.contains('\0') {
            return Err(Error::invalid_config(format!(
                "{what} of a discard must have 1 to {MAX_NOTE_BYTES} bytes, not only blanks and no NUL: say who \
                 discards and why"
            )));
        }
    }
    let note = format!("{}: {}", by.trim(), note.trim());
    settle(client, schema, DISCARD, filter, (&note, Type::TEXT), "discarding dead letters")
}

/// Runs a statement that looks at dead letters. Statistics from a day with many of them would make a sequential scan look
/// cheap; the rollback takes that setting along where the transaction is a savepoint.
fn read(
    client: &mut impl GenericClient,
    schema: &Schema,
    statement: &str,
    parameters: &[(&(dyn ToSql + Sync), Type)],
    what: &str,
) -> Result<Vec<Row>, Error> {
    let failed = |error| schema.error(what, error);
    let mut transaction = client.transaction().map_err(failed)?;
    transaction.batch_execute(READ_SETTINGS).map_err(failed)?;
    let rows = transaction.query_typed(&schema.sql(statement), parameters).map_err(failed)?;
    transaction.rollback().map_err(failed)?;
    Ok(rows)
}

/// Runs a statement that takes dead letters away, then wakes the relays, for what was held or requeued is due.
fn settle(
    client: &mut impl GenericClient,
    schema: &Schema,
    statement: &str,
    filter: &Filter,
    last: (&(dyn ToSql + Sync), Type),
    what: &str,
) -> Result<Vec<Uuid>, Error> {
    let mut parameters = filter.parameters();
    parameters.push(last);
    let mut transaction = client.transaction().map_err(|error| schema.error(what, error))?;
    let rows = transaction
        .query_typed(&schema.sql(statement), &parameters)
        .map_err(|error| schema.error(what, error))?;
    if !rows.is_empty() {
        transaction
            .query_typed(&schema.sql(WAKE), &[])
            .map_err(|error| schema.error(what, error))?;
    }
    transaction.commit().map_err(|error| schema.error(what, error))?;
    Ok(rows.iter().map(|row| row.get("event_id")).collect())
}

pub(super) fn details(row: &Row) -> EventDetails {
    let headers: serde_json::Value = row.get("headers");
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    EventDetails {
        id: row.get("id"),
        event_id: row.get("event_id"),
        aggregate_type: row.get("aggregate_type"),
        aggregate_id: row.get("aggregate_id"),
        event_type: row.get("event_type"),
        status: row.get("status"),
        content_type: row.get("content_type"),
        headers: headers
            .as_object()
            .into_iter()
            .flatten()
            .map(|(n, v)| (n.clone(), text(v)))
            .collect(),
        payload: row.get("payload"),
        attempts: count32(row, "attempts"),
        unexplained_failures: count32(row, "unexplained_failures"),
        in_doubt: row.get("in_doubt"),
        last_error: row.get("last_error"),
        discard_note: row.get("discard_note"),
        locked_by: row.get("locked_by"),
        lease_id: row.get("lease_id"),
        locked_until: moment(row, "locked_until"),
        created: required(row, "created_at"),
        not_before: moment(row, "not_before"),
        next_attempt: required(row, "next_attempt_at"),
        retry_since: moment(row, "retry_since"),
        published: moment(row, "published_at"),
        died: moment(row, "died_at"),
        discarded: moment(row, "discarded_at"),
    }
}

/// Counts are never negative.
fn count(row: &Row, column: &str) -> u64 {
    u64::try_from(row.get::<_, i64>(column)).unwrap_or(0)
}

fn count32(row: &Row, column: &str) -> u32 {
    u32::try_from(row.get::<_, i32>(column)).unwrap_or(0)
}

fn moment(row: &Row, column: &str) -> Option<Moment> {
    row.get::<_, Option<SystemTime>>(column).map(|at| Moment::new(at, row.get("now")))
}

fn required(row: &Row, column: &str) -> Moment {
    Moment::new(row.get(column), row.get("now"))
}
