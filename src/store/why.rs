//! Why has this event not gone out? One answer, in a sentence a person can act on.
//!
//! The order of the questions is the order in which the relay meets them: is it finished, does a dead event hold its
//! aggregate, does an earlier pending one, and what does the first of the aggregate itself wait for. Reads only.

use std::fmt;

use postgres::GenericClient;
use postgres::types::Type;
use uuid::Uuid;

use super::dead_letters::{EventDetails, details};
use super::status::{RelayRow, relays};
use super::{EventRef, Schema};
use crate::error::Error;
use crate::moment::Moment;

/// The event and the first dead and the first pending event in front of it. Takes $1 its id or NULL, $2 its event id or
/// NULL; by the unique indexes, then one probe each of `outbox_dead` and `outbox_unfinished`. The key is compared by
/// BETWEEN and sorted by, or a plan might walk the primary key from its beginning to find the first.
pub const WHY: &str = r#"
WITH event AS MATERIALIZED (
    SELECT e.* FROM "outbox".outbox AS e WHERE e.id = $1 OR e.event_id = $2)
SELECT 'event' AS role, event.*, statement_timestamp() AS now FROM event
UNION ALL
SELECT 'dead', ahead.*, statement_timestamp() FROM event CROSS JOIN LATERAL (
    SELECT a.* FROM "outbox".outbox AS a
     WHERE a.aggregate_key BETWEEN event.aggregate_key AND event.aggregate_key AND a.id < event.id
       AND a.status = 'dead'
     ORDER BY a.aggregate_key, a.id LIMIT 1) AS ahead
UNION ALL
SELECT 'pending', ahead.*, statement_timestamp() FROM event CROSS JOIN LATERAL (
    SELECT a.* FROM "outbox".outbox AS a
     WHERE a.aggregate_key BETWEEN event.aggregate_key AND event.aggregate_key AND a.id < event.id
       AND a.status IN ('pending', 'dead') AND a.status = 'pending'
     ORDER BY a.aggregate_key, a.id LIMIT 1) AS ahead"#;

/// An event and why it is where it is. Displays as plain sentences.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Why {
    /// The outbox id.
    pub id: i64,
    /// The id that every delivery carries.
    pub event_id: Uuid,
    /// Kind of aggregate.
    pub aggregate_type: String,
    /// Which one.
    pub aggregate_id: String,
    /// What happened.
    pub event_type: String,
    /// When it was appended.
    pub created: Moment,
    /// The answer.
    pub answer: Answer,
}

/// Why an event is where it is.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Answer {
    /// It went out.
    #[non_exhaustive]
    Published {
        /// When that was written down.
        at: Option<Moment>,
    },
    /// It waits for a person.
    #[non_exhaustive]
    Dead {
        /// Since when.
        since: Option<Moment>,
        /// Why.
        reason: String,
    },
    /// A person closed it.
    #[non_exhaustive]
    Discarded {
        /// When.
        at: Option<Moment>,
        /// Who and why.
        note: String,
    },
    /// A dead event of its aggregate is in front of it.
    #[non_exhaustive]
    Held {
        /// The outbox id of the dead event.
        by: i64,
        /// Since when that one is dead.
        since: Option<Moment>,
        /// Why it died.
        reason: String,
    },
    /// A pending event of its aggregate is in front of it.
    #[non_exhaustive]
    Behind {
        /// The outbox id of that event.
        id: i64,
        /// What that one waits for.
        waits: Wait,
    },
    /// It is the first of its aggregate.
    Waits(Wait),
}

/// What the first pending event of an aggregate waits for.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Wait {
    /// A relay has it.
    #[non_exhaustive]
    Leased {
        /// Which relay.
        by: String,
        /// Until when.
        until: Moment,
    },
    /// It failed and is tried again later.
    #[non_exhaustive]
    BackingOff {
        /// Not before this.
        until: Moment,
        /// First failure of the series.
        since: Option<Moment>,
        /// Attempts so far.
        attempts: u32,
        /// What went wrong last.
        error: String,
    },
    /// Its time has not come.
    #[non_exhaustive]
    NotBefore {
        /// When it comes.
        until: Moment,
    },
    /// No relay is alive that could take it.
    NoRelay,
    /// Relays are alive, but none of them serves its aggregate type.
    NotServed,
    /// Every living relay paused its destination or the broker.
    #[non_exhaustive]
    Paused {
        /// Why.
        reason: String,
        /// Since when.
        since: Option<Moment>,
    },
    /// Nothing: the next claim takes it.
    Due,
}

/// Explains one event; `None` where there is none (it may have been pruned).
///
/// # Errors
/// When there is no outbox in this schema, or the database refused or was lost.
pub fn why(
    client: &mut impl GenericClient,
    schema: &Schema,
    event: &EventRef,
) -> Result<Option<Why>, Error> {
    let (id, event_id) = (event.id(), event.event_id());
    let rows = client
        .query_typed(&schema.sql(WHY), &[(&id, Type::INT8), (&event_id, Type::UUID)])
        .map_err(|error| schema.error("explaining an event", error))?;
    let find = |role: &str| rows.iter().find(|row| row.get::<_, &str>("role") == role).map(details);
    let Some(event) = find("event") else { return Ok(None) };
    let answer = match event.status.as_str() {
        "published" => Answer::Published { at: event.published },
        "discarded" => Answer::Discarded {
            at: event.discarded,
            note: event.discard_note.clone().unwrap_or_default(),
        },
        "dead" => {
            Answer::Dead { since: event.died, reason: event.last_error.clone().unwrap_or_default() }
        }
        _ => match (find("dead"), find("pending")) {
            (Some(dead), _) => Answer::Held {
                by: dead.id,
                since: dead.died,
                reason: dead.last_error.unwrap_or_default(),
            },
            (None, Some(ahead)) => {
                Answer::Behind { id: ahead.id, waits: waits(&ahead, &relays(client, schema)?) }
            }
            (None, None) => Answer::Waits(waits(&event, &relays(client, schema)?)),
        },
    };
    Ok(Some(Why {
        id: event.id,
        event_id: event.event_id,
        aggregate_type: event.aggregate_type,
        aggregate_id: event.aggregate_id,
        event_type: event.event_type,
        created: event.created,
        answer,
    }))
}

fn waits(event: &EventDetails, relays: &[RelayRow]) -> Wait {
    if let Some(until) = event.locked_until.filter(Moment::is_ahead) {
        return Wait::Leased { by: event.locked_by.clone().unwrap_or_default(), until };
    }
    if event.next_attempt.is_ahead() {
        let until = event.next_attempt;
        if event.retry_since.is_none() && event.unexplained_failures == 0 {
            return Wait::NotBefore { until };
        }
        return Wait::BackingOff {
            until,
            since: event.retry_since,
            attempts: event.attempts,
            error: event.last_error.clone().unwrap_or_default(),
        };
    }
    // A thread that stopped cleanly says nothing of its relay any more.
    let alive: Vec<_> =
        relays.iter().filter(|relay| relay.alive && relay.heartbeat.is_some()).collect();
    if alive.is_empty() {
        return Wait::NoRelay;
    }
    let refuses = |relay: &RelayRow| !relay.serves(&event.aggregate_type);
    let refused_by: Vec<_> =
        alive.iter().filter(|relay| refuses(relay)).map(|r| &r.relay_id).collect();
    let alive: Vec<_> =
        alive.iter().filter(|relay| !refused_by.contains(&&relay.relay_id)).collect();
    if alive.is_empty() {
        return Wait::NotServed;
    }
    let paused = |relay: &RelayRow| {
        relay.paused_types.iter().any(|paused| paused == "*" || *paused == event.aggregate_type)
    };
    let free = alive.iter().any(|relay| {
        !alive.iter().any(|thread| thread.relay_id == relay.relay_id && paused(thread))
    });
    match alive.iter().find(|relay| paused(relay)) {
        Some(relay) if !free => Wait::Paused {
            reason: relay.paused_reason.clone().unwrap_or_default(),
            since: relay.paused_since,
        },
        _ => Wait::Due,
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "Event {} ({}, {}) of {} {} was appended at {}.",
            self.id,
            self.event_id,
            self.event_type,
            self.aggregate_type,
            self.aggregate_id,
            self.created
        )?;
        write!(f, "{}", self.answer)
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Published { at } => write!(f, "It was published{}.", when(" at ", at)),
            Self::Dead { since, reason } => write!(
                f,
                "It is dead{}: {}. It goes out only if you requeue it; discard it to give it up. Until then it holds \
                 its aggregate.",
                when(" since ", since),
                text(reason)
            ),
            Self::Discarded { at, note } => {
                write!(f, "It was discarded{} by {}.", when(" at ", at), text(note))
            }
            Self::Held { by, since, reason } => write!(
                f,
                "It is held behind event {by} of its aggregate, which is dead{}: {}. Requeue or discard event {by}.",
                when(" since ", since),
                text(reason)
            ),
            Self::Behind { id, waits } => {
                write!(
                    f,
                    "It waits behind event {id} of its aggregate. {}",
                    Sentence(&format!("Event {id}"), waits)
                )
            }
            Self::Waits(waits) => write!(f, "{}", Sentence("It", waits)),
        }
    }
}

/// What the named event waits for.
struct Sentence<'a>(&'a str, &'a Wait);

impl fmt::Display for Sentence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0;
        match self.1 {
            Wait::Leased { by, until } => {
                write!(f, "{name} is leased by {} until {until}.", text(by))
            }
            Wait::BackingOff { until, since, attempts, error } => write!(
                f,
                "{name} is backing off until {until}, after {attempts} attempts{}. The last error: {}.",
                when(" and failures since ", since),
                text(error)
            ),
            Wait::NotBefore { until } => write!(f, "{name} is not due before {until}."),
            Wait::NoRelay => {
                write!(f, "{name} is due, but no relay is alive. Start one with `pg-outbox run`.")
            }
            Wait::NotServed => write!(
                f,
                "{name} is due, but no living relay serves its aggregate type: see --only and --except of `pg-outbox run`."
            ),
            Wait::Paused { reason, since } => write!(
                f,
                "{name} is due, but every living relay paused its destination{}: {}.",
                when(" since ", since),
                text(reason)
            ),
            Wait::Due => write!(f, "{name} is due: the next claim takes it."),
        }
    }
}

fn when(words: &str, at: &Option<Moment>) -> String {
    at.map(|at| format!("{words}{at}")).unwrap_or_default()
}

/// Words of others inside a sentence of ours.
fn text(words: &str) -> &str {
    match words.trim_end_matches(['.', ' ', '\n']) {
        "" => "not recorded",
        words => words,
    }
}
