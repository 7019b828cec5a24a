//! The command, as the binary that is shipped: exit codes, settings, secrets, signals, and every subcommand once.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use common::process::{free_port, signal};
use common::{Database, eventually};
use serde_json::Value;

const SECOND: Duration = Duration::from_secs(1);

/// The binary, with nothing of this process's environment that could be a setting.
fn bare() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pg-outbox"));
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("USER", "tester");
    command.stdin(Stdio::null());
    command
}

fn command(url: &str) -> Command {
    let mut command = bare();
    command.env("DATABASE_URL", url);
    command
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn ran(command: &mut Command) -> Ran {
    command.output().unwrap().into()
}

fn run(database: &Database, arguments: &[&str]) -> Ran {
    ran(command(&database.url()).args(arguments))
}

#[track_caller]
fn ok(database: &Database, arguments: &[&str]) -> String {
    let ran = run(database, arguments);
    assert_eq!(ran.code, 0, "{arguments:?}: {}{}", ran.out, ran.err);
    ran.out
}

fn with_input(mut command: Command, input: &[u8]) -> Ran {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap().into()
}

/// A running command whose lines can be waited for. Killed with it.
struct Running {
    child: Child,
    log: Receiver<String>,
    seen: String,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, log) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, log, seen: String::new() }
    }

    #[track_caller]
    fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + 20 * SECOND;
        while !self.seen.contains(text) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.log.recv_timeout(left) {
                Ok(line) => self.seen.push_str(&(line + "\n")),
                Err(_) => panic!("no {text:?} in the log:\n{}", self.seen),
            }
        }
    }

    fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// The exit code and the rest of the output.
    #[track_caller]
    fn end(&mut self, within: Duration) -> (i32, String) {
        let deadline = Instant::now() + within;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "it has not ended within {within:?}:\n{}",
                self.seen
            );
            thread::sleep(Duration::from_millis(10));
        };
        let mut out = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        while let Ok(line) = self.log.recv_timeout(SECOND) {
            self.seen.push_str(&(line + "\n"));
        }
        (status.code().unwrap_or(-1), out)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn relay(url: &str) -> Command {
    let mut command = command(url);
    command.args(["run", "--broker", "stdout", "--listen", "off", "--relay-id", "tested"]);
    command
}

/// Three dead events: two of order A, one of whose names and reasons would do things to a terminal.
fn with_dead_letters() -> Database {
    let database = Database::create();
    database.append("order", "A", "placed", b"{}");
    database.append("order", "A", "paid", b"{}");
    database.append("order", "B", "placed", b"\xff\0");
    database.append("ord\u{202e}er", "\u{9b}31mC", "placed", b"\x1b[2J");
    database.execute(
        "UPDATE outbox.outbox SET status = 'dead', died_at = now(), attempts = 3,
                last_error = E'schema \\x1b[31mregistry\\nsays no ' || id || repeat('x', 500) WHERE id IN (1, 3, 4)",
    );
    database
}

// ------------------------------------------------------------------------------------------ commands

#[test]
fn migrate_creates_once_and_prints() {
    let database = Database::create_empty();
    let status = run(&database, &["status"]);
    assert_eq!(status.code, 1);
    assert!(
        status.err.contains("pg-outbox migrate") && status.err.lines().count() == 1,
        "{}",
        status.err
    );
    let relay = ran(relay(&database.url()).args(["--log-level", "error"]));
    assert_eq!(relay.code, 1);
    assert!(
        relay.err.contains("pg-outbox migrate") && relay.err.lines().count() == 1,
        "{}",
        relay.err
    );
    assert!(
        ok(&database, &["migrate"]).contains("created the outbox in schema \"outbox\", version 1")
    );
    assert!(ok(&database, &["migrate"]).contains("up to date"));
    let sql = ok(&database, &["migrate", "--print", "--schema", "my \"own\""]);
    assert!(sql.contains("\"my \"\"own\"\"\".outbox_append("), "the name is quoted: {sql}");
    database.execute(&sql);
    assert!(ok(&database, &["append", "o", "1", "t", "{}", "--schema", "my \"own\""]).len() > 30);
}

#[test]
fn migrate_grants() {
    let database = Database::create_empty();
    let roles = ["writer", "relay", "monitor"].map(|role| format!("{role}_{}", database.name()));
    for role in &roles {
        database.execute(&format!("CREATE ROLE {role}"));
    }
    let [writer, relay, monitor] = &roles;
    let arguments =
        ["migrate", "--grant-writer", writer, "--grant-relay", relay, "--grant-monitor", monitor];
    let granted = ok(&database, &arguments);
    ok(&database, &arguments);
    let may = |role: &str, what: &str| {
        let sql = format!("SELECT {what}");
        database.client().query_one(&sql, &[&role]).unwrap().get::<_, bool>(0)
    };
    let append = "has_function_privilege($1, (SELECT oid FROM pg_proc WHERE proname = 'outbox_append_all'), 'EXECUTE')";
    let settle = "has_column_privilege($1, 'outbox.outbox', 'status', 'UPDATE')";
    let scrape = "has_table_privilege($1, 'outbox.outbox_metrics', 'SELECT')";
    let rights = |role: &str| [append, settle, scrape].map(|what| may(role, what));
    let found = [rights(writer), rights(relay), rights(monitor)];
    let unknown = run(&database, &["migrate", "--grant-writer", "no such role"]);
    let printed = ok(&database, &["migrate", "--print", "--grant-monitor", monitor]);
    for role in &roles {
        database.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    }
    assert_eq!(
        found,
        [[true, false, false], [false, true, true], [false, false, true]],
        "{granted}"
    );
    assert_eq!(unknown.code, 1);
    assert!(unknown.err.contains("granting writing to \"no such role\""), "{}", unknown.err);
    assert!(printed.trim_end().ends_with(&format!("TO \"{monitor}\";")), "{printed}");
}

#[test]
fn append_takes_arguments_files_and_lines() {
    let database = Database::create();
    let url = database.url();
    let id = "01936f5e-8a2b-7c3d-9e4f-5a6b7c8d9e0f";
    let printed = ok(
        &database,
        &[
            "append",
            "order",
            "42",
            "placed",
            r#"{"b":1.0, "a":1}"#,
            "--header",
            "traceparent=00-a=b",
            "--event-id",
            id,
            "--not-before",
            "1h",
            "--content-type",
            "text/plain",
        ],
    );
    assert_eq!(printed, format!("{id}\n"));
    let shown = ok(&database, &["dead-letters", "show", id, "--json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["payload"], r#"{"b":1.0, "a":1}"#);
    assert_eq!(
        (&shown["headers"]["traceparent"], &shown["content_type"]),
        (&"00-a=b".into(), &"text/plain".into())
    );
    assert!(!shown["not_before"].is_null());
    let again = run(&database, &["append", "order", "42", "placed", "{}", "--event-id", id]);
    assert_eq!(again.code, 1);
    assert!(again.err.contains("event id is in the outbox already"), "{}", again.err);

    let mut piped = command(&url);
    piped.args(["append", "image", "1", "stored", "--payload-file", "-"]);
    assert_eq!(with_input(piped, b"\xff\0\r\n").code, 0);
    let mut lines = command(&url);
    lines.args(["append", "--stdin"]);
    let input = br#"{"aggregate_type":"a","aggregate_id":"1","event_type":"t","payload":"x"}

        {"aggregate_type":"a","aggregate_id":"1","event_type":"t","payload_hex":"ff00","headers":{"h":"v"}}"#;
    let appended = with_input(lines, input);
    assert_eq!((appended.code, appended.out.lines().count()), (0, 2), "{}", appended.err);
    let payloads =
        database.client().query("SELECT payload FROM outbox.outbox ORDER BY id", &[]).unwrap();
    let payloads: Vec<Vec<u8>> = payloads.iter().skip(1).map(|row| row.get(0)).collect();
    assert_eq!(payloads, [b"\xff\0\r\n".to_vec(), b"x".to_vec(), b"\xff\0".to_vec()]);

    let before = database.count("true");
    let mut broken = command(&url);
    broken.args(["append", "--stdin"]);
    let good = "{\"aggregate_type\":\"a\",\"aggregate_id\":\"1\",\"event_type\":\"t\",\"payload\":\"x\"}\n".repeat(1200);
    let broken = with_input(broken, format!("{good}{{}}\n").as_bytes());
    assert_eq!(broken.code, 2);
    assert!(
        broken.err.contains("line 1201: aggregate_type is missing; nothing was appended"),
        "{}",
        broken.err
    );
    for (arguments, expected) in [
        (vec!["append", "order", "", "t", "{}"], "aggregate id is empty; 1 to 255"),
        (vec!["append", "order", "1", "t"], "the payload is missing"),
        (vec!["append", "order", "1", "t", "{}", "--header", "outbox-x=1"], "reserved"),
        (vec!["append", "order", "1", "t", "--payload-file", "/nowhere"], "cannot be read"),
    ] {
        let ran = run(&database, &arguments);
        assert_eq!(ran.code, 2, "{arguments:?}");
        assert!(ran.err.contains(expected), "{}", ran.err);
    }
    assert_eq!(database.count("true"), before, "nothing half-written");
}

#[test]
fn status_why_metrics_and_prune() {
    let database = Database::create();
    database.append("order", "1", "placed", b"{}");
    let status = run(&database, &["status"]);
    assert_eq!(status.code, 4);
    assert!(
        status.out.starts_with("down: no relay is alive; 1 pending event waits"),
        "{}",
        status.out
    );
    let json = run(&database, &["status", "--json"]);
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((&json["health"], &json["metrics"]["pending_rows"]), (&"down".into(), &1.into()));
    assert!(ok(&database, &["why", "1"]).contains("no relay is alive"));
    assert_eq!(run(&database, &["why", "2"]).code, 3);
    let wrong = run(&database, &["why", "order-1"]);
    assert_eq!(wrong.code, 2);
    assert!(wrong.err.contains("outbox id"), "{}", wrong.err);
    assert!(ok(&database, &["metrics"]).contains("\noutbox_pending_rows 1\n"));
    database.execute("UPDATE outbox.outbox SET status = 'published', published_at = now()");
    assert_eq!(ok(&database, &["prune"]), "removed 0 events\n");
    database.shift(8 * 24 * 3600 * SECOND);
    assert_eq!(ok(&database, &["prune", "--retention", "9d"]), "removed 0 events\n");
    assert!(ok(&database, &["prune", "--retention", "forever"]).contains("nothing to remove"));
    assert_eq!(ok(&database, &["prune"]), "removed 1 event\n");
}

#[test]
fn dead_letters_from_list_to_discard() {
    let database = with_dead_letters();
    let list = ok(&database, &["dead-letters", "list"]);
    assert_eq!(list.lines().count(), 4, "one line an event: {list}");
    assert!(
        !list.chars().any(|c| c.is_control() && c != '\n') && !list.contains('\u{202e}'),
        "{list:?}"
    );
    assert!(
        list.contains("schema \\u{1b}[31mregistry\\nsays no 1") && list.contains('…'),
        "{list}"
    );
    assert!(
        list.lines().nth(1).unwrap().contains("order A") && list.contains("1 for 0 s"),
        "{list}"
    );
    let json = ok(&database, &["dead-letters", "list", "--json", "--aggregate-type", "order"]);
    let json: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((json.len(), &json[0]["id"], &json[0]["held"]), (2, &1.into(), &1.into()));
    let page = ok(&database, &["dead-letters", "list", "--limit", "1", "--after", "1"]);
    assert!(page.contains("order B") && page.contains("go on with --after 3"), "{page}");
    let groups = ok(&database, &["dead-letters", "list", "--group"]);
    assert_eq!(groups.lines().count(), 2, "{groups}");
    let shown = ok(&database, &["dead-letters", "show", "4"]);
    assert!(shown.contains("\\u{1b}[2J") && !shown.contains('\x1b'), "{shown:?}");
    assert!(
        ok(&database, &["dead-letters", "show", "3", "--json"]).contains(r#""payload_hex":"ff00""#)
    );
    assert_eq!(run(&database, &["dead-letters", "show", "9"]).code, 3);

    for verb in ["requeue", "discard"] {
        let mut arguments = vec!["dead-letters", verb];
        if verb == "discard" {
            arguments.extend(["--note", "n"]);
        }
        let unnamed = run(&database, &arguments);
        assert_eq!(unnamed.code, 2, "{verb}");
        assert!(unnamed.err.contains("or --all"), "{}", unnamed.err);
        arguments.push("--dry-run");
        arguments.push("--all");
        let dry = ok(&database, &arguments);
        assert!(dry.contains("3 events; nothing was changed"), "{dry}");
        arguments.extend(["--reason", "registry"]);
        assert_eq!(run(&database, &arguments).code, 2, "--all excludes a filter");
    }
    assert_eq!(database.count("status = 'dead'"), 3);
    assert_eq!(run(&database, &["dead-letters", "requeue", "--reason", "nothing like it"]).code, 3);
    let requeued = ok(
        &database,
        &["dead-letters", "requeue", "--aggregate-type", "order", "--aggregate-id", "A"],
    );
    assert!(requeued.ends_with("requeued 1 event\n"), "{requeued}");
    assert_eq!(database.count("id = 1 AND status = 'pending' AND last_error IS NOT NULL"), 1);
    let no_note = run(&database, &["dead-letters", "discard", "3"]);
    assert_eq!(no_note.code, 2);
    ok(&database, &["dead-letters", "discard", "3", "--note", "test data"]);
    assert_eq!(
        database.count("id = 3 AND status = 'discarded' AND discard_note = 'tester: test data'"),
        1
    );
    assert_eq!(run(&database, &["dead-letters", "discard", "3", "--note", "again"]).code, 3);
    ok(&database, &["dead-letters", "requeue", "--all"]);
    assert_eq!(ok(&database, &["dead-letters", "list"]), "no dead letters\n");
}

#[test]
fn check_says_a_line_for_everything() {
    let database = Database::create();
    let good = run(&database, &["check", "--broker", "stdout"]);
    assert_eq!(good.code, 0, "{}", good.out);
    let names =
        ["settings", "alerts", "database", "schema", "writable", "pooler", "wake-ups", "broker"];
    let lines: Vec<_> = good.out.lines().collect();
    assert_eq!(lines.len(), names.len(), "{}", good.out);
    for (line, name) in lines.iter().zip(names) {
        assert!(line.starts_with(&format!("ok    {name}")), "{line}");
    }
    assert_eq!(
        database.client().query("SELECT FROM outbox.outbox_relay", &[]).unwrap().len(),
        0,
        "taken back"
    );

    let bad = run(&database, &["check", "--schema", "other", "--lease", "1s"]);
    assert_eq!(bad.code, 4, "{}", bad.out);
    for expected in [
        "FAIL  settings   lease (1s) must be longer",
        "FAIL  schema",
        "FAIL  broker     no broker is named",
        "?     writable",
    ] {
        assert!(bad.out.contains(expected), "{}", bad.out);
    }
    database.execute(&format!(
        "ALTER DATABASE {} SET default_transaction_read_only = on",
        database.name()
    ));
    let read_only = run(&database, &["check", "--broker", "stdout"]);
    assert_eq!(read_only.code, 4);
    assert!(read_only.out.contains("FAIL  writable   it is read-only"), "{}", read_only.out);

    let down = ran(command("postgres://u@127.0.0.1:1/x").args(["check", "--broker", "stdout"]));
    assert_eq!(down.code, 4);
    assert!(down.out.contains("FAIL  database   connecting to 127.0.0.1:1/x: "), "{}", down.out);
}

#[test]
fn the_demo_happens_and_leaves_nothing() {
    let database = Database::create_empty();
    let started = Instant::now();
    let told = run(&database, &["demo"]);
    assert_eq!(told.code, 0, "{}{}", told.out, told.err);
    assert!(started.elapsed() < 60 * SECOND);
    for expected in [
        "x B placed  rejected, so dead at once",
        "~ A placed  attempt 2 failed",
        "| B paid    held behind a dead event",
        "+ A placed  published, at attempt 3",
        "outbox_held_rows 1\n",
        "+ B paid    published",
        "outbox_published_total 5\n",
    ] {
        assert!(told.out.contains(expected), "{expected}:\n{}", told.out);
    }
    assert!(!told.out.contains('\x1b'), "no colour in a pipe");
    let schemas = "SELECT FROM pg_namespace WHERE nspname LIKE 'outbox%'";
    assert_eq!(database.client().query(schemas, &[]).unwrap().len(), 0);
    database.execute("CREATE SCHEMA outbox_demo; CREATE TABLE outbox_demo.precious ()");
    let refused = run(&database, &["demo"]);
    assert_eq!(refused.code, 2);
    assert!(refused.err.contains("is not the demo's"), "{}", refused.err);
    database.execute("DROP TABLE outbox_demo.precious");
}

// ------------------------------------------------------------------------------------------ settings

#[test]
fn every_help_is_there_and_shows_no_value() {
    let help = ran(bare().arg("--help"));
    assert_eq!(help.code, 0);
    for expected in ["Exit codes:", "130", "DATABASE_URL", "PGSSLMODE"] {
        assert!(help.out.contains(expected), "{}", help.out);
    }
    for subcommand in
        ["migrate", "check", "run", "append", "status", "why", "metrics", "prune", "demo"]
    {
        let mut asked = bare();
        asked
            .env("PG_OUTBOX_BROKER", "amqp://u:s3cret@h")
            .env("DATABASE_URL", "postgres://u:s3cret@h/x");
        let help = ran(asked.args([subcommand, "--help"]));
        assert_eq!(help.code, 0, "{subcommand}");
        assert!(!help.out.contains("s3cret"), "{}", help.out);
    }
    for verb in ["list", "show", "requeue", "discard"] {
        assert_eq!(ran(bare().args(["dead-letters", verb, "--help"])).code, 0);
    }
    assert!(ran(bare().arg("--version")).out.starts_with("pg-outbox "));
    assert_eq!(ran(&mut bare()).code, 2);
}

#[test]
fn unknown_and_malformed_settings_are_named() {
    let url = "postgres://u@127.0.0.1:1/x";
    let started = |name: &str, value: &str| {
        // Without --listen and --relay-id, which would stand above the variables.
        let ran = ran(command(url).args(["run", "--broker", "stdout"]).env(name, value));
        assert_eq!(ran.code, 2, "{name}={value}: {}", ran.err);
        ran.err
    };
    let text = started("PG_OUTBOX_LEESE", "30s");
    assert!(
        text.contains("PG_OUTBOX_LEESE")
            && text.contains("nearest that is known is PG_OUTBOX_LEASE"),
        "{text}"
    );
    assert!(started("pg_outbox_workers", "2").contains("PG_OUTBOX_WORKERS"));
    for value in ["15", "15000", "0", "-1", "1e309", "", "NaN", "30 sec onds"] {
        let text = started("PG_OUTBOX_LEASE", value);
        assert!(
            text.contains("--lease")
                && text.contains("PG_OUTBOX_LEASE")
                && text.contains("30s, 5m, 24h"),
            "{text}"
        );
    }
    for (name, value, expected) in [
        (
            "PG_OUTBOX_LEASE",
            "12s",
            "lease (12s) must be longer than publish_timeout (10s) + lease_margin (5s)",
        ),
        ("PG_OUTBOX_POLL_INTERVAL", "2m", "poll_interval (120s) must be 1ms to 60s"),
        ("PG_OUTBOX_WORKERS", "many", "--workers"),
        ("PG_OUTBOX_WORKERS", "0", "workers (0) must be 1 to 64"),
        ("PG_OUTBOX_BATCH_BYTES", "8MB", "8MiB"),
        ("PG_OUTBOX_WAKE_UPS", "maybe", "true or false"),
        ("PG_OUTBOX_SCHEMA", "", "schema"),
        ("PG_OUTBOX_LISTEN", "everywhere", "127.0.0.1:9718"),
        ("PG_OUTBOX_LOG_LEVEL", "loud", "trace"),
        ("PG_OUTBOX_RETENTION", "7", "forever"),
        ("PGSSLMODE", "verify-full", "this build has no TLS to PostgreSQL"),
        ("PGCONNECT_TIMEOUT", "soon", "PGCONNECT_TIMEOUT must be a number of seconds"),
    ] {
        let text = started(name, value);
        assert!(text.contains(expected), "{name}={value}: {text}");
    }
    for (mode, url) in [
        ("require", "postgres://u@h/x?sslmode=require"),
        ("verify-full", "host=h sslmode=verify-full"),
    ] {
        let refused = ran(command(url).arg("status"));
        assert_eq!(refused.code, 2);
        assert!(
            refused.err.contains(mode) && refused.err.contains("no TLS to PostgreSQL"),
            "{}",
            refused.err
        );
    }
    let nothing = ran(bare().arg("status"));
    assert_eq!(nothing.code, 2);
    assert!(nothing.err.contains("DATABASE_URL"), "{}", nothing.err);
    let no_broker = ran(command(url).arg("run"));
    assert_eq!(no_broker.code, 2);
    assert!(no_broker.err.contains("PG_OUTBOX_BROKER"), "{}", no_broker.err);
}

#[test]
fn the_variables_of_libpq_name_the_database() {
    let database = Database::create();
    let config: postgres::Config = database.url().parse().unwrap();
    let host = match &config.get_hosts()[0] {
        postgres::config::Host::Tcp(host) => host.clone(),
        postgres::config::Host::Unix(path) => path.display().to_string(),
    };
    let mut command = bare();
    command
        .env("PGHOST", host)
        .env("PGPORT", config.get_ports()[0].to_string())
        .env("PGDATABASE", database.name());
    command.env("PGUSER", config.get_user().unwrap()).env("PGAPPNAME", "named");
    if let Some(password) = config.get_password() {
        command.env("PGPASSWORD", String::from_utf8(password.to_vec()).unwrap());
    }
    assert_eq!(ran(command.arg("metrics")).code, 0);

    let folder = std::env::temp_dir().join(format!("pg-outbox-test-{}", fastrand::u64(..)));
    std::fs::write(&folder, format!("{}\n", database.url())).unwrap();
    let from_file = ran(bare().args(["metrics", "--database-url-file"]).arg(&folder));
    std::fs::remove_file(&folder).unwrap();
    assert_eq!(from_file.code, 0, "{}", from_file.err);
}

// ------------------------------------------------------------------------------------------- secrets

/// Whatever is wrong, and however much is logged, the password is nowhere.
#[test]
fn a_password_is_never_shown() {
    let database = Database::create();
    let good = database.url().replacen("postgres@", "postgres:s3cret@", 1);
    let urls = [
        good.as_str(),
        "postgres://u:s3cret@127.0.0.1:1/x",
        "postgres://u:q^G$F%Js3cret@127.0.0.1:1/x",
        "postgres://u:s3cret@127.0.0.1:port/x",
        "postgres://u:x@s3cret@127.0.0.1/x",
        "postgres://u:x/s3cret@127.0.0.1:1/x",
        "postgres//u:s3cret@h/x",
        "mysql://u:s3cret@h/x",
        "s3cret",
        "host=h password=s3cret user",
        "postgres://u:s3cret@h/x?sslmode=verify-full",
        "postgres://u:s3cret@h/x?nonsense=1",
    ];
    let check = |what: &str, ran: Ran| {
        assert!(
            !format!("{}{}", ran.out, ran.err).contains("s3cret"),
            "{what}: {}{}",
            ran.out,
            ran.err
        );
    };
    for url in urls {
        for arguments in [&["status"][..], &["check", "--broker", "stdout"]] {
            check(url, ran(command(url).env("RUST_LOG", "trace").args(arguments)));
            let option = format!("--database-url={url}");
            check(url, ran(bare().env("RUST_LOG", "trace").arg(option).args(arguments)));
        }
        // In places where it does not belong. A bare word there cannot be told from any other.
        if url == "s3cret" {
            continue;
        }
        check(url, ran(bare().args(["status", url])));
        check(url, ran(bare().args([url, "status"])));
        check(url, ran(bare().arg(format!("--datbase-url={url}")).arg("status")));
        check(url, ran(bare().args(["why", url])));
        check(url, ran(bare().args(["run", "--lease", url])));
        check(url, ran(bare().env("PG_OUTBOX_LISTEN", url).args(["run"])));
    }
    for url in [
        "amqp://u:s3cret@127.0.0.1:1/v",
        "amqp://u:x@s3cret@h",
        "amqp://u:x/s3cret@h",
        "amqp:/u:s3cret@h",
        "kafka://u:s3cret@h",
        "amqps://u:s3cret@127.0.0.1:port",
        "s3cret",
    ] {
        for mut command in [command(&database.url()), command(&database.url())] {
            check(
                url,
                ran(command.env("RUST_LOG", "trace").env("PG_OUTBOX_BROKER", url).arg("check")),
            );
        }
        check(
            url,
            ran(command(&database.url()).env("RUST_LOG", "trace").args(["check", "--broker", url])),
        );
    }
}

#[test]
fn a_running_relay_shows_no_password_to_ps_or_metrics() {
    let database = Database::create();
    let port = free_port();
    let url = database.url().replacen("postgres@", "postgres:s3cret@", 1);
    assert!(url.contains("s3cret"));
    let mut command = command(&url);
    command.env("RUST_LOG", "trace").env("PG_OUTBOX_RELAY_ID", "secretive");
    let mut running = Running::start(command.args([
        "run",
        "--broker",
        "stdout",
        "--listen",
        &format!("127.0.0.1:{port}"),
    ]));
    running.wait_for("started with");
    let cmdline = std::fs::read_to_string(format!("/proc/{}/cmdline", running.child.id())).unwrap();
    assert!(cmdline.contains("run") && !cmdline.contains("s3cret"), "{cmdline}");
    for path in ["/metrics", "/readyz", "/healthz", "/"] {
        // Ready once the broker was asked.
        eventually(path, 10 * SECOND, || {
            let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert!(!text.contains("s3cret"), "{path}: {text}");
            text.starts_with("HTTP/1.0 200")
        });
    }
    running.signal("TERM");
    let (code, out) = running.end(10 * SECOND);
    assert_eq!(code, 0);
    assert!(!out.contains("s3cret") && !running.seen.contains("s3cret"), "{}", running.seen);
    let warned = ran(bare().arg(format!("--database-url={url}")).arg("metrics"));
    assert_eq!(warned.code, 0);
    assert!(warned.err.contains("--database-url-file"), "{}", warned.err);
}

// ------------------------------------------------------------------------------------------- signals

#[test]
fn each_signal_stops_the_relay_cleanly() {
    let database = Database::create();
    for name in ["TERM", "INT", "HUP"] {
        database.append("order", name, "placed", name.as_bytes());
        let mut running = Running::start(&mut relay(&database.url()));
        running.wait_for("started with");
        let published = format!("aggregate_id = '{name}' AND status = 'published'");
        eventually("the event is published", 20 * SECOND, || database.count(&published) == 1);
        running.signal(name);
        let (code, out) = running.end(5 * SECOND);
        assert_eq!(code, 0, "SIG{name}: {}", running.seen);
        let line: Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
        assert_eq!((&line["payload"], out.lines().count()), (&name.into(), 1));
        assert!(running.seen.contains("1 published"), "{}", running.seen);
    }
    assert_eq!(database.count("unexplained_failures > 0 OR locked_by IS NOT NULL"), 0);
}

#[test]
fn a_stop_is_bounded_while_the_database_is_down() {
    let mut running = Running::start(&mut relay("postgres://u@127.0.0.1:1/x"));
    running.wait_for("Connection refused");
    running.signal("TERM");
    let (code, _) = running.end(5 * SECOND);
    assert_eq!(code, 0, "{}", running.seen);
}

/// Nobody reads the pipe, so the publisher hangs in its write.
fn stuck(database: &Database, settings: &[&str]) -> Running {
    database.append("order", "1", "placed", &vec![b'x'; 1_000_000]);
    let mut running = Running::start(relay(&database.url()).args(settings));
    running.wait_for("started with");
    eventually("it is being published", 20 * SECOND, || {
        database.count("locked_by IS NOT NULL") == 1
    });
    running
}

#[test]
fn a_stop_is_bounded_while_the_publisher_hangs() {
    let database = Database::create();
    let settings = [
        "--publish-timeout",
        "500ms",
        "--lease-margin",
        "500ms",
        "--lease",
        "2s",
        "--shutdown-timeout",
        "1s",
    ];
    let mut running = stuck(&database, &settings);
    let started = Instant::now();
    running.signal("TERM");
    let (code, _) = running.end(5 * SECOND);
    assert!(started.elapsed() < 4 * SECOND, "{:?}", started.elapsed());
    assert!(code == 0 || code == 1, "{code}: {}", running.seen);
}

#[test]
fn a_second_signal_leaves_at_once() {
    let database = Database::create();
    let mut running = stuck(&database, &[]);
    let started = Instant::now();
    running.signal("INT");
    running.wait_for("stopping");
    assert!(running.child.try_wait().unwrap().is_none(), "it waits for the publisher");
    // A supervisor may signal the process and then its group: within a second that is one wish.
    eventually("it leaves", 10 * SECOND, || {
        running.signal("INT");
        running.child.try_wait().unwrap().is_some()
    });
    assert!(started.elapsed() > SECOND, "{:?}", started.elapsed());
    assert!(started.elapsed() < 5 * SECOND, "{:?}", started.elapsed());
    let (code, _) = running.end(5 * SECOND);
    assert_eq!(code, 130, "{}", running.seen);
}

#[test]
fn names_of_types_are_trimmed_and_never_empty() {
    let database = Database::create();
    let mut running = Running::start(relay(&database.url()).args(["--only", "order, invoice"]));
    running.wait_for(r#"serves only the aggregate types ["order", "invoice"]"#);
    running.signal("TERM");
    assert_eq!(running.end(10 * SECOND).0, 0, "{}", running.seen);
    for list in ["order,,invoice", " ", "order,"] {
        let ran = ran(relay(&database.url()).args(["--except", list]));
        assert_eq!(ran.code, 2, "{list:?}");
        assert!(ran.err.contains("a name is empty"), "{list:?}: {}", ran.err);
    }
}

#[test]
fn a_port_that_is_taken_is_said() {
    let database = Database::create();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let ran = ran(command(&database.url()).args(["run", "--broker", "stdout", "--listen", &addr]));
    assert_eq!(ran.code, 1);
    assert!(
        ran.err.contains(&format!("listening on {addr}")) && ran.err.contains("--listen"),
        "{}",
        ran.err
    );
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let database = Database::create();
    let mut child = command(&database.url())
        .args(["migrate", "--print"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
