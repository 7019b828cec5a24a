//! Faults: three lanes that each do one thing after the other, so that what they do overlaps: to relays, to servers, and to
//! the network between. Each lane draws from a deck of its kinds, so every kind has its turn, in an order and with times that
//! the seed decides. Storms alternate with calms, in which nothing begins: a duplicate there would have no cause.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use postgres::{Client, NoTls};

use super::history::{Clock, Fault};
use super::relays::{Paths, Relay};
use crate::common::proxy::{Direction, Mode, Proxy};
use crate::common::{Rabbit, Server};

/// How long a storm and the calm after it take, in milliseconds.
const STORM: u64 = 90_000;
const CALM: u64 = 25_000;

/// What was done, and what went wrong on the way; and when it is over.
pub struct Chaos {
    pub clock: Clock,
    /// No fault begins after this time of the run.
    pub ends_at: u64,
    faults: Mutex<Vec<Fault>>,
    incidents: Mutex<Vec<String>>,
}

impl Chaos {
    pub fn new(clock: Clock, ends_at: u64) -> Self {
        Self { clock, ends_at, faults: Mutex::default(), incidents: Mutex::default() }
    }

    pub fn faults(&self) -> MutexGuard<'_, Vec<Fault>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn incidents(&self) -> MutexGuard<'_, Vec<String>> {
        self.incidents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what should not have been. A run that goes wrong all the time does not fill the memory.
    pub fn incident(&self, text: String) {
        let mut incidents = self.incidents();
        if incidents.len() < 1_000 {
            incidents.push(format!("at {} ms: {text}", self.clock.now()));
        }
    }

    pub fn is_over(&self) -> bool {
        self.clock.now() >= self.ends_at
    }

    /// Waits, and then until there is a storm. False when the run is over.
    fn wait(&self, milliseconds: u64) -> bool {
        let until = self.clock.now() + milliseconds;
        loop {
            let now = self.clock.now();
            if now >= self.ends_at {
                return false;
            }
            if now >= until && now % (STORM + CALM) < STORM {
                return true;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Notes a fault from before `work` begins until it has ended.
    fn during(&self, kind: &'static str, relay: Option<usize>, work: impl FnOnce()) {
        let explains = kind != "SIGTERM and restart";
        let from = self.clock.now();
        let number = {
            let mut faults = self.faults();
            faults.push(Fault { kind, relay, explains, from, until: u64::MAX });
            faults.len() - 1
        };
        log::info!("{from} ms: {kind} {relay:?}");
        work();
        self.faults()[number].until = self.clock.now();
    }
}

/// Kinds in a random order, each once before any comes again.
struct Deck {
    kinds: &'static [&'static str],
    left: Vec<&'static str>,
}

impl Deck {
    fn new(kinds: &'static [&'static str]) -> Self {
        Self { kinds, left: Vec::new() }
    }

    fn draw(&mut self, rng: &mut Rng) -> &'static str {
        if self.left.is_empty() {
            self.left = self.kinds.to_vec();
            rng.shuffle(&mut self.left);
        }
        self.left.pop().expect("a deck has kinds")
    }
}

fn hold(rng: &mut Rng, milliseconds: std::ops::Range<u64>) {
    thread::sleep(Duration::from_millis(rng.u64(milliseconds)));
}

const TO_RELAYS: &[&str] = &[
    "SIGKILL and restart",
    "SIGKILL and restart at once",
    "SIGTERM and restart",
    "SIGSTOP past the lease, SIGCONT",
    "SIGSTOP for a moment, SIGCONT",
    "pg_terminate_backend",
];

pub fn trouble_relays(chaos: &Chaos, seed: u64, relays: &mut [Relay], database_url: &str) {
    let (mut rng, mut deck) = (Rng::with_seed(seed ^ 0x52), Deck::new(TO_RELAYS));
    while chaos.wait(rng.u64(500..5_000)) {
        let number = rng.usize(..relays.len());
        let relay = &mut relays[number];
        let kind = deck.draw(&mut rng);
        chaos.during(kind, Some(number), || match kind {
            "SIGKILL and restart" => {
                relay.kill();
                hold(&mut rng, 500..8_000);
                relay.spawn();
            }
            "SIGKILL and restart at once" => {
                relay.kill();
                relay.spawn();
            }
            "SIGTERM and restart" => {
                relay.stop().unwrap_or_else(|error| chaos.incident(error));
                hold(&mut rng, 0..2_000);
                relay.spawn();
            }
            "SIGSTOP past the lease, SIGCONT" => {
                relay.freeze();
                hold(&mut rng, 6_500..10_000);
                relay.thaw();
            }
            "SIGSTOP for a moment, SIGCONT" => {
                relay.freeze();
                hold(&mut rng, 500..4_000);
                relay.thaw();
            }
            _ => terminate(number, database_url),
        });
        for relay in &mut *relays {
            if let Err(error) = relay.look() {
                chaos.incident(error);
                relay.spawn();
            }
        }
    }
}

/// Ends the sessions of one relay, unless the server is away.
fn terminate(relay: usize, database_url: &str) {
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1";
    if let Ok(mut client) = Client::connect(database_url, NoTls) {
        let _ = client.execute(sql, &[&Relay::application(relay)]);
    }
}

const TO_SERVERS: &[&str] = &[
    "PostgreSQL crash and restart",
    "PostgreSQL read-only and back",
    "PostgreSQL frozen and thawed",
    "RabbitMQ crash and restart",
    "RabbitMQ stop and restart",
    "RabbitMQ memory alarm and back",
    "RabbitMQ closes all connections",
];

pub fn trouble_servers(chaos: &Chaos, seed: u64, server: &mut Server, rabbit: &mut Rabbit) {
    let (mut rng, mut deck) = (Rng::with_seed(seed ^ 0x53), Deck::new(TO_SERVERS));
    while chaos.wait(rng.u64(1_000..8_000)) {
        let kind = deck.draw(&mut rng);
        chaos.during(kind, None, || match kind {
            "PostgreSQL crash and restart" => {
                server.stop();
                hold(&mut rng, 0..8_000);
                server.start_again();
            }
            "PostgreSQL read-only and back" => {
                server.set("default_transaction_read_only = on");
                hold(&mut rng, 1_000..9_000);
                server.set("default_transaction_read_only = off");
            }
            "PostgreSQL frozen and thawed" => {
                server.freeze();
                hold(&mut rng, 1_000..9_000);
                server.thaw();
            }
            "RabbitMQ crash and restart" => {
                rabbit.kill();
                hold(&mut rng, 0..5_000);
                rabbit.start_again();
            }
            "RabbitMQ stop and restart" => {
                rabbit.stop();
                hold(&mut rng, 0..5_000);
                rabbit.start_again();
            }
            "RabbitMQ memory alarm and back" => {
                rabbit.block();
                hold(&mut rng, 500..6_000);
                rabbit.unblock();
            }
            _ => rabbit.close_all_connections("chaos"),
        });
    }
}

const TO_NETWORK: &[&str] = &[
    "delay to PostgreSQL",
    "stall to PostgreSQL",
    "reset to PostgreSQL",
    "requests to PostgreSQL dropped",
    "replies of PostgreSQL dropped",
    "a reply of PostgreSQL swallowed",
    "delay to RabbitMQ",
    "stall to RabbitMQ",
    "reset to RabbitMQ",
    "requests to RabbitMQ dropped",
    "replies of RabbitMQ dropped",
    "a reply of RabbitMQ swallowed",
];

pub fn trouble_network(chaos: &Chaos, seed: u64, paths: &[Paths]) {
    let (mut rng, mut deck) = (Rng::with_seed(seed ^ 0x4e), Deck::new(TO_NETWORK));
    while chaos.wait(rng.u64(500..4_000)) {
        let kind = deck.draw(&mut rng);
        // One relay is cut off while the others work, or all of them are.
        let one = (rng.u32(..3) > 0).then(|| rng.usize(..paths.len()));
        let to_database = kind.contains("PostgreSQL");
        let hit: Vec<&Proxy> = paths
            .iter()
            .filter(|paths| one.is_none_or(|one| one == paths.relay))
            .map(|paths| if to_database { &paths.database } else { &paths.broker })
            .collect();
        chaos.during(kind, one, || trouble(kind, &hit, &mut rng));
    }
}

fn trouble(kind: &str, hit: &[&Proxy], rng: &mut Rng) {
    let mode = match kind {
        _ if kind.starts_with("delay") => Mode::Delay(Duration::from_millis(rng.u64(5..300))),
        _ if kind.starts_with("stall") => Mode::Stall,
        _ if kind.starts_with("requests") => Mode::Drop(Direction::ToServer),
        _ if kind.ends_with("dropped") => Mode::Drop(Direction::ToClient),
        _ if kind.ends_with("swallowed") => {
            let bytes = rng.usize(1..600);
            hit.iter().for_each(|proxy| proxy.swallow_replies(bytes));
            hold(rng, 500..3_000);
            hit.iter().for_each(|proxy| proxy.swallow_replies(0));
            return;
        }
        _ => return hit.iter().for_each(|proxy| proxy.reset()),
    };
    hit.iter().for_each(|proxy| proxy.set(mode));
    hold(rng, 1_000..9_000);
    hit.iter().for_each(|proxy| proxy.set(Mode::Pass));
}
