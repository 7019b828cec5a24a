//! What ships in `monitoring/`: rules that Prometheus takes and that do what their tests say, thresholds that follow the settings, a
//! dashboard whose queries have answers, and a runbook whose commands exist.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use common::process::{self, Nest, free_port};
use common::{Database, eventually};
use pg_outbox::store::status::{LAG_LIMIT, TOLERATED_OUTAGE};
use pg_outbox::{Policy, RelayConfig};
use serde_json::Value;

const RULES: &str = include_str!("../monitoring/alerts.yml");
const SCENARIOS: &str = include_str!("../monitoring/alerts.test.yml");
const DASHBOARD: &str = include_str!("../monitoring/grafana-dashboard.json");
const RUNBOOK: &str = include_str!("../monitoring/README.md");
const SOON: Duration = Duration::from_secs(60);

/// A program of the package prometheus. Without it a test is skipped, and fails where CI is set.
fn is_there(program: &str) -> bool {
    let found = process::find(Vec::new(), &[program]).is_some();
    assert!(
        found || std::env::var_os("CI").is_none(),
        "{program} is missing; install the package prometheus"
    );
    if !found {
        eprintln!("SKIPPED: {program} is missing; install the package prometheus");
    }
    found
}

fn binary(url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pg-outbox"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("DATABASE_URL", url).env("USER", "tester").stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A rule as its text has it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rule<'a> {
    name: &'a str,
    expr: &'a str,
    wait: Option<&'a str>,
    severity: &'a str,
    /// Every line of it.
    text: &'a str,
}

/// The rules of `alerts.yml`, which has one key a line.
fn rules() -> Vec<Rule<'static>> {
    let value = |text: &'static str, key: &str| {
        let mut lines = text.lines().map(str::trim);
        lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
    };
    let rule = |text: &'static str| Rule {
        name: text.lines().next().unwrap(),
        expr: value(text, "expr").unwrap(),
        wait: value(text, "for"),
        severity: value(text, "severity").unwrap(),
        text,
    };
    RULES.split("- alert: ").skip(1).map(rule).collect()
}

fn rule(name: &str) -> Rule<'static> {
    rules().into_iter().find(|rule| rule.name == name).unwrap()
}

#[test]
fn the_six_rules_of_every_outbox_and_those_that_were_added() {
    let found: Vec<_> =
        rules().iter().map(|r| (r.name, r.expr, r.wait.unwrap_or("0s"), r.severity)).collect();
    let expected = [
        ("OutboxLagHigh", "outbox_oldest_pending_age_seconds > 600", "1m", "page"),
        ("OutboxAggregateParked", "outbox_held_rows > 0", "15m", "page"),
        ("OutboxDeadLetter", "outbox_dead_rows > 0", "0s", "ticket"),
        ("OutboxRelayDown", "outbox_relays_alive < 1", "2m", "page"),
        ("OutboxLeaseLost", "increase(outbox_lease_lost_total[1h]) > 3", "0s", "ticket"),
        ("OutboxMetricsAbsent", "absent(outbox_relays_alive)", "5m", "page"),
        ("OutboxUnreachable", "max(up{job=\"pg-outbox\"}) == 0", "2m", "page"),
        ("OutboxBrokerPaused", "outbox_relays_paused > 0", "5m", "ticket"),
        ("OutboxDeathsAhead", "outbox_dying_within_6h_rows > 0", "5m", "ticket"),
        ("OutboxDeathsImminent", "outbox_dying_within_1h_rows > 0", "5m", "page"),
    ];
    assert_eq!(found, expected);
}

/// The scenarios that look at an alert. A whole night takes promtool a while, and nothing happens after its first minutes.
fn scenarios_of(alert: &str) -> String {
    let mut scenarios = SCENARIOS.split("\n  - interval:");
    let head = scenarios.next().unwrap().to_owned();
    let asked = format!("alertname: {alert}\n");
    let of_it = scenarios.filter(|scenario| scenario.contains(&asked));
    let text = of_it.fold(head, |text, scenario| text + "\n  - interval:" + scenario);
    text.replace("eval_time: 7h", "eval_time: 1h")
}

/// Runs promtool's unit tests with these rules.
fn test_rules(rules: &str, scenarios: &str) -> Output {
    let nest = Nest::new("rules", "true");
    nest.write("alerts.yml", rules);
    nest.write("alerts.test.yml", scenarios);
    let mut tool = Command::new("promtool");
    tool.args(["test", "rules", "alerts.test.yml"]).current_dir(nest.folder()).output().unwrap()
}

#[test]
fn promtool_accepts_the_rules_and_their_scenarios_pass() {
    if !is_there("promtool") {
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("monitoring");
    let checked = Command::new("promtool")
        .args(["check", "rules", "alerts.yml"])
        .current_dir(folder)
        .output();
    let checked = checked.unwrap();
    assert!(checked.status.success(), "{}", said(&checked));
    assert!(said(&checked).contains("10 rules found"), "{}", said(&checked));
    let tested = test_rules(RULES, SCENARIOS);
    assert!(tested.status.success(), "{}", said(&tested));
    let evaluations = SCENARIOS.matches("eval_time:").count();
    let scenarios = SCENARIOS.matches("\n  - interval:").count();
    assert!(RUNBOOK.contains(&format!("in {scenarios} scenarios")), "{scenarios}");
    assert!(
        scenarios >= 16 && evaluations >= 30,
        "{scenarios} scenarios, {evaluations} evaluations"
    );
}

/// Each threshold, each wait, each severity and each rule is held by a scenario.
#[test]
fn the_scenarios_notice_every_change_of_a_rule() {
    if !is_there("promtool") {
        return;
    }
    let mut changes = Vec::new();
    for rule in rules() {
        let mut change = |from: &str, to: &str| {
            let changed = rule.text.replacen(from, to, 1);
            assert_ne!(changed, rule.text, "{}: {from} is not there", rule.name);
            changes.push((
                format!("{}: {from} to {to}", rule.name),
                RULES.replace(rule.text, &changed),
            ));
        };
        let severity = if rule.severity == "page" { "ticket" } else { "page" };
        change(&format!("severity: {}", rule.severity), &format!("severity: {severity}"));
        if let Some(wait) = rule.wait {
            let minutes: u32 = wait.strip_suffix('m').unwrap().parse().unwrap();
            change(&format!("for: {wait}"), "for: 0s");
            change(&format!("for: {wait}"), &format!("for: {}m", minutes * 3));
        }
        let never = format!("expr: ({}) and vector(0) > 1", rule.expr);
        change(&format!("expr: {}", rule.expr), &never);
    }
    for (name, from, to) in [
        ("OutboxLagHigh", "> 600", "> 299"),
        ("OutboxLagHigh", "> 600", "> 1200"),
        ("OutboxAggregateParked", "held", "dead"),
        ("OutboxRelayDown", "< 1", "< 2"),
        ("OutboxLeaseLost", "> 3", "> 0"),
        ("OutboxLeaseLost", "> 3", "> 6"),
        ("OutboxLeaseLost", "[1h]", "[3h]"),
        (
            "OutboxLeaseLost",
            "increase(outbox_lease_lost_total[1h])",
            "delta(outbox_lease_lost_total[1h])",
        ),
        ("OutboxMetricsAbsent", "absent(outbox_relays_alive)", "outbox_relays_alive == 0"),
        ("OutboxUnreachable", "max(up{job=\"pg-outbox\"})", "min(up{job=\"pg-outbox\"})"),
        ("OutboxUnreachable", "{job=\"pg-outbox\"}", ""),
        ("OutboxBrokerPaused", "> 0", "> 1"),
        ("OutboxDeathsAhead", "6h_rows", "1h_rows"),
        ("OutboxDeathsImminent", "1h_rows", "6h_rows"),
    ] {
        let text = rule(name).text;
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{name}: {from} is not there");
        changes.push((format!("{name}: {from} to {to}"), RULES.replace(text, &changed)));
    }
    for (change, rules) in changes {
        let (alert, _) = change.split_once(':').unwrap();
        let tested = test_rules(&rules, &scenarios_of(alert));
        let text = said(&tested);
        assert!(
            !tested.status.success() && text.contains("FAILED"),
            "not noticed: {change}: {text}"
        );
    }
}

fn seconds(text: &str) -> u64 {
    let (number, unit) = text.split_at(text.len() - 1);
    number.parse::<u64>().unwrap()
        * match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3_600,
            _ => panic!("{text}"),
        }
}

#[test]
fn thresholds_follow_the_settings() {
    let policy = Policy::default();
    let (cap, tolerated) = (policy.backoff_cap.as_secs(), TOLERATED_OUTAGE.as_secs());
    let (lag, threshold) = rule("OutboxLagHigh").expr.split_once(" > ").unwrap();
    assert_eq!(lag, "outbox_oldest_pending_age_seconds");
    assert_eq!(threshold.parse::<u64>().unwrap(), tolerated + cap);
    assert_eq!(LAG_LIMIT.as_secs(), tolerated + cap, "the verdict of `status` and the alert agree");
    // The arithmetic is where whoever changes a figure reads it.
    let arithmetic =
        format!("{tolerated} s tolerated + {cap} s backoff cap = {} s", tolerated + cap);
    assert!(RULES.contains(&format!("#   {arithmetic}\n")), "{arithmetic}");
    let arithmetic =
        format!("{tolerated} s of outage tolerated + {cap} s backoff cap = {} s", tolerated + cap);
    assert!(RUNBOOK.contains(&arithmetic), "{arithmetic}");
    assert_eq!(rule("OutboxBrokerPaused").wait.map(seconds), Some(tolerated), "the same tolerance");
    // About nine failures: base * 2^(n-1) reaches the cap with the tenth.
    assert!(policy.backoff_ceiling(9) < policy.backoff_cap);
    assert_eq!(policy.backoff_ceiling(10), policy.backoff_cap);

    let config = RelayConfig::builder("x").build().unwrap();
    assert!(config.lease() < TOLERATED_OUTAGE, "a crash alone must not page");
    let window = config.policy().transient_window.as_secs();
    assert!(window > 6 * 3_600, "OutboxDeathsAhead would be on from the first failure");
    assert!(RULES.contains(&format!("--transient-window ({} h)", window / 3_600)));
    // A beat is good for 30 s.
    assert!(
        rule("OutboxRelayDown").text.contains("for: 2m")
            && RUNBOOK.contains("30 s + 2 minutes of `for`")
    );
}

#[test]
fn check_warns_where_the_settings_do_not_fit_the_rules() {
    let check = |arguments: &[&str]| {
        let mut command = binary("postgres://u@127.0.0.1:1/x");
        let output =
            command.args(["check", "--broker", "stdout"]).args(arguments).output().unwrap();
        let text = said(&output);
        text.lines().find(|line| line.contains(" alerts ")).unwrap().to_owned()
    };
    assert!(check(&[]).starts_with("ok    alerts"), "{}", check(&[]));
    let cap = check(&["--backoff-cap", "10m"]);
    assert!(cap.starts_with("warn  alerts") && cap.contains("300s + 600s = 900s"), "{cap}");
    let lease = check(&["--lease", "301s"]);
    assert!(lease.starts_with("warn  alerts") && lease.contains("--lease of 301s"), "{lease}");
    let window = check(&["--transient-window", "6h"]);
    assert!(window.starts_with("warn  alerts") && window.contains("OutboxDeathsAhead"), "{window}");
    for fits in [["--backoff-cap", "5m"], ["--lease", "5m"], ["--transient-window", "7h"]] {
        assert!(check(&fits).starts_with("ok    alerts"), "{fits:?}");
    }
}

/// Headings of the runbook with their text.
fn sections() -> Vec<(&'static str, &'static str)> {
    let section = |text: &'static str| text.split_once('\n').unwrap();
    RUNBOOK.split("\n## ").skip(1).map(section).collect()
}

#[test]
fn every_alert_has_its_entry_in_the_runbook() {
    let sections = sections();
    let titles: Vec<_> =
        sections.iter().map(|(title, _)| *title).filter(|t| t.starts_with("Outbox")).collect();
    assert_eq!(titles, rules().iter().map(|rule| rule.name).collect::<Vec<_>>());
    for rule in rules() {
        let anchor = format!("runbook_url: monitoring/README.md#{}\n", rule.name.to_lowercase());
        assert!(rule.text.contains(&anchor), "{anchor}");
        let (_, entry) = sections.iter().find(|(title, _)| *title == rule.name).unwrap();
        let severity = if rule.severity == "page" { "*Page.*" } else { "*Ticket.*" };
        for part in [severity, "**Means**", "**Confirm**", "**Do**", "**Do not**"] {
            assert!(entry.contains(part), "{}: {part}", rule.name);
        }
    }
    for link in RUNBOOK.split("](#").skip(1) {
        let anchor = link.split(')').next().unwrap();
        assert!(titles.iter().any(|title| title.to_lowercase() == anchor), "{anchor}");
    }
}

/// Every `pg-outbox ...` of a text, in backquotes or on a line of its own.
fn commands(text: &str) -> BTreeSet<&str> {
    let quoted = text.split('`').skip(1).step_by(2);
    let lines = text.lines().map(str::trim);
    let all = quoted.chain(lines).filter(|command| command.starts_with("pg-outbox "));
    all.filter(|command| !command.contains('\n')).collect()
}

/// What a shell makes of a command without variables.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut quoted) = (vec![String::new()], false);
    for c in command.chars() {
        match c {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().unwrap().push(c),
        }
    }
    words
}

#[test]
fn the_commands_of_runbook_and_alerts_exist() {
    let database = Database::create();
    let mut found: BTreeSet<_> = commands(RUNBOOK);
    found.extend(commands(RULES));
    assert!(found.len() >= 10, "{found:?}");
    // Each against an event 42 that has just died, so that it has something to do.
    for command in found {
        let arguments = words(command);
        database.execute(
            "TRUNCATE outbox.outbox RESTART IDENTITY;
             SELECT setval(pg_get_serial_sequence('outbox.outbox', 'id'), 41);
             SELECT outbox.outbox_append('order', '42', 'order.placed', '{}'::json);
             UPDATE outbox.outbox SET status = 'dead', died_at = now(), last_error = 'schema registry: no field'",
        );
        let mut run = binary(&database.url());
        let output = run.args(&arguments[1..]).env("PG_OUTBOX_BROKER", "stdout").output().unwrap();
        // `status` finds no relay, which is 4, and a canary refuses to go without one; anything else is done.
        let expected = match arguments[1].as_str() {
            "status" => 4,
            _ if command.contains("--canary") => 1,
            _ => 0,
        };
        assert_eq!(output.status.code(), Some(expected), "{command}: {}", said(&output));
    }
}

#[test]
fn the_options_that_the_runbook_names_exist() {
    let help = binary("").args(["run", "--help"]).output().unwrap();
    let help = said(&help);
    let options = RUNBOOK.split('`').skip(1).step_by(2).chain(RULES.split_whitespace());
    let options: BTreeSet<&str> = options
        .flat_map(str::split_whitespace)
        .map(|word| word.trim_matches(['(', ')', ',', '.', ':', '`']))
        .filter(|word| word.starts_with("--") && word.len() > 2)
        .collect();
    assert!(options.len() >= 8, "{options:?}");
    let elsewhere = ["--group", "--dry-run", "--limit", "--reason", "--note", "--canary"];
    for option in options {
        assert!(help.contains(option) || elsewhere.contains(&option), "{option}");
    }
}

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    dashboard["panels"].as_array().unwrap().clone()
}

/// Every query of the dashboard, with its variables filled in as Grafana does.
fn queries() -> Vec<String> {
    let targets = panels()
        .into_iter()
        .flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default());
    targets
        .map(|target| {
            let expr = target["expr"].as_str().unwrap();
            expr.replace("$__rate_interval", "1m").replace("$job", "pg-outbox")
        })
        .collect()
}

#[test]
fn the_dashboard_is_what_grafana_imports() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    assert_eq!(dashboard["uid"], "pg-outbox");
    assert_eq!(dashboard["title"], "pg-outbox");
    assert!(dashboard["id"].is_null(), "an id is given by the Grafana that imports it");
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 36);
    // The data source is asked for by a variable, so that no uid of anybody's Grafana is in the file.
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert_eq!(
        (&variables[0]["name"], &variables[0]["type"]),
        (&"datasource".into(), &"datasource".into())
    );
    assert_eq!(variables[0]["query"], "prometheus");
    assert_eq!(variables[1]["name"], "job");
    let panels = panels();
    assert!(panels[0]["title"].as_str().unwrap().starts_with("Lag"), "lag first");
    assert_eq!(panels[0]["gridPos"]["y"], 0);
    let mut ids = BTreeSet::new();
    let mut places: Vec<[u64; 4]> = Vec::new();
    for panel in &panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}");
        let place = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap());
        let [x, y, w, h] = place;
        assert!(x + w <= 24 && w > 0 && h > 0, "{title}");
        let apart =
            |[a, b, c, d]: &[u64; 4]| a + c <= x || x + w <= *a || b + d <= y || y + h <= *b;
        assert!(places.iter().all(apart), "{title} lies on another panel");
        places.push(place);
        if panel["type"] == "row" {
            continue;
        }
        assert!(
            ["timeseries", "stat", "table"].contains(&panel["type"].as_str().unwrap()),
            "{title}"
        );
        let targets = panel["targets"].as_array().unwrap();
        let mut names = BTreeSet::new();
        for target in targets {
            assert!(names.insert(target["refId"].as_str().unwrap()), "{title}");
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            assert!(!target["expr"].as_str().unwrap().is_empty());
        }
        assert!(!names.is_empty(), "{title}");
        assert_eq!(panel["datasource"]["type"], "prometheus", "{title}");
    }
    // The line in the first panel is that of the alert.
    let steps = panels[0]["fieldConfig"]["defaults"]["thresholds"]["steps"].as_array().unwrap();
    assert_eq!(steps.last().unwrap()["value"], LAG_LIMIT.as_secs());
}

/// Names of metrics in an expression or in what `/metrics` says.
fn metric_names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("outbox_")).map(str::to_owned).collect()
}

#[test]
fn every_metric_that_is_asked_for_exists_and_none_is_forgotten() {
    let database = Database::create();
    let output = binary(&database.url()).arg("metrics").output().unwrap();
    let text = said(&output);
    let samples: String =
        text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let there = metric_names(&samples);
    assert!(there.len() >= 19, "{there:?}");
    let (mut asked, mut alerted) = (BTreeSet::new(), BTreeSet::new());
    queries().iter().for_each(|query| asked.extend(metric_names(query)));
    rules().iter().for_each(|rule| alerted.extend(metric_names(rule.expr)));
    assert!(asked.is_subset(&there), "{:?}", asked.difference(&there));
    assert!(alerted.is_subset(&there), "{:?}", alerted.difference(&there));
    assert_eq!(asked, there, "each has its place on the dashboard");
}

/// A Prometheus that scrapes one target every second, with the rules.
struct Prometheus {
    port: u16,
    child: Child,
    nest: Nest,
}

impl Prometheus {
    fn start(target: u16) -> Self {
        let (nest, port) =
            (Nest::new("prometheus", "kill -KILL $(cat pid) 2>/dev/null; true"), free_port());
        nest.write("alerts.yml", RULES);
        nest.write(
            "prometheus.yml",
            &format!(
                "global: {{ scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s }}\nrule_files: [alerts.yml]\n\
                 scrape_configs:\n  - job_name: pg-outbox\n    static_configs: [{{ targets: ['127.0.0.1:{target}'] }}]\n"
            ),
        );
        let log = nest.log();
        let mut command = Command::new("prometheus");
        command
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .current_dir(nest.folder())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = command.spawn().unwrap();
        nest.write("pid", &format!("{}\n", child.id()));
        Self { port, child, nest }
    }

    /// The `data` of an answer of its API; `None` while it does not answer.
    fn ask(&self, path: &str) -> Option<Value> {
        let body = get(self.port, path).ok()?;
        let answer: Value = serde_json::from_str(&body).ok()?;
        assert_ne!(answer["status"], "error", "{path}: {answer}");
        Some(answer["data"].clone())
    }

    /// The samples of a query.
    fn query(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let data = self.ask(&format!("/api/v1/query?query={encoded}"));
        data.and_then(|data| data["result"].as_array().cloned()).unwrap_or_default()
    }

    fn is_firing(&self, alert: &str) -> bool {
        let alerts = self.ask("/api/v1/alerts").unwrap_or_default();
        let mut alerts = alerts["alerts"].as_array().into_iter().flatten();
        alerts.any(|a| a["labels"]["alertname"] == alert && a["state"] == "firing")
    }

    fn state(&self, alert: &str) -> String {
        let rules = self.ask("/api/v1/rules").unwrap_or_default();
        let rules = rules["groups"][0]["rules"].as_array().cloned().unwrap_or_default();
        let found = rules.iter().find(|rule| rule["name"] == alert && rule["health"] == "ok");
        found.and_then(|rule| rule["state"].as_str()).unwrap_or_default().to_owned()
    }

    #[track_caller]
    fn eventually(&self, what: &str, condition: impl FnMut() -> bool) {
        eprintln!("waiting until {what}; the log of Prometheus is in {:?}", self.nest.folder());
        eventually(what, SOON, condition);
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// By HTTP/1.0, so that the body comes in one piece.
fn get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(SOON))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (_, body) = text.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    Ok(body.into())
}

/// A running relay, killed with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_real_prometheus_scrapes_the_relay_and_evaluates_the_rules() {
    if !is_there("prometheus") {
        return;
    }
    let (database, port) = (Database::create(), free_port());
    database.append_many(20, 1);
    let mut relay = binary(&database.url());
    relay
        .args(["run", "--broker", "stdout", "--relay-id", "relay-a", "--listen"])
        .arg(format!("127.0.0.1:{port}"));
    let relay = Running(relay.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let prometheus = Prometheus::start(port);
    prometheus.eventually("the events are published, as Prometheus sees it", || {
        prometheus.query("outbox_published_total == 20").len() == 1
    });
    prometheus.eventually("a rate can be had", || {
        prometheus.query("rate(outbox_published_total[1m])").len() == 1
    });
    for query in queries() {
        prometheus
            .eventually(&format!("{query} has an answer"), || !prometheus.query(&query).is_empty());
    }
    let names: Vec<_> = rules().iter().map(|rule| rule.name).collect();
    for name in &names {
        prometheus.eventually(&format!("{name} is evaluated and quiet"), || {
            prometheus.state(name) == "inactive"
        });
    }
    database.append("order", "42", "placed", b"{}");
    database.append("order", "42", "paid", b"{}");
    // A dead event with one behind it. Whatever the relay has done with them by now, it leaves them alone then.
    database.execute(
        "UPDATE outbox.outbox SET locked_by = NULL, lease_id = NULL, locked_until = NULL, published_at = NULL,
                status = CASE WHEN event_type = 'placed' THEN 'dead' ELSE 'pending' END, died_at = now(), last_error = 'rejected',
                created_at = now() - interval '20 min'
          WHERE aggregate_id = '42'",
    );
    prometheus.eventually("the ticket is there", || prometheus.is_firing("OutboxDeadLetter"));
    for waits in ["OutboxLagHigh", "OutboxAggregateParked"] {
        prometheus.eventually(&format!("{waits} waits for its minutes"), || {
            prometheus.state(waits) == "pending"
        });
    }
    drop(relay);
    prometheus.eventually("a relay that is gone is noticed", || {
        prometheus.state("OutboxUnreachable") == "pending"
            && prometheus.state("OutboxMetricsAbsent") == "pending"
    });
    assert_eq!(prometheus.state("OutboxRelayDown"), "inactive", "there is nothing to compare with");
    let folder: PathBuf = prometheus.nest.folder().into();
    drop(prometheus);
    assert!(fs::metadata(folder).is_err(), "nothing is left behind");
}

/// What a relay that runs says, not only what the library renders.
#[test]
fn promtool_accepts_what_the_relay_serves() {
    if !is_there("promtool") {
        return;
    }
    let (database, port) = (Database::create(), free_port());
    database.append_many(3, 2);
    let mut relay = binary(&database.url());
    relay
        .args(["run", "--broker", "stdout", "--relay-id", "relay-a", "--listen"])
        .arg(format!("127.0.0.1:{port}"));
    let _relay = Running(relay.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let mut text = String::new();
    eventually("the relay serves what it has published", SOON, || {
        text = get(port, "/metrics").unwrap_or_default();
        text.contains("\noutbox_published_total 6\n")
    });
    assert!(text.contains("\noutbox_delivery_latency_seconds_count 6\n"), "{text}");
    let mut tool = Command::new("promtool");
    tool.args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut tool = tool.spawn().unwrap();
    tool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = tool.wait_with_output().unwrap();
    assert!(
        output.status.success() && said(&output).trim().is_empty(),
        "{}\n{text}",
        said(&output)
    );
}
