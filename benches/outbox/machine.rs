//! What Linux says of processes and of the machine. Where it does not, a figure is missing and nothing fails.

use std::collections::HashMap;
use std::fs;
use std::time::Instant;

/// Ticks a second in /proc, on every Linux that this runs on.
const TICKS: f64 = 100.0;

/// The most memory that a process has had resident, in MB.
pub(crate) fn peak_mb(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kilobytes / 1024.0)
}

/// Seconds of processor time that a process has used.
pub(crate) fn cpu_seconds(pid: u32) -> Option<f64> {
    Some(stat(pid)?.own / TICKS)
}

struct Stat {
    parent: u32,
    own: f64,
    with_children: f64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |range: std::ops::Range<usize>| -> Option<f64> {
        fields.get(range)?.iter().map(|field| field.parse::<f64>().ok()).sum()
    };
    Some(Stat {
        parent: fields.get(1)?.parse().ok()?,
        own: ticks(11..13)?,
        with_children: ticks(11..15)?,
    })
}

pub(crate) fn parent(pid: u32) -> Option<u32> {
    stat(pid).map(|stat| stat.parent)
}

/// Measures what share of the machine others took.
pub(crate) struct Others {
    roots: Vec<u32>,
    since: Instant,
    busy: f64,
    own: f64,
}

impl Others {
    /// Counts what descends from this process and from these (the servers) as its own.
    pub(crate) fn watch(servers: &[u32]) -> Self {
        let mut roots = servers.to_vec();
        roots.push(std::process::id());
        Self { since: Instant::now(), busy: busy(), own: tree_seconds(&roots), roots }
    }

    /// A note when it was enough to spoil a figure.
    pub(crate) fn note(&self) -> Option<String> {
        let cores = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        let spent = (busy() - self.busy) - (tree_seconds(&self.roots) - self.own);
        let share = spent / (self.since.elapsed().as_secs_f64() * cores);
        (share > 0.1).then(|| format!("others took {:.0} % of the machine", share * 100.0))
    }
}

fn busy() -> f64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    let ticks: Vec<f64> =
        first.split_whitespace().skip(1).take(8).filter_map(|t| t.parse().ok()).collect();
    // Not idle, not waiting.
    ticks
        .iter()
        .enumerate()
        .filter(|(index, _)| !matches!(index, 3 | 4))
        .map(|(_, t)| t)
        .sum::<f64>()
        / TICKS
}

/// Seconds of processor time of these processes and all that they started, so far.
pub(crate) fn tree_seconds(roots: &[u32]) -> f64 {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let all: HashMap<u32, Stat> = pids
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, stat(pid)?)))
        .collect();
    let descends = |mut pid: u32| loop {
        if roots.contains(&pid) {
            return true;
        }
        match all.get(&pid) {
            Some(stat) => pid = stat.parent,
            None => return false,
        }
    };
    all.iter().filter(|(pid, _)| descends(**pid)).map(|(_, stat)| stat.with_children).sum::<f64>()
        / TICKS
}
