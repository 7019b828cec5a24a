//! A relay's connection: its settings, and statements that are prepared once.
//!
//! The plans of these statements must not depend on statistics: a table that is empty when ANALYZE looks and holds a
//! million rows a minute later would otherwise be read from end to end. So the session plans once, generically, and
//! never chooses a sequential scan. It also runs at READ COMMITTED whatever the database's default, because a claim
//! has to look at the state of a row again after it got the lock on it.
//!
//! Behind a transaction pooler neither settings nor prepared statements outlive a transaction, so there each call is
//! a transaction of its own with its own settings ([`Session::open`] with `pooled`).

use std::collections::HashMap;

use postgres::error::SqlState;
use postgres::types::{ToSql, Type};
use postgres::{Client, IsolationLevel, Row};

use super::Schema;
use crate::error::Error;

/// An SQL statement of the relay, with the types of its parameters and what it is for.
#[derive(Debug)]
pub struct Statement {
    /// The text, with the schema as `"outbox"`.
    pub sql: &'static str,
    /// The types of `$1`, `$2` and so on.
    pub types: &'static [Type],
    /// What to say of an error, such as "claiming events".
    pub doing: &'static str,
}

const SETTINGS: &str = "enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off; \
     SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL statement_timeout = '20s'; \
     SET LOCAL lock_timeout = '10s'";

/// A connection that runs [`Statement`]s of one outbox.
pub struct Session {
    client: Client,
    schema: Schema,
    pooled: bool,
    prepared: HashMap<usize, postgres::Statement>,
}

impl Session {
    /// Takes a connection over and sets it up.
    ///
    /// # Errors
    /// The database's, and a server that cannot be written to: a standby, or a primary that was demoted.
    pub fn open(mut client: Client, schema: &Schema, pooled: bool) -> Result<Self, Error> {
        const OPENING: &str = "opening a session";
        if !pooled {
            let settings = SETTINGS.replace("SET LOCAL ", "SET ");
            let isolation = "SET default_transaction_isolation = 'read committed'";
            client
                .batch_execute(&format!("{isolation}; SET {settings}"))
                .map_err(|error| Error::database(OPENING, error))?;
        }
        let row = client
            .query_typed(
                "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool",
                &[],
            )
            .map_err(|error| Error::database(OPENING, error))?;
        if row.first().is_some_and(|row| row.get::<_, bool>(0)) {
            let why = "the database is read-only (a standby, or a primary that was demoted); the relay has to write";
            return Err(Error::database(OPENING, why));
        }
        Ok(Self { client, schema: schema.clone(), pooled, prepared: HashMap::new() })
    }

    /// Runs a statement in a transaction of its own.
    ///
    /// # Errors
    /// The database's, with what the statement is for.
    pub fn query(
        &mut self,
        statement: &'static Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, Error> {
        let rows = if self.pooled {
            self.query_pooled(statement, params)
        } else {
            self.query_prepared(statement, params)
        };
        rows.map_err(|error| Error::database(statement.doing, error))
    }

    fn query_prepared(
        &mut self,
        statement: &'static Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, postgres::Error> {
        let prepared = self.prepare(statement)?;
        match self.client.query(&prepared, params) {
            // "cached plan must not change result type": a migration changed a table under a running relay.
            Err(error) if error.code() == Some(&SqlState::FEATURE_NOT_SUPPORTED) => {
                self.prepared.clear();
                let prepared = self.prepare(statement)?;
                self.client.query(&prepared, params)
            }
            result => result,
        }
    }

    fn prepare(
        &mut self,
        statement: &'static Statement,
    ) -> Result<postgres::Statement, postgres::Error> {
        // Statements are statics, so the address names them.
        let key = std::ptr::from_ref(statement).addr();
        if let Some(prepared) = self.prepared.get(&key) {
            return Ok(prepared.clone());
        }
        let prepared =
            self.client.prepare_typed(&self.schema.sql(statement.sql), statement.types)?;
        self.prepared.insert(key, prepared.clone());
        Ok(prepared)
    }

    fn query_pooled(
        &mut self,
        statement: &'static Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, postgres::Error> {
        let sql = self.schema.sql(statement.sql);
        let typed: Vec<_> = params.iter().copied().zip(statement.types.iter().cloned()).collect();
        let mut transaction = self
            .client
            .build_transaction()
            .isolation_level(IsolationLevel::ReadCommitted)
            .start()?;
        transaction.batch_execute(&format!("SET LOCAL {SETTINGS}"))?;
        let rows = transaction.query_typed(&sql, &typed)?;
        transaction.commit()?;
        Ok(rows)
    }

    /// The connection itself, for LISTEN.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("schema", &self.schema.name())
            .field("pooled", &self.pooled)
            .finish()
    }
}

/// Whether two connections meet a transaction pooler: they share a server process, or one of them changes its own.
///
/// # Errors
/// The database's.
pub fn is_pooled(first: &mut Client, second: &mut Client) -> Result<bool, Error> {
    let mut detect = || {
        const PID: &str = "SELECT pg_backend_pid()";
        let pid = |rows: Vec<Row>| rows.first().map(|row| row.get::<_, i32>(0));
        let before = pid(first.query_typed(PID, &[])?);
        // Keeps the server process that a pooler would hand out next, and not for long should the network stall here.
        let mut transaction = second.transaction()?;
        transaction.batch_execute("SET LOCAL idle_in_transaction_session_timeout = '5s'")?;
        let other = pid(transaction.query_typed(PID, &[])?);
        let after = pid(first.query_typed(PID, &[])?);
        transaction.rollback()?;
        Ok(before == other || before != after)
    };
    detect().map_err(|error: postgres::Error| Error::database("looking for a pooler", error))
}
