//! The schema: creating it, upgrading it in place, and checking that it is the one this version works with.
//!
//! A migration is one transaction under a lock of its own, so eight at once do it once, and one that is killed leaves
//! nothing half done and no lock behind.

use postgres::types::Type;
use postgres::{Client, GenericClient, IsolationLevel};

use super::Schema;
use crate::error::Error;

/// The schema version that this version of the library works with.
pub const SCHEMA_VERSION: i32 = 1;

/// What brings the schema to each version, in order. A new installation runs all of them.
const MIGRATIONS: [(i32, &str); 1] = [(1, include_str!("../../schema.sql"))];

/// The oldest server that is supported.
const OLDEST_SERVER: i32 = 140_000;

/// Namespace of the lock that migrations take: "outb" + 2, beside those of `schema.sql`.
const LOCK: &str = "SELECT pg_advisory_xact_lock(1869968484, hashtext($1))";

/// Functions and views are parsed when they are created; what others put into `public` must not be found then.
const SEARCH_PATH: &str = "SET LOCAL search_path = pg_catalog, pg_temp;";

const DOING: &str = "migrating the outbox";

/// What a migration did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migrated {
    /// The version that was found; `None` for a new outbox.
    pub from: Option<i32>,
    /// The version that is there now.
    pub to: i32,
}

/// Creates the outbox in `schema`, or upgrades it. Does nothing when it is up to date.
///
/// # Errors
/// The database's, among them a read-only one; a server older than PostgreSQL 14; an outbox newer than this version;
/// another migration that has not ended within a minute.
pub fn migrate(client: &mut Client, schema: &Schema) -> Result<Migrated, Error> {
    let failed = |error: postgres::Error| match error.code().map(|code| code.code()) {
        Some("25006") => {
            Error::database(DOING, "the database is read-only; connect to the primary")
        }
        Some("55P03") => Error::database(
            DOING,
            "another migration of this outbox has held its lock for a minute; look for it in pg_stat_activity",
        ),
        _ => Error::database(DOING, error),
    };
    let mut transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .start()
        .map_err(failed)?;
    check_server(&mut transaction)?;
    let settings = format!("{SEARCH_PATH} SET LOCAL lock_timeout = '60s'");
    transaction.batch_execute(&settings).map_err(failed)?;
    transaction.query_typed(LOCK, &[(&schema.name(), Type::TEXT)]).map_err(failed)?;
    let from = version(&mut transaction, schema)?;
    refuse_newer(schema, from)?;
    for (version, sql) in MIGRATIONS {
        if from.is_none_or(|from| from < version) {
            transaction.batch_execute(&schema.sql(sql)).map_err(failed)?;
        }
    }
    transaction.commit().map_err(failed)?;
    Ok(Migrated { from, to: SCHEMA_VERSION })
}

/// Everything that [`migrate`] runs on a new database, for `psql`.
pub fn migration_sql(schema: &Schema) -> String {
    let steps: String = MIGRATIONS.iter().map(|(_, sql)| schema.sql(sql)).collect();
    format!("BEGIN;\n{SEARCH_PATH}\n\n{steps}\nCOMMIT;\n")
}

/// Checks that the outbox is there and of this version.
///
/// # Errors
/// Says what is missing and what to do; `is_schema_mismatch()` is true of it.
pub fn check_schema(client: &mut impl GenericClient, schema: &Schema) -> Result<(), Error> {
    match schema_version(client, schema)? {
        Some(SCHEMA_VERSION) => Ok(()),
        None => Err(Error::schema_missing(schema.name())),
        Some(older) => Err(Error::schema_version(format!(
            "the outbox in schema {:?} has version {older}, and this pg-outbox needs {SCHEMA_VERSION}; run `pg-outbox migrate`",
            schema.name()
        ))),
    }
}

/// The version of the outbox in `schema`; `None` where there is none.
///
/// # Errors
/// The database's, and a version that is newer than this library.
pub fn schema_version(
    client: &mut impl GenericClient,
    schema: &Schema,
) -> Result<Option<i32>, Error> {
    let found = version(client, schema)?;
    refuse_newer(schema, found)?;
    Ok(found)
}

/// The version of the outbox in `schema`, without an error when there is none.
fn version(client: &mut impl GenericClient, schema: &Schema) -> Result<Option<i32>, Error> {
    const LOOKING: &str = "reading the version of the outbox";
    let is_there =
        "SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                     WHERE n.nspname = $1 AND c.relname = 'outbox_schema'";
    let failed = |error| Error::database(LOOKING, error);
    if client.query_typed(is_there, &[(&schema.name(), Type::TEXT)]).map_err(failed)?.is_empty() {
        return Ok(None);
    }
    let rows = client
        .query_typed(&schema.sql(r#"SELECT max(version) FROM "outbox".outbox_schema"#), &[])
        .map_err(failed)?;
    Ok(rows.first().and_then(|row| row.get(0)))
}

fn refuse_newer(schema: &Schema, found: Option<i32>) -> Result<(), Error> {
    match found {
        Some(newer) if newer > SCHEMA_VERSION => Err(Error::schema_version(format!(
            "the outbox in schema {:?} has version {newer}, and this pg-outbox knows only {SCHEMA_VERSION}; upgrade pg-outbox",
            schema.name()
        ))),
        _ => Ok(()),
    }
}

fn check_server(client: &mut impl GenericClient) -> Result<(), Error> {
    let rows = client
        .query_typed(
            "SELECT current_setting('server_version_num')::int, current_setting('server_version')",
            &[],
        )
        .map_err(|error| Error::database(DOING, error))?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (number, name): (i32, String) = (row.get(0), row.get(1));
    if number < OLDEST_SERVER {
        return Err(Error::database(
            DOING,
            format!("the server is PostgreSQL {name}; 14 or newer is needed"),
        ));
    }
    Ok(())
}
