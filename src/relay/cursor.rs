//! Where the claimer looks next, and how much it takes.
//!
//! Nothing here decides what may be claimed; the statement does. These are hints that keep a claim cheap and let every
//! aggregate have its turn.

use std::time::Duration;

use crate::config::RelayConfig;
use crate::store::claim::{Claim, Class, Request};

/// Aggregates in one claim. A hundred runs of five cost the database a fifth of the index probes of five hundred single
/// events, and still leave a wave wide enough for a broker's pipeline.
const HEADS: i32 = 100;
/// Ids to look at for fresh events while the walk does not come round.
const FRESH: i32 = 500;
/// Ids that are looked at again, since a lower id may be committed after a higher one.
const OVERLAP: i64 = 200;
/// Between two steps of a walk that finds nothing but does not come round either.
const STROLL: Duration = Duration::from_millis(50);

/// The claimer's hints.
#[derive(Debug)]
pub(crate) struct Cursors {
    base: Request,
    clean_key: i64,
    /// The walk met its bound before it had enough or came round: most aggregates are held, dead or backing off.
    is_slow: bool,
    /// The last walk of clean events came to the last aggregate; and it began at the first.
    wrapped: bool,
    from_start: bool,
    suspect_key: Option<i64>,
    last_chance_key: Option<i64>,
    last_class: Class,
    newer_than: i64,
}

impl Cursors {
    pub(crate) fn new(config: &RelayConfig) -> Self {
        let rows = config.batch_size as i32;
        let heads = HEADS.min(rows);
        let base = Request {
            class: Class::Clean,
            last_chance: config.policy.unexplained_budget.saturating_sub(1).min(i32::MAX as u32)
                as i32,
            from_key: i64::MIN,
            probes: heads * 4,
            heads,
            rows,
            bytes: config.batch_bytes as i64,
            run: rows,
            newer_than: i64::MAX,
            fresh: 0,
            only: config.only.clone(),
            except: config.except.clone(),
        };
        Self {
            base,
            clean_key: i64::MIN,
            is_slow: false,
            wrapped: false,
            from_start: false,
            suspect_key: None,
            last_chance_key: None,
            last_class: Class::Clean,
            newer_than: i64::MAX,
        }
    }

    /// Whose turn it is: clean events in between, so that suspects cannot hold up the healthy.
    pub(crate) fn next_class(&mut self) -> Class {
        self.last_class = match self.last_class {
            Class::Clean if self.suspect_key.is_some() => Class::Suspect,
            Class::Clean | Class::Suspect if self.last_chance_key.is_some() => Class::LastChance,
            _ => Class::Clean,
        };
        self.last_class
    }

    pub(crate) fn request(&self, class: Class) -> Request {
        let request = self.base.clone();
        match class {
            // A bulk load is as many claims long as a table full of blocked aggregates; what comes after it must not wait
            // for its turn in the walk either.
            Class::Clean if self.is_slow || !self.wrapped => Request {
                from_key: self.clean_key,
                newer_than: self.newer_than.saturating_sub(OVERLAP),
                fresh: FRESH,
                ..request
            },
            Class::Clean => Request { from_key: self.clean_key, ..request },
            // A batch of suspects is small, so that few are blamed together, and single file.
            Class::Suspect => {
                let rows = self.base.rows.isqrt().max(1);
                let from_key = self.suspect_key.unwrap_or(i64::MIN);
                Request { class, from_key, heads: rows, rows, run: 1, ..request }
            }
            Class::LastChance => {
                let from_key = self.last_chance_key.unwrap_or(i64::MIN);
                Request { class, from_key, heads: 1, rows: 1, run: 1, ..request }
            }
        }
    }

    /// One event of the class, whichever comes first.
    pub(crate) fn probe_request(&self, class: Class) -> Request {
        Request { heads: 1, rows: 1, run: 1, ..self.request(class) }
    }

    /// Whether a walk has met an event with its last chance.
    pub(crate) fn has_last_chance(&self) -> bool {
        self.last_chance_key.is_some()
    }

    pub(crate) fn learn(&mut self, request: &Request, claim: &Claim) {
        if request.class == Class::Clean {
            self.wrapped = claim.next_key.is_none();
            self.from_start = request.from_key == i64::MIN;
            self.clean_key = claim.next_key.unwrap_or(i64::MIN);
            if self.wrapped && self.from_start {
                self.is_slow = false;
            } else if claim.probes >= request.probes {
                self.is_slow = true;
            }
            let sees_all = self.wrapped && !self.is_slow;
            if sees_all || self.newer_than == i64::MAX {
                self.newer_than = claim.table_end.unwrap_or(0);
            } else if let Some(newest) = claim.newest_id {
                self.newer_than = self.newer_than.max(newest);
            }
        }
        match request.class {
            Class::Clean => {}
            Class::Suspect => self.suspect_key = None,
            Class::LastChance => self.last_chance_key = None,
        }
        self.suspect_key = self.suspect_key.or(claim.suspect_key);
        self.last_chance_key = self.last_chance_key.or(claim.last_chance_key);
    }

    /// After a claim that found nothing: whether another may at once, because the walk began in the middle or suspects
    /// have their turn now.
    pub(crate) fn go_on_at_once(&self) -> bool {
        let has_suspects = self.suspect_key.is_some() || self.last_chance_key.is_some();
        let began_in_the_middle = self.wrapped && !self.from_start && !self.is_slow;
        self.last_class == Class::Clean && (has_suspects || began_in_the_middle)
    }

    /// How long to sleep after a claim that found nothing.
    pub(crate) fn longest_sleep(&self, poll_interval: Duration) -> Duration {
        // A round of many steps that found nothing is over as well.
        let is_over = self.wrapped && (self.from_start || self.is_slow);
        let saw_everything = self.last_class == Class::Clean && is_over;
        if saw_everything { poll_interval } else { poll_interval.min(STROLL) }
    }
}
