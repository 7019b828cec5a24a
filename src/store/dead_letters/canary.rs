//! What a careful requeue looks at: which dead letters there are, and what has become of those that were put back.
//!
//! Reads only. The care itself (one first, then the rest in steps) is the caller's, because it takes as long as the relay does.

use postgres::GenericClient;
use postgres::types::{ToSql, Type};

use super::{Filter, MATCHING_IDS, count32, read};
use crate::error::Error;
use crate::store::Schema;

/// Those of some events that are not settled. Takes $1 outbox ids. By the primary key, and for each that is pending one probe
/// of `outbox_dead`. An event that is gone was published and deleted, or removed after its retention.
pub const UNSETTLED: &str = r#"
SELECT e.id, e.status, e.attempts, e.last_error,
       (SELECT min(a.id) FROM "outbox".outbox AS a
         WHERE a.aggregate_key = e.aggregate_key AND a.id < e.id AND a.status = 'dead') AS behind
  FROM "outbox".outbox AS e
 WHERE e.id = ANY ($1) AND e.status IN ('pending', 'dead')
 ORDER BY e.id"#;

/// An event that was put back and is not published yet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unsettled {
    /// The outbox id.
    pub id: i64,
    /// Whether it is dead again.
    pub is_dead: bool,
    /// Attempts since it was put back.
    pub attempts: u32,
    /// Its last error; the one of its former life until it has another.
    pub last_error: String,
    /// A dead event of its aggregate in front of it, which holds it.
    pub behind: Option<i64>,
}

/// The outbox ids of dead letters, at most `limit` of them, in their order.
///
/// # Errors
/// As [`list`](super::list).
pub fn matching_ids(
    client: &mut impl GenericClient,
    schema: &Schema,
    filter: &Filter,
    limit: Option<u32>,
) -> Result<Vec<i64>, Error> {
    let limit = limit.map(i64::from);
    let mut parameters = filter.parameters();
    parameters.push((&limit as &(dyn ToSql + Sync), Type::INT8));
    let rows = read(client, schema, MATCHING_IDS, &parameters, "looking for dead letters")?;
    Ok(rows.iter().map(|row| row.get("id")).collect())
}

/// Which of these events are pending or dead, in the order of their ids.
///
/// # Errors
/// As [`list`](super::list).
pub fn unsettled(
    client: &mut impl GenericClient,
    schema: &Schema,
    ids: &[i64],
) -> Result<Vec<Unsettled>, Error> {
    let parameters: [(&(dyn ToSql + Sync), Type); 1] = [(&ids, Type::INT8_ARRAY)];
    let rows = read(client, schema, UNSETTLED, &parameters, "looking what became of events")?;
    let event = |row: &postgres::Row| Unsettled {
        id: row.get("id"),
        is_dead: row.get::<_, &str>("status") == "dead",
        attempts: count32(row, "attempts"),
        last_error: row.get::<_, Option<String>>("last_error").unwrap_or_default(),
        behind: row.get("behind"),
    };
    Ok(rows.iter().map(event).collect())
}
