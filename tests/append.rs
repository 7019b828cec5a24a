//! The writer's door: what is appended is there as it was given, in order, when the transaction commits, and never otherwise.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{Database, eventually};
use pg_outbox::{Error, NewEvent, Outbox, Schema, append, append_all};
use postgres::fallible_iterator::FallibleIterator;
use postgres::{Client, Transaction};
use uuid::Uuid;

fn event(id: impl Into<String>) -> NewEvent {
    NewEvent::new("order", id, "placed", "{}")
}

/// Appends in a transaction of its own.
fn append_now(client: &mut Client, event: &NewEvent) -> Result<Uuid, Error> {
    let mut transaction = client.transaction().unwrap();
    let id = append(&mut transaction, event)?;
    transaction.commit().unwrap();
    Ok(id)
}

/// A transaction that does not wait for another for longer than it takes to notice.
fn impatient(client: &mut Client) -> Transaction<'_> {
    let mut transaction = client.transaction().unwrap();
    transaction.batch_execute("SET LOCAL lock_timeout = '200ms'").unwrap();
    transaction
}

#[track_caller]
fn waits(client: &mut Client, aggregate_id: &str) {
    let error = append(&mut impatient(client), &event(aggregate_id)).unwrap_err();
    assert_eq!(error.sqlstate(), Some("55P03"), "{error}");
}

#[track_caller]
fn passes(client: &mut Client, aggregate_id: &str) {
    append(&mut impatient(client), &event(aggregate_id)).unwrap();
}

fn payload(client: &mut Client, event_id: Uuid) -> Vec<u8> {
    let sql = "SELECT payload FROM outbox.outbox WHERE event_id = $1";
    client.query_one(sql, &[&event_id]).unwrap().get(0)
}

/// Refused by the SQL function: the SQLSTATE, and the constraint or the text.
#[track_caller]
fn refused(client: &mut Client, sql: &str, sqlstate: &str, says: &str) {
    let error = client.batch_execute(sql).unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!(error.code().code(), sqlstate, "{sql}: {error}");
    let words = format!("{} {}", error.message(), error.constraint().unwrap_or(""));
    assert!(words.contains(says), "{sql}: {words}");
    let rows = client.query_one("SELECT count(*) FROM outbox.outbox", &[]).unwrap();
    assert_eq!(rows.get::<_, i64>(0), 0, "{sql}");
}

// ------------------------------------------------------------------------------------------------ order

#[test]
fn ids_come_back_in_input_order_which_is_the_order_of_the_outbox() {
    let db = Database::create();
    let mut client = db.client();
    let events: Vec<_> = (0..500).map(|n| event(format!("k{}", n * 7 % 13))).collect();
    let mut transaction = client.transaction().unwrap();
    let ids = append_all(&mut transaction, &events).unwrap();
    transaction.commit().unwrap();
    let rows =
        client.query("SELECT event_id, aggregate_id FROM outbox.outbox ORDER BY id", &[]).unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<Uuid>>(), ids);
    for (n, row) in rows.iter().enumerate() {
        assert_eq!(row.get::<_, String>(1), format!("k{}", n * 7 % 13));
    }
    let mut transaction = client.transaction().unwrap();
    assert!(append_all(&mut transaction, &[]).unwrap().is_empty());
}

#[test]
fn writers_of_one_aggregate_wait_for_each_other_and_others_do_not() {
    let db = Database::create();
    let (mut first, mut second) = (db.client(), db.client());
    let mut holding = first.transaction().unwrap();
    append(&mut holding, &event("1")).unwrap();
    waits(&mut second, "1");
    passes(&mut second, "2");
    // The same id of another type is another aggregate.
    append(&mut impatient(&mut second), &NewEvent::new("invoice", "1", "t", "{}")).unwrap();
    // Through SQL, too.
    let mut transaction = impatient(&mut second);
    let error = transaction
        .batch_execute("SELECT outbox.outbox_append('order', '1', 'placed', '{}')")
        .unwrap_err();
    assert_eq!(error.code().unwrap().code(), "55P03");
    transaction.rollback().unwrap();
    holding.commit().unwrap();
    passes(&mut second, "1");
}

/// An id that was drawn before the wait would be lower than one that was committed meanwhile.
#[test]
fn ids_are_drawn_after_the_wait() {
    let db = Database::create();
    let (mut first, mut second, mut watch) = (db.client(), db.client(), db.client());
    let mut holding = first.transaction().unwrap();
    append(&mut holding, &event("1")).unwrap();
    let waiting = thread::spawn(move || append_now(&mut second, &event("1")).unwrap());
    let waiters = "SELECT FROM pg_locks JOIN pg_database d ON d.oid = database
                    WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted";
    eventually("the second writer waits", Duration::from_secs(20), || {
        !watch.query(waiters, &[]).unwrap().is_empty()
    });
    append(&mut holding, &event("1")).unwrap();
    holding.commit().unwrap();
    let last = waiting.join().unwrap();
    let row = watch
        .query_one("SELECT event_id FROM outbox.outbox ORDER BY id DESC LIMIT 1", &[])
        .unwrap();
    assert_eq!(row.get::<_, Uuid>(0), last);
}

#[test]
fn opposite_orders_do_not_deadlock() {
    let db = Database::create();
    let start = Arc::new(Barrier::new(2));
    let writers = [false, true].map(|backwards| {
        let (start, mut client) = (start.clone(), db.client());
        thread::spawn(move || {
            for round in 0..60 {
                let mut events: Vec<_> = (0..300).map(|n| event(format!("{round}-{n}"))).collect();
                if backwards {
                    events.reverse();
                }
                start.wait();
                let mut transaction = client.transaction().unwrap();
                append_all(&mut transaction, &events).map_err(|e| format!("round {round}: {e}"))?;
                transaction.commit().unwrap();
            }
            Ok::<_, String>(())
        })
    });
    // A writer that failed would leave the other at the barrier.
    let mut writers = writers.into_iter().collect::<Vec<_>>();
    eventually("both writers are done, or one has failed", Duration::from_secs(120), || {
        writers.iter().all(|writer| writer.is_finished())
            || writers.iter().any(|writer| writer.is_finished())
    });
    let done = writers.iter().position(|writer| writer.is_finished()).unwrap();
    writers.remove(done).join().unwrap().unwrap();
    writers.remove(0).join().unwrap().unwrap();
    assert_eq!(db.count("true"), 2 * 60 * 300);
}

// ------------------------------------------------------------------------------------------------ the gate

#[test]
fn a_hundred_thousand_aggregates_in_one_call() {
    let db = Database::create();
    let mut client = db.client();
    let (mut other, mut watch) = (db.client(), db.client());
    passes(&mut other, "free");
    let events: Vec<_> = (0..100_000).map(|n| event(format!("k{n}"))).collect();
    let mut transaction = client.transaction().unwrap();
    let ids = append_all(&mut transaction, &events).unwrap();
    assert_eq!(ids.len(), 100_000);
    let held = transaction.query_one(LOCKS, &[]).unwrap().get::<_, i64>(0);
    assert!(held <= 2, "{held} locks");
    // The gate is held, so everybody waits, until it is opened.
    waits(&mut other, "k5");
    waits(&mut other, "another");
    transaction.commit().unwrap();
    passes(&mut other, "k5");
    let count = watch.query_one("SELECT count(*) FROM outbox.outbox", &[]).unwrap();
    assert_eq!(count.get::<_, i64>(0), 100_000);
}

const LOCKS: &str =
    "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'";

#[test]
fn three_thousand_calls_in_one_transaction_keep_the_lock_table_free() {
    let db = Database::create();
    let (mut client, mut other) = (db.client(), db.client());
    let mut transaction = client.transaction().unwrap();
    let call =
        transaction.prepare("SELECT outbox.outbox_append('order', $1, 'placed', '{}')").unwrap();
    for n in 0..1000 {
        transaction.execute(&call, &[&format!("k{n}")]).unwrap();
    }
    // Up to here by aggregate, so that others go on.
    passes(&mut other, "another");
    waits(&mut other, "k999");
    for n in 1000..3000 {
        transaction.execute(&call, &[&format!("k{n}")]).unwrap();
    }
    let held = transaction.query_one(LOCKS, &[]).unwrap().get::<_, i64>(0);
    assert!((1000..=1002).contains(&held), "{held} locks");
    waits(&mut other, "k2999");
    transaction.commit().unwrap();
    passes(&mut other, "k2999");
    assert_eq!(db.count("true"), 3000);
}

#[test]
fn five_thousand_calls_for_one_aggregate_leave_the_gate_open() {
    let db = Database::create();
    let (mut client, mut other) = (db.client(), db.client());
    let mut transaction = client.transaction().unwrap();
    let call =
        transaction.prepare("SELECT outbox.outbox_append('order', '1', 'placed', '{}')").unwrap();
    for _ in 0..5000 {
        transaction.execute(&call, &[]).unwrap();
    }
    passes(&mut other, "2");
    waits(&mut other, "1");
    transaction.commit().unwrap();
    assert_eq!(db.count("true"), 5000);
}

#[test]
fn a_bulk_transaction_waits_for_the_writers_that_were_there() {
    let db = Database::create();
    let (mut first, mut bulk) = (db.client(), db.client());
    let mut holding = first.transaction().unwrap();
    append(&mut holding, &event("1")).unwrap();
    let events: Vec<_> = (0..1001).map(|n| event(format!("k{n}"))).collect();
    let error = append_all(&mut impatient(&mut bulk), &events).unwrap_err();
    assert_eq!(error.sqlstate(), Some("55P03"), "{error}");
    // One fewer is no bulk.
    append_all(&mut impatient(&mut bulk), &events[1..]).unwrap();
    holding.commit().unwrap();
    append_all(&mut impatient(&mut bulk), &events).unwrap();
}

// ------------------------------------------------------------------------------------------------ all or nothing

#[test]
fn what_is_rolled_back_never_was() {
    let db = Database::create();
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    append_all(&mut transaction, &[event("1"), event("2")]).unwrap();
    transaction.rollback().unwrap();
    assert_eq!(db.count("true"), 0);

    let mut transaction = client.transaction().unwrap();
    let kept = append(&mut transaction, &event("1")).unwrap();
    let mut savepoint = transaction.transaction().unwrap();
    append(&mut savepoint, &event("1")).unwrap();
    append(&mut savepoint, &event("3")).unwrap();
    savepoint.rollback().unwrap();
    let after = append(&mut transaction, &event("1")).unwrap();
    transaction.commit().unwrap();
    let rows = client.query("SELECT event_id FROM outbox.outbox ORDER BY id", &[]).unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<Uuid>>(), [kept, after]);
}

#[test]
fn one_bad_event_and_none_is_appended() {
    let db = Database::create();
    let mut client = db.client();
    let own = Uuid::from_u128(3);
    let events = [event("1"), event("2").event_id(own), event("3").event_id(own)];
    let mut transaction = client.transaction().unwrap();
    let error = append_all(&mut transaction, &events).unwrap_err();
    assert!(error.is_duplicate_event_id(), "{error}");
    assert!(transaction.query("SELECT 1", &[]).is_err(), "only a rollback is possible");
    transaction.commit().unwrap();
    assert_eq!(db.count("true"), 0);

    // A limit is found before anything is sent, and the transaction goes on.
    let mut transaction = client.transaction().unwrap();
    let error = append_all(&mut transaction, &[event("1"), event("")]).unwrap_err();
    assert!(
        error.is_invalid_event() && error.to_string().starts_with("event 1: aggregate id is empty"),
        "{error}"
    );
    append(&mut transaction, &event("1")).unwrap();
    transaction.commit().unwrap();
    assert_eq!(db.count("true"), 1);
}

#[test]
fn own_event_ids_are_kept_and_unique() {
    let db = Database::create();
    let mut client = db.client();
    let own = Uuid::from_u128(0x1234);
    assert_eq!(append_now(&mut client, &event("1").event_id(own)).unwrap(), own);
    let error = append_now(&mut client, &event("2").event_id(own)).unwrap_err();
    assert!(error.is_duplicate_event_id() && !error.is_database(), "{error}");
    assert!(error.to_string().contains("rolled back"), "{error}");
    assert_eq!(db.count("true"), 1);
    let before =
        db.client().query_one("SELECT extract(epoch FROM clock_timestamp())::float8", &[]).unwrap();
    let made = append_now(&mut client, &event("1")).unwrap();
    assert_eq!(made.get_version_num(), 7);
    assert_eq!(made.get_variant(), uuid::Variant::RFC4122);
    let millis = (made.as_u128() >> 80) as f64;
    assert!((millis / 1000.0 - before.get::<_, f64>(0)).abs() < 60.0, "{made}");
}

// ------------------------------------------------------------------------------------------------ bytes

#[test]
fn bytes_come_out_as_they_went_in() {
    let db = Database::create();
    let mut client = db.client();
    let all: Vec<u8> = (0..=255).collect();
    let payloads =
        [Vec::new(), vec![0], b"a\0b".to_vec(), b"\xff\xfe\x80".to_vec(), all, vec![0xa7; 1 << 20]];
    for bytes in &payloads {
        let id = append_now(&mut client, &NewEvent::new("o", "1", "t", bytes.clone())).unwrap();
        assert!(payload(&mut client, id) == *bytes, "{} bytes", bytes.len());
        let sql = "SELECT outbox.outbox_append('o', '1', 't', $1::bytea)";
        let id = client.query_one(sql, &[bytes]).unwrap().get(0);
        assert!(payload(&mut client, id) == *bytes, "{} bytes by SQL", bytes.len());
    }
    let events: Vec<_> = payloads.iter().map(|p| NewEvent::new("o", "1", "t", p.clone())).collect();
    let mut transaction = client.transaction().unwrap();
    let ids = append_all(&mut transaction, &events).unwrap();
    transaction.commit().unwrap();
    for (id, bytes) in ids.into_iter().zip(&payloads) {
        assert!(payload(&mut client, id) == *bytes);
    }
}

#[test]
fn json_keeps_its_text_in_every_form() {
    let db = Database::create();
    let mut client = db.client();
    let texts = [
        r#"{"b": 1.0,  "a":1, "a":2, "big":820982911946154508, "e":1E400}"#,
        r#"{"z":"\u0000", "emoji":"🦀", "escaped":"\u00e9"}"#,
        " [ 1 ,\n\t2 ] ",
        "null",
        r#""""#,
    ];
    for text in texts {
        let literal = text.replace('\'', "''");
        for form in ["", "::json", "::text"] {
            let sql = format!("SELECT outbox.outbox_append('o', '1', 't', '{literal}'{form})");
            let id = client.query_one(&sql, &[]).unwrap().get(0);
            assert_eq!(String::from_utf8(payload(&mut client, id)).unwrap(), text, "{form}");
        }
        let id = append_now(&mut client, &NewEvent::new("o", "1", "t", text)).unwrap();
        assert_eq!(payload(&mut client, id), text.as_bytes());
    }
    let types = "SELECT DISTINCT content_type FROM outbox.outbox";
    assert_eq!(client.query_one(types, &[]).unwrap().get::<_, String>(0), "application/json");
    let id = client
        .query_one("SELECT outbox.outbox_append('o', '1', 't', '\\x00'::bytea)", &[])
        .unwrap();
    let row = client.query_one(
        "SELECT content_type FROM outbox.outbox WHERE event_id = $1",
        &[&id.get::<_, Uuid>(0)],
    );
    assert_eq!(row.unwrap().get::<_, String>(0), "application/octet-stream");
    db.execute("DELETE FROM outbox.outbox");
    for form in ["", ", NULL", ", 'application/problem+json; charset=utf-8'"] {
        let sql = format!("SELECT outbox.outbox_append('o', '1', 't', 'no json'{form})");
        refused(&mut client, &sql, "22P02", "json");
    }
    let text = "SELECT outbox.outbox_append('o', '1', 't', 'no json', 'text/plain')";
    let id: Uuid = client.query_one(text, &[]).unwrap().get(0);
    let row = client
        .query_one("SELECT payload, content_type FROM outbox.outbox WHERE event_id = $1", &[&id]);
    let row = row.unwrap();
    assert_eq!((row.get(0), row.get(1)), (b"no json".to_vec(), "text/plain".to_owned()));
}

#[test]
fn without_an_outbox_it_says_what_to_do() {
    let db = Database::create_empty();
    let mut client = db.client();
    for schema in ["outbox", "elsewhere"] {
        let mut transaction = client.transaction().unwrap();
        let outbox = Outbox::in_schema(Schema::new(schema).unwrap());
        let error = outbox.append(&mut transaction, &event("1")).unwrap_err();
        assert!(error.is_schema_mismatch(), "{error}");
        assert!(error.to_string().contains("`pg-outbox migrate`"), "{error}");
        drop(transaction);
        client.batch_execute("CREATE SCHEMA IF NOT EXISTS elsewhere").unwrap();
    }
}

#[test]
fn a_read_only_database_says_where_to_connect() {
    let db = Database::create();
    let mut client = db.client();
    let mut transaction = client.build_transaction().read_only(true).start().unwrap();
    let error = append(&mut transaction, &event("1")).unwrap_err();
    assert!(error.to_string().contains("connect to the primary"), "{error}");
}

#[test]
fn hostile_strings_are_only_strings() {
    let db = Database::create();
    let mut client = db.client();
    let strings = [
        "'; DROP TABLE outbox.outbox; --",
        "\"quoted\" \\ $1 %s ${x} {{y}}",
        "👩‍👩‍👧 🦀 é e\u{301}",
        "\u{202e}rtl \u{2066}isolate",
        "NULL",
        "{a,b}",
        " spaces ",
    ];
    for string in strings {
        let hostile = NewEvent::new(string, string, string, string)
            .content_type(string)
            .header(string, string)
            .header("x", "tab\tand\u{1b}[31m");
        let id = append_now(&mut client, &hostile).unwrap();
        let row =
            client.query_one("SELECT * FROM outbox.outbox WHERE event_id = $1", &[&id]).unwrap();
        for column in ["aggregate_type", "aggregate_id", "event_type", "content_type"] {
            assert_eq!(row.get::<_, String>(column), string);
        }
        assert_eq!(row.get::<_, Vec<u8>>("payload"), string.as_bytes());
        let headers: BTreeMap<String, String> = serde_json::from_value(row.get("headers")).unwrap();
        assert_eq!(headers[string], string);
    }
    for bad in ["\u{1b}[31mred", "a\0", "a\nb", "\u{7f}"] {
        let events = [
            NewEvent::new(bad, "1", "t", ""),
            NewEvent::new("o", bad, "t", ""),
            NewEvent::new("o", "1", bad, ""),
            event("1").content_type(bad),
            event("1").header(bad, "x"),
        ];
        for event in events {
            let error = append_now(&mut client, &event).unwrap_err();
            assert!(
                error.is_invalid_event() && error.to_string().contains("control character"),
                "{error}"
            );
        }
    }
    assert_eq!(db.count("true"), strings.len() as i64);
}

// ------------------------------------------------------------------------------------------------ limits

#[test]
fn every_limit_by_name_from_sql() {
    let db = Database::create();
    let client = &mut db.client();
    let call = |args: &str| format!("SELECT outbox.outbox_append({args})");
    let long = "repeat('é', 127) || 'xy'"; // 256 bytes
    for value in ["''", long] {
        for (args, name) in [
            (format!("{value}, '1', 't', '{{}}'"), "aggregate_type_has_1_to_255_bytes"),
            (format!("'o', {value}, 't', '{{}}'"), "aggregate_id_has_1_to_255_bytes"),
            (format!("'o', '1', {value}, '{{}}'"), "event_type_has_1_to_255_bytes"),
            (
                format!("'o', '1', 't', '{{}}', content_type => {value}"),
                "content_type_has_1_to_255_bytes",
            ),
        ] {
            refused(client, &call(&args), "23514", name);
        }
    }
    let large = "'o', '1', 't', convert_to(repeat('x', 67108865), 'UTF8')";
    refused(client, &call(large), "23514", "payload_has_at_most_67108864_bytes");
    for field in 0..4 {
        let mut names = ["'o'", "'1'", "'t'", "'c'"];
        names[field] = r"E'a\x1b[31m'";
        let [aggregate_type, aggregate_id, event_type, content_type] = names;
        let args = format!(
            "{aggregate_type}, {aggregate_id}, {event_type}, '{{}}', content_type => {content_type}"
        );
        refused(client, &call(&args), "23514", "control character");
    }
    let forever = "'o', '1', 't', '{}', not_before => 'infinity'";
    refused(client, &call(forever), "23514", "times_are_finite");
    // What keeps every limit exactly.
    client
        .batch_execute(&call(
            "repeat('é', 127) || 'x', repeat('x', 255), repeat('x', 255), '{}', repeat('x', 255)",
        ))
        .unwrap();
}

#[test]
fn headers_have_rules_from_sql() {
    let db = Database::create();
    let client = &mut db.client();
    let with = |headers: &str| {
        format!("SELECT outbox.outbox_append('o', '1', 't', '{{}}', headers => {headers})")
    };
    for bad in [
        "'[]'",
        "'\"text\"'",
        "'null'",
        r#"'{"a":1}'"#,
        r#"'{"a":null}'"#,
        r#"'{"a":{"b":"c"}}'"#,
        r#"'{"":"x"}'"#,
        r#"'{"outbox-event-id":"x"}'"#,
        r#"'{"OutBox-x":"x"}'"#,
        r#"'{"a\nb":"x"}'"#,
        r#"'{"a\u001b":"x"}'"#,
        r#"'{"a":"x\r\nInjected: 1"}'"#,
        "jsonb_build_object(repeat('x', 256), 'x')",
        "jsonb_build_object('x', repeat('y', 16384))",
    ] {
        refused(client, &with(bad), "23514", "headers break a limit");
    }
    for good in [
        "'{}'",
        "NULL",
        "jsonb_build_object('x', repeat('y', 16383))",
        r#"'{"traceparent":"00-é", "outbox":"x"}'"#,
    ] {
        client.batch_execute(&with(good)).unwrap();
    }
}

#[test]
fn every_limit_by_name_from_rust() {
    let db = Database::create();
    let mut client = db.client();
    let long = "x".repeat(256);
    for (bad, says) in [
        (NewEvent::new(&*long, "1", "t", ""), "aggregate type has 256 bytes; at most 255"),
        (NewEvent::new("o", &*long, "t", ""), "aggregate id has 256 bytes; at most 255"),
        (NewEvent::new("o", "1", &*long, ""), "event type has 256 bytes; at most 255"),
        (NewEvent::new("o", "1", "", ""), "event type is empty; 1 to 255"),
        (event("1").content_type(&*long), "content type has 256 bytes; at most 255"),
        (event("1").header(&*long, ""), "header name has 256 bytes; at most 255"),
        (event("1").header("Outbox-x", ""), "reserved"),
        (event("1").header("x", "y".repeat(16384)), "headers has 16385 bytes; at most 16384"),
        (
            NewEvent::new("o", "1", "t", vec![0; 67_108_865]),
            "payload has 67108865 bytes; at most 67108864",
        ),
    ] {
        let error = append_now(&mut client, &bad).unwrap_err();
        assert!(error.is_invalid_event() && error.to_string().contains(says), "{error}");
    }
    // What only the database refuses is an invalid event, too.
    let never = event("1").not_before(UNIX_EPOCH + Duration::from_secs(10_000_000_000_000));
    let error = append_now(&mut client, &never).unwrap_err();
    assert!(error.is_invalid_event() || error.is_database(), "{error:?}");
    db.execute("ALTER TABLE outbox.outbox ADD CONSTRAINT no_cats CHECK (aggregate_type <> 'cat')");
    let error = append_now(&mut client, &NewEvent::new("cat", "1", "t", "")).unwrap_err();
    assert!(error.is_invalid_event() && error.to_string().contains("no_cats"), "{error}");
    assert_eq!(db.count("true"), 0);
}

#[test]
fn nulls_and_uneven_arrays_are_refused() {
    let db = Database::create();
    let client = &mut db.client();
    for (args, says) in [
        ("NULL, '1', 't', '{}'", "aggregate type or aggregate id is NULL"),
        ("'o', NULL, 't', '{}'", "aggregate type or aggregate id is NULL"),
        ("'o', '1', NULL, '{}'", "\"event_type\""),
        ("'o', '1', 't', NULL::json", "\"payload\""),
        ("'o', '1', 't', NULL::bytea", "\"payload\""),
        ("'o', '1', 't', NULL", "\"payload\""),
    ] {
        refused(client, &format!("SELECT outbox.outbox_append({args})"), "23502", says);
    }
    let three = "ARRAY['o','o'], ARRAY['1','2'], ARRAY['t','t']";
    for args in [
        format!("{three}, ARRAY['x']::bytea[]"),
        format!("{three}, ARRAY['x','y','z']::bytea[]"),
        format!("{three}, NULL"),
        format!("{three}, ARRAY['x','y']::bytea[], ARRAY['c']"),
        format!("{three}, ARRAY['x','y']::bytea[], headers => ARRAY['{{}}']::jsonb[]"),
        format!(
            "{three}, ARRAY['x','y']::bytea[], event_ids => ARRAY[NULL,NULL,gen_random_uuid()]"
        ),
        format!("{three}, ARRAY['x','y']::bytea[], not_befores => ARRAY[now()]"),
        "NULL, ARRAY['1'], ARRAY['t'], ARRAY['x']::bytea[]".into(),
        "ARRAY['o'], NULL, ARRAY['t'], ARRAY['x']::bytea[]".into(),
        "NULL, NULL, NULL, NULL".into(),
    ] {
        let sql = format!("SELECT outbox.outbox_append_all({args})");
        refused(client, &sql, "22023", "as many entries");
    }
    // Defaults, and nothing at all.
    let sql = format!(
        "SELECT outbox.outbox_append_all({three}, ARRAY['x','y']::bytea[], ARRAY[NULL,'c'], ARRAY[NULL,'{{}}']::jsonb[])"
    );
    let ids: Vec<Uuid> = client.query_one(&sql, &[]).unwrap().get(0);
    assert_eq!(ids.len(), 2);
    let ids: Vec<Uuid> = client
        .query_one("SELECT outbox.outbox_append_all('{}', '{}', '{}', '{}')", &[])
        .unwrap()
        .get(0);
    assert!(ids.is_empty());
}

// ------------------------------------------------------------------------------------------------ the row

#[test]
fn not_before_is_in_the_row() {
    let db = Database::create();
    let mut client = db.client();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let later = UNIX_EPOCH + Duration::from_micros((now + 3600) * 1_000_000 + 123_456);
    let id = append_now(&mut client, &event("1").not_before(later)).unwrap();
    let sql = "SELECT not_before, next_attempt_at, created_at < not_before, status FROM outbox.outbox WHERE event_id = $1";
    let row = client.query_one(sql, &[&id]).unwrap();
    assert_eq!(row.get::<_, SystemTime>(0), later);
    assert_eq!(row.get::<_, SystemTime>(1), later);
    assert!(row.get::<_, bool>(2));
    // In the past: due at once, but the lag is measured from when it was appended.
    let past = event("1").not_before(UNIX_EPOCH);
    let id = append_now(&mut client, &past).unwrap();
    let sql = "SELECT next_attempt_at = created_at AND not_before < created_at FROM outbox.outbox WHERE event_id = $1";
    assert!(client.query_one(sql, &[&id]).unwrap().get::<_, bool>(0));
}

#[test]
fn ids_beyond_what_a_double_can_hold() {
    let db = Database::create();
    let mut client = db.client();
    for last in [(1_i64 << 31) - 1, 1 << 53, i64::MAX - 10] {
        client.execute("SELECT setval('outbox.outbox_id_seq', $1)", &[&last]).unwrap();
        let id = append_now(&mut client, &event("1")).unwrap();
        let row =
            client.query_one("SELECT id FROM outbox.outbox WHERE event_id = $1", &[&id]).unwrap();
        assert_eq!(row.get::<_, i64>(0), last + 1);
    }
}

#[test]
fn relays_are_woken_only_when_one_asked_for_it() {
    let db = Database::create();
    let (mut writer, mut listener) = (db.client(), db.client());
    let channel: String =
        writer.query_one("SELECT 'outbox_' || md5('outbox')", &[]).unwrap().get(0);
    listener.batch_execute(&format!("LISTEN {channel}; LISTEN probe")).unwrap();
    // Notifications come in the order of commits, so what is in front of the probe is all there was.
    let mut woken = |writer: &mut Client, appends: usize| {
        for n in 0..appends {
            append_now(writer, &event(n.to_string())).unwrap();
        }
        writer.batch_execute("NOTIFY probe").unwrap();
        let mut notifications = listener.notifications();
        let mut wait = notifications.timeout_iter(Duration::from_secs(20));
        let mut count = 0;
        while wait.next().unwrap().expect("the probe arrives").channel() != "probe" {
            count += 1;
        }
        count
    };
    assert_eq!(woken(&mut writer, 3), 0);
    db.execute("INSERT INTO outbox.outbox_wakeup VALUES ('gone', now() - interval '1 s')");
    assert_eq!(woken(&mut writer, 3), 0);
    db.execute("INSERT INTO outbox.outbox_wakeup VALUES ('asleep', now() + interval '1 min')");
    assert_eq!(woken(&mut writer, 3), 3);
    // Not for what is rolled back.
    let mut transaction = writer.transaction().unwrap();
    append(&mut transaction, &event("1")).unwrap();
    transaction.rollback().unwrap();
    assert_eq!(woken(&mut writer, 0), 0);
}

#[test]
fn an_array_that_does_not_begin_at_one_is_like_any_other() {
    let db = Database::create();
    let own_id = Uuid::from_u128(7);
    let mut first = db.client();
    let mut open = first.transaction().unwrap();
    let sql = "SELECT outbox.outbox_append_all('[7:7]={order}', '[7:7]={42}', '[7:7]={placed}',
               ARRAY['x'::bytea], event_ids => ('[7:7]={' || $1::text || '}')::uuid[])";
    let ids: Vec<Uuid> = open.query_one(sql, &[&own_id.to_string()]).unwrap().get(0);
    assert_eq!(ids, [own_id]);
    let mut second = db.client();
    second.batch_execute("SET lock_timeout = '200ms'").unwrap();
    let append = "SELECT outbox.outbox_append('order', '42', 'paid', '{}')";
    let error = second.batch_execute(append).unwrap_err();
    assert_eq!(error.code().unwrap().code(), "55P03", "the aggregate was not locked");
    open.commit().unwrap();
    second.batch_execute(append).unwrap();
}

#[test]
fn a_clash_of_outbox_ids_is_no_duplicate_event_id() {
    let db = Database::create();
    db.append("order", "1", "placed", b"{}");
    db.execute("SELECT setval(pg_get_serial_sequence('outbox.outbox', 'id'), 1, false)");
    let mut client = db.client();
    let mut transaction = client.transaction().unwrap();
    let error = append(&mut transaction, &NewEvent::new("order", "1", "paid", "{}")).unwrap_err();
    assert!(error.is_database() && !error.is_duplicate_event_id(), "{error}");
}
