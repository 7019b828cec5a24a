//! What relays say of themselves: heartbeats, pauses, and the wish for a wake-up.

use std::time::Duration;

use postgres::types::Type;

use super::session::{Session, Statement};
use crate::config::RelayConfig;
use crate::error::Error;

/// `$1` relay id, `$2` worker. A thread made progress.
pub static BEAT: Statement = Statement {
    sql: r#"
INSERT INTO "outbox".outbox_relay (relay_id, worker) VALUES ($1, $2)
ON CONFLICT (relay_id, worker) DO UPDATE SET heartbeat_at = clock_timestamp()"#,
    types: &[Type::TEXT, Type::INT4],
    doing: "writing a heartbeat",
};

/// `$1` relay id, `$2` worker. A thread started; its counters go on from where they were.
pub static STARTED: Statement = Statement {
    sql: r#"
INSERT INTO "outbox".outbox_relay (relay_id, worker) VALUES ($1, $2)
ON CONFLICT (relay_id, worker) DO UPDATE
   SET heartbeat_at = clock_timestamp(), started_at = clock_timestamp(), paused_types = '{}', paused_reason = NULL, paused_since = NULL"#,
    types: &[Type::TEXT, Type::INT4],
    doing: "registering the relay",
};

/// `$1` relay id, `$2` the only aggregate types that it serves (empty for all), `$3` those that it leaves to others, `$4`
/// how many seconds it lets an event fail. For people who look for the relay that should have taken an event, and for a
/// scrape that tells which will die.
pub static INTRODUCED: Statement = Statement {
    sql: r#"
UPDATE "outbox".outbox_relay SET only_types = $2, except_types = $3, transient_window = $4 * interval '1 second'
 WHERE relay_id = $1 AND worker = 0"#,
    types: &[Type::TEXT, Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::FLOAT8],
    doing: "registering the relay",
};

/// `$1` relay id, `$2` first worker. These threads ended cleanly (or a restart has fewer), so their old beats must not
/// make the relay look dead, or alive. The counters stay.
pub static ENDED: Statement = Statement {
    sql: r#"
UPDATE "outbox".outbox_relay SET heartbeat_at = NULL, paused_types = '{}', paused_reason = NULL, paused_since = NULL
 WHERE relay_id = $1 AND worker >= $2"#,
    types: &[Type::TEXT, Type::INT4],
    doing: "signing the relay off",
};

/// `$1` relay id, `$2` paused aggregate types (`*` for all), `$3` why (NULL when none is). For people and metrics.
pub static PAUSED: Statement = Statement {
    sql: r#"
UPDATE "outbox".outbox_relay SET paused_types = $2, paused_reason = $3,
       paused_since = CASE WHEN $3::text IS NULL THEN NULL ELSE coalesce(paused_since, clock_timestamp()) END
 WHERE relay_id = $1 AND worker = 0"#,
    types: &[Type::TEXT, Type::TEXT_ARRAY, Type::TEXT],
    doing: "recording a pause",
};

/// `$1` relay id, `$2` for how many seconds. From its commit on, writers send a NOTIFY.
pub static WANT_WAKE_UP: Statement = Statement {
    sql: r#"
INSERT INTO "outbox".outbox_wakeup (relay_id, until) VALUES ($1, clock_timestamp() + $2 * interval '1 second')
ON CONFLICT (relay_id) DO UPDATE SET until = excluded.until"#,
    types: &[Type::TEXT, Type::FLOAT8],
    doing: "asking for wake-ups",
};

/// `$1` relay id. From its commit on, writers send none.
pub static NO_WAKE_UP: Statement = Statement {
    sql: r#"DELETE FROM "outbox".outbox_wakeup WHERE relay_id = $1"#,
    types: &[Type::TEXT],
    doing: "declining wake-ups",
};

/// The channel of an outbox's wake-ups, from its schema's name.
pub static CHANNEL: Statement = Statement {
    sql: "SELECT 'outbox_' || md5('outbox')",
    types: &[],
    doing: "listening for wake-ups",
};

/// See [`BEAT`].
///
/// # Errors
/// The database's.
pub fn beat(session: &mut Session, relay_id: &str, worker: i32) -> Result<(), Error> {
    session.query(&BEAT, &[&relay_id, &worker]).map(drop)
}

/// See [`STARTED`].
///
/// # Errors
/// The database's.
pub fn started(session: &mut Session, relay_id: &str, worker: i32) -> Result<(), Error> {
    session.query(&STARTED, &[&relay_id, &worker]).map(drop)
}

/// See [`INTRODUCED`].
///
/// # Errors
/// The database's.
pub fn introduced(
    session: &mut Session,
    relay_id: &str,
    config: &RelayConfig,
) -> Result<(), Error> {
    let window = config.policy.transient_window.as_secs_f64();
    session.query(&INTRODUCED, &[&relay_id, &config.only, &config.except, &window]).map(drop)
}

/// See [`ENDED`].
///
/// # Errors
/// The database's.
pub fn ended(session: &mut Session, relay_id: &str, first_worker: i32) -> Result<(), Error> {
    session.query(&ENDED, &[&relay_id, &first_worker]).map(drop)
}

/// See [`PAUSED`].
///
/// # Errors
/// The database's.
pub fn paused(
    session: &mut Session,
    relay_id: &str,
    types: &[String],
    reason: Option<&str>,
) -> Result<(), Error> {
    session.query(&PAUSED, &[&relay_id, &types, &reason]).map(drop)
}

/// See [`WANT_WAKE_UP`].
///
/// # Errors
/// The database's.
pub fn want_wake_up(
    session: &mut Session,
    relay_id: &str,
    how_long: Duration,
) -> Result<(), Error> {
    session.query(&WANT_WAKE_UP, &[&relay_id, &how_long.as_secs_f64()]).map(drop)
}

/// See [`NO_WAKE_UP`].
///
/// # Errors
/// The database's.
pub fn no_wake_up(session: &mut Session, relay_id: &str) -> Result<(), Error> {
    session.query(&NO_WAKE_UP, &[&relay_id]).map(drop)
}

/// Starts listening for wake-ups on this session.
///
/// # Errors
/// The database's.
pub fn listen(session: &mut Session) -> Result<(), Error> {
    let rows = session.query(&CHANNEL, &[])?;
    let channel: String = rows.first().map(|row| row.get(0)).unwrap_or_default();
    session
        .client()
        .batch_execute(&format!("LISTEN \"{channel}\""))
        .map_err(|error| Error::database(CHANNEL.doing, error))
}
