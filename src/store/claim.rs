//! Claims: one short statement, committed before anything is published.
//!
//! *The rule.* An event is claimable when it is pending, due, not leased, and no earlier event of its aggregate is
//! unfinished, except those claimed together with it in front of it (a *run*). Dead events are unfinished, so they
//! hold their aggregate. The statement reads the table and never this process's memory, so the rule holds across relays.
//!
//! *The cost.* Heads of aggregates are found on three paths, each bounded, so that a claim costs what it claims:
//! - `waiting`: retries, requeues and delayed events that have become due, by their time;
//! - `fresh`: new events by id, from where the last look ended, past whatever is held, dead or backing off (a cursor moves over the ids once);
//! - `walk`: from aggregate to aggregate in the order of a hash, one index probe each, past everything that is held
//!   behind a head. Its cursor goes round, so nothing starves; the other two only make the common cases quick.
//!
//! The cursors live in memory and may be wrong at any time without harm: they say where to look, not what to take.

use std::collections::BTreeMap;
use std::time::Duration;

use postgres::Row;
use postgres::types::{Json, Type};
use serde_json::Value;

use super::session::{Session, Statement};
use crate::error::Error;
use crate::event::Event;

/// `$1` relay id, `$2` lease id, `$3` lease in seconds, `$4` first aggregate key of the walk, `$5` probes of the walk,
/// `$6` heads, `$7` rows, `$8` payload bytes, `$9` the id that fresh events come after, `$10` ids to look at for
/// fresh ones, `$11`/`$12` least and most suspicion, `$13` most rows of one run, `$14` only these aggregate types (NULL:
/// all), `$15` not these, `$16` the suspicion of a last chance.
///
/// Uses `outbox_unfinished` (walk, heads, runs), `outbox_waiting` and the primary key; never a sequential scan.
///
/// Invariants: rows are locked in a CTE with `SKIP LOCKED` and their state is looked at again under the lock, so two
/// relays never take one row; a run ends at the first row that could not be taken, so no event passes an earlier one;
/// `attempts` is counted here, and a holder still named on the row never came back, which is an unexplained failure.
///
/// Returns a row an event, in no order, and one last row without an id that tells how far the paths went.
pub static CLAIM: Statement = Statement {
    sql: r#"
WITH RECURSIVE waiting AS MATERIALIZED (
    SELECT w.aggregate_key, w.id
      FROM (SELECT o.* FROM "outbox".outbox o
             WHERE o.status = 'pending' AND o.next_attempt_at > o.created_at AND o.next_attempt_at <= now()
             ORDER BY o.next_attempt_at, o.id LIMIT 4 * $6) w
     WHERE (w.locked_until IS NULL OR w.locked_until <= now())
       AND w.unexplained_failures + (w.locked_by IS NOT NULL)::int BETWEEN $11 AND $12
       AND ($14::text[] IS NULL OR w.aggregate_type = ANY ($14)) AND w.aggregate_type <> ALL ($15)
       AND w.id = (SELECT h.id FROM "outbox".outbox h WHERE h.status IN ('pending', 'dead')
                      AND h.aggregate_key = w.aggregate_key ORDER BY h.aggregate_key, h.id LIMIT 1)
     LIMIT ($6 + 3) / 4
), newest AS MATERIALIZED (
    SELECT o.id, o.aggregate_key, o.status, o.next_attempt_at, o.locked_until, o.locked_by, o.unexplained_failures, o.aggregate_type
      FROM "outbox".outbox o WHERE o.id > $9 ORDER BY o.id LIMIT $10
), fresh AS MATERIALIZED (
    SELECT n.aggregate_key, n.id
      FROM (SELECT DISTINCT ON (aggregate_key) * FROM newest WHERE status IN ('pending', 'dead') ORDER BY aggregate_key, id) n
     WHERE n.status = 'pending' AND n.next_attempt_at <= now() AND (n.locked_until IS NULL OR n.locked_until <= now())
       AND n.unexplained_failures + (n.locked_by IS NOT NULL)::int BETWEEN $11 AND $12
       AND ($14::text[] IS NULL OR n.aggregate_type = ANY ($14)) AND n.aggregate_type <> ALL ($15)
       AND n.id = (SELECT h.id FROM "outbox".outbox h WHERE h.status IN ('pending', 'dead')
                      AND h.aggregate_key = n.aggregate_key ORDER BY h.aggregate_key, h.id LIMIT 1)
     LIMIT ($6 + 1) / 2
), walk AS (
    (SELECT o.aggregate_key, o.id, f.free, f.suspicion, 1 AS probes, (f.free AND f.suspicion BETWEEN $11 AND $12)::int AS found
       FROM "outbox".outbox o CROSS JOIN LATERAL (
            SELECT o.status = 'pending' AND o.next_attempt_at <= now() AND (o.locked_until IS NULL OR o.locked_until <= now())
                   AND ($14::text[] IS NULL OR o.aggregate_type = ANY ($14)) AND o.aggregate_type <> ALL ($15) AS free,
                   o.unexplained_failures + (o.locked_by IS NOT NULL)::int AS suspicion) f
      WHERE o.status IN ('pending', 'dead') AND o.aggregate_key >= $4
      ORDER BY o.aggregate_key, o.id LIMIT 1)
    UNION ALL
    SELECT next.aggregate_key, next.id, next.free, next.suspicion, w.probes + 1,
           w.found + (next.free AND next.suspicion BETWEEN $11 AND $12)::int
      FROM walk w CROSS JOIN LATERAL (
           SELECT o.aggregate_key, o.id, f.free, f.suspicion
             FROM "outbox".outbox o CROSS JOIN LATERAL (
                  SELECT o.status = 'pending' AND o.next_attempt_at <= now() AND (o.locked_until IS NULL OR o.locked_until <= now())
                         AND ($14::text[] IS NULL OR o.aggregate_type = ANY ($14)) AND o.aggregate_type <> ALL ($15) AS free,
                         o.unexplained_failures + (o.locked_by IS NOT NULL)::int AS suspicion) f
            WHERE o.status IN ('pending', 'dead') AND o.aggregate_key > w.aggregate_key
            ORDER BY o.aggregate_key, o.id LIMIT 1) next
     WHERE w.probes < $5 AND w.found < $6 - (SELECT count(*) FROM waiting) - (SELECT count(*) FROM fresh)
), head AS MATERIALIZED (
    SELECT aggregate_key, id FROM waiting UNION SELECT aggregate_key, id FROM fresh
     UNION SELECT aggregate_key, id FROM walk WHERE free AND suspicion BETWEEN $11 AND $12
), run AS MATERIALIZED (
    SELECT r.id, h.aggregate_key, r.position, r.bytes
      FROM head h CROSS JOIN LATERAL (
           SELECT o.id, row_number() OVER (ORDER BY o.id) AS position, octet_length(o.payload) AS bytes
             FROM "outbox".outbox o
            WHERE o.status IN ('pending', 'dead') AND o.aggregate_key = h.aggregate_key AND o.id >= h.id
            ORDER BY o.aggregate_key, o.id
            LIMIT least($13, greatest(1, $7 / greatest(1, (SELECT count(*) FROM head))))) r
), locked AS MATERIALIZED (
    SELECT o.id FROM "outbox".outbox o
     WHERE o.id = ANY (ARRAY(SELECT id FROM run))
       AND o.status = 'pending' AND o.next_attempt_at <= now() AND (o.locked_until IS NULL OR o.locked_until <= now())
       AND o.unexplained_failures + (o.locked_by IS NOT NULL)::int BETWEEN $11 AND $12
       AND ($14::text[] IS NULL OR o.aggregate_type = ANY ($14)) AND o.aggregate_type <> ALL ($15)
       FOR UPDATE SKIP LOCKED
), prefix AS (
    SELECT p.id, sum(p.bytes) OVER w AS bytes, row_number() OVER w AS n
      FROM (SELECT r.*, bool_and(l.id IS NOT NULL) OVER (PARTITION BY r.aggregate_key ORDER BY r.id) AS unbroken
              FROM run r LEFT JOIN locked l ON l.id = r.id) p
     WHERE p.unbroken WINDOW w AS (ORDER BY p.position, p.id)
), claimed AS (
    UPDATE "outbox".outbox o
       SET locked_by = $1, lease_id = $2, locked_until = now() + $3 * interval '1 second', attempts = o.attempts + 1,
           unexplained_failures = o.unexplained_failures + (o.locked_by IS NOT NULL)::int,
           in_doubt = o.in_doubt OR o.locked_by IS NOT NULL
     WHERE o.id = ANY (ARRAY(SELECT id FROM prefix WHERE n <= $7 AND (bytes <= $8 OR n = 1)))
    RETURNING o.id, o.event_id, o.aggregate_key, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.content_type,
              o.headers, o.created_at, o.attempts, o.unexplained_failures, o.in_doubt,
              extract(epoch FROM now() - o.retry_since)::float8 AS failing_for
)
SELECT c.*, NULL::bigint AS last_key, NULL::int AS probes, NULL::bigint AS suspect_key,
       NULL::bigint AS last_chance_key, NULL::bigint AS newest_id, NULL::boolean AS ended, NULL::bigint AS table_end
  FROM claimed c
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       (SELECT max(aggregate_key) FROM walk), (SELECT max(probes) FROM walk),
       (SELECT min(aggregate_key) FROM walk WHERE free AND suspicion > 0 AND suspicion < $16),
       (SELECT min(aggregate_key) FROM walk WHERE free AND suspicion > 0 AND suspicion >= $16),
       (SELECT max(id) FROM newest),
       -- The walk came to the last aggregate, and not to one of its bounds.
       (SELECT count(*) = 0 OR (max(probes) < $5 AND max(found) < $6 - (SELECT count(*) FROM waiting) - (SELECT count(*) FROM fresh))
          FROM walk),
       (SELECT id FROM "outbox".outbox ORDER BY id DESC LIMIT 1)
"#,
    types: &[
        Type::TEXT,
        Type::INT8,
        Type::FLOAT8,
        Type::INT8,
        Type::INT4,
        Type::INT4,
        Type::INT4,
        Type::INT8,
        Type::INT8,
        Type::INT4,
        Type::INT4,
        Type::INT4,
        Type::INT4,
        Type::TEXT_ARRAY,
        Type::TEXT_ARRAY,
        Type::INT4,
    ],
    doing: "claiming events",
};

/// Which events may share a batch. An event that lost its holder, or failed without an explanation, is a suspect: it
/// may be what killed the process, and when it does so again, whatever shares its batch is blamed with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Never failed without an explanation.
    Clean,
    /// Did, but has more than one chance left.
    Suspect,
    /// Is dead after one more: published alone, with nothing else in flight in this process.
    LastChance,
}

/// Where to look and how much to take.
#[derive(Debug, Clone)]
pub struct Request {
    /// Which events.
    pub class: Class,
    /// Suspicion of a last chance: the budget of unexplained failures, less one.
    pub last_chance: i32,
    /// First aggregate key of the walk.
    pub from_key: i64,
    /// Most aggregates that the walk looks at.
    pub probes: i32,
    /// Most aggregates that are claimed.
    pub heads: i32,
    /// Most events that are claimed.
    pub rows: i32,
    /// Most payload bytes; a larger first event is claimed alone.
    pub bytes: i64,
    /// Most events of one aggregate.
    pub run: i32,
    /// Fresh events are looked for after this id.
    pub newer_than: i64,
    /// How many ids to look at for fresh events.
    pub fresh: i32,
    /// Only these aggregate types; empty for all.
    pub only: Vec<String>,
    /// Not these aggregate types.
    pub except: Vec<String>,
}

/// A claimed event with what its verdict needs to know.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// For the publisher.
    pub event: Event,
    /// Its aggregate.
    pub aggregate_key: i64,
    /// Unexplained failures so far, claims that never came back included.
    pub unexplained_failures: u32,
    /// Time from its first failure to this claim.
    pub failing_for: Option<Duration>,
}

/// What a claim found.
#[derive(Debug)]
pub struct Claim {
    /// Claimed events, by aggregate and in their order.
    pub events: Vec<Claimed>,
    /// Where the next walk goes on; `None` when this one came to the end.
    pub next_key: Option<i64>,
    /// Aggregates that the walk looked at.
    pub probes: i32,
    /// The first aggregate of the walk whose head is a suspect.
    pub suspect_key: Option<i64>,
    /// The first aggregate of the walk whose head has its last chance.
    pub last_chance_key: Option<i64>,
    /// The newest id that was looked at.
    pub newest_id: Option<i64>,
    /// The newest id of the table.
    pub table_end: Option<i64>,
}

/// Claims events under `lease_id`, which the caller makes up, so that it knows the id even when the answer is lost.
///
/// # Errors
/// The database's. Whether anything was claimed is then unknown: release by `lease_id`.
pub fn claim(
    session: &mut Session,
    relay_id: &str,
    lease_id: i64,
    lease: Duration,
    request: &Request,
) -> Result<Claim, Error> {
    let (least, most) = match request.class {
        Class::Clean => (0, 0),
        Class::Suspect => (1, request.last_chance - 1),
        Class::LastChance => (request.last_chance, i32::MAX),
    };
    let only = (!request.only.is_empty()).then_some(&request.only);
    let rows = session.query(
        &CLAIM,
        &[
            &relay_id,
            &lease_id,
            &lease.as_secs_f64(),
            &request.from_key,
            &request.probes,
            &request.heads,
            &request.rows,
            &request.bytes,
            &request.newer_than,
            &request.fresh,
            &least,
            &most,
            &request.run,
            &only,
            &request.except,
            &request.last_chance,
        ],
    )?;
    read(&rows).map_err(|error| Error::database(CLAIM.doing, error))
}

fn read(rows: &[Row]) -> Result<Claim, postgres::Error> {
    let mut claim = Claim {
        events: Vec::with_capacity(rows.len()),
        next_key: None,
        probes: 0,
        suspect_key: None,
        last_chance_key: None,
        newest_id: None,
        table_end: None,
    };
    for row in rows {
        match row.try_get::<_, Option<i64>>("id")? {
            Some(id) => claim.events.push(read_event(row, id)?),
            None => {
                let last_key: Option<i64> = row.try_get("last_key")?;
                let ended = row.try_get::<_, Option<bool>>("ended")?.unwrap_or(true);
                claim.next_key = last_key.and_then(|key| key.checked_add(1)).filter(|_| !ended);
                claim.probes = row.try_get::<_, Option<i32>>("probes")?.unwrap_or(0);
                claim.suspect_key = row.try_get("suspect_key")?;
                claim.last_chance_key = row.try_get("last_chance_key")?;
                claim.newest_id = row.try_get("newest_id")?;
                claim.table_end = row.try_get("table_end")?;
            }
        }
    }
    // RETURNING has no order.
    claim.events.sort_unstable_by_key(|claimed| (claimed.aggregate_key, claimed.event.id));
    Ok(claim)
}

fn read_event(row: &Row, id: i64) -> Result<Claimed, postgres::Error> {
    // Strings, unless somebody wrote past `outbox_append`; one such row must not stop every claim.
    let headers: Json<BTreeMap<String, Value>> = row.try_get("headers").unwrap_or_else(|error| {
        log::warn!("the headers of event {id} cannot be read and are left out: {error}");
        Json(BTreeMap::new())
    });
    let text = |value| match value {
        Value::String(text) => text,
        other => other.to_string(),
    };
    let failing_for: Option<f64> = row.try_get("failing_for")?;
    let count = |n: i32| u32::try_from(n).unwrap_or(0);
    Ok(Claimed {
        event: Event {
            id,
            event_id: row.try_get("event_id")?,
            aggregate_type: row.try_get("aggregate_type")?,
            aggregate_id: row.try_get("aggregate_id")?,
            event_type: row.try_get("event_type")?,
            payload: row.try_get("payload")?,
            content_type: row.try_get("content_type")?,
            headers: headers.0.into_iter().map(|(name, value)| (name, text(value))).collect(),
            created_at: row.try_get("created_at")?,
            attempt: count(row.try_get("attempts")?),
            possible_duplicate: row.try_get("in_doubt")?,
        },
        aggregate_key: row.try_get("aggregate_key")?,
        unexplained_failures: count(row.try_get("unexplained_failures")?),
        failing_for: failing_for
            .map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)),
    })
}
