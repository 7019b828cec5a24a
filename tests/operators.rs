//! What an operator does by hand: a careful requeue, a look before a change, and a status that is watched.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use common::driver::{SOON, config, start};
use common::{Database, Server, eventually};
use pg_outbox::{Event, PublishError, RunningRelay, ScriptedBroker};
use serde_json::Value;

fn binary(url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pg-outbox"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("DATABASE_URL", url).env("USER", "tester").args(arguments).stdin(Stdio::null());
    command
}

/// The exit code, and both outputs.
fn run(db: &Database, arguments: &[&str]) -> (i32, String) {
    let output = binary(&db.url(), arguments).output().unwrap();
    let text =
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap_or(-1), text)
}

#[track_caller]
fn expect(db: &Database, arguments: &[&str], code: i32, text: &str) {
    let (found, said) = run(db, arguments);
    assert_eq!(found, code, "{arguments:?}: {said}");
    assert!(said.contains(text), "{arguments:?}: {said}");
}

const REQUEUE: [&str; 4] = ["dead-letters", "requeue", "--all", "--canary"];

/// This many dead events of as many aggregates, with ids from 1, and a living relay.
fn dead(events: usize, broker: &ScriptedBroker) -> (Database, RunningRelay) {
    let db = Database::create();
    db.append_many(events, 1);
    db.execute(
        "UPDATE outbox.outbox SET status = 'dead', died_at = now() - interval '1 h', attempts = 3, last_error = 'schema registry'",
    );
    let relay = start(&db, config("relay-a"), broker);
    let alive = "SELECT relays_alive FROM outbox.outbox_metrics";
    eventually("the relay is alive", SOON, || {
        db.client().query_one(alive, &[]).unwrap().get::<_, i64>(0) == 1
    });
    (db, relay)
}

fn end(relay: RunningRelay) {
    relay.stop();
    relay.join().unwrap();
}

#[test]
fn a_canary_goes_first_and_the_rest_in_steps() {
    let broker = ScriptedBroker::new();
    let (db, relay) = dead(25, &broker);
    let (code, said) = run(&db, &REQUEUE);
    assert_eq!(code, 0, "{said}");
    let steps: Vec<_> = said.lines().collect();
    let expected = [
        "requeued 1 event, waiting until published",
        "requeued 10 events, waiting until published",
        "requeued 14 events, waiting until published",
        "requeued 25 events, all published",
    ];
    assert_eq!(steps, expected);
    assert_eq!(db.count("status = 'published'"), 25);
    assert_eq!(broker.deliveries()[0].id, 1, "the oldest is the canary");
    end(relay);
}

#[test]
fn deleted_events_were_published() {
    let broker = ScriptedBroker::new();
    let (db, first) = dead(2, &broker);
    end(first);
    let relay = start(&db, config("relay-a").delete_on_publish(true), &broker);
    eventually("a relay is alive that publishes them", SOON, || run(&db, &REQUEUE).0 == 0);
    assert_eq!(db.count("true"), 0);
    end(relay);
}

#[test]
fn nothing_more_is_put_back_once_one_dies_again() {
    for (poison, requeued, left) in [(1, 1, 24), (7, 11, 14)] {
        let broker = ScriptedBroker::new();
        broker.fail_always(
            move |event: &Event| event.id == poison,
            PublishError::permanent("no field"),
        );
        let (db, relay) = dead(25, &broker);
        let (code, said) = run(&db, &REQUEUE);
        assert_eq!(code, 4, "{said}");
        let last =
            format!("stopped: event {poison} died again: no field; not put back: {left} events");
        assert_eq!(said.lines().last(), Some(last.as_str()), "{said}");
        // Those that were not put back died an hour ago, and no attempt was made with them.
        let untouched = "status = 'dead' AND attempts = 3 AND died_at < now() - interval '50 min'";
        assert_eq!(db.count(untouched), left);
        assert_eq!(db.count(&format!("id > {requeued} AND NOT ({untouched})")), 0);
        end(relay);
    }
}

#[test]
fn a_canary_that_cannot_sing_is_noticed() {
    let broker = ScriptedBroker::new();
    broker.fail_always(|_: &Event| true, PublishError::transient("503 try later"));
    let (db, relay) = dead(3, &broker);
    let (code, said) = run(&db, &[&REQUEUE[..], &["--wait", "1s"]].concat());
    assert_eq!(code, 4, "{said}");
    assert!(
        said.contains("stopped: after 1s 1 event is not published; event 1 is being retried: 503"),
        "{said}"
    );
    assert!(said.contains("not put back: 2 events"), "{said}");
    assert_eq!(db.count("status = 'dead'"), 2);
    end(relay);

    // Held by a dead event that the filter does not name.
    let db = Database::create();
    db.append_many(1, 2);
    db.execute(
        "UPDATE outbox.outbox SET status = 'dead', died_at = now(), last_error = 'reason ' || id",
    );
    let relay = start(&db, config("relay-a"), &ScriptedBroker::new());
    eventually("the relay is alive", SOON, || {
        let (code, said) =
            run(&db, &["dead-letters", "requeue", "--reason", "reason 2", "--canary"]);
        assert!(code == 4 || said.contains("no relay is alive"), "{said}");
        code == 4 && said.contains("event 2 waits behind the dead event 1 of its aggregate")
    });
    end(relay);
}

#[test]
fn a_canary_needs_a_relay_and_something_to_put_back() {
    let db = Database::create();
    expect(&db, &REQUEUE, 3, "no dead letter matched; nothing was requeued");
    db.append_many(2, 1);
    db.execute("UPDATE outbox.outbox SET status = 'dead', died_at = now(), last_error = 'x'");
    expect(
        &db,
        &REQUEUE,
        1,
        "no relay is alive, so a canary would wait in vain; nothing was requeued",
    );
    assert_eq!(db.count("status = 'dead'"), 2);
    expect(&db, &["dead-letters", "requeue", "--all", "--wait", "1s"], 2, "--canary");
    expect(&db, &["dead-letters", "requeue", "--canary"], 2, "say which dead letters");
}

/// Every row of the outbox.
fn everything(db: &Database) -> String {
    let sql = "SELECT coalesce(string_agg(o::text, ',' ORDER BY id), '') FROM outbox.outbox AS o";
    db.client().query_one(sql, &[]).unwrap().get(0)
}

#[test]
fn a_dry_run_says_what_would_change_and_changes_nothing() {
    let db = Database::create();
    db.append_many(5, 1);
    db.execute(
        "UPDATE outbox.outbox SET status = 'dead', died_at = now(), last_error = 'x' WHERE id < 3;
         UPDATE outbox.outbox SET status = 'published', published_at = now() - interval '2 days' WHERE id = 3;
         UPDATE outbox.outbox SET status = 'published', published_at = now() WHERE id = 4",
    );
    let before = everything(&db);
    let requeue = ["dead-letters", "requeue", "--all", "--dry-run"];
    expect(&db, &requeue, 0, "would have requeued 2 events; nothing was changed");
    expect(&db, &[&requeue[..], &["--canary"]].concat(), 0, "would have requeued 2 events");
    let discard = ["dead-letters", "discard", "2", "--note", "test", "--dry-run"];
    expect(&db, &discard, 0, "would have discarded 1 event; nothing was changed");
    let prune = ["prune", "--retention", "1d"];
    expect(
        &db,
        &[&prune[..], &["--dry-run"]].concat(),
        0,
        "would remove 1 event; nothing was changed",
    );
    let append = ["append", "order", "1", "placed", "{}"];
    expect(
        &db,
        &[&append[..], &["--dry-run"]].concat(),
        0,
        "would have appended 1 event; nothing was changed",
    );
    expect(
        &db,
        &["migrate", "--dry-run", "--grant-writer", "shop"],
        0,
        "is up to date, version 1\nwould grant writing",
    );
    assert_eq!(everything(&db), before);
    // What it said is what happens.
    expect(&db, &prune, 0, "removed 1 event");
    expect(&db, &append, 0, "-");
    assert_eq!(db.count("true"), 5);

    let empty = Database::create_empty();
    expect(
        &empty,
        &["migrate", "--dry-run"],
        0,
        "would create the outbox in schema \"outbox\", version 1\nnothing was changed",
    );
    let schemas = "SELECT FROM pg_namespace WHERE nspname = 'outbox'";
    assert!(empty.client().query(schemas, &[]).unwrap().is_empty());
    expect(&empty, &["prune", "--dry-run"], 1, "pg-outbox migrate");
}

#[test]
fn the_first_line_is_the_verdict_and_the_code_is_for_scripts() {
    let broker = ScriptedBroker::new();
    let (db, relay) = dead(0, &broker);
    let first = |code: i32, start: &str| {
        let (found, said) = run(&db, &["status"]);
        assert!(found == code && said.starts_with(start), "{found}: {said}");
    };
    first(0, "healthy\n");
    // One transaction, so that the relay never sees it pending.
    db.execute(
        "SELECT outbox.outbox_append('order', '1', 'placed', '{}'::json);
         UPDATE outbox.outbox SET status = 'dead', died_at = now(), last_error = 'x'",
    );
    first(4, "degraded: dead events: 1");
    end(relay);
    first(4, "down: no relay is alive");
}

/// `status --watch --json`, with a reader of its lines.
struct Watch {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Watch {
    fn start(url: &str) -> Self {
        let mut command = binary(url, &["status", "--watch", "--json"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The next line.
    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_watched_status_goes_on_and_ends_with_its_reader() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    let mut watch = Watch::start(&db.url());
    assert_eq!(watch.next()["metrics"]["pending_rows"], 0);
    let mut errors = BufReader::new(watch.child.stderr.take().unwrap());
    server.stop();
    let mut said = String::new();
    errors.read_line(&mut said).unwrap();
    assert!(said.starts_with("pg-outbox: "), "{said}");
    assert!(watch.child.try_wait().unwrap().is_none(), "it goes on");
    server.start_again();
    db.append("order", "1", "placed", b"{}");
    // One that was read before the append may be on its way.
    while watch.next()["metrics"]["pending_rows"] != 1 {}

    let mut command = binary(&db.url(), &["status", "--watch"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    lines.read_line(&mut first).unwrap();
    assert!(first.starts_with("down: no relay is alive"), "{first}");
    drop(lines);
    let mut status = None;
    eventually("it ends with its reader", Duration::from_secs(20), || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(0));
}

#[test]
fn a_watch_that_can_never_see_anything_ends() {
    let empty = Database::create_empty();
    expect(&empty, &["status", "--watch"], 1, "pg-outbox migrate");
    let output = binary("postgres://u@127.0.0.1:1/x", &["status", "--watch"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
}
