//! The metrics against situations that were set up by hand: what each number says, and what it costs to ask.

mod common;

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::Database;
use common::driver::{
    SOON, claim, config, failed, ids, published, request, session, settle, start,
};
use common::eventually;
use pg_outbox::metrics::{LATENCY_BUCKETS, Snapshot};
use pg_outbox::store::dead_letters::{Filter, requeue};
use pg_outbox::store::status::{Condition, METRICS, SCRAPE_SETTINGS, scrape, status};
use pg_outbox::store::{Session, verdict};
use pg_outbox::{Policy, Schema, ScriptedBroker};
use postgres::Client;

const TIMEOUT: Duration = Duration::from_secs(10);

fn read(client: &mut Client) -> Snapshot {
    scrape(client, &Schema::default(), TIMEOUT).expect("scrape")
}

fn run(client: &mut Client, sql: &str) {
    client.batch_execute(sql).expect(sql);
}

fn append(client: &mut Client, aggregate: &str, count: i32) {
    client
        .query(
            "SELECT outbox.outbox_append('order', $1, 'placed', '{}'::json) FROM generate_series(1, $2)",
            &[&aggregate, &count],
        )
        .expect("append");
}

fn near(found: f64, expected: f64) -> bool {
    (expected..expected + 60.0).contains(&found)
}

#[test]
fn an_empty_outbox_is_all_zeros() {
    let database = Database::create();
    assert_eq!(read(&mut database.client()), Snapshot::default());
}

#[test]
fn backlog_and_lag_tell_a_burst_from_a_stuck_event() {
    let database = Database::create();
    let mut client = database.client();
    append(&mut client, "burst", 1_000);
    let burst = read(&mut client);
    assert_eq!(burst.pending_rows, 1_000);
    assert!(near(burst.oldest_pending_age_seconds, 0.0), "{burst:?}");
    run(&mut client, "DELETE FROM outbox.outbox");
    append(&mut client, "stuck", 1);
    run(&mut client, "UPDATE outbox.outbox SET created_at = created_at - interval '1 h'");
    let stuck = read(&mut client);
    assert_eq!(stuck.pending_rows, 1);
    assert!(near(stuck.oldest_pending_age_seconds, 3_600.0), "{stuck:?}");
}

#[test]
fn the_lag_starts_when_the_writer_asked_for_delivery() {
    let database = Database::create();
    let mut client = database.client();
    append(&mut client, "a", 1);
    let set = |client: &mut Client, created: &str, not_before: &str| {
        run(
            client,
            &format!(
                "UPDATE outbox.outbox SET created_at = now() - interval '{created}', not_before = {not_before}"
            ),
        );
        read(client).oldest_pending_age_seconds
    };
    assert_eq!(
        set(&mut client, "1 h", "now() + interval '1 h'"),
        0.0,
        "not due, so not late, and never negative"
    );
    assert!(near(set(&mut client, "1 h", "now() - interval '10 min'"), 600.0));
    assert!(
        near(set(&mut client, "1 h", "now() - interval '10 days'"), 3_600.0),
        "no older than its append"
    );
    assert!(near(set(&mut client, "1 h", "'-infinity'"), 3_600.0));
    assert_eq!(set(&mut client, "-1 h", "NULL"), 0.0, "appended before the clock stepped back");
}

#[test]
fn held_is_behind_a_dead_event_of_the_same_aggregate() {
    let database = Database::create();
    let mut client = database.client();
    append(&mut client, "parked", 4);
    append(&mut client, "retrying", 3);
    append(&mut client, "alone", 1);
    // The second of the parked aggregate is dead; the first goes out by itself.
    run(&mut client,
        "UPDATE outbox.outbox SET status = 'dead', died_at = now() - interval '5 min' WHERE id = 2;
         UPDATE outbox.outbox SET retry_since = now(), last_error = 'timeout' WHERE id = 5;
         UPDATE outbox.outbox SET locked_until = now() + interval '1 min' WHERE id = 5;
         UPDATE outbox.outbox SET locked_until = now() - interval '1 min' WHERE id = 1;
         UPDATE outbox.outbox SET status = 'dead', died_at = now() - interval '2 h' WHERE aggregate_id = 'alone'");
    let found = read(&mut client);
    assert_eq!((found.pending_rows, found.held_rows, found.dead_rows), (6, 2, 2), "{found:?}");
    assert_eq!((found.retrying_rows, found.leased_rows), (1, 1), "{found:?}");
    assert!(near(found.oldest_dead_age_seconds, 7_200.0), "{found:?}");
    run(&mut client, "UPDATE outbox.outbox SET status = 'dead', died_at = now() WHERE id = 3");
    let found = read(&mut client);
    assert_eq!((found.held_rows, found.dead_rows), (1, 3), "a dead event is not held: {found:?}");
    requeue(&mut client, &Schema::default(), &Filter::everything(), None).expect("requeue");
    let found = read(&mut client);
    assert_eq!((found.pending_rows, found.held_rows, found.retrying_rows), (8, 0, 1), "{found:?}");
}

#[test]
fn a_dead_event_with_nothing_behind_it_does_not_move_the_lag_and_a_held_one_does() {
    let database = Database::create();
    let mut client = database.client();
    append(&mut client, "a", 1);
    run(
        &mut client,
        "UPDATE outbox.outbox SET status = 'dead', died_at = now(), created_at = now() - interval '1 day'",
    );
    assert_eq!(read(&mut client).oldest_pending_age_seconds, 0.0);
    append(&mut client, "a", 1);
    run(
        &mut client,
        "UPDATE outbox.outbox SET created_at = now() - interval '1 h' WHERE status = 'pending'",
    );
    assert!(near(read(&mut client).oldest_pending_age_seconds, 3_600.0));
}

fn relay(client: &mut Client, relay: &str, worker: i32, heartbeat: &str) {
    run(client, &format!(
        "INSERT INTO outbox.outbox_relay (relay_id, worker, heartbeat_at, published, retried, dead_lettered, lease_lost)
         VALUES ('{relay}', {worker}, {heartbeat}, 100, 10, 1, 2)"));
}

#[test]
fn a_relay_is_as_alive_as_its_slowest_thread_and_counters_are_summed() {
    let database = Database::create();
    let mut client = database.client();
    relay(&mut client, "fresh", 0, "now()");
    relay(&mut client, "fresh", 1, "now() - interval '29 s'");
    relay(&mut client, "hangs", 0, "now()");
    relay(&mut client, "hangs", 1, "now() - interval '31 s'");
    relay(&mut client, "shrunk", 0, "now()");
    relay(&mut client, "shrunk", 1, "NULL");
    relay(&mut client, "stopped", 0, "NULL");
    relay(&mut client, "gone", 0, "now() - interval '1 day'");
    let found = read(&mut client);
    assert_eq!(found.relays_alive, 2, "fresh and shrunk");
    let counters = (
        found.published_total,
        found.retried_total,
        found.dead_lettered_total,
        found.lease_lost_total,
    );
    assert_eq!(counters, (800, 80, 8, 16), "also of those that are gone");
    assert_eq!(found.relays_paused, 0);
    run(&mut client, "UPDATE outbox.outbox_relay SET paused_types = '{order}' WHERE worker = 0");
    assert_eq!(read(&mut client).relays_paused, 2, "only living ones");
    let alive: Vec<_> = status(&mut client, &Schema::default())
        .expect("status")
        .relays
        .into_iter()
        .filter(|row| row.alive)
        .map(|row| (row.relay_id, row.worker))
        .collect();
    assert_eq!(
        alive,
        [("fresh".into(), 0), ("fresh".into(), 1), ("shrunk".into(), 0), ("shrunk".into(), 1)]
    );
}

#[test]
fn the_verdict_says_what_is_wrong() {
    let (database, schema) = (Database::create(), Schema::default());
    let mut client = database.client();
    let mut verdict = |sql: &str| {
        run(&mut client, sql);
        status(&mut client, &schema).expect("status").assess()
    };
    let down = verdict("");
    assert_eq!(down.condition, Condition::Down);
    assert!(down.to_string().starts_with("down: no relay is alive; nothing is pending"), "{down}");
    let healthy =
        verdict("INSERT INTO outbox.outbox_relay (relay_id, worker) VALUES ('relay-a', 0)");
    assert_eq!(healthy.to_string(), "healthy");
    let late = verdict(
        "SELECT outbox.outbox_append('order', 'a', 'placed', '{}'::json) FROM generate_series(1, 2);
         UPDATE outbox.outbox SET created_at = now() - interval '610 s'");
    assert_eq!(
        late.to_string(),
        "degraded: the oldest pending event is 10 min old, more than 10 min"
    );
    let held = verdict(
        "UPDATE outbox.outbox SET status = 'dead', died_at = now() - interval '5 h' WHERE id = 1",
    );
    assert!(
        held.to_string().starts_with("degraded: dead events: 1 (the oldest for 5 h)"),
        "{held}"
    );
    assert!(held.reasons[1].contains("held behind a dead one: 1"), "{held}");
    let paused = verdict(
        "UPDATE outbox.outbox_relay SET paused_types = '{*}', paused_reason = 'refused', paused_since = now()",
    );
    assert!(
        paused.reasons.iter().any(|reason| reason.contains("relay-a paused the broker since")),
        "{paused}"
    );
    let dying = verdict(
        "UPDATE outbox.outbox_relay SET transient_window = '24 h';
         UPDATE outbox.outbox SET retry_since = now() - interval '19 h' WHERE status = 'pending'",
    );
    assert!(
        dying.to_string().contains("events that die within 6 h unless they are published: 1"),
        "{dying}"
    );
    let down = verdict("UPDATE outbox.outbox_relay SET heartbeat_at = NULL");
    assert_eq!((down.condition, down.reasons.len()), (Condition::Down, 5), "{down}");
    assert!(down.reasons[0].contains("1 pending event waits"), "{down}");
}

/// The latencies that a claim of everything and a verdict add, as (bucket, count).
fn publish_all(database: &Database, session: &mut Session, delete: bool) -> Vec<(usize, u64)> {
    let before = read(&mut database.client());
    let claimed = ids(&claim(session, "relay-a", 7, &request()));
    let verdict = published(claimed);
    verdict::settle(session, "relay-a", 1, 7, &verdict, delete, false).expect("a verdict");
    let after = read(&mut database.client());
    assert_eq!(after.latency.iter().sum::<u64>(), after.published_total, "they add up");
    let added = after.latency.iter().zip(before.latency).map(|(after, before)| after - before);
    added.enumerate().filter(|(_, count)| *count > 0).collect()
}

#[test]
fn the_latency_is_counted_with_the_verdict() {
    let database = Database::create();
    let (mut client, mut session) = (database.client(), session(&database));
    for delete in [false, true] {
        // One age, then one event for each bucket in the same batch, the last of them asked for later.
        append(&mut client, "same", 20);
        run(&mut client, "UPDATE outbox.outbox SET created_at = now() - interval '20 s'");
        assert_eq!(publish_all(&database, &mut session, delete), [(7, 20)]);
        let mut expected: Vec<_> = (4..14).map(|bucket| (bucket, 1)).collect();
        for bucket in 4..14 {
            let age = LATENCY_BUCKETS[bucket - 1] + 0.3;
            append(&mut client, &format!("each{bucket}"), 1);
            run(
                &mut client,
                &format!(
                    "UPDATE outbox.outbox SET created_at = now() - interval '{age} s' WHERE aggregate_id = 'each{bucket}'"
                ),
            );
        }
        append(&mut client, "late", 1);
        run(
            &mut client,
            "UPDATE outbox.outbox SET created_at = now() - interval '10 days', not_before = now() - interval '20 min'
              WHERE aggregate_id = 'late'",
        );
        expected[7].1 = 2;
        assert_eq!(publish_all(&database, &mut session, delete), expected);
    }
    let found = read(&mut client);
    assert_eq!(found.published_total, 62);
    // Twice: 20 times 20 s, each bucket's lower end, and 20 min.
    let sum: f64 = LATENCY_BUCKETS[3..].iter().sum::<f64>() + 400.0 + 1_200.0;
    assert!((sum * 2.0..sum * 2.0 + 120.0).contains(&found.latency_seconds_sum), "{found:?}");
    let text = found.render();
    for line in [
        "outbox_delivery_latency_seconds_bucket{le=\"10\"} 6\n",
        "outbox_delivery_latency_seconds_bucket{le=\"30\"} 48\n",
        "outbox_delivery_latency_seconds_bucket{le=\"+Inf\"} 62\n",
        "outbox_delivery_latency_seconds_count 62\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
}

#[test]
fn what_was_not_published_has_no_latency() {
    let database = Database::create();
    let (mut client, mut session) = (database.client(), session(&database));
    append(&mut client, "a", 3);
    let claimed = ids(&claim(&mut session, "relay-a", 7, &request()));
    settle(&mut session, "relay-a", 7, &failed(&claimed[..1], None));
    // Another claim has the second by now.
    run(&mut client, "UPDATE outbox.outbox SET lease_id = 8 WHERE id = 2");
    settle(&mut session, "relay-a", 7, &published(claimed[1..].to_vec()));
    let found = read(&mut client);
    assert_eq!(found.latency.iter().sum::<u64>(), 1, "{found:?}");
    assert_eq!(
        (found.published_total, found.dead_lettered_total, found.lease_lost_total),
        (1, 1, 1)
    );
}

#[test]
fn deaths_ahead_follow_the_window_of_the_living_relay() {
    let database = Database::create();
    let mut client = database.client();
    append(&mut client, "a", 5);
    run(
        &mut client,
        "UPDATE outbox.outbox SET retry_since = now() - (ARRAY['25 h', '23.5 h', '20 h', '5 h']::interval[])[id] WHERE id < 5",
    );
    let mut dying = |sql: &str| {
        run(&mut client, sql);
        let found = read(&mut client);
        (found.dying_within_1h_rows, found.dying_within_6h_rows)
    };
    assert_eq!(dying(""), (0, 0), "no relay ever ran, so nothing is known");
    let relay =
        "INSERT INTO outbox.outbox_relay (relay_id, worker, transient_window, heartbeat_at) VALUES";
    assert_eq!(dying(&format!("{relay} ('a', 0, '24 h', now()), ('a', 1, NULL, now())")), (2, 3));
    let shorter = format!("{relay} ('b', 0, '6 h', now()), ('old', 0, '1 min', NULL)");
    assert_eq!(
        dying(&shorter),
        (4, 4),
        "the shorter window kills first; a stopped relay kills nothing"
    );
    let stopped = "UPDATE outbox.outbox_relay SET heartbeat_at = NULL, started_at = now() - interval '1 h' WHERE relay_id <> 'a';
        UPDATE outbox.outbox_relay SET heartbeat_at = NULL";
    assert_eq!(dying(stopped), (2, 3), "all are stopped: the one that started last");
    assert_eq!(
        dying("UPDATE outbox.outbox SET status = 'dead' WHERE id < 3"),
        (0, 1),
        "dead already"
    );
}

#[test]
fn a_relay_says_its_window_when_it_starts() {
    let database = Database::create();
    let policy = Policy { transient_window: Duration::from_secs(7_200), ..Policy::default() };
    let relay = start(&database, config("a").policy(policy), &ScriptedBroker::new());
    let said =
        "SELECT count(*) FROM outbox.outbox_relay WHERE worker = 0 AND transient_window = '2 h'";
    eventually("the window is known", SOON, || {
        database.client().query_one(said, &[]).expect("a count").get::<_, i64>(0) == 1
    });
    relay.stop();
    relay.join().expect("a clean stop");
}

/// No sequential scan of the events, by the plan and by what the server counted.
fn assert_cheap(database: &Database, situation: &str) {
    // A new session has counted nothing yet.
    let mut client = database.client();
    let mut transaction = client.transaction().expect("begin");
    transaction.batch_execute(&format!("{SCRAPE_SETTINGS}10000")).expect("settings");
    let plan = transaction.query(&format!("EXPLAIN {METRICS}"), &[]).expect("explain");
    let plan: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
    let plan = plan.join("\n");
    assert!(
        !plan.contains("Seq Scan on outbox ") && !plan.contains("Seq Scan on outbox_1"),
        "{situation}: {plan}"
    );
    assert!(plan.contains("outbox_unfinished"), "{situation}: {plan}");
    transaction.query(METRICS, &[]).expect("metrics");
    let row = transaction
        .query_one(
            "SELECT coalesce(seq_scan, 0), coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables
          WHERE relid = 'outbox.outbox'::regclass",
            &[],
        )
        .expect("statistics");
    let (sequential, fetched): (i64, i64) = (row.get(0), row.get(1));
    assert!(
        sequential == 0 && fetched < 100,
        "{situation}: {sequential} sequential scans, {fetched} rows: {plan}"
    );
}

#[test]
fn what_is_published_is_not_read() {
    let database = Database::create();
    let mut client = database.client();
    run(&mut client,
        "ALTER TABLE outbox.outbox SET (autovacuum_enabled = off); ANALYZE outbox.outbox;
         INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status)
         SELECT gen_random_uuid(), 'order', (i % 1000)::text, 'placed', '', 'published' FROM generate_series(1, 200000) i");
    append(&mut client, "a", 2);
    assert_cheap(&database, "analyzed while empty");
    run(&mut client, "ANALYZE outbox.outbox");
    assert_cheap(&database, "analyzed");
    // Held by one of 20,000 dead events, which the statistics know nothing of.
    run(&mut client,
        "INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload, status)
         SELECT gen_random_uuid(), 'order', i::text, 'placed', '', 'dead' FROM generate_series(2000, 21999) i;
         INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT gen_random_uuid(), 'order', '2000', 'placed', '' FROM generate_series(1, 20000) i");
    let found = read(&mut client);
    assert_eq!((found.held_rows, found.dead_rows, found.pending_rows), (20_000, 20_000, 20_002));
}

#[test]
fn a_scrape_is_bounded_and_leaves_nothing_behind() {
    let (database, schema) = (Database::create(), Schema::default());
    let (mut client, mut other) = (database.client(), database.client());
    let mut blocker = other.transaction().expect("begin");
    blocker.batch_execute("LOCK TABLE outbox.outbox IN ACCESS EXCLUSIVE MODE").expect("a blocker");
    let error = scrape(&mut client, &schema, Duration::from_millis(50)).expect_err("blocked");
    assert_eq!(error.sqlstate(), Some("57014"), "{error}");
    blocker.rollback().expect("rollback");
    let mut transaction = client.transaction().expect("begin");
    scrape(&mut transaction, &schema, TIMEOUT).expect("scrape");
    let show = |t: &mut postgres::Transaction<'_>, name: &str| -> String {
        t.query_one(&format!("SHOW {name}"), &[]).expect("show").get(0)
    };
    assert_eq!(show(&mut transaction, "enable_seqscan"), "on");
    assert_eq!(show(&mut transaction, "statement_timeout"), "0");
    assert_eq!(show(&mut transaction, "transaction_read_only"), "off");
    transaction.rollback().expect("rollback");
    let error = scrape(&mut client, &Schema::new("elsewhere").expect("a name"), TIMEOUT)
        .expect_err("no schema");
    assert!(
        error.is_schema_mismatch() && error.to_string().contains("pg-outbox migrate"),
        "{error}"
    );
}

#[test]
fn the_text_has_the_promised_names_and_no_labels() {
    let database = Database::create();
    let text = read(&mut database.client()).render();
    let is_latency = |line: &&str| line.contains("outbox_delivery_latency_seconds");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let (latency, samples): (Vec<_>, Vec<_>) = lines.partition(is_latency);
    assert_eq!(latency.len(), LATENCY_BUCKETS.len() + 3, "{latency:?}");
    assert!(text.contains("# TYPE outbox_delivery_latency_seconds histogram\n"), "{text}");
    let names: Vec<_> = samples.iter().filter_map(|line| line.split([' ', '{']).next()).collect();
    let promised = [
        "outbox_pending_rows",
        "outbox_retrying_rows",
        "outbox_leased_rows",
        "outbox_held_rows",
        "outbox_dead_rows",
        "outbox_oldest_pending_age_seconds",
        "outbox_relays_alive",
        "outbox_relays_paused",
        "outbox_oldest_dead_age_seconds",
        "outbox_dying_within_1h_rows",
        "outbox_dying_within_6h_rows",
        "outbox_published_total",
        "outbox_retried_total",
        "outbox_dead_lettered_total",
        "outbox_lease_lost_total",
        "outbox_build_info",
    ];
    assert_eq!(names, promised);
    let labels = |line: &&&str| line.contains('{') && !line.contains("_bucket{le=\"");
    assert_eq!(latency.iter().filter(labels).count(), 0, "{latency:?}");
    for name in promised {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        assert!(
            text.contains(&format!("# TYPE {name} {kind}\n"))
                && text.contains(&format!("# HELP {name} ")),
            "{name}"
        );
    }
    assert_eq!(
        samples.iter().filter(|line| line.contains('{')).count(),
        1,
        "labels: only the version"
    );
    assert_eq!(
        samples.last(),
        Some(&concat!("outbox_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"))
    );
}

#[test]
fn promtool_accepts_the_text() {
    let tool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut tool = match tool {
        Ok(tool) => tool,
        Err(error) => {
            assert!(
                std::env::var_os("CI").is_none(),
                "promtool is missing ({error}); install the package prometheus"
            );
            eprintln!(
                "SKIPPED promtool_accepts_the_text: promtool is missing; install the package prometheus"
            );
            return;
        }
    };
    let database = Database::create();
    let mut client = database.client();
    append(&mut client, "a", 1);
    let text = read(&mut client).render();
    tool.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("written");
    let output = tool.wait_with_output().expect("an answer");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.trim().is_empty(), "{said}\n{text}");
}
