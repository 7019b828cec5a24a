//! The benchmark: `./run bench` starts a throw-away PostgreSQL and runs it.
//!
//! Every case makes a database of its own, so each can be run alone and again. A relay under test is a child process:
//! this program, started once more (`relay.rs`). Progress goes to standard error, the table to standard output. A case
//! that fails ends with a row that says so, and the program then exits with 1. No figure decides anything else:
//! whether one meets its goal stands in the table.

mod args;
mod chart;
mod costs;
mod database;
mod drain;
mod growth;
mod latency;
mod limit;
mod machine;
mod memory;
mod producer;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
mod relay;
mod report;
mod start;
mod writers;

use std::process::ExitCode;

use args::Args;
use database::Server;
use report::{Report, Row};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What the cases share.
struct Bench {
    args: Args,
    server: Server,
    report: Report,
    /// Events a second of the plain SQL on two connections, once it is known.
    limit: Option<f64>,
}

type Case = fn(&mut Bench) -> Result<()>;

/// In the order of the table.
const CASES: &[(&str, Case, &str)] = &[
    (
        "limit",
        limit::run,
        "claim and verdict as plain SQL inside the server, on 1 and 2 connections",
    ),
    (
        "drain",
        drain::run,
        "a backlog spread over many aggregates: 1, 2, 4 processes, delete-on-publish",
    ),
    ("hot", drain::hot, "a backlog of one single aggregate"),
    (
        "growth",
        growth::run,
        "a drain beside rows that cannot be claimed, against the same drain without them",
    ),
    ("latency", latency::run, "commit to publish, and what an idle relay costs"),
    (
        "writers",
        writers::run,
        "append against a bare insert; wake-ups against NOTIFY in every commit",
    ),
    #[cfg(feature = "rabbitmq")]
    ("rabbitmq", rabbitmq::run, "end to end, against the same client publishing from memory"),
    ("memory", memory::run, "resident peak of a relay"),
    ("start", start::run, "exec to first claim, and the size of the binary"),
];

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == relay::VERB) {
        return outcome(relay::child(&words[1..]));
    }
    // What `cargo bench` adds.
    words.retain(|word| word != "--bench");
    let args = match args::parse(&words) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{}", args::usage());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("bench: {error}\n\n{}", args::usage());
            return ExitCode::from(2);
        }
    };
    outcome(run(args))
}

fn outcome(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<()> {
    let server = Server::from_environment()?;
    let conditions = server.conditions()?;
    let earlier = args.compare.as_deref().map(Report::read).transpose()?;
    let mut bench = Bench { args, server, report: Report::new(conditions), limit: None };
    let mut failed = 0;
    for (name, case, _) in CASES {
        if !bench.args.wants(name) {
            continue;
        }
        eprintln!("{name}:");
        if let Err(error) = case(&mut bench) {
            eprintln!("  failed: {error}");
            bench.report.rows.push(Row::failed(name, &error.to_string()));
            failed += 1;
        }
    }
    print!("{}", bench.report.table(earlier.as_ref()));
    if let Some(path) = &bench.args.json {
        std::fs::write(path, bench.report.json())?;
    }
    if let Some(path) = &bench.args.svg {
        std::fs::write(path, chart::svg(&bench.report))?;
    }
    if failed > 0 { Err(format!("{failed} cases failed").into()) } else { Ok(()) }
}

impl Bench {
    /// Adds a row, and shows it at once.
    fn row(&mut self, row: Row) {
        eprintln!("  {}", row.line());
        self.report.rows.push(row);
    }

    /// Measures the limit unless it is known, so that a case run alone has its ratio.
    fn limit(&mut self) -> Result<f64> {
        match self.limit {
            Some(limit) => Ok(limit),
            None => {
                limit::run(self)?;
                self.limit.ok_or_else(|| "the limit was not measured".into())
            }
        }
    }
}
