//! What happened in a run, as plain data: what was committed, what arrived, what was done to the servers.

use std::time::Instant;

/// A committed event and what the outbox says of it at the end.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    pub event_id: u128,
    pub aggregate: u32,
    /// Its number in the aggregate, from 1, given under the aggregate's lock.
    pub sequence: u32,
    /// Of everything its writer wrote.
    pub content: u64,
    /// It is too large for the broker.
    pub is_poison: bool,
    pub outcome: Outcome,
}

/// What the outbox says of an event at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Pending,
    Published,
    Dead {
        has_reason: bool,
    },
    Discarded,
    /// Its row is not there.
    Missing,
}

/// A message that arrived in the queue.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrival {
    pub event_id: u128,
    /// What the message says of itself, where its writer put it in.
    pub claims: Option<(u32, u32)>,
    /// Of everything its writer wrote.
    pub content: u64,
    /// Of the relay's own headers, but for the two that may change: attempt and possible duplicate.
    pub envelope: u64,
    pub possible_duplicate: bool,
    /// Milliseconds from the start of the run.
    pub at: u64,
}

/// Something that was done to a relay, a server or a network.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    pub kind: &'static str,
    /// The relay it was done to; `None` for all of them.
    pub relay: Option<usize>,
    /// Whether the relay may publish again what it has published: not after a mere request to stop.
    pub explains: bool,
    pub from: u64,
    /// Still going on while this is `u64::MAX`.
    pub until: u64,
}

/// The sums of `outbox_relay`, and what the changes of the table really were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub published: i64,
    pub retried: i64,
    pub dead_lettered: i64,
}

/// A whole run.
#[derive(Debug, Default)]
pub struct History {
    /// By aggregate and sequence.
    pub committed: Vec<Committed>,
    /// In the order of arrival.
    pub arrivals: Vec<Arrival>,
    pub faults: Vec<Fault>,
    pub counted: Counts,
    pub happened: Counts,
    /// Rows of the outbox, committed or not by the writers' own table.
    pub outbox_rows: i64,
    /// What else went wrong, in words: sessions that were idle in transaction, rows that changed against the rules,
    /// relays that ended by themselves.
    pub incidents: Vec<String>,
    /// How many relays there were, and how many events one may have published without a verdict.
    pub relays: usize,
    pub most_unsettled: usize,
    /// Within this time of its arrival the verdict of an event is written, unless a fault keeps it from that.
    pub verdict_time: u64,
}

/// The run's own time.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn now(&self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }
}

/// FNV-1a, with a mark after each part, so that parts cannot run into each other.
#[derive(Debug, Clone, Copy)]
pub struct Hash(u64);

impl Hash {
    pub fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub fn part(mut self, bytes: &[u8]) -> Self {
        let length = (bytes.len() as u64).to_le_bytes();
        for byte in bytes.iter().chain(&length) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self
    }

    pub fn value(self) -> u64 {
        self.0
    }
}

/// The hash of what a writer wrote. Headers come sorted by name.
pub fn content<'a>(
    event_type: &str,
    content_type: &str,
    headers: impl IntoIterator<Item = (&'a str, &'a str)>,
    payload: &[u8],
) -> u64 {
    let start = Hash::new().part(event_type.as_bytes()).part(content_type.as_bytes());
    let with_headers = headers
        .into_iter()
        .fold(start, |hash, (name, value)| hash.part(name.as_bytes()).part(value.as_bytes()));
    with_headers.part(payload).value()
}
