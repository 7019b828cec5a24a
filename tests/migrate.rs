//! The schema: created once by however many ask for it at once, under any name, and refused with advice where it is not the
//! one that this version works with.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::{Database, eventually};
use pg_outbox::store::{self, Migrated, SCHEMA_VERSION, check_schema, migrate, migration_sql};
use pg_outbox::{NewEvent, Outbox, Schema, append};

const CREATED: Migrated = Migrated { from: None, to: SCHEMA_VERSION };
const UP_TO_DATE: Migrated = Migrated { from: Some(SCHEMA_VERSION), to: SCHEMA_VERSION };

const NAMES: [&str; 9] = [
    "outbox",
    "Upper Case",
    "quo\"te",
    "it's",
    "'outbox'",
    "\"outbox\"",
    "söme 事件 🦀",
    "$body$ $1 \\ $abody$",
    "; DROP TABLE x; --",
];

#[test]
fn a_second_migration_changes_nothing() {
    let db = Database::create_empty();
    let schema = Schema::default();
    assert_eq!(migrate(&mut db.client(), &schema).unwrap(), CREATED);
    let id = db.append("order", "1", "placed", b"{}");
    assert_eq!(migrate(&mut db.client(), &schema).unwrap(), UP_TO_DATE);
    assert_eq!(db.status_of(id), "pending");
    check_schema(&mut db.client(), &schema).unwrap();
}

#[test]
fn eight_at_once_do_it_once() {
    let db = Database::create_empty();
    for round in 0..6 {
        let start = Arc::new(Barrier::new(8));
        let migrators: Vec<_> = (0..8)
            .map(|_| {
                let (start, mut client) = (start.clone(), db.client());
                thread::spawn(move || {
                    start.wait();
                    migrate(&mut client, &Schema::default())
                })
            })
            .collect();
        let done: Vec<_> = migrators.into_iter().map(|m| m.join().unwrap().unwrap()).collect();
        assert_eq!(done.iter().filter(|d| **d == CREATED).count(), 1, "round {round}: {done:?}");
        assert_eq!(done.iter().filter(|d| **d == UP_TO_DATE).count(), 7, "round {round}: {done:?}");
        db.execute("DROP SCHEMA outbox CASCADE");
    }
}

#[test]
fn a_killed_migrator_leaves_nothing_behind() {
    let db = Database::create_empty();
    // Holds the name of the schema, so that the migrator waits while it holds its lock.
    let mut other = db.client();
    let mut blocker = other.transaction().unwrap();
    blocker.batch_execute("CREATE SCHEMA outbox").unwrap();
    let mut client = db.client();
    let migrator = thread::spawn(move || migrate(&mut client, &Schema::default()));
    let mut admin = db.client();
    let holders = "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                    WHERE a.datname = current_database() AND l.locktype = 'advisory' AND l.classid = 1869968484 AND l.granted
                      AND EXISTS (SELECT FROM pg_locks w WHERE w.pid = l.pid AND NOT w.granted)";
    let mut pid = 0;
    eventually("the migrator holds its lock and waits", Duration::from_secs(20), || {
        pid = admin.query(holders, &[]).unwrap().first().map_or(0, |row| row.get(0));
        pid != 0
    });
    admin.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
    let error = migrator.join().unwrap().unwrap_err();
    assert!(error.is_database(), "{error}");
    blocker.rollback().unwrap();
    let left = "SELECT FROM pg_locks JOIN pg_database d ON d.oid = database
                 WHERE datname = current_database() AND locktype = 'advisory'";
    eventually("its lock is gone", Duration::from_secs(20), || {
        admin.query(left, &[]).unwrap().is_empty()
    });
    assert!(check_schema(&mut admin, &Schema::default()).unwrap_err().is_schema_mismatch());
    assert_eq!(migrate(&mut admin, &Schema::default()).unwrap(), CREATED);
}

#[test]
fn any_name_and_several_in_one_database() {
    let db = Database::create_empty();
    let mut client = db.client();
    for name in NAMES {
        let schema = Schema::new(name).unwrap();
        assert!(check_schema(&mut client, &schema).unwrap_err().is_schema_mismatch(), "{name}");
        assert_eq!(migrate(&mut client, &schema).unwrap(), CREATED, "{name}");
        assert_eq!(migrate(&mut client, &schema).unwrap(), UP_TO_DATE, "{name}");
        check_schema(&mut client, &schema).unwrap();
        let mut transaction = client.transaction().unwrap();
        let event = NewEvent::new("order", name, "placed", "{}").header("a", "b");
        Outbox::in_schema(schema).append(&mut transaction, &event).unwrap();
        transaction.commit().unwrap();
    }
    for name in NAMES {
        let schema = Schema::new(name).unwrap();
        let sql = format!("SELECT aggregate_id FROM \"{}\".outbox", name.replace('"', "\"\""));
        let rows = client.query(&sql, &[]).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].get::<_, String>(0), name);
        let snapshot = store::status::scrape(&mut client, &schema, Duration::from_secs(5)).unwrap();
        assert_eq!(snapshot.pending_rows, 1);
    }
}

/// Two outboxes in one database are strangers: an aggregate that is being written in one is free in the other.
#[test]
fn outboxes_of_one_database_do_not_wait_for_each_other() {
    let db = Database::create_empty();
    let (mut first, mut second) = (db.client(), db.client());
    let outboxes = ["one", "two"].map(|name| {
        let schema = Schema::new(name).unwrap();
        migrate(&mut first, &schema).unwrap();
        Outbox::in_schema(schema)
    });
    let event = NewEvent::new("order", "1", "placed", "{}");
    let mut held = first.transaction().unwrap();
    outboxes[0].append(&mut held, &event).unwrap();
    let mut free = second.transaction().unwrap();
    free.batch_execute("SET LOCAL lock_timeout = '200ms'").unwrap();
    outboxes[1].append(&mut free, &event).unwrap();
    let error = outboxes[0].append(&mut free, &event).unwrap_err();
    assert_eq!(error.sqlstate(), Some("55P03"), "{error}");
}

#[test]
fn the_printed_sql_is_a_script_of_its_own() {
    for name in NAMES {
        let (schema, db) = (Schema::new(name).unwrap(), Database::create_empty());
        db.execute(&migration_sql(&schema));
        assert_eq!(migrate(&mut db.client(), &schema).unwrap(), UP_TO_DATE, "{name}");
    }
}

#[test]
fn the_printed_sql_runs_in_psql() {
    if Command::new("psql").arg("--version").stdout(Stdio::null()).status().is_err() {
        return; // no server is missing, and the script is run as one above
    }
    for name in NAMES {
        let (schema, db) = (Schema::new(name).unwrap(), Database::create_empty());
        let mut psql = Command::new("psql")
            .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &db.url()])
            .env("PGCLIENTENCODING", "UTF8")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        psql.stdin.take().unwrap().write_all(migration_sql(&schema).as_bytes()).unwrap();
        assert!(psql.wait().unwrap().success(), "{name}");
        check_schema(&mut db.client(), &schema).unwrap();
    }
}

#[test]
fn the_wrong_schema_is_refused_with_advice() {
    let db = Database::create_empty();
    let (mut client, schema) = (db.client(), Schema::default());
    let says = |result: Result<(), pg_outbox::Error>, words: &[&str]| {
        let error = result.unwrap_err();
        assert!(error.is_schema_mismatch(), "{error:?}");
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    let run_migrate = "`pg-outbox migrate`";
    says(check_schema(&mut client, &schema), &["no outbox", "\"outbox\"", run_migrate]);
    // A schema that is there for something else is no outbox.
    db.execute("CREATE SCHEMA outbox");
    says(check_schema(&mut client, &schema), &["no outbox", run_migrate]);
    migrate(&mut client, &schema).unwrap();
    db.execute("UPDATE outbox.outbox_schema SET version = 0");
    says(check_schema(&mut client, &schema), &["version 0", "needs 1", run_migrate]);
    db.execute("UPDATE outbox.outbox_schema SET version = 99");
    says(check_schema(&mut client, &schema), &["version 99", "knows only 1", "upgrade pg-outbox"]);
    says(migrate(&mut client, &schema).map(drop), &["version 99", "upgrade pg-outbox"]);
    let row = client.query_one("SELECT array_agg(version) FROM outbox.outbox_schema", &[]).unwrap();
    assert_eq!(row.get::<_, Vec<i32>>(0), [99]);
}

#[test]
fn a_read_only_database_says_so() {
    let db = Database::create_empty();
    db.execute(&format!("ALTER DATABASE {} SET default_transaction_read_only = on", db.name()));
    let error = migrate(&mut db.client(), &Schema::default()).unwrap_err();
    assert!(error.is_database(), "{error:?}");
    assert!(error.to_string().contains("read-only; connect to the primary"), "{error}");
}

#[test]
fn a_database_that_is_serializable_by_default() {
    let db = Database::create_empty();
    let set =
        format!("ALTER DATABASE {} SET default_transaction_isolation = serializable", db.name());
    db.execute(&set);
    let start = Arc::new(Barrier::new(4));
    let migrators = [(); 4].map(|()| {
        let (start, mut client) = (start.clone(), db.client());
        thread::spawn(move || {
            start.wait();
            migrate(&mut client, &Schema::default())
        })
    });
    let done = migrators.map(|migrator| migrator.join().unwrap().unwrap());
    assert_eq!(done.iter().filter(|d| **d == CREATED).count(), 1);
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    append(&mut transaction, &NewEvent::new("order", "1", "placed", "{}")).unwrap();
    transaction.commit().unwrap();
    assert_eq!(db.count("true"), 1);
}

/// Functions and views are parsed when they are created, so what somebody put into `public` must not slip in.
#[test]
fn a_hostile_public_schema_does_not_slip_in() {
    let db = Database::create_empty();
    db.execute(
        "CREATE FUNCTION public.replace(text, text, text) RETURNS text LANGUAGE sql IMMUTABLE RETURN 'shadow';
         CREATE FUNCTION public.octet_length(bytea) RETURNS integer LANGUAGE sql IMMUTABLE RETURN -1;
         CREATE FUNCTION public.greatest_age(timestamptz) RETURNS text LANGUAGE sql IMMUTABLE RETURN 'shadow';
         CREATE FUNCTION public.hashtextextended(text, bigint) RETURNS bigint LANGUAGE sql IMMUTABLE RETURN 7;
         CREATE TABLE public.shadow (); ",
    );
    let mut client = db.client();
    client.batch_execute("SET search_path = public, pg_catalog").unwrap();
    migrate(&mut client, &Schema::default()).unwrap();
    // The caller's own setting is as it was.
    let path: String = client.query_one("SHOW search_path", &[]).unwrap().get(0);
    assert_eq!(path, "public, pg_catalog");
    let check = "SELECT count(*) FROM pg_depend d JOIN pg_proc p ON d.refclassid = 'pg_proc'::regclass AND d.refobjid = p.oid
                  WHERE p.pronamespace = 'public'::regnamespace AND d.deptype = 'n'";
    assert_eq!(client.query_one(check, &[]).unwrap().get::<_, i64>(0), 0);

    let printed = Database::create_empty();
    printed.execute(
        "CREATE FUNCTION public.octet_length(bytea) RETURNS integer LANGUAGE sql IMMUTABLE RETURN -1",
    );
    let mut client = printed.client();
    client.batch_execute("SET search_path = public, pg_catalog").unwrap();
    client.batch_execute(&migration_sql(&Schema::default())).unwrap();
    assert_eq!(client.query_one(check, &[]).unwrap().get::<_, i64>(0), 0);
}

#[test]
fn everything_carries_a_comment() {
    let db = Database::create();
    let sql = "
        SELECT c.relname || coalesce('.' || a.attname, '')
          FROM pg_class c LEFT JOIN LATERAL (
               SELECT 0 AS attnum, NULL::name AS attname UNION ALL
               SELECT a.attnum, a.attname FROM pg_attribute a
                WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'v')) a ON true
         WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind IN ('r', 'v', 'i')
           AND col_description(c.oid, a.attnum) IS NULL AND (a.attnum > 0 OR obj_description(c.oid, 'pg_class') IS NULL)
        UNION ALL
        SELECT p.oid::regprocedure::text FROM pg_proc p
         WHERE p.pronamespace = 'outbox'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL
        UNION ALL
        SELECT nspname FROM pg_namespace WHERE nspname = 'outbox' AND obj_description(oid, 'pg_namespace') IS NULL
         ORDER BY 1";
    let bare: Vec<String> =
        db.client().query(sql, &[]).unwrap().iter().map(|row| row.get(0)).collect();
    assert!(bare.is_empty(), "without a comment: {bare:#?}");
}
