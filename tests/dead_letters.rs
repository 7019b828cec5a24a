//! Dead letters: look, put back, close; two operators at once; a hundred thousand of them.

mod common;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use common::Database;
use pg_outbox::store::dead_letters::{Filter, FilterBuilder, discard, groups, list, requeue, show};
use pg_outbox::store::status::scrape;
use pg_outbox::{EventRef, Schema};
use postgres::Client;
use uuid::Uuid;

type Work<'a> = &'a mut dyn FnMut(&mut postgres::Transaction<'_>);

const REASON: &str = "schema rejected";

/// Appends an event and returns its id.
fn append(client: &mut Client, aggregate: &str, event_type: &str) -> i64 {
    let event_id: Uuid = client
        .query_one("SELECT outbox.outbox_append('order', $1, $2, '{\"n\":1}'::json, headers => '{\"k\":\"v\"}')", &[&aggregate, &event_type])
        .expect("append")
        .get(0);
    client
        .query_one("SELECT id FROM outbox.outbox WHERE event_id = $1", &[&event_id])
        .expect("id")
        .get(0)
}

/// Makes an event dead, as a relay's verdict after some history leaves it.
fn kill(client: &mut Client, id: i64, reason: &str, ago: Duration) {
    let done = client
        .execute(
            "UPDATE outbox.outbox SET status = 'dead', died_at = clock_timestamp() - $3 * interval '1 s', last_error = $2,
                    attempts = 7, unexplained_failures = 2, retry_since = clock_timestamp() - interval '2 days',
                    locked_by = 'relay-a', lease_id = 9, locked_until = clock_timestamp() + interval '1 h' WHERE id = $1",
            &[&id, &reason, &ago.as_secs_f64()],
        )
        .expect("kill");
    assert_eq!(done, 1);
}

fn dead(client: &mut Client, aggregate: &str, reason: &str) -> i64 {
    let id = append(client, aggregate, "placed");
    kill(client, id, reason, Duration::ZERO);
    id
}

fn by_id(id: i64) -> Filter {
    Filter::events([EventRef::Id(id)])
}

#[test]
fn a_requeued_event_gets_a_new_window_and_keeps_its_error() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    let id = dead(&mut client, "a", REASON);
    let event = show(&mut client, &schema, &id.into()).expect("show").expect("an event");
    assert_eq!((event.status.as_str(), event.payload.as_slice()), ("dead", &br#"{"n":1}"#[..]));
    assert_eq!(event.headers["k"], "v");

    assert_eq!(requeue(&mut client, &schema, &by_id(id), None).expect("requeue"), [event.event_id]);

    let event =
        show(&mut client, &schema, &event.event_id.into()).expect("show").expect("an event");
    assert_eq!(event.status, "pending");
    assert_eq!((event.attempts, event.unexplained_failures), (0, 0));
    assert_eq!((event.retry_since, event.died), (None, None));
    assert_eq!((event.locked_by, event.lease_id, event.locked_until), (None, None, None));
    assert_eq!(event.last_error.as_deref(), Some(REASON));
    assert!(event.next_attempt.at > event.created.at, "or it is not in the index outbox_waiting");
    assert!(!event.next_attempt.is_ahead(), "due at once");
    let metrics = scrape(&mut client, &schema, Duration::from_secs(5)).expect("scrape");
    assert_eq!((metrics.pending_rows, metrics.retrying_rows, metrics.dead_rows), (1, 0, 0));
}

#[test]
fn a_requeue_in_an_old_transaction_is_still_found_by_the_waiting_index() {
    let (database, schema) = (Database::create(), Schema::default());
    let (mut client, mut other) = (database.client(), database.client());
    let mut transaction = client.transaction().expect("begin");
    transaction.query("SELECT now()", &[]).expect("an early now()");
    let id = dead(&mut other, "a", REASON);
    assert_eq!(requeue(&mut transaction, &schema, &by_id(id), None).expect("requeue").len(), 1);
    assert_eq!(
        list(&mut other, &schema, &by_id(id), None, 10).expect("list").len(),
        1,
        "not committed yet"
    );
    transaction.commit().expect("commit");
    let event = show(&mut client, &schema, &id.into()).expect("show").expect("an event");
    assert!(event.next_attempt.at > event.created.at);
}

#[test]
fn of_two_operators_at_once_one_wins() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    for round in 0..40 {
        for n in 0..5 {
            dead(&mut client, &format!("{round}-{n}"), REASON);
        }
        let barrier = Barrier::new(2);
        let operator = |number: i32| {
            let (barrier, schema, mut client) = (&barrier, &schema, database.client());
            move || {
                barrier.wait();
                if round % 2 == 1 && number == 1 {
                    discard(&mut client, schema, &Filter::everything(), "ann", "obsolete")
                        .expect("discard")
                } else {
                    requeue(&mut client, schema, &Filter::everything(), None).expect("requeue")
                }
            }
        };
        let (first, second) = thread::scope(|scope| {
            let (a, b) = (scope.spawn(operator(0)), scope.spawn(operator(1)));
            (a.join().expect("first"), b.join().expect("second"))
        });
        let mut sizes = [first.len(), second.len()];
        sizes.sort_unstable();
        assert_eq!(sizes, [0, 5], "round {round}");
    }
}

#[test]
fn an_operator_who_waits_for_another_gets_nothing() {
    let (database, schema) = (Database::create(), Schema::default());
    let (mut client, mut watcher) = (database.client(), database.client());
    dead(&mut client, "a", REASON);
    let mut transaction = client.transaction().expect("begin");
    assert_eq!(
        requeue(&mut transaction, &schema, &Filter::everything(), None).expect("requeue").len(),
        1
    );
    let mut late = database.client();
    let second = thread::scope(|scope| {
        let second = scope
            .spawn(|| requeue(&mut late, &schema, &Filter::everything(), None).expect("requeue"));
        let deadline = Instant::now() + Duration::from_secs(20);
        let waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        while watcher.query(waiting, &[]).expect("activity").is_empty() {
            assert!(Instant::now() < deadline, "the second operator never waited");
            thread::sleep(Duration::from_millis(5));
        }
        transaction.commit().expect("commit");
        second.join().expect("second")
    });
    assert!(second.is_empty(), "{second:?}");
}

#[test]
fn a_discard_needs_a_note_and_releases_the_aggregate() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    let id = dead(&mut client, "a", REASON);
    append(&mut client, "a", "paid");
    for (by, note) in [("", "why"), ("ann", " "), ("ann", "x\0y")] {
        let error =
            discard(&mut client, &schema, &by_id(id), by, note).expect_err("no note").to_string();
        assert!(error.contains("who discards and why"), "{error}");
    }
    assert_eq!(
        discard(&mut client, &schema, &by_id(id), "ann", "obsolete").expect("discard").len(),
        1
    );
    let event = show(&mut client, &schema, &id.into()).expect("show").expect("an event");
    assert_eq!(
        (event.status.as_str(), event.discard_note.as_deref()),
        ("discarded", Some("ann: obsolete"))
    );
    assert!(event.discarded.is_some() && event.locked_by.is_none());
    assert!(discard(&mut client, &schema, &by_id(id), "ann", "again").expect("discard").is_empty());
    assert!(
        requeue(&mut client, &schema, &by_id(id), None).expect("requeue").is_empty(),
        "closed for good"
    );
    assert_eq!(scrape(&mut client, &schema, Duration::from_secs(5)).expect("scrape").held_rows, 0);
}

#[test]
fn only_the_dead_are_requeued() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    let ids: Vec<i64> = (0..3).map(|n| append(&mut client, &n.to_string(), "placed")).collect();
    client
        .execute("UPDATE outbox.outbox SET status = 'published' WHERE id = $1", &[&ids[1]])
        .expect("update");
    kill(&mut client, ids[2], REASON, Duration::ZERO);
    let everything = Filter::events(ids.iter().copied().map(EventRef::Id));
    assert_eq!(requeue(&mut client, &schema, &everything, None).expect("requeue").len(), 1);
}

#[test]
fn each_filter_finds_its_own() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    let old = append(&mut client, "old", "placed");
    kill(&mut client, old, "timeout 100% sure", Duration::from_secs(3600));
    let young = append(&mut client, "young", "paid");
    kill(&mut client, young, "rejected", Duration::ZERO);
    let young_event =
        show(&mut client, &schema, &young.into()).expect("show").expect("an event").event_id;
    let hour = Duration::from_secs(1800);
    let cases: Vec<(FilterBuilder, Vec<i64>)> = vec![
        (Filter::builder().events([old.into(), young_event.into()]), vec![old, young]),
        (Filter::builder().events([young_event.into()]), vec![young]),
        (Filter::builder().events([]), vec![]),
        (Filter::builder().aggregate("order", "old"), vec![old]),
        (Filter::builder().aggregate("invoice", "old"), vec![]),
        (Filter::builder().aggregate_type("order"), vec![old, young]),
        (Filter::builder().aggregate_type("invoice"), vec![]),
        (Filter::builder().event_type("paid"), vec![young]),
        (Filter::builder().reason("100% s"), vec![old]),
        (Filter::builder().reason("%"), vec![old]),
        (Filter::builder().older_than(hour), vec![old]),
        (Filter::builder().younger_than(hour), vec![young]),
        (Filter::builder().older_than(Duration::MAX), vec![]),
        (Filter::builder().younger_than(Duration::MAX), vec![old, young]),
        (Filter::builder().older_than(hour).event_type("paid"), vec![]),
    ];
    for (builder, expected) in cases {
        let filter = builder.build().expect("a filter");
        let found = list(&mut client, &schema, &filter, None, 10).expect("list");
        assert_eq!(
            found.iter().map(|letter| letter.id).collect::<Vec<_>>(),
            expected,
            "{filter:?}"
        );
    }
    assert_eq!(
        requeue(&mut client, &schema, &Filter::everything(), Some(1)).expect("requeue").len(),
        1
    );
    let left = list(&mut client, &schema, &Filter::everything(), None, 10).expect("list");
    assert_eq!(
        left.iter().map(|letter| letter.id).collect::<Vec<_>>(),
        [young],
        "the oldest id went first"
    );
}

#[test]
fn the_list_shows_what_is_held_and_groups_fold_the_numbers() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    let first = dead(
        &mut client,
        "a",
        "order 12 of 01936f5e-8a2b-7c3d-9e4f-5a6b7c8d9e0f refused at 0xFF after 1.5s",
    );
    append(&mut client, "a", "paid");
    append(&mut client, "a", "shipped");
    append(&mut client, "free", "paid");
    let second = dead(
        &mut client,
        "b",
        "order 7 of 01936f5e-8a2b-7c3d-9e4f-5a6b7c8d9e10 refused at 0xA after 20s",
    );
    dead(&mut client, "c", "bad facade");
    client.execute("UPDATE outbox.outbox SET created_at = created_at - interval '1 h' WHERE event_type = 'paid'", &[]).expect("shift");

    let page = list(&mut client, &schema, &Filter::everything(), None, 2).expect("list");
    assert_eq!(
        page.iter().map(|letter| (letter.id, letter.held)).collect::<Vec<_>>(),
        [(first, 2), (second, 0)]
    );
    let waits = page[0].held_since.expect("a held event").age();
    assert!((3600..3700).contains(&waits.as_secs()), "{waits:?}");
    assert_eq!(page[1].held_since, None);
    assert_eq!((page[0].attempts, page[0].aggregate_id.as_str()), (7, "a"));
    let next =
        list(&mut client, &schema, &Filter::everything(), Some(page[1].id), 2).expect("list");
    assert_eq!(
        next.iter().map(|letter| letter.reason.as_str()).collect::<Vec<_>>(),
        ["bad facade"]
    );

    let groups = groups(&mut client, &schema, &Filter::everything()).expect("groups");
    let found: Vec<_> =
        groups.iter().map(|g| (g.reason.as_str(), g.count, g.held, g.example)).collect();
    assert_eq!(found[0], ("order # of … refused at … after #s", 2, 2, first));
    assert_eq!((found[1].0, found[1].1), ("bad facade", 1));
}

#[test]
fn relays_are_woken_only_while_one_sleeps() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    client
        .batch_execute(&format!("LISTEN outbox_{}", md5(&mut database.client())))
        .expect("listen");
    let sleep = |client: &mut Client, until: &str| {
        client
            .batch_execute(&format!(
                "INSERT INTO outbox.outbox_wakeup VALUES ('relay-a', now() + interval '{until}')
             ON CONFLICT (relay_id) DO UPDATE SET until = excluded.until"
            ))
            .expect("sleep");
    };
    // A session gets its own notifications before the answer to its commit.
    let notified = |client: &mut Client, discards: bool| {
        dead(client, "a", REASON);
        client.batch_execute("SELECT 1").expect("drain");
        let earlier = client.notifications().len();
        let done = if discards {
            discard(client, &schema, &Filter::everything(), "ann", "obsolete")
        } else {
            requeue(client, &schema, &Filter::everything(), None)
        };
        assert_eq!(done.expect("settle").len(), 1);
        client.batch_execute("SELECT 1").expect("drain");
        client.notifications().len() - earlier
    };
    assert_eq!(notified(&mut client, false), 0, "nobody sleeps");
    sleep(&mut client, "-1 s");
    assert_eq!(notified(&mut client, false), 0, "the wish has expired");
    sleep(&mut client, "1 min");
    assert_eq!(notified(&mut client, false), 1);
    assert_eq!(notified(&mut client, true), 1);
}

fn md5(client: &mut Client) -> String {
    client.query_one("SELECT md5('outbox')", &[]).expect("md5").get(0)
}

#[test]
fn a_hundred_thousand_dead_are_no_trouble_and_what_is_published_is_not_read() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    client.batch_execute(
        "ALTER TABLE outbox.outbox SET (autovacuum_enabled = off);
         ANALYZE outbox.outbox;
         INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status)
         SELECT gen_random_uuid(), 'order', i::text, 'placed', '', 'published' FROM generate_series(1, 200000) i;
         INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status, died_at, last_error)
         SELECT gen_random_uuid(), 'order', i::text, 'placed', '', 'dead', now(), 'refused ' || i FROM generate_series(1, 10) i",
    ).expect("rows");
    let looked_at = |work: Work<'_>| -> (i64, i64) {
        // A new session has counted nothing yet.
        let mut client = database.client();
        let mut transaction = client.transaction().expect("begin");
        work(&mut transaction);
        let row = transaction.query_one(
            "SELECT coalesce(seq_scan, 0), coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relid = 'outbox.outbox'::regclass", &[]).expect("statistics");
        (row.get(0), row.get(1))
    };
    let everything = Filter::everything();
    let works: [(&str, Work<'_>); 5] = [
        ("list", &mut |t| {
            assert_eq!(list(t, &schema, &everything, None, 5).expect("list").len(), 5)
        }),
        ("groups", &mut |t| assert_eq!(groups(t, &schema, &everything).expect("groups").len(), 1)),
        ("show", &mut |t| assert!(show(t, &schema, &200_003.into()).expect("show").is_some())),
        ("requeue", &mut |t| {
            assert_eq!(requeue(t, &schema, &everything, None).expect("requeue").len(), 10)
        }),
        ("discard", &mut |t| {
            assert_eq!(discard(t, &schema, &everything, "ann", "x").expect("discard").len(), 10)
        }),
    ];
    for (name, work) in works {
        let (sequential, fetched) = looked_at(work);
        assert!(
            sequential == 0 && fetched < 200,
            "{name}: {sequential} sequential scans, {fetched} rows"
        );
    }
    client.batch_execute(
        "INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status, died_at, last_error)
         SELECT gen_random_uuid(), 'invoice', i::text, 'placed', '', 'dead', now(), 'refused ' || i FROM generate_series(1, 100000) i",
    ).expect("rows");
    client.batch_execute("SET statement_timeout = '20 s'").expect("timeout");
    let page = list(&mut client, &schema, &everything, Some(250_000), 100).expect("list");
    assert_eq!((page.len(), page[0].id), (100, 250_001));
    assert_eq!(groups(&mut client, &schema, &everything).expect("groups")[0].count, 100_010);
    let mut transaction = client.transaction().expect("begin");
    let requeued = requeue(&mut transaction, &schema, &everything, None).expect("requeue");
    assert_eq!(requeued.len(), 100_010);
    transaction.rollback().expect("rollback");

    // Statistics that take a third of the table for dead, when ten are left at its end.
    client
        .batch_execute(
            "ANALYZE outbox.outbox; DELETE FROM outbox.outbox WHERE status = 'dead' AND id < 300005",
        )
        .expect("old statistics");
    let (sequential, fetched) = looked_at(&mut |t| {
        assert_eq!(list(t, &schema, &everything, None, 5).expect("list").len(), 5);
    });
    assert!(sequential == 0 && fetched < 200, "{sequential} sequential scans, {fetched} rows");
}
