//! What a failure is, and what it costs: three kinds, three scopes, three budgets, and the backoff between.
//!
//! | kind | says something about | budget | then |
//! |---|---|---|---|
//! | [`Permanent`](FailureKind::Permanent) | the event | none | dead at once |
//! | [`Transient`](FailureKind::Transient) | the broker | a window from the *first* failure | dead |
//! | [`Unexplained`](FailureKind::Unexplained) | nobody knows what | a small count, together with claims that never came back | dead |
//!
//! Everything here is arithmetic: no clock is read and nothing is written.

use std::time::Duration;

/// What a failure is evidence of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The event is the problem and will be on every attempt: rejected schema, too large, unroutable, malformed.
    Permanent,
    /// The broker is the problem and time may mend it: refused, timeout, throttled, leader election.
    Transient,
    /// Not classified. A panic in the publisher is one, and so is a slot that was left unset.
    Unexplained,
}

/// How far a failure reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureScope {
    /// Only the event that met it.
    Event,
    /// Every event of the same aggregate type, which is what a publisher routes by.
    Destination,
    /// Every event: the broker itself is away.
    Broker,
}

/// Why the broker does not have an event. Made by a [`Publisher`](crate::Publisher).
///
/// ```
/// use pg_outbox::PublishError;
/// use std::time::Duration;
/// let rejected = PublishError::permanent("schema registry: field `total` is missing");
/// let throttled = PublishError::transient("429 Too Many Requests").destination().retry_after(Duration::from_secs(120));
/// let lost = PublishError::transient("no confirm within 10s").broker().in_doubt();
/// # let _ = (rejected, throttled, lost);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PublishError {
    kind: FailureKind,
    scope: FailureScope,
    reason: String,
    retry_after: Option<Duration>,
    in_doubt: bool,
}

impl PublishError {
    fn new(kind: FailureKind, reason: impl Into<String>) -> Self {
        let reason = clean_reason(&reason.into());
        Self { kind, scope: FailureScope::Event, reason, retry_after: None, in_doubt: false }
    }

    /// The event is the problem.
    pub fn permanent(reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Permanent, reason)
    }

    /// The broker is the problem, for this event only unless a wider scope is set.
    pub fn transient(reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Transient, reason)
    }

    /// Not classified. Name the type of what was caught, so that a person can classify it.
    pub fn unexplained(reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Unexplained, reason)
    }

    /// Widens the scope to the event's aggregate type, which then pauses alone.
    pub fn destination(mut self) -> Self {
        self.scope = FailureScope::Destination;
        self
    }

    /// Widens the scope to the whole broker, which pauses the relay.
    pub fn broker(mut self) -> Self {
        self.scope = FailureScope::Broker;
        self
    }

    /// The broker asked not to be tried again for this long (`Retry-After`); more than a day counts as a day.
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait.min(MAX_RETRY_AFTER));
        self
    }

    /// The broker may have taken the event all the same (a timeout, a connection lost before the confirm). The next
    /// delivery is then marked as a possible duplicate.
    pub fn in_doubt(mut self) -> Self {
        self.in_doubt = true;
        self
    }

    /// What the failure is evidence of.
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// How far it reaches.
    pub fn scope(&self) -> FailureScope {
        self.scope
    }

    /// The reason in words: one line, bounded, without control characters.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The wait that the broker asked for.
    pub fn wait(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Whether the broker may have taken the event all the same.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }
}

/// Longest wait that a broker may ask for.
pub const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Longest reason that is kept, in bytes.
pub const MAX_REASON_BYTES: usize = 2_000;

/// A broker's words as one bounded line that PostgreSQL can store and a terminal can show: control characters
/// (NUL, newlines, escapes) become spaces, and what is too long is cut at a character.
pub(crate) fn clean_reason(text: &str) -> String {
    let mut clean = String::with_capacity(text.len().min(MAX_REASON_BYTES));
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if clean.len() + c.len_utf8() > MAX_REASON_BYTES {
            clean.truncate(clean.floor_char_boundary(MAX_REASON_BYTES - '…'.len_utf8()));
            clean.push('…');
            break;
        }
        clean.push(c);
    }
    clean
}

/// The budgets and the backoff.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// How long an event may fail for transient reasons, from its first failure. Default: 24 h.
    pub transient_window: Duration,
    /// How many unexplained failures kill an event; at least 2. Default: 3.
    pub unexplained_budget: u32,
    /// Ceiling of the first backoff. Default: 1 s.
    pub backoff_base: Duration,
    /// Ceiling of every backoff. Default: 5 min.
    pub backoff_cap: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            transient_window: Duration::from_secs(24 * 3600),
            unexplained_budget: 3,
            backoff_base: Duration::from_secs(1),
            backoff_cap: Duration::from_secs(300),
        }
    }
}

/// What a row's past says when a failure is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct History {
    /// Attempts so far, this one included.
    pub attempts: u32,
    /// Unexplained failures before this one, claims that never came back included.
    pub unexplained_failures: u32,
    /// Time since the first failure; `None` when this is the first.
    pub failing_for: Option<Duration>,
}

/// What becomes of a failed event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Try again after the wait.
    Retry(Duration),
    /// No more attempts: a person decides.
    Dead,
}

impl Policy {
    /// Judges a failure.
    pub fn decide(&self, error: &PublishError, past: History, rng: &mut fastrand::Rng) -> Decision {
        let spent = match error.kind {
            FailureKind::Permanent => true,
            FailureKind::Transient => {
                past.failing_for.is_some_and(|since| since >= self.transient_window)
            }
            FailureKind::Unexplained => {
                self.is_out_of_chances(past.unexplained_failures.saturating_add(1))
            }
        };
        if spent {
            return Decision::Dead;
        }
        // A broker-wide pause paces itself; the row that met it must not wait minutes after the recovery.
        let failures = if error.scope == FailureScope::Event { past.attempts } else { 1 };
        let backoff = self.backoff(failures, rng);
        Decision::Retry(error.retry_after.map_or(backoff, |asked| asked.saturating_add(backoff)))
    }

    /// Whether an event has had all its unexplained failures. Asked before publishing, too: the claims that
    /// never came back are among them.
    pub fn is_out_of_chances(&self, unexplained_failures: u32) -> bool {
        unexplained_failures >= self.unexplained_budget
    }

    /// Full jitter: uniform between zero and `min(cap, base * 2^(failures-1))`, at any number of failures.
    pub fn backoff(&self, failures: u32, rng: &mut fastrand::Rng) -> Duration {
        self.backoff_ceiling(failures).mul_f64(rng.f64())
    }

    /// The upper end of [`backoff`](Self::backoff).
    pub fn backoff_ceiling(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.backoff_base.saturating_mul(1 << doublings).min(self.backoff_cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const HOUR: Duration = Duration::from_secs(3600);

    fn decide(
        error: PublishError,
        attempts: u32,
        unexplained: u32,
        failing_for: Option<Duration>,
    ) -> Decision {
        let past = History { attempts, unexplained_failures: unexplained, failing_for };
        Policy::default().decide(&error, past, &mut fastrand::Rng::with_seed(1))
    }

    #[test]
    fn permanent_is_dead_at_once() {
        assert_eq!(decide(PublishError::permanent("no"), 1, 0, None), Decision::Dead);
    }

    #[test]
    fn transient_is_bounded_by_time_not_by_count() {
        let error = || PublishError::transient("timeout");
        assert!(matches!(decide(error(), 40, 0, Some(HOUR)), Decision::Retry(_)));
        assert_eq!(decide(error(), 2, 0, Some(24 * HOUR)), Decision::Dead);
        assert!(matches!(decide(error(), 1, 0, None), Decision::Retry(_)));
    }

    #[test]
    fn unexplained_is_counted() {
        let error = || PublishError::unexplained("FooError");
        assert!(matches!(decide(error(), 2, 1, None), Decision::Retry(_)));
        assert_eq!(decide(error(), 3, 2, None), Decision::Dead);
        assert!(Policy::default().is_out_of_chances(3));
        assert!(!Policy::default().is_out_of_chances(2));
    }

    #[test]
    fn full_jitter_spreads_a_thousand_rows() {
        let policy = Policy::default();
        let mut rng = fastrand::Rng::with_seed(7);
        let mut seconds = HashMap::new();
        for _ in 0..1000 {
            *seconds.entry(policy.backoff(9, &mut rng).as_secs()).or_insert(0) += 1;
        }
        assert!(seconds.len() >= 200, "{} distinct seconds", seconds.len());
        assert!(seconds.values().all(|&n| n <= 15), "busiest {:?}", seconds.values().max());
        assert!(seconds.keys().all(|&s| s <= 256));
    }

    #[test]
    fn backoff_doubles_to_the_cap_and_never_overflows() {
        let policy = Policy::default();
        let ceiling = |n| policy.backoff_ceiling(n).as_secs();
        assert_eq!([ceiling(1), ceiling(2), ceiling(9), ceiling(10)], [1, 2, 256, 300]);
        assert_eq!([ceiling(0), ceiling(10_000), ceiling(u32::MAX)], [1, 300, 300]);
    }

    #[test]
    fn a_brokers_wait_is_a_floor() {
        let error = PublishError::transient("503").retry_after(Duration::from_secs(120));
        for seed in 0..100 {
            let past = History { attempts: 3, unexplained_failures: 0, failing_for: None };
            match Policy::default().decide(&error, past, &mut fastrand::Rng::with_seed(seed)) {
                Decision::Retry(wait) => assert!(wait >= Duration::from_secs(120)),
                Decision::Dead => panic!("a transient failure killed"),
            }
        }
    }

    #[test]
    fn no_broker_can_ask_for_ever() {
        let error = PublishError::transient("503").retry_after(Duration::MAX);
        assert_eq!(error.wait(), Some(MAX_RETRY_AFTER));
    }

    #[test]
    fn a_pause_does_not_make_the_row_wait() {
        let error = PublishError::transient("refused").broker();
        match decide(error, 30, 0, Some(HOUR)) {
            Decision::Retry(wait) => assert!(wait <= Duration::from_secs(1)),
            Decision::Dead => panic!("an outage killed"),
        }
    }

    #[test]
    fn reasons_are_one_bounded_line() {
        assert_eq!(PublishError::permanent("a\0b\r\n\x1b[31mc").reason(), "a b   [31mc");
        let long = PublishError::permanent("é".repeat(5_000));
        assert!(long.reason().len() <= MAX_REASON_BYTES && long.reason().ends_with('…'));
    }
}
