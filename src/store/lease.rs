//! Leases after the claim: renewing what is held, and giving back what an answer was lost for.
//!
//! Every write here matches `lease_id`. `locked_by` alone would be no fence: the same relay may have claimed the row again.

use std::time::Duration;

use postgres::types::Type;

use super::session::{Session, Statement};
use crate::error::Error;

/// `$1` relay id, `$2` worker, `$3` lease id, `$4` event ids, `$5` lease in seconds.
///
/// Primary key. Extends what this lease still holds and returns those ids; the heartbeat and the count of what was lost
/// are written with it.
pub static RENEW: Statement = Statement {
    sql: r#"
WITH renewed AS (
    UPDATE "outbox".outbox SET locked_until = now() + $5 * interval '1 second'
     WHERE id = ANY ($4) AND lease_id = $3 RETURNING id
), beat AS (
    INSERT INTO "outbox".outbox_relay AS r (relay_id, worker, lease_lost)
    VALUES ($1, $2, cardinality($4) - (SELECT count(*) FROM renewed))
    ON CONFLICT (relay_id, worker) DO UPDATE
       SET heartbeat_at = clock_timestamp(), lease_lost = r.lease_lost + excluded.lease_lost
)
SELECT id FROM renewed"#,
    types: &[Type::TEXT, Type::INT4, Type::INT8, Type::INT8_ARRAY, Type::FLOAT8],
    doing: "renewing leases",
};

/// `$1` lease id.
///
/// Reads `outbox_unfinished` from end to end, so it is only for a claim whose answer was lost. The attempts are given
/// back: nobody knew of these rows, so nobody published them.
pub static RELEASE_LEASE: Statement = Statement {
    sql: r#"
UPDATE "outbox".outbox SET locked_by = NULL, lease_id = NULL, locked_until = NULL, attempts = greatest(0, attempts - 1)
 WHERE status IN ('pending', 'dead') AND lease_id = $1 RETURNING id"#,
    types: &[Type::INT8],
    doing: "releasing a claim whose answer was lost",
};

/// Renews the lease on `ids` and returns those that it still holds.
///
/// # Errors
/// The database's.
pub fn renew(
    session: &mut Session,
    relay_id: &str,
    worker: i32,
    lease_id: i64,
    ids: &[i64],
    lease: Duration,
) -> Result<Vec<i64>, Error> {
    let rows =
        session.query(&RENEW, &[&relay_id, &worker, &lease_id, &ids, &lease.as_secs_f64()])?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Releases everything that a claim took whose answer was lost. Returns how many rows that was.
///
/// # Errors
/// The database's.
pub fn release_lease(session: &mut Session, lease_id: i64) -> Result<usize, Error> {
    Ok(session.query(&RELEASE_LEASE, &[&lease_id])?.len())
}
