//! Verdicts: what became of the events of one claim, written in one statement together with its counters.

use std::time::Duration;

use postgres::types::Type;

use super::session::{Session, Statement};
use crate::error::Error;

/// The bucket, 0 to 13, of what has waited since this time: [`LATENCY_BUCKETS`](crate::metrics::LATENCY_BUCKETS) in SQL.
macro_rules! age {
    ($since:literal) => {
        concat!(
            "width_bucket(date_part('epoch', statement_timestamp() - ",
            $since,
            "), '{0.01,0.05,0.1,0.5,1,5,10,30,60,300,600,3600,86400}'::float8[])"
        )
    };
}

macro_rules! settle {
    ($published:literal) => {
        concat!(
            "WITH published AS (",
            $published,
            r#" WHERE id = ANY ($4) AND lease_id = $3 RETURNING id, greatest(created_at, not_before) AS since
), failed AS (
    UPDATE "outbox".outbox o
       SET status = CASE WHEN f.dead THEN 'dead' ELSE 'pending' END,
           died_at = CASE WHEN f.dead THEN clock_timestamp() END,
           next_attempt_at = CASE WHEN f.dead THEN o.next_attempt_at ELSE clock_timestamp() + f.wait * interval '1 second' END,
           retry_since = coalesce(o.retry_since, clock_timestamp()),
           unexplained_failures = o.unexplained_failures + f.unexplained::int, in_doubt = o.in_doubt OR f.in_doubt,
           last_error = f.reason, locked_by = NULL, lease_id = NULL, locked_until = NULL
      FROM unnest($5::bigint[], $6::bool[], $7::float8[], $8::bool[], $9::bool[], $10::text[])
           AS f (id, dead, wait, unexplained, in_doubt, reason)
     WHERE o.id = f.id AND o.lease_id = $3 RETURNING f.dead
), released AS (
    UPDATE "outbox".outbox o
       SET attempts = greatest(0, o.attempts - 1), in_doubt = o.in_doubt OR r.in_doubt,
           locked_by = NULL, lease_id = NULL, locked_until = NULL
      FROM unnest($11::bigint[], $12::bool[]) AS r (id, in_doubt)
     WHERE o.id = r.id AND o.lease_id = $3 RETURNING o.id
), spread AS (
    SELECT count(*) AS events, "#,
            age!("max(since)"),
            " AS least, ",
            age!("min(since)"),
            r#" AS most,
           coalesce(greatest(0, count(*) * date_part('epoch', statement_timestamp()) - sum(date_part('epoch', since))), 0) AS seconds
      FROM published
), settled AS (
    SELECT (SELECT count(*) FROM published) AS published, (SELECT count(*) FROM failed WHERE NOT dead) AS retried,
           (SELECT count(*) FROM failed WHERE dead) AS dead_lettered, (SELECT count(*) FROM released) AS released
), counted AS (
    INSERT INTO "outbox".outbox_relay AS c (relay_id, worker, published, retried, dead_lettered, lease_lost, latency_sum, latency)
    SELECT $1, $2, s.published, s.retried, s.dead_lettered,
           CASE WHEN $13 THEN (SELECT count(*) FROM "outbox".outbox WHERE id = ANY ($4 || $5 || $11) AND lease_id <> $3)
                ELSE cardinality($4) + cardinality($5) + cardinality($11)
                - s.published - s.retried - s.dead_lettered - s.released END, a.seconds,
           CASE WHEN a.least = a.most
                THEN ARRAY(SELECT CASE WHEN place = a.most THEN a.events ELSE 0 END FROM generate_series(0, 13) AS place)
                ELSE ARRAY(SELECT count(since) FROM generate_series(0, 13) AS place LEFT JOIN published ON place = "#,
            age!("since"),
            r#"
                            GROUP BY place ORDER BY place) END
      FROM settled s, spread a
    ON CONFLICT (relay_id, worker) DO UPDATE
       SET heartbeat_at = clock_timestamp(), published = c.published + excluded.published,
           retried = c.retried + excluded.retried, dead_lettered = c.dead_lettered + excluded.dead_lettered,
           lease_lost = c.lease_lost + excluded.lease_lost, latency_sum = c.latency_sum + excluded.latency_sum,
           latency = ARRAY(SELECT n.a + n.b FROM unnest(c.latency, excluded.latency) AS n (a, b))
)
SELECT published, retried, dead_lettered, released FROM settled"#
        )
    };
}

const TYPES: &[Type] = &[
    Type::TEXT,
    Type::INT4,
    Type::INT8,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::BOOL_ARRAY,
    Type::FLOAT8_ARRAY,
    Type::BOOL_ARRAY,
    Type::BOOL_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT8_ARRAY,
    Type::BOOL_ARRAY,
    Type::BOOL,
];

/// `$1` relay id, `$2` worker, `$3` lease id, `$4` published ids, `$5`-`$10` failures (id, dead, wait in seconds, unexplained,
/// in doubt, reason), `$11`-`$12` released ones (id, in doubt), `$13` whether an earlier
/// try may have been written: then only what another lease holds is counted as lost.
///
/// Primary key. A row that this lease no longer holds is left alone and counted as lost. The retry window starts at the
/// *first* failure, hence `coalesce`. A released row gets its attempt back.
///
/// What was published is also counted by its latency, so that the buckets always add up to the counter. A batch is mostly
/// of one age: each row is looked at only where the oldest and the youngest are not in the same bucket.
pub static SETTLE: Statement = Statement {
    sql: settle!(
        r#"UPDATE "outbox".outbox SET status = 'published', published_at = clock_timestamp(), locked_by = NULL, lease_id = NULL,
           locked_until = NULL, retry_since = NULL"#
    ),
    types: TYPES,
    doing: "writing verdicts",
};

/// The same, where published events are not kept.
pub static SETTLE_AND_DELETE: Statement = Statement {
    sql: settle!(r#"DELETE FROM "outbox".outbox"#),
    types: TYPES,
    doing: "writing verdicts",
};

/// What became of the events of one lease.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Verdict {
    /// Confirmed by the broker.
    pub published: Vec<i64>,
    /// Failed.
    pub failed: Vec<Failure>,
    /// Not tried, or not to be blamed: id, and whether the broker may have it all the same.
    pub released: Vec<(i64, bool)>,
}

/// A failed event.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// Which.
    pub id: i64,
    /// When to try again; `None` when it is dead.
    pub retry_in: Option<Duration>,
    /// Whether it counts against the budget of unexplained failures.
    pub unexplained: bool,
    /// Whether the broker may have it all the same.
    pub in_doubt: bool,
    /// Why, for people.
    pub reason: String,
}

/// How many rows a verdict changed. What is missing from the sum was no longer held.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// Marked as published.
    pub published: u64,
    /// Will be retried.
    pub retried: u64,
    /// Dead.
    pub dead_lettered: u64,
    /// Released, with the attempt given back.
    pub released: u64,
    /// No longer held by this lease, and left alone.
    pub lease_lost: u64,
}

impl Verdict {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many events it speaks of.
    pub fn len(&self) -> usize {
        self.published.len() + self.failed.len() + self.released.len()
    }
}

/// Writes a verdict. Safe to repeat after a lost answer: what was written no longer matches the lease. Say so with
/// `is_repeat`, or those rows would be counted as lost; what another lease holds by then is counted all the same.
///
/// # Errors
/// The database's.
pub fn settle(
    session: &mut Session,
    relay_id: &str,
    worker: i32,
    lease_id: i64,
    verdict: &Verdict,
    delete_published: bool,
    is_repeat: bool,
) -> Result<Settled, Error> {
    let statement = if delete_published { &SETTLE_AND_DELETE } else { &SETTLE };
    let each = |column: fn(&Failure) -> bool| verdict.failed.iter().map(column).collect::<Vec<_>>();
    let ids: Vec<i64> = verdict.failed.iter().map(|f| f.id).collect();
    let waits: Vec<f64> =
        verdict.failed.iter().map(|f| f.retry_in.unwrap_or_default().as_secs_f64()).collect();
    let reasons: Vec<&str> = verdict.failed.iter().map(|f| f.reason.as_str()).collect();
    let (released, doubts): (Vec<i64>, Vec<bool>) = verdict.released.iter().copied().unzip();
    let rows = session.query(
        statement,
        &[
            &relay_id,
            &worker,
            &lease_id,
            &verdict.published,
            &ids,
            &each(|f| f.retry_in.is_none()),
            &waits,
            &each(|f| f.unexplained),
            &each(|f| f.in_doubt),
            &reasons,
            &released,
            &doubts,
            &is_repeat,
        ],
    )?;
    let count = |column| rows.first().map_or(0, |row| row.get::<_, i64>(column).unsigned_abs());
    let (published, retried, dead_lettered, released) = (count(0), count(1), count(2), count(3));
    let done = published + retried + dead_lettered + released;
    let lease_lost = if is_repeat { 0 } else { (verdict.len() as u64).saturating_sub(done) };
    Ok(Settled { published, retried, dead_lettered, released, lease_lost })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::LATENCY_BUCKETS;

    #[test]
    fn the_buckets_of_the_statement_are_those_of_the_metrics() {
        let list: Vec<_> = LATENCY_BUCKETS.iter().map(f64::to_string).collect();
        assert!(age!("since").contains(&format!("'{{{}}}'::float8[]", list.join(","))));
        assert!(SETTLE.sql.contains(&format!("generate_series(0, {})", LATENCY_BUCKETS.len())));
    }
}
