//! The writer's door through Diesel: what `tests/append.rs` proves of the SQL, here of the way to it.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::Database;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use pg_outbox::append::diesel::{append, append_all};
use pg_outbox::{Error, NewEvent, Outbox, Schema, store};
use uuid::Uuid;

fn connect(db: &Database) -> PgConnection {
    PgConnection::establish(&db.url()).unwrap()
}

fn event(id: &str) -> NewEvent {
    NewEvent::new("order", id, "placed", "{}")
}

fn event_ids(db: &Database) -> Vec<Uuid> {
    let rows = db.client().query("SELECT event_id FROM outbox.outbox ORDER BY id", &[]).unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[test]
fn ids_in_input_order_and_every_field_as_it_was() {
    let db = Database::create();
    let mut conn = connect(&db);
    let events: Vec<_> = (0..500).map(|n| event(&format!("k{}", n % 7))).collect();
    let ids = conn.transaction(|conn| append_all(conn, &events)).unwrap();
    assert_eq!(ids.len(), 500);
    assert_eq!(event_ids(&db), ids);

    let own = Uuid::from_u128(7);
    // Microseconds, before and after the year from which PostgreSQL counts.
    for micros in [1_u64, 946_684_799_999_999, 4_000_000_000_123_456] {
        db.execute("DELETE FROM outbox.outbox");
        let time = UNIX_EPOCH + Duration::from_micros(micros);
        let full = NewEvent::new("wörd \"'$1", "🦀", "t", vec![0, 0xff, 0x80])
            .content_type("application/x-bytes")
            .header("traceparent", "00-é")
            .header("a", "")
            .event_id(own)
            .not_before(time);
        assert_eq!(conn.transaction(|conn| append(conn, &full)).unwrap(), own);
        let row = db.client().query_one("SELECT * FROM outbox.outbox", &[]).unwrap();
        assert_eq!(row.get::<_, String>("aggregate_type"), "wörd \"'$1");
        assert_eq!(row.get::<_, String>("aggregate_id"), "🦀");
        assert_eq!(row.get::<_, Vec<u8>>("payload"), [0, 0xff, 0x80]);
        assert_eq!(row.get::<_, String>("content_type"), "application/x-bytes");
        assert_eq!(
            row.get::<_, serde_json::Value>("headers").to_string(),
            r#"{"a":"","traceparent":"00-é"}"#
        );
        assert_eq!(row.get::<_, SystemTime>("not_before"), time);
    }
    let big = vec![7; 1 << 20];
    let id =
        conn.transaction(|conn| append(conn, &NewEvent::new("o", "1", "t", big.clone()))).unwrap();
    let row = db
        .client()
        .query_one("SELECT payload FROM outbox.outbox WHERE event_id = $1", &[&id])
        .unwrap();
    assert_eq!(row.get::<_, Vec<u8>>(0), big);
}

#[test]
fn outside_a_transaction_nothing_is_sent() {
    let db = Database::create();
    let mut conn = connect(&db);
    for events in [&[][..], &[event("1")]] {
        let error = append_all(&mut conn, events).unwrap_err();
        assert!(error.is_not_in_transaction(), "{error}");
        assert!(error.to_string().contains("conn.transaction"), "{error}");
    }
    assert!(append(&mut conn, &event("1")).unwrap_err().is_not_in_transaction());
    // A transaction that has ended is none.
    conn.transaction(|conn| append(conn, &event("1"))).unwrap();
    assert!(append(&mut conn, &event("2")).unwrap_err().is_not_in_transaction());
    assert_eq!(event_ids(&db).len(), 1);
}

#[test]
fn through_a_pool() {
    let db = Database::create();
    let pool = Pool::builder()
        .max_size(2)
        .build(ConnectionManager::<PgConnection>::new(db.url()))
        .unwrap();
    let mut conn = pool.get().unwrap();
    assert!(append(&mut conn, &event("1")).unwrap_err().is_not_in_transaction());
    let id = conn.transaction(|conn| append(conn, &event("1"))).unwrap();
    assert_eq!(event_ids(&db), [id]);
    let error = conn
        .transaction(|conn| {
            append(conn, &event("2"))?;
            Err::<(), Error>(DieselError::RollbackTransaction.into())
        })
        .unwrap_err();
    assert!(error.is_database());
    assert_eq!(event_ids(&db), [id]);
}

#[test]
fn what_is_rolled_back_never_was() {
    let db = Database::create();
    let mut conn = connect(&db);
    let rolled_back = conn.transaction(|conn| {
        append(conn, &event("1"))?;
        Err::<(), _>(DieselError::RollbackTransaction)
    });
    assert_eq!(rolled_back, Err(DieselError::RollbackTransaction));
    assert!(event_ids(&db).is_empty());
    // The savepoint is rolled back, the transaction around it is not.
    let kept = conn.transaction(|conn| {
        let kept = append(conn, &event("1"))?;
        let inner = conn.transaction(|conn| {
            append(conn, &event("2"))?;
            Err::<(), _>(DieselError::RollbackTransaction)
        });
        assert!(inner.is_err());
        Ok::<_, DieselError>(kept)
    });
    assert_eq!(event_ids(&db), [kept.unwrap()]);
}

#[test]
fn a_limit_and_a_duplicate_are_told_apart() {
    let db = Database::create();
    let mut conn = connect(&db);
    let long = event(&"x".repeat(256));
    let error = conn.transaction(|conn| append(conn, &long)).unwrap_err();
    assert!(
        error.is_invalid_event() && error.to_string().contains("256 bytes; at most 255"),
        "{error}"
    );
    let error = conn.transaction(|conn| append_all(conn, &[event("1"), long.clone()])).unwrap_err();
    assert!(error.is_invalid_event() && error.to_string().starts_with("event 1: "), "{error}");
    assert!(event_ids(&db).is_empty());

    let own = event("1").event_id(Uuid::from_u128(9));
    conn.transaction(|conn| append(conn, &own)).unwrap();
    let error = conn.transaction(|conn| append(conn, &own)).unwrap_err();
    assert!(error.is_duplicate_event_id(), "{error:?}");
    // In a savepoint, so that the transaction can go on.
    conn.transaction(|conn| {
        let again = conn.transaction(|conn| append(conn, &own));
        assert!(again.unwrap_err().is_duplicate_event_id());
        append(conn, &event("2"))
    })
    .unwrap();
    assert_eq!(event_ids(&db).len(), 2);

    // What only the database refuses.
    db.execute("ALTER TABLE outbox.outbox ADD CONSTRAINT no_cats CHECK (aggregate_type <> 'cat')");
    let cat = NewEvent::new("cat", "1", "t", "{}");
    let error = conn.transaction(|conn| append(conn, &cat)).unwrap_err();
    assert!(error.is_invalid_event() && error.to_string().contains("no_cats"), "{error}");
    db.execute("DROP SCHEMA outbox CASCADE");
    let error = conn.transaction(|conn| append(conn, &cat)).unwrap_err();
    assert!(error.is_database(), "{error:?}");
}

#[test]
fn question_mark_works_with_every_error_type() {
    let db = Database::create();
    let mut conn = connect(&db);
    let (long, own) = (event(&"x".repeat(256)), event("1").event_id(Uuid::from_u128(9)));
    conn.transaction(|conn| append(conn, &own)).unwrap();

    // Diesel's own: the database's error is Diesel's again, and a limit can be taken out.
    let error =
        conn.transaction::<Uuid, DieselError, _>(|conn| Ok(append(conn, &own)?)).unwrap_err();
    assert!(
        matches!(error, DieselError::DatabaseError(DatabaseErrorKind::UniqueViolation, _)),
        "{error:?}"
    );
    let error =
        conn.transaction::<Uuid, DieselError, _>(|conn| Ok(append(conn, &long)?)).unwrap_err();
    assert!(error.to_string().contains("at most 255"), "{error}");
    assert!(Error::from(error).is_invalid_event());
    let outside: DieselError = append(&mut conn, &own).unwrap_err().into();
    assert!(Error::from(outside).is_not_in_transaction());

    // Ours: Diesel's error is the source.
    let error = conn
        .transaction::<(), Error, _>(|conn| {
            diesel::sql_query("SELECT 1/0").execute(conn)?;
            Ok(())
        })
        .unwrap_err();
    assert!(error.is_database() && error.to_string().contains("division by zero"), "{error}");
    assert!(std::error::Error::source(&error).unwrap().is::<DieselError>());

    // Any: the predicates by a downcast.
    type Any = Box<dyn std::error::Error + Send + Sync>;
    let error = conn
        .transaction::<Uuid, Any, _>(|conn| {
            diesel::sql_query("SELECT 1").execute(conn)?;
            Ok(append(conn, &own)?)
        })
        .unwrap_err();
    assert!(error.downcast_ref::<Error>().unwrap().is_duplicate_event_id());
}

#[test]
fn another_schema_and_nothing_to_append() {
    let db = Database::create_empty();
    let schema = Schema::new("an \"outbox\" for 'billing'").unwrap();
    store::migrate(&mut db.client(), &schema).unwrap();
    let (mut conn, outbox) = (connect(&db), Outbox::in_schema(schema));
    conn.transaction(|conn| {
        assert!(outbox.append_all_diesel(conn, &[])?.is_empty());
        outbox.append_diesel(conn, &event("1"))
    })
    .unwrap();
    let sql = r#"SELECT count(*) FROM "an ""outbox"" for 'billing'".outbox"#;
    assert_eq!(db.client().query_one(sql, &[]).unwrap().get::<_, i64>(0), 1);
}
