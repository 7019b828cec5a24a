//! Every SQL statement of the relay and of its operators, each a documented constant, and typed calls around them.
//!
//! The statements name the schema as `"outbox"` (identifier) and `'outbox'` (string); [`Schema`] puts the real name in.
//! What publishes or waits is not here: this room only talks to the database.
//!
//! The relay's own steps (claim, lease, verdict, heartbeats, and the session they run on) can be called from outside for the
//! sake of tests. They are hidden from the documentation, and no promise is made of their shape.

#[doc(hidden)]
pub mod claim;
pub mod dead_letters;
mod event_ref;
mod grants;
#[doc(hidden)]
pub mod lease;
mod migrate;
mod prune;
#[doc(hidden)]
pub mod relays;
mod session;
pub mod status;
#[doc(hidden)]
pub mod verdict;
pub mod why;

pub use event_ref::EventRef;
pub use grants::{Grantee, grants};
pub use migrate::{Migrated, SCHEMA_VERSION, check_schema, migrate, migration_sql, schema_version};
pub use prune::{PRUNABLE, PRUNE, PRUNE_BATCH, Pruned, prunable, prune};
#[doc(hidden)]
pub use session::{Session, Statement, is_pooled};

use crate::error::Error;

/// The name of an outbox's schema, quoted where it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schema {
    name: String,
}

impl Schema {
    /// A schema by its name, unquoted: `Schema::new("billing outbox")` is fine.
    ///
    /// # Errors
    /// When the name is empty, longer than the 63 bytes PostgreSQL keeps, or has a control character.
    pub fn new(name: &str) -> Result<Self, Error> {
        if name.is_empty() || name.len() > 63 || name.contains(|c: char| c.is_control()) {
            return Err(Error::invalid_config(format!(
                "schema ({name:?}) must have 1 to 63 bytes and no control characters"
            )));
        }
        Ok(Self { name: name.into() })
    }

    /// A name that the settings have checked.
    pub(crate) fn unchecked(name: &str) -> Self {
        Self { name: name.into() }
    }

    /// The name, unquoted.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A database error while doing `what`; where the outbox itself is missing, an error that says so.
    pub(crate) fn error(&self, what: &str, error: postgres::Error) -> Error {
        match error.code().map(|code| code.code()) {
            Some("42P01" | "3F000") => Error::schema_missing(&self.name),
            _ => Error::database(what, error),
        }
    }

    /// A statement with this schema's name in it.
    pub(crate) fn sql(&self, statement: &str) -> String {
        let identifier = format!("\"{}\"", self.name.replace('"', "\"\""));
        let literal = format!("'{}'", self.name.replace('\'', "''"));
        // A name that has the quotes of a function's body in it would end the body.
        let mut quotes = String::from("$body$");
        while self.name.contains(&quotes) {
            quotes.insert(1, 'a');
        }
        // Through a token that no statement has, so that a name with quotes in it is not replaced twice.
        statement
            .replace("$body$", &quotes)
            .replace("'outbox'", "\u{1}")
            .replace("\"outbox\"", &identifier)
            .replace('\u{1}', &literal)
    }
}

impl Default for Schema {
    fn default() -> Self {
        Self { name: crate::config::DEFAULT_SCHEMA.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_quoted_in_both_forms() {
        let schema = Schema::new("we\"ird 'outbox'").expect("a name");
        assert_eq!(
            schema.sql("SELECT md5('outbox') FROM \"outbox\".outbox"),
            "SELECT md5('we\"ird ''outbox''') FROM \"we\"\"ird 'outbox'\".outbox"
        );
        let schema = Schema::new("$body$ $abody$").expect("a name");
        let body = schema.sql("AS $body$ SELECT FROM \"outbox\".outbox $body$");
        assert_eq!(body, "AS $aabody$ SELECT FROM \"$body$ $abody$\".outbox $aabody$");
        assert!(Schema::new(&"x".repeat(64)).is_err());
        assert!(Schema::new("").is_err());
    }
}
