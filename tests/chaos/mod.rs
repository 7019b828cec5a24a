//! One run: servers, relays, writers and watchers are started, trouble is made for a while, everything is healed, what is left
//! is delivered, and the checker looks at all of it.
//!
//! The environment says how: `CHAOS_SEED`, `CHAOS_SECONDS`, `CHAOS_RELAYS`, `CHAOS_RATE` (events a second). A run that goes
//! wrong ends in a panic with its report, its seed, and the end of each relay's log.

mod checker;
#[cfg(test)]
mod checker_tests;
mod faults;
mod history;
mod ledger;
mod recorder;
mod relays;
mod report;
mod watch;
mod writers;

use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Database, Rabbit, Server};
use checker::check;
use faults::Chaos;
use history::{Clock, History};
use recorder::Recorder;
use relays::{Paths, Relay};
use watch::Seen;
use writers::{Tally, Writers};

const AGGREGATES: u32 = 300;
const WRITERS: u32 = 4;
/// How long what is left may take once everything is healed.
const DRAIN: Duration = Duration::from_secs(120);
/// How much longer than its length a run may take, with everything that comes before and after.
const MOST_MORE: Duration = Duration::from_secs(600);
const PROGRESS: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub seed: u64,
    pub length: Duration,
    pub relays: usize,
    pub rate: u32,
}

impl Options {
    pub fn from_environment() -> Self {
        Self {
            seed: variable("CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000_000)),
            length: Duration::from_secs(variable("CHAOS_SECONDS").unwrap_or(60)),
            relays: variable("CHAOS_RELAYS").unwrap_or(3),
            rate: variable("CHAOS_RATE").unwrap_or(200),
        }
    }

    /// How to run it again.
    pub fn command(&self) -> String {
        let Self { seed, length, relays, rate } = self;
        let minutes = length.as_secs_f64() / 60.0;
        format!("./run chaos --minutes {minutes} --seed {seed} --relays {relays} --rate {rate}")
    }
}

fn variable<T: FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// What a run runs on.
struct Stage {
    server: Server,
    rabbit: Rabbit,
    db: Database,
    paths: Vec<Paths>,
    relays: Vec<Relay>,
}

impl Stage {
    fn set(options: &Options) -> Self {
        let server = Server::start();
        let db = Database::create_on(&server);
        db.execute(ledger::TABLES);
        let rabbit = Rabbit::start();
        recorder::declare(&rabbit);
        let paths: Vec<_> =
            (0..options.relays).map(|number| Paths::new(number, &server, &rabbit)).collect();
        let relays = paths.iter().map(|paths| Relay::new(paths, &db)).collect();
        Self { server, rabbit, db, paths, relays }
    }
}

/// Everything that a report tells.
pub struct Told {
    options: Options,
    versions: Vec<String>,
    tally: std::sync::Arc<Tally>,
    seen: Seen,
    longest_gap: Duration,
    recorder_connections: u64,
    dead: Vec<(String, i64)>,
    drained_in: Option<Duration>,
    lease_lost: i64,
}

/// Runs, reports, and panics if the contract was not kept.
pub fn run(options: &Options) {
    println!("chaos, seed {}: {}", options.seed, options.command());
    end_at_last(options);
    let stage = &mut Stage::set(options);
    let clock = Clock::start();
    let chaos = Chaos::new(clock, options.length.as_millis() as u64);
    let recorder = Recorder::start(&stage.rabbit, clock);
    stage.relays.iter_mut().for_each(Relay::spawn);
    let seen = Seen::default();
    let url = stage.db.url();
    let writers = Writers::start(&url, options.seed, WRITERS, options.rate, AGGREGATES);
    make_trouble(stage, &chaos, options.seed, &seen, || {
        println!("{}", report::progress(&chaos, &writers.tally, recorder.arrived()));
    });
    println!("{:>6} s  healed; the rest is delivered", clock.now() / 1_000);
    let tally = writers.stop();
    let drained_in = drain(stage, &chaos, &tally, &recorder);
    stop_relays(stage, &chaos);
    let (arrivals, strange) = recorder.finish(DRAIN);
    chaos.incidents().extend(strange);
    if tally.clashes.load(Ordering::Relaxed) > 0 {
        chaos.incident("two writers gave sequences of one aggregate at once".into());
    }

    let mut client = stage.db.client();
    let mut history = History {
        arrivals,
        faults: chaos.faults().clone(),
        relays: options.relays,
        most_unsettled: relays::WORKERS * relays::BATCH,
        verdict_time: (relays::LEASE + Duration::from_secs(2)).as_millis() as u64,
        ..History::default()
    };
    ledger::read(&mut client, AGGREGATES, &mut history);
    history.incidents.extend(chaos.incidents().iter().cloned());
    let finding = check(&history);
    let told = Told {
        options: *options,
        versions: report::versions(&mut client, &stage.rabbit),
        tally,
        seen,
        longest_gap: recorder.longest_gap(),
        recorder_connections: recorder.connections(),
        dead: ledger::reasons(&mut client),
        drained_in,
        lease_lost: ledger::lease_lost(&mut client),
    };
    println!("{}", report::page(&told, &history, &finding));
    if !finding.is_clean() {
        keep_logs(stage, options.seed);
        panic!("the contract was not kept; run it again with: {}", options.command());
    }
}

/// A run that hangs ends all the same. Its servers and relays end with the process.
fn end_at_last(options: &Options) {
    let (most, command) = (options.length + MOST_MORE, options.command());
    thread::spawn(move || {
        thread::sleep(most);
        eprintln!("chaos has not ended within {most:?}; run it again with: {command}");
        std::process::exit(1);
    });
}

/// Everybody does what he does until the time is over, and everything is whole again.
fn make_trouble(stage: &mut Stage, chaos: &Chaos, seed: u64, seen: &Seen, progress: impl Fn()) {
    let url = stage.db.url();
    let Stage { server, rabbit, paths, relays, .. } = stage;
    thread::scope(|scope| {
        let lanes = [
            scope.spawn(|| faults::trouble_relays(chaos, seed, relays, &url)),
            scope.spawn(|| faults::trouble_servers(chaos, seed, server, rabbit)),
            scope.spawn(|| faults::trouble_network(chaos, seed, paths)),
            scope.spawn(|| watch::sample(chaos, &url, seen)),
            scope.spawn(|| watch::operate(chaos, &url, seed, seen)),
        ];
        let mut last = Instant::now();
        while !lanes.iter().all(|lane| lane.is_finished()) {
            thread::sleep(Duration::from_millis(50));
            if last.elapsed() >= PROGRESS {
                last = Instant::now();
                progress();
            }
        }
    });
}

/// Waits until nothing is left but what is dead and what that holds. `None`, and an incident, when it takes too long.
fn drain(stage: &mut Stage, chaos: &Chaos, tally: &Tally, recorder: &Recorder) -> Option<Duration> {
    let (start, mut last) = (Instant::now(), Instant::now());
    let mut client = stage.db.client();
    loop {
        let left = ledger::left(&mut client);
        if left == 0 {
            return Some(start.elapsed());
        }
        if start.elapsed() > DRAIN {
            let why = ledger::why(&mut client).join("\n");
            chaos.incident(format!("{left} events were not delivered within {DRAIN:?}:\n{why}"));
            return None;
        }
        if last.elapsed() >= PROGRESS {
            last = Instant::now();
            println!("{}, {left} left", report::progress(chaos, tally, recorder.arrived()));
        }
        thread::sleep(Duration::from_millis(300));
    }
}

fn stop_relays(stage: &mut Stage, chaos: &Chaos) {
    for relay in &mut stage.relays {
        relay.look().unwrap_or_else(|error| chaos.incident(error));
        relay.stop().unwrap_or_else(|error| chaos.incident(error));
        relay.panics().into_iter().for_each(|line| chaos.incident(line));
    }
}

/// The relays' logs go with the run's folders, but for those of a run that went wrong.
fn keep_logs(stage: &Stage, seed: u64) {
    for relay in &stage.relays {
        let kept = std::env::temp_dir().join(format!("chaos-{seed}-relay-{}.log", relay.number));
        if std::fs::copy(relay.log(), &kept).is_ok() {
            println!("the log of relay {} is in {}", relay.number, kept.display());
        }
    }
}
