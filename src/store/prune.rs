//! Retention: removing published and discarded events in small batches, each in its own transaction.

use std::time::Duration;

use postgres::GenericClient;
use postgres::types::Type;

use super::Schema;
use super::session::Statement;
use crate::error::Error;

/// `$1` an id to start after, `$2` how many ids to look at, `$3` retention in seconds.
///
/// Primary key, from the oldest id. Only published and discarded rows go; pending, leased and dead ones stay for ever.
/// Rows that somebody else has locked are left for the next pass, so several relays do not wait for each other.
/// Ids and times grow together, so a batch that is wholly younger than the retention ends the pass.
pub static PRUNE: Statement = Statement {
    sql: r#"
WITH batch AS MATERIALIZED (
    SELECT id, created_at FROM "outbox".outbox WHERE id > $1 ORDER BY id LIMIT $2
), old AS MATERIALIZED (
    SELECT o.id FROM "outbox".outbox o
     WHERE o.id = ANY (ARRAY(SELECT id FROM batch)) AND o.status IN ('published', 'discarded')
       AND coalesce(o.published_at, o.discarded_at) < now() - $3 * interval '1 second'
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM "outbox".outbox WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT (SELECT count(*) FROM gone) AS deleted,
       (SELECT max(id) FROM batch HAVING min(created_at) < now() - $3 * interval '1 second') AS next_after"#,
    types: &[Type::INT8, Type::INT8, Type::FLOAT8],
    doing: "removing old events",
};

/// How many ids one batch looks at.
pub const PRUNE_BATCH: i64 = 1000;

/// What one batch did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pruned {
    /// Rows that were removed.
    pub deleted: u64,
    /// Where to go on; `None` when the pass is over.
    pub next_after: Option<i64>,
}

/// Removes one batch of events that were published or discarded longer ago than `retention`. Start a pass with
/// `after_id` 0.
///
/// # Errors
/// The database's. Nothing is removed then.
pub fn prune(
    client: &mut impl GenericClient,
    schema: &Schema,
    retention: Duration,
    after_id: i64,
) -> Result<Pruned, Error> {
    let rows = client
        .query_typed(
            &schema.sql(PRUNE.sql),
            &[
                (&after_id, Type::INT8),
                (&PRUNE_BATCH, Type::INT8),
                (&retention.as_secs_f64(), Type::FLOAT8),
            ],
        )
        .map_err(|error| Error::database(PRUNE.doing, error))?;
    let row = rows.first();
    Ok(Pruned {
        deleted: row.map_or(0, |row| row.get::<_, i64>("deleted").unsigned_abs()),
        next_after: row.and_then(|row| row.get("next_after")),
    })
}

/// How many events there are to remove. Takes $1 the retention in seconds. Reads the whole table: for a person who asks.
pub const PRUNABLE: &str = r#"
SELECT count(*) FROM "outbox".outbox
 WHERE status IN ('published', 'discarded') AND coalesce(published_at, discarded_at) < now() - $1 * interval '1 second'"#;

/// See [`PRUNABLE`].
///
/// # Errors
/// The database's.
pub fn prunable(
    client: &mut impl GenericClient,
    schema: &Schema,
    retention: Duration,
) -> Result<u64, Error> {
    let row = client
        .query_typed_one(&schema.sql(PRUNABLE), &[(&retention.as_secs_f64(), Type::FLOAT8)])
        .map_err(|error| Error::database("counting old events", error))?;
    Ok(row.get::<_, i64>(0).unsigned_abs())
}
