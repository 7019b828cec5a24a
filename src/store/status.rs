//! How the outbox is doing: one scrape of the metrics, what each relay says of itself, and a verdict in words.
//!
//! Reads only. A scrape is one statement with a deadline, so that a monitor never piles up on a slow database.

use std::fmt;
use std::time::{Duration, SystemTime};

use postgres::GenericClient;
use postgres::types::Type;

use super::Schema;
use crate::error::Error;
use crate::metrics::{LATENCY_BUCKETS, Snapshot};
use crate::moment::{Moment, span};

/// Above this lag the outbox is degraded: five minutes of a broker's outage that one sits through, and the longest
/// backoff (five minutes) that is added to it. The alert OutboxLagHigh has the same figure.
pub const LAG_LIMIT: Duration = Duration::from_secs(600);

/// How much of that is the outage; the rest is the longest backoff.
pub const TOLERATED_OUTAGE: Duration = Duration::from_secs(300);

const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

/// Every metric in one row. Takes nothing. The view reads `outbox_unfinished`, `outbox_dead` and the relay rows, never
/// what is finished; [`SCRAPE_SETTINGS`] goes first.
pub const METRICS: &str = r#"SELECT * FROM "outbox".outbox_metrics"#;

/// Before [`METRICS`]: the statistics of a queue are often those of an empty table, and a sequential scan would then
/// look cheap; the compiler of the server costs more than such a statement. All end with the transaction.
pub const SCRAPE_SETTINGS: &str = "SET TRANSACTION READ ONLY; SET LOCAL enable_seqscan = off; SET LOCAL jit = off; SET LOCAL statement_timeout = ";

/// Every thread of every relay. Takes nothing; a small table, read whole. `alive` follows the rule of the metrics: the
/// slowest thread of the relay that has not stopped cleanly made progress within 30 s.
pub const RELAYS: &str = r#"
SELECT relay_id, worker, started_at, heartbeat_at, only_types, except_types, paused_types, paused_reason, paused_since,
       published, retried, dead_lettered, lease_lost, statement_timestamp() AS now,
       coalesce(min(heartbeat_at) OVER (PARTITION BY relay_id) > statement_timestamp() - interval '30 s', false) AS alive
  FROM "outbox".outbox_relay
 ORDER BY relay_id, worker"#;

/// What one thread of a relay says of itself.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RelayRow {
    /// The relay.
    pub relay_id: String,
    /// Its thread; 0 claims, the others publish.
    pub worker: i32,
    /// When the thread last started.
    pub started: Moment,
    /// Its last progress; `None` after a clean stop.
    pub heartbeat: Option<Moment>,
    /// Whether the relay, by the slowest of its threads, is alive.
    pub alive: bool,
    /// The aggregate types that it serves; empty for all. Known of thread 0 only.
    pub only_types: Vec<String>,
    /// The aggregate types that it leaves to others. Known of thread 0 only.
    pub except_types: Vec<String>,
    /// Destinations that it paused; `*` is the whole broker.
    pub paused_types: Vec<String>,
    /// Why.
    pub paused_reason: Option<String>,
    /// Since when.
    pub paused_since: Option<Moment>,
    /// Events it marked as published.
    pub published: i64,
    /// Failures it put off.
    pub retried: i64,
    /// Events it marked as dead.
    pub dead_lettered: i64,
    /// Verdicts and renewals of its that came too late.
    pub lease_lost: i64,
}

impl RelayRow {
    /// Whether the relay takes events of this type, as far as this thread says.
    pub(super) fn serves(&self, aggregate_type: &str) -> bool {
        let among = |types: &[String]| types.iter().any(|name| name == aggregate_type);
        (self.only_types.is_empty() || among(&self.only_types)) && !among(&self.except_types)
    }
}

/// Metrics and relays at one time.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Status {
    /// Every metric.
    pub snapshot: Snapshot,
    /// Every thread of every relay that ever ran, by relay and thread.
    pub relays: Vec<RelayRow>,
}

/// How good an [`Assessment`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// Everything goes out.
    Healthy,
    /// Something does not go out, or goes out late.
    Degraded,
    /// Nothing goes out.
    Down,
}

/// A [`Status`] in words. Displays as `degraded: 2 dead events ...; ...`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assessment {
    /// The worst of what was found.
    pub condition: Condition,
    /// What was found; empty while healthy.
    pub reasons: Vec<String>,
}

/// Reads every metric in one read-only transaction that ends within `timeout`. Inside a caller's transaction it is a
/// savepoint, which leaves no setting behind.
///
/// # Errors
/// When there is no outbox in this schema, or the database refused, was lost, or took longer than `timeout`.
pub fn scrape(
    client: &mut impl GenericClient,
    schema: &Schema,
    timeout: Duration,
) -> Result<Snapshot, Error> {
    let failed = |error| schema.error("reading the metrics", error);
    // 0 would mean no limit.
    let milliseconds = timeout.as_millis().clamp(1, i32::MAX as u128);
    let mut transaction = client.transaction().map_err(failed)?;
    transaction.batch_execute(&format!("{SCRAPE_SETTINGS}{milliseconds}")).map_err(failed)?;
    let row = transaction.query_typed_one(&schema.sql(METRICS), &[]).map_err(failed)?;
    // Nothing was written, and a rollback takes the settings along where this was a savepoint.
    transaction.rollback().map_err(failed)?;
    // Counts are never negative.
    let count = |name: &str| u64::try_from(row.get::<_, i64>(name)).unwrap_or(0);
    Ok(Snapshot {
        pending_rows: count("pending_rows"),
        retrying_rows: count("retrying_rows"),
        leased_rows: count("leased_rows"),
        held_rows: count("held_rows"),
        dead_rows: count("dead_rows"),
        oldest_pending_age_seconds: row.get("oldest_pending_age_seconds"),
        oldest_dead_age_seconds: row.get("oldest_dead_age_seconds"),
        dying_within_1h_rows: count("dying_within_1h_rows"),
        dying_within_6h_rows: count("dying_within_6h_rows"),
        relays_alive: count("relays_alive"),
        relays_paused: count("relays_paused"),
        published_total: count("published_total"),
        retried_total: count("retried_total"),
        dead_lettered_total: count("dead_lettered_total"),
        lease_lost_total: count("lease_lost_total"),
        latency: latency(&row.get::<_, Vec<i64>>("latency")),
        latency_seconds_sum: row.get("latency_sum"),
    })
}

fn latency(counts: &[i64]) -> [u64; LATENCY_BUCKETS.len() + 1] {
    std::array::from_fn(|place| counts.get(place).map_or(0, |count| count.unsigned_abs()))
}

/// Reads the metrics and the relays, within 10 s.
///
/// # Errors
/// As [`scrape`].
pub fn status(client: &mut impl GenericClient, schema: &Schema) -> Result<Status, Error> {
    let snapshot = scrape(client, schema, STATUS_TIMEOUT)?;
    Ok(Status { snapshot, relays: relays(client, schema)? })
}

pub(super) fn relays(
    client: &mut impl GenericClient,
    schema: &Schema,
) -> Result<Vec<RelayRow>, Error> {
    const NO_PARAMETERS: &[(&(dyn postgres::types::ToSql + Sync), Type)] = &[];
    let rows = client
        .query_typed(&schema.sql(RELAYS), NO_PARAMETERS)
        .map_err(|error| schema.error("reading the relays", error))?;
    let relay = |row: &postgres::Row| {
        let now: SystemTime = row.get("now");
        let moment =
            |name: &str| row.get::<_, Option<SystemTime>>(name).map(|at| Moment::new(at, now));
        RelayRow {
            relay_id: row.get("relay_id"),
            worker: row.get("worker"),
            started: Moment::new(row.get("started_at"), now),
            heartbeat: moment("heartbeat_at"),
            alive: row.get("alive"),
            only_types: row.get("only_types"),
            except_types: row.get("except_types"),
            paused_types: row.get("paused_types"),
            paused_reason: row.get("paused_reason"),
            paused_since: moment("paused_since"),
            published: row.get("published"),
            retried: row.get("retried"),
            dead_lettered: row.get("dead_lettered"),
            lease_lost: row.get("lease_lost"),
        }
    };
    Ok(rows.iter().map(relay).collect())
}

impl Status {
    /// What a person has to know: is everything going out, and if not, why and what to do.
    pub fn assess(&self) -> Assessment {
        let snapshot = &self.snapshot;
        let mut found = Vec::new();
        if snapshot.relays_alive == 0 {
            let waiting = match snapshot.pending_rows {
                0 => "nothing is pending, but nothing would go out either".into(),
                1 => "1 pending event waits".into(),
                many => format!("{many} pending events wait"),
            };
            found.push((
                Condition::Down,
                format!("no relay is alive; {waiting}; start one with `pg-outbox run`"),
            ));
        }
        let degraded = [
            (snapshot.dead_rows > 0).then(|| {
                format!(
                    "dead events: {} (the oldest for {}); see `pg-outbox dead-letters list`",
                    snapshot.dead_rows,
                    span(snapshot.oldest_dead_age_seconds)
                )
            }),
            (snapshot.held_rows > 0)
                .then(|| format!("pending events held behind a dead one: {}", snapshot.held_rows)),
            self.paused(),
            (snapshot.dying_within_6h_rows > 0).then(|| {
                format!(
                    "events that die within 6 h unless they are published: {}",
                    snapshot.dying_within_6h_rows
                )
            }),
            (snapshot.oldest_pending_age_seconds > LAG_LIMIT.as_secs_f64()).then(|| {
                let (lag, limit) =
                    (span(snapshot.oldest_pending_age_seconds), span(LAG_LIMIT.as_secs_f64()));
                format!("the oldest pending event is {lag} old, more than {limit}")
            }),
        ];
        found.extend(degraded.into_iter().flatten().map(|reason| (Condition::Degraded, reason)));
        let condition =
            found.iter().map(|(condition, _)| *condition).max().unwrap_or(Condition::Healthy);
        Assessment { condition, reasons: found.into_iter().map(|(_, reason)| reason).collect() }
    }

    fn paused(&self) -> Option<String> {
        let says = |relay: &RelayRow| {
            let what = match relay.paused_types.iter().any(|paused| paused == "*") {
                true => "the broker".into(),
                false => relay.paused_types.join(", "),
            };
            let why = relay.paused_reason.as_deref().unwrap_or("no reason given");
            let since = relay.paused_since.map(|at| format!(" since {at}")).unwrap_or_default();
            format!("{} paused {what}{since}: {why}", relay.relay_id)
        };
        let paused = self
            .relays
            .iter()
            .filter(|r| r.alive && r.heartbeat.is_some() && !r.paused_types.is_empty());
        let all: Vec<_> = paused.map(says).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Down => "down",
        })
    }
}

impl fmt::Display for Assessment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.condition)?;
        if !self.reasons.is_empty() {
            write!(f, ": {}", self.reasons.join("; "))?;
        }
        Ok(())
    }
}
