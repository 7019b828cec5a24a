//! What a run tells: a line now and then, and a page at the end.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use postgres::Client;

use super::Told;
use super::checker::{Finding, Rule};
use super::faults::Chaos;
use super::history::{History, Outcome};
use super::writers::Tally;
use crate::common::Rabbit;

/// How it goes.
pub fn progress(chaos: &Chaos, tally: &Tally, arrived: usize) -> String {
    let faults = chaos.faults();
    let now: Vec<_> =
        faults.iter().filter(|fault| fault.until == u64::MAX).map(|fault| fault.kind).collect();
    format!(
        "{:>6} s  {} appended, {} messages arrived, {} faults, {} incidents; now: {}",
        chaos.clock.now() / 1_000,
        read(&tally.appended),
        arrived,
        faults.len(),
        chaos.incidents().len(),
        if now.is_empty() { "calm".to_owned() } else { now.join(", ") }
    )
}

pub fn versions(client: &mut Client, rabbit: &Rabbit) -> Vec<String> {
    let postgres: String = client.query_one("SHOW server_version", &[]).unwrap().get(0);
    let relay = Command::new(env!("CARGO_BIN_EXE_pg-outbox")).arg("--version").output().unwrap();
    vec![
        String::from_utf8_lossy(&relay.stdout).trim().to_owned(),
        format!("PostgreSQL {postgres}"),
        format!("RabbitMQ {}", rabbit.ctl(&["version"]).trim()),
        format!("Linux {}", std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim()),
    ]
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The report of a run.
pub fn page(told: &Told, history: &History, finding: &Finding) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| writeln!(page, "  {name:<28}{text}").unwrap();
    let (options, tally, seen) = (&told.options, &told.tally, &told.seen);
    line("again", options.command());
    line("versions", told.versions.join(", "));
    line("relays", format!("{}, leases of {:?}", options.relays, super::relays::LEASE));
    line("transactions committed", read(&tally.commits).to_string());
    line(
        "rolled back",
        format!("{}, {} savepoints", read(&tally.rollbacks), read(&tally.savepoints_rolled_back)),
    );
    line(
        "refused or lost",
        format!("{}, {} open for seconds", read(&tally.failures), read(&tally.long_transactions)),
    );
    line("events appended", read(&tally.appended).to_string());
    line("events committed", history.committed.len().to_string());
    line("events arrived", format!("{} in {} messages", finding.arrived, history.arrivals.len()));
    line("duplicates", duplicates(finding));
    line("at the end", outcomes(history));
    for (reason, count) in &told.dead {
        line("healthy events that died", format!("{count} of: {reason}"));
    }
    line(
        "operator",
        format!("{} requeued, {} discarded", read(&seen.requeued), read(&seen.discarded)),
    );
    line("counted by relays", format!("{:?}, lease_lost {}", history.counted, told.lease_lost));
    line("happened to rows", format!("{:?}", history.happened));
    line("longest time without arrival", format!("{:.1?}", told.longest_gap));
    line(
        "rest delivered in",
        told.drained_in.map_or("not at all".into(), |time| format!("{time:.1?}")),
    );
    line("looks at sessions", read(&seen.samples).to_string());
    line("connections of the recorder", told.recorder_connections.to_string());
    for (kind, count) in faults(history) {
        line("fault", format!("{count:>4} {kind}"));
    }
    line("lost", broken(finding, Rule::NothingIsLost));
    line("reordered", broken(finding, Rule::Order));
    for (rule, count) in &finding.broken {
        line("BROKEN", format!("{rule:?}, {count} times"));
    }
    for example in &finding.examples {
        line("", format!("{:?}: {}", example.rule, example.text));
    }
    let verdict =
        if finding.is_clean() { "the contract was kept" } else { "THE CONTRACT WAS NOT KEPT" };
    format!("chaos, seed {}: {verdict}\n{page}", options.seed)
}

fn duplicates(finding: &Finding) -> String {
    let causes: Vec<_> =
        finding.causes.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    format!("{} ({})", finding.duplicates, causes.join(", "))
}

fn broken(finding: &Finding, rule: Rule) -> String {
    finding.broken.get(&rule).copied().unwrap_or(0).to_string()
}

fn outcomes(history: &History) -> String {
    let count = |outcome: fn(&Outcome) -> bool| {
        history.committed.iter().filter(|event| outcome(&event.outcome)).count()
    };
    format!(
        "{} published, {} dead, {} held, {} discarded",
        count(|outcome| *outcome == Outcome::Published),
        count(|outcome| matches!(outcome, Outcome::Dead { .. })),
        count(|outcome| *outcome == Outcome::Pending),
        count(|outcome| *outcome == Outcome::Discarded)
    )
}

fn faults(history: &History) -> BTreeMap<&'static str, usize> {
    let mut kinds = BTreeMap::new();
    for fault in &history.faults {
        *kinds.entry(fault.kind).or_default() += 1;
    }
    kinds
}
