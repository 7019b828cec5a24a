//! Least privilege: what a writer, a relay and a monitor need, as SQL to run once after [`migrate`](super::migrate()).
//!
//! Nothing is granted to anybody else: the functions are taken from PUBLIC when they are created, and a new schema
//! gives PUBLIC nothing.

use super::Schema;

/// Who gets rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Grantee {
    /// An application: appends, and sees nothing.
    Writer,
    /// A relay, and the operator of its dead letters: reads and settles events, cannot append any.
    Relay,
    /// A monitor: reads the metrics, sees no event.
    Monitor,
}

/// Takes nothing; changes the catalogue only. The functions run with their owner's rights, so no table is needed.
const WRITER: &str = r#"GRANT USAGE ON SCHEMA "outbox" TO "role";
GRANT EXECUTE ON FUNCTION
    "outbox".outbox_append(text, text, text, bytea, text, jsonb, uuid, timestamptz),
    "outbox".outbox_append(text, text, text, json, text, jsonb, uuid, timestamptz),
    "outbox".outbox_append(text, text, text, text, text, jsonb, uuid, timestamptz),
    "outbox".outbox_append_all(text[], text[], text[], bytea[], text[], jsonb[], uuid[], timestamptz[])
    TO "role";
"#;

/// Takes nothing; changes the catalogue only. A relay updates what it and its operators settle, by column, so that it
/// cannot change what was appended. A view calls its functions with the rights of whoever reads it, hence `outbox_text`.
const RELAY: &str = r#"GRANT USAGE ON SCHEMA "outbox" TO "role";
GRANT SELECT, DELETE ON "outbox".outbox TO "role";
GRANT UPDATE (status, attempts, unexplained_failures, in_doubt, next_attempt_at, locked_by, lease_id, locked_until,
    retry_since, last_error, published_at, died_at, discarded_at, discard_note) ON "outbox".outbox TO "role";
GRANT SELECT, INSERT, UPDATE ON "outbox".outbox_relay TO "role";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox".outbox_wakeup TO "role";
GRANT SELECT ON "outbox".outbox_schema, "outbox".outbox_events, "outbox".outbox_metrics TO "role";
GRANT EXECUTE ON FUNCTION "outbox".outbox_text(bytea) TO "role";
"#;

/// Takes nothing; changes the catalogue only. The view reads the tables with its owner's rights.
const MONITOR: &str = r#"GRANT USAGE ON SCHEMA "outbox" TO "role";
GRANT SELECT ON "outbox".outbox_schema, "outbox".outbox_metrics TO "role";
"#;

/// The SQL that gives `role`, a role that exists, what it needs in the outbox of `schema` and no more. Safe to repeat.
pub fn grants(schema: &Schema, grantee: Grantee, role: &str) -> String {
    let sql = match grantee {
        Grantee::Writer => WRITER,
        Grantee::Relay => RELAY,
        Grantee::Monitor => MONITOR,
    };
    let role = format!("\"{}\"", role.replace('"', "\"\""));
    // Each piece by itself, so that a schema that is called "role" is left alone.
    let pieces: Vec<_> = sql.split("\"role\"").map(|piece| schema.sql(piece)).collect();
    pieces.join(&role)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_names_are_quoted() {
        let schema = Schema::new("\"role\" 'outbox'").expect("a name");
        let sql = grants(&schema, Grantee::Monitor, "the \"outbox\" reader");
        let start =
            "GRANT USAGE ON SCHEMA \"\"\"role\"\" 'outbox'\" TO \"the \"\"outbox\"\" reader\";\n";
        assert!(sql.starts_with(start), "{sql}");
    }
}
