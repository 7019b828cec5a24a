//! The checker must refuse what is wrong: a hand-made history that is right, and one thing made wrong in each test.

use super::checker::{Finding, Rule, check};
use super::history::{Arrival, Committed, Counts, Fault, History, Outcome};

fn committed(aggregate: u32, sequence: u32) -> Committed {
    Committed {
        event_id: id(aggregate, sequence),
        aggregate,
        sequence,
        content: u64::from(sequence),
        is_poison: false,
        outcome: Outcome::Published,
    }
}

fn id(aggregate: u32, sequence: u32) -> u128 {
    u128::from(aggregate) << 64 | u128::from(sequence)
}

fn arrival(aggregate: u32, sequence: u32, at: u64) -> Arrival {
    Arrival {
        event_id: id(aggregate, sequence),
        claims: Some((aggregate, sequence)),
        content: u64::from(sequence),
        envelope: 7,
        possible_duplicate: false,
        at,
    }
}

fn marked(aggregate: u32, sequence: u32, at: u64) -> Arrival {
    Arrival { possible_duplicate: true, ..arrival(aggregate, sequence, at) }
}

fn kill(from: u64, until: u64) -> Fault {
    Fault { kind: "kill", relay: Some(0), explains: true, from, until }
}

/// Two aggregates of three events. The last of the second is dead, so it has not arrived; event 2 of the first arrived
/// twice, because of a kill.
fn right() -> History {
    let mut committed: Vec<_> =
        (1..=2).flat_map(|a| (1..=3).map(move |s| committed(a, s))).collect();
    committed[5].outcome = Outcome::Dead { has_reason: true };
    let arrivals = vec![
        arrival(1, 1, 1_000),
        arrival(2, 1, 1_010),
        arrival(1, 2, 1_020),
        arrival(2, 2, 1_030),
        marked(1, 2, 9_000),
        arrival(1, 3, 9_010),
    ];
    let counts = Counts { published: 5, retried: 2, dead_lettered: 1 };
    History {
        outbox_rows: committed.len() as i64,
        committed,
        arrivals,
        faults: vec![kill(1_200, 4_000)],
        counted: counts,
        happened: counts,
        incidents: Vec::new(),
        relays: 2,
        most_unsettled: 1,
        verdict_time: 2_000,
    }
}

#[track_caller]
fn refuses(rule: Rule, change: impl FnOnce(&mut History)) -> Finding {
    let mut history = right();
    change(&mut history);
    let finding = check(&history);
    assert!(finding.broken.contains_key(&rule), "{finding:?}");
    finding
}

#[test]
fn a_right_history_is_clean() {
    let finding = check(&right());
    assert!(finding.is_clean(), "{finding:?}");
    assert_eq!((finding.arrived, finding.duplicates), (5, 1));
    assert_eq!(finding.causes["kill"], 1);
}

#[test]
fn a_lost_event() {
    refuses(Rule::NothingIsLost, |history| history.arrivals.truncate(5));
    refuses(Rule::NothingIsLost, |history| history.committed[2].outcome = Outcome::Missing);
    refuses(Rule::NothingIsLost, |history| history.committed[2].outcome = Outcome::Pending);
    refuses(Rule::NothingIsLost, |history| {
        history.committed[5].outcome = Outcome::Dead { has_reason: false };
    });
}

#[test]
fn a_reordered_event() {
    let finding = refuses(Rule::Order, |history| history.arrivals.swap(0, 2));
    assert_eq!(finding.broken[&Rule::Order], 2);
}

#[test]
fn a_hole_in_an_aggregate() {
    refuses(Rule::Order, |history| {
        history.arrivals.remove(1);
    });
}

#[test]
fn an_event_that_passed_a_dead_one() {
    refuses(Rule::Order, |history| {
        history.committed[4].outcome = Outcome::Dead { has_reason: true };
        history.committed[5].outcome = Outcome::Published;
        history.arrivals.remove(3);
        history.arrivals.push(arrival(2, 3, 9_900));
    });
}

#[test]
fn a_held_event_that_arrived() {
    refuses(Rule::Order, |history| {
        history.committed[4].outcome = Outcome::Dead { has_reason: true };
        history.committed[5].outcome = Outcome::Pending;
        history.arrivals.push(arrival(2, 3, 9_900));
    });
}

#[test]
fn only_what_a_person_discarded_is_passed_over() {
    let mut history = right();
    history.committed[0] =
        Committed { is_poison: true, outcome: Outcome::Discarded, ..committed(1, 1) };
    history.arrivals.remove(0);
    history.counted.published -= 1;
    history.happened.published -= 1;
    assert!(check(&history).is_clean(), "{:?}", check(&history));
    refuses(Rule::Outcomes, |history| history.committed[0].outcome = Outcome::Discarded);
}

#[test]
fn sequences_that_two_writers_gave_at_once() {
    refuses(Rule::Order, |history| history.committed[1].sequence = 1);
}

#[test]
fn changed_bytes_and_headers() {
    refuses(Rule::SameBytes, |history| history.arrivals[3].content += 1);
    refuses(Rule::SameBytes, |history| history.arrivals[4].envelope += 1);
    refuses(Rule::SameBytes, |history| history.arrivals[3].claims = Some((2, 3)));
}

#[test]
fn an_event_that_rolled_back() {
    refuses(Rule::NothingUncommitted, |history| history.arrivals.push(arrival(3, 1, 9_900)));
    refuses(Rule::NothingUncommitted, |history| history.outbox_rows += 1);
}

#[test]
fn an_event_that_is_too_large_and_arrived() {
    refuses(Rule::Outcomes, |history| history.committed[0].is_poison = true);
}

#[test]
fn a_duplicate_without_a_fault() {
    refuses(Rule::DuplicatesHaveACause, |history| history.faults.clear());
    refuses(Rule::DuplicatesHaveACause, |history| history.faults[0].explains = false);
    // Over before its first delivery; begun when its verdict was long due; begun after its second.
    for (from, until) in [(0, 500), (3_500, 4_000), (9_100, 9_200)] {
        let finding = refuses(Rule::DuplicatesHaveACause, |history| {
            history.faults = vec![kill(from, until)];
            history.verdict_time = 400;
        });
        assert_eq!(finding.broken.len(), 1, "{finding:?}");
    }
}

#[test]
fn more_duplicates_than_a_fault_can_make() {
    let again = |history: &mut History| history.arrivals.push(marked(2, 2, 9_020));
    refuses(Rule::DuplicatesHaveACause, again);
    let mut history = right();
    again(&mut history);
    history.faults[0].relay = None;
    assert!(check(&history).is_clean(), "two relays may have one each");
}

#[test]
fn a_duplicate_that_does_not_say_so() {
    refuses(Rule::DuplicatesAreMarked, |history| history.arrivals[4].possible_duplicate = false);
}

#[test]
fn the_mark_may_come_first() {
    // A relay that was frozen sends what it had begun after another has sent it as a possible duplicate.
    let mut history = right();
    history.arrivals[2].possible_duplicate = true;
    history.arrivals[4].possible_duplicate = false;
    assert!(check(&history).is_clean());
}

#[test]
fn counters_that_are_wrong() {
    refuses(Rule::Counters, |history| history.counted.retried += 1);
    refuses(Rule::Counters, |history| {
        history.counted.published += 1;
        history.happened.published += 1;
    });
}

#[test]
fn whatever_was_seen_on_the_way() {
    refuses(Rule::Incident, |history| history.incidents.push("idle in transaction".into()));
}
