//! The checker: from the history of a run to everything in it that the contract does not allow.
//!
//! It looks at plain data only and knows nothing of how the relay works, but for one number: how many events a relay may
//! have published whose verdicts are not yet written. Its own tests (`checker_tests`) hand it histories that are wrong.

use std::collections::{BTreeMap, HashMap};

use super::history::{Arrival, Committed, Fault, History, Outcome};

/// A rule of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Every committed event arrived, or is dead with a reason, or is held behind a dead one.
    NothingIsLost,
    /// What did not commit never arrives, and is not in the outbox.
    NothingUncommitted,
    /// First deliveries of an aggregate come in the order of its sequence, without a hole.
    Order,
    /// Every delivery of an event has the same bytes and headers, which are the writer's.
    SameBytes,
    /// A duplicate comes from a fault, and no fault makes more of them than were under way.
    DuplicatesHaveACause,
    /// A delivery that may not be the first says so.
    DuplicatesAreMarked,
    /// Counters equal what happened to the rows.
    Counters,
    /// Dead, discarded and published events are what they should be.
    Outcomes,
    /// Anything that was seen on the way.
    Incident,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub rule: Rule,
    pub text: String,
}

/// What the checker found.
#[derive(Debug, Default)]
pub struct Finding {
    /// How often each rule was broken.
    pub broken: BTreeMap<Rule, usize>,
    /// The first ones of each, in words.
    pub examples: Vec<Violation>,
    /// Deliveries after the first.
    pub duplicates: usize,
    /// Duplicates by the fault that explains them.
    pub causes: BTreeMap<&'static str, usize>,
    /// Events that arrived.
    pub arrived: usize,
}

const MOST_EXAMPLES: usize = 10;

impl Finding {
    pub fn is_clean(&self) -> bool {
        self.broken.is_empty()
    }

    fn add(&mut self, rule: Rule, text: impl FnOnce() -> String) {
        let count = self.broken.entry(rule).or_default();
        *count += 1;
        if *count <= MOST_EXAMPLES {
            self.examples.push(Violation { rule, text: text() });
        }
    }
}

/// Checks every rule.
pub fn check(history: &History) -> Finding {
    let mut finding = Finding::default();
    let places = places(history, &mut finding);
    let deliveries = deliveries(history, &places, &mut finding);
    check_order(history, &places, &mut finding);
    for (event, arrivals) in history.committed.iter().zip(&deliveries) {
        check_deliveries(history, event, arrivals, &mut finding);
    }
    check_outcomes(history, &deliveries, &mut finding);
    check_causes(history, &deliveries, &mut finding);
    check_sums(history, &mut finding);
    finding
}

fn name(event: &Committed) -> String {
    format!("event {} of aggregate {}", event.sequence, event.aggregate)
}

/// Where each event id stands in what was committed.
fn places(history: &History, finding: &mut Finding) -> HashMap<u128, usize> {
    let mut places = HashMap::with_capacity(history.committed.len());
    for (place, event) in history.committed.iter().enumerate() {
        if places.insert(event.event_id, place).is_some() {
            finding.add(Rule::Outcomes, || format!("{} has an id that another has", name(event)));
        }
    }
    places
}

/// For each committed event the numbers of its arrivals.
fn deliveries(
    history: &History,
    places: &HashMap<u128, usize>,
    finding: &mut Finding,
) -> Vec<Vec<u32>> {
    let mut deliveries = vec![Vec::new(); history.committed.len()];
    for (number, arrival) in history.arrivals.iter().enumerate() {
        match places.get(&arrival.event_id) {
            Some(&place) => deliveries[place].push(number as u32),
            None => finding.add(Rule::NothingUncommitted, || {
                format!(
                    "{:032x} arrived at {} ms and never committed",
                    arrival.event_id, arrival.at
                )
            }),
        }
    }
    finding.arrived = deliveries.iter().filter(|some| !some.is_empty()).count();
    finding.duplicates = deliveries.iter().map(|some| some.len().saturating_sub(1)).sum();
    deliveries
}

/// First deliveries of each aggregate are 1, 2, 3 and so on; only what a person discarded is passed over.
fn check_order(history: &History, places: &HashMap<u128, usize>, finding: &mut Finding) {
    // For each aggregate its slice of what was committed, and how far it has come.
    let mut next: HashMap<u32, usize> = HashMap::new();
    for (place, event) in history.committed.iter().enumerate() {
        let first = *next.entry(event.aggregate).or_insert(place);
        let expected = (place - first + 1) as u32;
        if event.sequence != expected {
            finding.add(Rule::Order, || {
                format!("{} was committed where {expected} was to come", name(event))
            });
        }
    }
    let mut seen = vec![false; history.committed.len()];
    for arrival in &history.arrivals {
        let Some(&place) = places.get(&arrival.event_id) else { continue };
        if std::mem::replace(&mut seen[place], true) {
            continue;
        }
        let event = &history.committed[place];
        let next = next.get_mut(&event.aggregate).expect("an aggregate that was committed to");
        while *next < place && history.committed[*next].outcome == Outcome::Discarded {
            *next += 1;
        }
        if *next != place {
            let (found, due) = (name(event), history.committed[*next].sequence);
            finding.add(Rule::Order, || {
                format!("{found} arrived at {} ms when {due} was to come", arrival.at)
            });
        }
        *next = (*next).max(place + 1);
    }
}

fn check_deliveries(history: &History, event: &Committed, arrivals: &[u32], finding: &mut Finding) {
    let of = |&number: &u32| -> &Arrival { &history.arrivals[number as usize] };
    let Some(first) = arrivals.first().map(of) else { return };
    if event.is_poison {
        finding.add(Rule::Outcomes, || format!("{} is too large and arrived", name(event)));
    }
    for arrival in arrivals.iter().map(of) {
        let claims = arrival.claims.unwrap_or((event.aggregate, event.sequence));
        if arrival.content != event.content
            || arrival.envelope != first.envelope
            || claims != (event.aggregate, event.sequence)
        {
            finding.add(Rule::SameBytes, || {
                format!("{} arrived changed at {} ms, as {claims:?}", name(event), arrival.at)
            });
        }
    }
    let unmarked = arrivals.iter().map(of).filter(|arrival| !arrival.possible_duplicate).count();
    if unmarked > 1 {
        finding.add(Rule::DuplicatesAreMarked, || {
            format!("{} arrived {unmarked} times without a mark", name(event))
        });
    }
}

/// The rows at the end: published ones have arrived, and nothing is left but what is dead and what that holds.
fn check_outcomes(history: &History, deliveries: &[Vec<u32>], finding: &mut Finding) {
    let mut dead: Option<&Committed> = None;
    for (event, arrivals) in history.committed.iter().zip(deliveries) {
        let arrived = !arrivals.is_empty();
        let held = dead.is_some_and(|dead| dead.aggregate == event.aggregate);
        match event.outcome {
            Outcome::Published if held => finding.add(Rule::Order, || {
                format!("{} is published, behind one that is dead", name(event))
            }),
            Outcome::Published if arrived => {}
            Outcome::Published => finding.add(Rule::NothingIsLost, || {
                format!("{} counts as published and never arrived", name(event))
            }),
            Outcome::Pending if held && !arrived => {}
            Outcome::Pending if held => finding.add(Rule::Order, || {
                format!("{} is held by a dead event and arrived", name(event))
            }),
            Outcome::Pending => finding.add(Rule::NothingIsLost, || {
                format!("{} is still pending, and nothing dead is in front of it", name(event))
            }),
            Outcome::Dead { has_reason } => {
                if !has_reason {
                    finding.add(Rule::NothingIsLost, || {
                        format!("{} is dead without a reason", name(event))
                    });
                }
                if !held {
                    dead = Some(event);
                }
            }
            Outcome::Discarded if event.is_poison => {}
            Outcome::Discarded => {
                finding.add(Rule::Outcomes, || format!("{} was discarded by nobody", name(event)))
            }
            Outcome::Missing => finding.add(Rule::NothingIsLost, || {
                format!("{} committed, and is not in the outbox", name(event))
            }),
        }
    }
}

/// Lays each duplicate at the door of a fault. Its first delivery got no verdict, so the fault was there when that was due.
/// Of several faults the one that ends first takes it, as long as it may take any.
fn check_causes(history: &History, deliveries: &[Vec<u32>], finding: &mut Finding) {
    let mut duplicates: Vec<(u64, u64, &Committed)> = Vec::new();
    for (event, arrivals) in history.committed.iter().zip(deliveries) {
        for pair in arrivals.windows(2) {
            let at = |number: u32| history.arrivals[number as usize].at;
            duplicates.push((at(pair[0]), at(pair[1]), event));
        }
    }
    duplicates.sort_unstable_by_key(|&(before, at, _)| (before, at));
    let mut faults: Vec<(&Fault, usize)> = history
        .faults
        .iter()
        .filter(|fault| fault.explains)
        .map(|fault| {
            let relays = if fault.relay.is_some() { 1 } else { history.relays };
            (fault, relays * history.most_unsettled)
        })
        .collect();
    faults.sort_by_key(|(fault, _)| fault.until);
    for (before, at, event) in duplicates {
        let explains = |fault: &Fault| {
            fault.from <= at.min(before.saturating_add(history.verdict_time))
                && before <= fault.until.saturating_add(history.verdict_time)
        };
        match faults.iter_mut().find(|(fault, left)| *left > 0 && explains(fault)) {
            Some((fault, left)) => {
                *left -= 1;
                *finding.causes.entry(fault.kind).or_default() += 1;
            }
            None => finding.add(Rule::DuplicatesHaveACause, || {
                format!("{} arrived at {before} ms and again at {at} ms for no reason", name(event))
            }),
        }
    }
}

fn check_sums(history: &History, finding: &mut Finding) {
    let (counted, happened) = (history.counted, history.happened);
    if counted != happened {
        finding.add(Rule::Counters, || {
            format!("the counters say {counted:?}, the table {happened:?}")
        });
    }
    let published =
        history.committed.iter().filter(|event| event.outcome == Outcome::Published).count();
    if counted.published != published as i64 {
        finding.add(Rule::Counters, || {
            format!("{} count as published, {published} are", counted.published)
        });
    }
    if history.outbox_rows != history.committed.len() as i64 {
        finding.add(Rule::NothingUncommitted, || {
            format!(
                "the outbox has {} rows for {} events",
                history.outbox_rows,
                history.committed.len()
            )
        });
    }
    for incident in &history.incidents {
        finding.add(Rule::Incident, || incident.clone());
    }
}
