//! Why an event has not gone out: each answer, from rows that were set up by hand.

mod common;

use common::Database;
use pg_outbox::store::why::{Answer, Wait, Why, why};
use pg_outbox::{EventRef, Schema};
use postgres::Client;

const SETUP: &str = "
    SELECT outbox.outbox_append('order', 'a', 'placed', '{}'::json);
    SELECT outbox.outbox_append('order', 'a', 'paid', '{}'::json);
    INSERT INTO outbox.outbox_relay (relay_id, worker) VALUES ('relay-a', 0), ('relay-a', 1)";

struct Case {
    // Dropped before the database, which could not be dropped otherwise.
    client: Client,
    database: Database,
}

impl Case {
    /// Two events of one aggregate, ids 1 and 2, and a living relay.
    fn new() -> Self {
        let database = Database::create();
        let mut client = database.client();
        client.batch_execute(SETUP).expect("setup");
        Self { client, database }
    }

    fn ask(&mut self, event: impl Into<EventRef>) -> Why {
        why(&mut self.client, &Schema::default(), &event.into()).expect("why").expect("an event")
    }

    fn set(&mut self, id: i64, what: &str) {
        let done = self
            .client
            .execute(&format!("UPDATE outbox.outbox SET {what} WHERE id = $1"), &[&id])
            .expect(what);
        assert_eq!(done, 1);
    }
}

fn has(why: &Why, parts: &[&str]) {
    let text = why.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn finished_events() {
    let mut case = Case::new();
    case.set(1, "status = 'published', published_at = now() - interval '1 h'");
    has(
        &case.ask(1),
        &["It was published at 20", "(60 min ago)", "placed) of order a was appended at 20"],
    );
    case.set(1, "status = 'discarded', discarded_at = now(), discard_note = 'ann: obsolete'");
    has(&case.ask(1), &["It was discarded at 20", "by ann: obsolete."]);
    case.set(
        1,
        "status = 'dead', died_at = now() - interval '3 min', last_error = 'schema rejected'",
    );
    has(&case.ask(1), &["It is dead since 20", "(3 min ago): schema rejected.", "requeue"]);
}

#[test]
fn both_ids_find_the_event_and_an_unknown_one_is_none() {
    let mut case = Case::new();
    let event_id = case.ask(2).event_id;
    assert_eq!(case.ask(event_id).id, 2);
    for unknown in [EventRef::Id(99), EventRef::EventId(uuid::Uuid::nil())] {
        assert_eq!(why(&mut case.client, &Schema::default(), &unknown).expect("why"), None);
    }
}

#[test]
fn held_behind_a_dead_event() {
    let mut case = Case::new();
    case.set(
        1,
        "status = 'dead', died_at = now() - interval '3 h', last_error = 'schema rejected.'",
    );
    let held = case.ask(2);
    assert!(matches!(held.answer, Answer::Held { by: 1, .. }), "{held:?}");
    has(
        &held,
        &[
            "held behind event 1",
            "dead since 20",
            "(3 h ago): schema rejected. Requeue or discard event 1.",
        ],
    );
    case.set(1, "aggregate_id = 'b'");
    assert_eq!(case.ask(2).answer, Answer::Waits(Wait::Due), "another aggregate holds nothing");
}

#[test]
fn behind_an_earlier_pending_event_and_what_that_one_waits_for() {
    let mut case = Case::new();
    has(
        &case.ask(2),
        &["waits behind event 1 of its aggregate. Event 1 is due: the next claim takes it."],
    );
    case.set(1, "locked_by = 'relay-b', locked_until = now() + interval '20 s'");
    has(&case.ask(2), &["Event 1 is leased by relay-b until 20", "s)."]);
    case.set(
        1,
        "locked_by = NULL, locked_until = NULL, retry_since = now() - interval '1 h', attempts = 9,
                 next_attempt_at = now() + interval '4 min', last_error = 'timed out'",
    );
    has(
        &case.ask(2),
        &[
            "Event 1 is backing off until 20",
            "(in 4 min)",
            "after 9 attempts and failures since 20",
            "timed out.",
        ],
    );
    case.set(1, "retry_since = NULL, next_attempt_at = now() + interval '3 h', not_before = now() + interval '3 h'");
    has(&case.ask(2), &["Event 1 is not due before 20", "(in 3 h)"]);
    case.set(1, "status = 'published'");
    assert_eq!(case.ask(2).answer, Answer::Waits(Wait::Due));
}

#[test]
fn the_first_of_its_aggregate() {
    let mut case = Case::new();
    assert_eq!(case.ask(1).answer, Answer::Waits(Wait::Due));
    case.set(1, "locked_by = 'relay-a', locked_until = now() + interval '20 s'");
    has(&case.ask(1), &["It is leased by relay-a until"]);
    case.set(1, "locked_until = now() - interval '1 s'");
    assert_eq!(case.ask(1).answer, Answer::Waits(Wait::Due), "a lapsed lease holds nothing");
    case.set(1, "unexplained_failures = 1, next_attempt_at = now() + interval '4 s', last_error = 'panicked'");
    has(&case.ask(1), &["It is backing off until", "panicked."]);
}

#[test]
fn no_relay_or_none_that_is_not_paused() {
    let mut case = Case::new();
    let relay = |case: &mut Case, sql: &str| case.client.batch_execute(sql).expect(sql);
    let paused = |case: &mut Case| matches!(case.ask(1).answer, Answer::Waits(Wait::Paused { .. }));
    // A pause is written by thread 0 and holds for the whole relay.
    let pause = |types: &str| {
        format!(
            "UPDATE outbox.outbox_relay SET paused_types = '{types}', paused_reason = 'refused', paused_since = now() WHERE worker = 0"
        )
    };
    relay(&mut case, &pause("{invoice}"));
    assert_eq!(case.ask(1).answer, Answer::Waits(Wait::Due), "another destination");
    relay(&mut case, &pause("{invoice,order}"));
    assert!(paused(&mut case));
    has(
        &case.ask(2),
        &["Event 1 is due, but every living relay paused its destination since 20", ": refused."],
    );
    relay(&mut case, &pause("{*}"));
    assert!(paused(&mut case));
    relay(&mut case, "INSERT INTO outbox.outbox_relay (relay_id, worker) VALUES ('relay-b', 0)");
    assert_eq!(case.ask(1).answer, Answer::Waits(Wait::Due), "relay-b takes it");
    relay(
        &mut case,
        "UPDATE outbox.outbox_relay SET heartbeat_at = now() - interval '31 s' WHERE relay_id = 'relay-b'",
    );
    assert!(paused(&mut case), "relay-b is not alive");
    relay(
        &mut case,
        "UPDATE outbox.outbox_relay SET heartbeat_at = NULL WHERE relay_id = 'relay-a'",
    );
    has(&case.ask(1), &["It is due, but no relay is alive."]);
    case.set(1, "next_attempt_at = now() + interval '3 h'");
    has(&case.ask(1), &["It is not due before"]);
}

#[test]
fn no_relay_that_serves_its_type() {
    let mut case = Case::new();
    let relays = |case: &mut Case, only: &str, except: &str| {
        let serves = format!(
            "UPDATE outbox.outbox_relay SET only_types = '{only}', except_types = '{except}' WHERE worker = 0"
        );
        case.client.batch_execute(&serves).expect("an update");
        case.ask(1).answer
    };
    assert_eq!(relays(&mut case, "{order}", "{}"), Answer::Waits(Wait::Due));
    assert_eq!(relays(&mut case, "{invoice}", "{}"), Answer::Waits(Wait::NotServed));
    assert_eq!(relays(&mut case, "{}", "{order}"), Answer::Waits(Wait::NotServed));
    has(&case.ask(1), &["It is due, but no living relay serves its aggregate type: see --only"]);
    case.client
        .batch_execute("INSERT INTO outbox.outbox_relay (relay_id, worker) VALUES ('relay-b', 0)")
        .expect("a row");
    assert_eq!(case.ask(1).answer, Answer::Waits(Wait::Due), "relay-b serves all");
}

#[test]
fn finding_what_is_in_front_reads_one_row_of_each_kind() {
    let mut case = Case::new();
    case.client.batch_execute(
        "ALTER TABLE outbox.outbox SET (autovacuum_enabled = off); DELETE FROM outbox.outbox; ANALYZE outbox.outbox;
         INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status)
         SELECT gen_random_uuid(), 'order', i::text, 'placed', '', 'published' FROM generate_series(1, 50000) i;
         INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT gen_random_uuid(), 'order', 'hot', 'placed', '' FROM generate_series(1, 50000) i").expect("rows");
    for analyze in ["", "ANALYZE outbox.outbox"] {
        case.client.batch_execute(analyze).expect("analyze");
        let last: i64 =
            case.client.query_one("SELECT max(id) FROM outbox.outbox", &[]).expect("max").get(0);
        // A new session has counted nothing yet.
        let mut client = case.database.client();
        let mut transaction = client.transaction().expect("begin");
        let answer = why(&mut transaction, &Schema::default(), &last.into())
            .expect("why")
            .expect("an event")
            .answer;
        assert!(matches!(answer, Answer::Behind { id, .. } if id == last - 49_999), "{answer:?}");
        let row = transaction.query_one(
            "SELECT coalesce(seq_scan, 0), coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables
              WHERE relid = 'outbox.outbox'::regclass", &[]).expect("statistics");
        let (sequential, fetched): (i64, i64) = (row.get(0), row.get(1));
        assert!(
            sequential == 0 && fetched < 20,
            "{analyze:?}: {sequential} sequential scans, {fetched} rows"
        );
    }
}
