//! Least privilege, by trying: each role does all of its work, and nothing else.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::Duration;

use common::{Database, eventually};
use pg_outbox::store::dead_letters::{self, Filter};
use pg_outbox::store::{Grantee, check_schema, grants, migrate, status};
use pg_outbox::{
    NewEvent, PublishError, Relay, RelayConfig, Schema, ScriptedBroker, append, append_all,
};
use postgres::Client;

const DENIED: &str = "42501";

/// A role of one test, dropped with what it owns. Roles belong to the server, hence the name of the database in theirs.
struct Role<'a> {
    db: &'a Database,
    name: String,
}

impl<'a> Role<'a> {
    fn create(db: &'a Database, grantee: Grantee) -> Self {
        let name = format!("{}'s \"role\" {grantee:?}", db.name());
        let role = Self { db, name };
        db.execute(&format!("CREATE ROLE {} LOGIN", role.quoted()));
        let sql = grants(&Schema::default(), grantee, &role.name);
        db.execute(&sql);
        db.execute(&sql); // safe to repeat
        role
    }

    fn quoted(&self) -> String {
        format!("\"{}\"", self.name.replace('"', "\"\""))
    }

    fn login(&self) -> String {
        format!("SET SESSION AUTHORIZATION {}", self.quoted())
    }

    /// A session of this role, whatever authentication the server wants of it.
    fn client(&self) -> Client {
        let mut client = self.db.client();
        client.batch_execute(&self.login()).unwrap();
        client
    }
}

impl Drop for Role<'_> {
    fn drop(&mut self) {
        let role = self.quoted();
        let gone = self
            .db
            .client()
            .batch_execute(&format!("DROP OWNED BY {role} CASCADE; DROP ROLE {role}"));
        if !std::thread::panicking() {
            gone.unwrap();
        }
    }
}

#[track_caller]
fn denied(client: &mut Client, sql: &str) {
    let error = client.batch_execute(sql).expect_err(sql);
    assert_eq!(error.code().expect(sql).code(), DENIED, "{sql}: {error}");
}

/// Every table and view of the outbox.
fn relations(db: &Database) -> Vec<String> {
    let sql = "SELECT relname::text FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'v')";
    let all: Vec<String> =
        db.client().query(sql, &[]).unwrap().iter().map(|row| row.get(0)).collect();
    assert!(all.len() >= 6, "{all:?}");
    all
}

/// Everything that changes or reads `relation`, except what is in `but`.
#[track_caller]
fn denied_on(db: &Database, client: &mut Client, relation: &str, but: &[&str]) {
    let sql = "SELECT attname::text FROM pg_attribute WHERE attrelid = ('outbox.' || $1)::text::regclass AND attnum = 2";
    let column: String = db.client().query_one(sql, &[&relation]).unwrap().get(0);
    for (what, sql) in [
        ("SELECT", format!("SELECT FROM outbox.{relation}")),
        ("INSERT", format!("INSERT INTO outbox.{relation} DEFAULT VALUES")),
        ("UPDATE", format!("UPDATE outbox.{relation} SET {column} = DEFAULT")),
        ("DELETE", format!("DELETE FROM outbox.{relation}")),
    ] {
        if but.contains(&what) {
            continue;
        }
        let error = client.batch_execute(&sql).expect_err(&sql);
        let code = error.code().expect(&sql).code();
        // Nobody writes to a view of sums; PostgreSQL says that before it looks at rights.
        let no_such_thing = relation == "outbox_metrics" && what != "SELECT" && code == "55000";
        assert!(code == DENIED || no_such_thing, "{sql}: {error:?}");
    }
}

/// What nobody may.
#[track_caller]
fn denied_to_all(client: &mut Client) {
    for sql in [
        "CREATE TABLE outbox.mine ()",
        "CREATE FUNCTION outbox.mine() RETURNS int LANGUAGE sql RETURN 1",
        "ALTER TABLE outbox.outbox ADD COLUMN mine int",
        "ALTER TABLE outbox.outbox DISABLE TRIGGER ALL",
        "DROP TABLE outbox.outbox",
        "DROP VIEW outbox.outbox_metrics",
        "DROP SCHEMA outbox CASCADE",
        "TRUNCATE outbox.outbox",
        "TRUNCATE outbox.outbox_relay",
        "CREATE INDEX ON outbox.outbox (created_at)",
        "SELECT nextval('outbox.outbox_id_seq')",
        "SELECT setval('outbox.outbox_id_seq', 1)",
        "CREATE OR REPLACE FUNCTION outbox.outbox_new_event_id() RETURNS uuid LANGUAGE sql RETURN NULL",
    ] {
        denied(client, sql);
    }
}

const APPENDS: [&str; 4] = [
    "SELECT outbox.outbox_append('order', '1', 'placed', '{}')",
    "SELECT outbox.outbox_append('order', '1', 'placed', '{}'::json)",
    "SELECT outbox.outbox_append('order', '1', 'placed', '\\x00'::bytea)",
    "SELECT outbox.outbox_append_all(ARRAY['order'], ARRAY['1'], ARRAY['placed'], ARRAY['x']::bytea[])",
];

const OTHER_FUNCTIONS: [&str; 4] = [
    "SELECT outbox.outbox_lock_aggregates(ARRAY['o'], ARRAY['1'])",
    "SELECT outbox.outbox_headers_ok('{}')",
    "SELECT outbox.outbox_text('x')",
    "SELECT outbox.outbox_new_event_id()",
];

#[test]
fn a_writer_appends_and_sees_nothing() {
    let db = Database::create();
    let role = Role::create(&db, Grantee::Writer);
    let mut client = role.client();
    for sql in APPENDS {
        client.batch_execute(sql).unwrap();
    }
    let full = NewEvent::new("order", "2", "placed", "{}").header("a", "b");
    let mut transaction = client.transaction().unwrap();
    append(&mut transaction, &full).unwrap();
    append_all(&mut transaction, &[full.clone(), full]).unwrap();
    transaction.commit().unwrap();
    // It wakes relays, too, and locks by the gate.
    db.execute("INSERT INTO outbox.outbox_wakeup VALUES ('asleep', now() + interval '1 min')");
    client.batch_execute(APPENDS[0]).unwrap();
    let many = "SELECT outbox.outbox_append_all(array_agg('o'::text), array_agg(n::text), array_agg('t'::text), array_agg(''::bytea))
                  FROM generate_series(1, 1001) n";
    client.batch_execute(many).unwrap();
    assert_eq!(db.count("true"), 4 + 3 + 1 + 1001);

    for relation in relations(&db) {
        denied_on(&db, &mut client, &relation, &[]);
    }
    for sql in OTHER_FUNCTIONS {
        denied(&mut client, sql);
    }
    denied_to_all(&mut client);
}

#[test]
fn a_monitor_reads_the_metrics_and_no_event() {
    let db = Database::create();
    db.append("order", "1", "placed", b"secret");
    let role = Role::create(&db, Grantee::Monitor);
    let mut client = role.client();
    let schema = Schema::default();
    let snapshot = status::scrape(&mut client, &schema, Duration::from_secs(5)).unwrap();
    assert_eq!(snapshot.pending_rows, 1);
    check_schema(&mut client, &schema).unwrap();
    for relation in relations(&db) {
        let may = matches!(&*relation, "outbox_metrics" | "outbox_schema");
        denied_on(&db, &mut client, &relation, if may { &["SELECT"] } else { &[] });
    }
    for sql in APPENDS.iter().chain(&OTHER_FUNCTIONS) {
        denied(&mut client, sql);
    }
    denied_to_all(&mut client);
}

#[test]
fn a_relay_does_all_of_its_work_and_nothing_else() {
    common::log();
    let db = Database::create();
    let role = Role::create(&db, Grantee::Relay);
    let (connect, login) = (db.factory(), role.login());
    let connect = move || {
        let mut client = connect()?;
        client.batch_execute(&login)?;
        Ok::<_, postgres::Error>(client)
    };
    let broker = ScriptedBroker::new();
    broker.fail_next(|event| event.aggregate_id == "retried", PublishError::transient("busy"));
    broker.fail_always(|event| event.aggregate_id == "dies", PublishError::permanent("too bad"));
    let publishers = broker.clone();
    let config =
        RelayConfig::builder("relay-a").prune_interval(Duration::from_secs(1)).build().unwrap();
    let relay = Relay::new(config, connect, move |_| publishers.publisher()).start();
    let wakes = || {
        let row = db.client().query_one("SELECT count(*) FROM outbox.outbox_wakeup", &[]);
        row.unwrap().get::<_, i64>(0) > 0
    };
    eventually("the relay sleeps and asks to be woken", Duration::from_secs(20), wakes);
    for aggregate_id in ["fine", "retried", "dies"] {
        db.append("order", aggregate_id, "placed", b"{}");
    }
    eventually("two are published and one is dead", Duration::from_secs(30), || {
        db.count("status = 'published'") == 2 && db.count("status = 'dead'") == 1
    });
    assert_eq!(db.count("status = 'published' AND attempts = 2 AND last_error IS NOT NULL"), 1);

    // Its operator, by the same role.
    let (mut client, schema) = (role.client(), Schema::default());
    check_schema(&mut client, &schema).unwrap();
    let state = status::status(&mut client, &schema).unwrap();
    assert_eq!((state.snapshot.dead_rows, state.snapshot.retried_total), (1, 1));
    let text = "SELECT payload_text FROM outbox.outbox_events LIMIT 1";
    assert_eq!(client.query_one(text, &[]).unwrap().get::<_, String>(0), "{}");
    assert_eq!(
        dead_letters::requeue(&mut client, &schema, &Filter::everything(), None).unwrap().len(),
        1
    );
    eventually("it dies once more", Duration::from_secs(30), || {
        db.count("status = 'dead' AND attempts = 1") == 1
    });
    dead_letters::discard(&mut client, &schema, &Filter::everything(), "tester", "no use").unwrap();
    assert_eq!(db.count("status = 'discarded'"), 1);

    db.shift(Duration::from_secs(8 * 86_400));
    eventually("what is old is removed", Duration::from_secs(30), || db.count("true") == 0);
    relay.stop();
    let report = relay.join().unwrap();
    assert_eq!((report.published, report.retried, report.dead_lettered), (2, 1, 2));

    denied_on(&db, &mut client, "outbox", &["SELECT", "UPDATE", "DELETE"]);
    denied_on(&db, &mut client, "outbox_relay", &["SELECT", "INSERT", "UPDATE"]);
    for view in ["outbox_schema", "outbox_events", "outbox_metrics"] {
        denied_on(&db, &mut client, view, &["SELECT"]);
    }
    for sql in APPENDS.iter().chain(&OTHER_FUNCTIONS).filter(|sql| !sql.contains("outbox_text")) {
        denied(&mut client, sql);
    }
    denied_to_all(&mut client);
}

#[test]
fn without_a_grant_there_is_nothing() {
    let db = Database::create();
    let name = format!("{}_nobody", db.name());
    let role = Role { db: &db, name };
    db.execute(&format!("CREATE ROLE {}", role.quoted()));
    let mut client = role.client();
    for sql in APPENDS.iter().chain(&OTHER_FUNCTIONS) {
        denied(&mut client, sql);
    }
    // Nor with a look into the schema.
    db.execute(&format!("GRANT USAGE ON SCHEMA outbox TO {}", role.quoted()));
    for relation in relations(&db) {
        denied_on(&db, &mut client, &relation, &[]);
    }
    for sql in APPENDS.iter().chain(&OTHER_FUNCTIONS) {
        denied(&mut client, sql);
    }
    denied_to_all(&mut client);
}

#[test]
fn the_outbox_of_another_schema_is_not_granted() {
    let db = Database::create();
    let (other, mut admin) = (Schema::new("role").unwrap(), db.client());
    migrate(&mut admin, &other).unwrap();
    let role = Role::create(&db, Grantee::Writer);
    let mut client = role.client();
    let elsewhere = APPENDS[0].replace("outbox.outbox_", "role.outbox_");
    denied(&mut client, &elsewhere);
    db.execute(&grants(&other, Grantee::Writer, &role.name));
    client.batch_execute(&elsewhere).unwrap();
}

/// The functions run with their owner's rights, so nothing that the caller made may be found by them: not by name in a
/// schema of its own, not by a better match of the argument types, not in its temporary schema.
#[test]
fn shadows_in_the_search_path_change_nothing() {
    let db = Database::create();
    let role = Role::create(&db, Grantee::Writer);
    db.execute(&format!("CREATE SCHEMA mine AUTHORIZATION {}", role.quoted()));
    let mut client = role.client();
    client
        .batch_execute(
            "CREATE FUNCTION mine.stop() RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'a shadow was called'; END $$;
             CREATE FUNCTION mine.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT mine.stop(); SELECT now()';
             CREATE FUNCTION mine.cardinality(text[]) RETURNS integer LANGUAGE sql AS 'SELECT mine.stop(); SELECT 1';
             CREATE FUNCTION mine.unnest(jsonb[]) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT mine.stop(); SELECT NULL::jsonb';
             CREATE FUNCTION mine.hashtext(text) RETURNS integer LANGUAGE sql AS 'SELECT mine.stop(); SELECT 1';
             CREATE FUNCTION mine.hashtextextended(text, bigint) RETURNS bigint LANGUAGE sql AS 'SELECT mine.stop(); SELECT 1::bigint';
             CREATE FUNCTION mine.pg_advisory_xact_lock(integer, integer) RETURNS void LANGUAGE sql AS 'SELECT mine.stop()';
             CREATE FUNCTION mine.pg_advisory_xact_lock_shared(integer, integer) RETURNS void LANGUAGE sql AS 'SELECT mine.stop()';
             CREATE FUNCTION mine.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT mine.stop()';
             CREATE FUNCTION mine.octet_length(text) RETURNS integer LANGUAGE sql AS 'SELECT mine.stop(); SELECT 1';
             CREATE FUNCTION mine.convert_to(text, name) RETURNS bytea LANGUAGE sql AS 'SELECT mine.stop(); SELECT NULL::bytea';
             CREATE FUNCTION mine.jsonb_each(jsonb, OUT key text, OUT value jsonb) RETURNS SETOF record LANGUAGE sql
                 AS 'SELECT mine.stop(); SELECT NULL::text, NULL::jsonb';
             CREATE FUNCTION mine.never(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT mine.stop(); SELECT false';
             CREATE OPERATOR mine.~ (LEFTARG = text, RIGHTARG = text, FUNCTION = mine.never);
             CREATE OPERATOR mine.!~ (LEFTARG = text, RIGHTARG = text, FUNCTION = mine.never);
             CREATE FUNCTION mine.later(timestamptz, timestamptz) RETURNS boolean LANGUAGE sql AS 'SELECT mine.stop(); SELECT false';
             CREATE OPERATOR mine.> (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = mine.later);
             CREATE FUNCTION mine.same(integer, integer) RETURNS boolean LANGUAGE sql AS 'SELECT mine.stop(); SELECT false';
             CREATE OPERATOR mine.= (LEFTARG = integer, RIGHTARG = integer, FUNCTION = mine.same);
             CREATE OPERATOR mine.> (LEFTARG = integer, RIGHTARG = integer, FUNCTION = mine.same);
             CREATE FUNCTION mine.both(text[], text[]) RETURNS text[] LANGUAGE sql AS 'SELECT mine.stop(); SELECT NULL::text[]';
             CREATE OPERATOR mine.|| (LEFTARG = text[], RIGHTARG = text[], FUNCTION = mine.both);
             CREATE TABLE mine.outbox (LIKE pg_catalog.pg_class);
             CREATE TABLE mine.outbox_wakeup (until timestamptz);
             CREATE TABLE mine.pg_locks ();
             CREATE TEMP TABLE outbox ();
             CREATE TEMP TABLE pg_locks ();
             CREATE TEMP TABLE outbox_wakeup ();
             CREATE TYPE pg_temp.uuid AS (a int);
             SET search_path = mine, pg_temp, pg_catalog;",
        )
        .unwrap();
    db.execute("INSERT INTO outbox.outbox_wakeup VALUES ('asleep', now() + interval '1 min')");
    let mut transaction = client.transaction().unwrap();
    for sql in APPENDS {
        transaction.batch_execute(sql).unwrap();
    }
    let headers =
        "SELECT outbox.outbox_append('order', '1', 't', '{}', headers => '{\"a\":\"b\"}')";
    transaction.batch_execute(headers).unwrap();
    let many = "SELECT outbox.outbox_append_all(pg_catalog.array_agg('o'::text), pg_catalog.array_agg(n::text), pg_catalog.array_agg('t'::text),
                       pg_catalog.array_agg(''::bytea)) FROM pg_catalog.generate_series(1, 1001) n";
    transaction.batch_execute(many).unwrap();
    transaction.commit().unwrap();
    assert_eq!(db.count("true"), 4 + 1 + 1001);
    for bad in [
        "SELECT outbox.outbox_append(E'a\\x1b', '1', 't', '{}')",
        "SELECT outbox.outbox_append('a', '1', 't', '{}', headers => '{\"outbox-x\":\"b\"}')",
    ] {
        let error = client.batch_execute(bad).unwrap_err();
        assert_eq!(error.code().unwrap().code(), "23514", "{error}");
    }
    // The order of writers holds as ever.
    let mut holding = client.transaction().unwrap();
    holding.batch_execute(APPENDS[0]).unwrap();
    let mut other = db.client();
    other.batch_execute("SET lock_timeout = '200ms'").unwrap();
    assert_eq!(other.batch_execute(APPENDS[0]).unwrap_err().code().unwrap().code(), "55P03");
}
