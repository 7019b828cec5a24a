//! The numbers of one scrape and their Prometheus text. No I/O: [`scrape`](crate::store::status::scrape) reads them.
//!
//! Every number comes from the tables in one statement, so that a restart resets none and two relays never know half
//! each. There are no labels but the version: the metrics say how much, `dead-letters list` says which.

use std::fmt::Write as _;

/// Every metric at one moment, by the database's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Events that are waiting, leased, retrying or held.
    pub pending_rows: u64,
    /// Pending events whose present series of attempts has failed at least once.
    pub retrying_rows: u64,
    /// Pending events that a relay holds now.
    pub leased_rows: u64,
    /// Pending events behind a dead one of their own aggregate.
    pub held_rows: u64,
    /// Events that a person must requeue or discard.
    pub dead_rows: u64,
    /// The lag: age of the oldest pending event, from its append or the time its writer asked for; 0 without one.
    pub oldest_pending_age_seconds: f64,
    /// Time since the longest-dead event died; 0 without one.
    pub oldest_dead_age_seconds: f64,
    /// Relays all of whose threads made progress in the last 30 s.
    pub relays_alive: u64,
    /// Those of them that paused a destination or the broker.
    pub relays_paused: u64,
    /// Events marked as published, ever.
    pub published_total: u64,
    /// Failures that were put off for another attempt, ever.
    pub retried_total: u64,
    /// Events marked as dead, ever.
    pub dead_lettered_total: u64,
    /// Events whose verdict or renewal came too late, ever.
    pub lease_lost_total: u64,
}

impl Snapshot {
    /// The Prometheus text format, version 0.0.4 (`text/plain; version=0.0.4; charset=utf-8`).
    pub fn render(&self) -> String {
        let mut text = String::with_capacity(4096);
        for (name, help, value) in self.gauges() {
            family(&mut text, name, "gauge", help, &value);
        }
        for (name, help, value) in self.counters() {
            family(&mut text, name, "counter", help, &value.to_string());
        }
        head(&mut text, "outbox_build_info", "gauge", "1, with the version that rendered this.");
        text.push_str(concat!(
            "outbox_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\"} 1\n"
        ));
        text
    }

    fn gauges(&self) -> [(&'static str, &'static str, String); 9] {
        [
            (
                "outbox_pending_rows",
                "Events not yet published: waiting, leased, retrying or held.",
                self.pending_rows.to_string(),
            ),
            (
                "outbox_retrying_rows",
                "Pending events that failed since they were appended or requeued.",
                self.retrying_rows.to_string(),
            ),
            (
                "outbox_leased_rows",
                "Pending events that a relay holds now.",
                self.leased_rows.to_string(),
            ),
            (
                "outbox_held_rows",
                "Pending events behind a dead event of their own aggregate.",
                self.held_rows.to_string(),
            ),
            (
                "outbox_dead_rows",
                "Dead events, which wait for a person.",
                self.dead_rows.to_string(),
            ),
            (
                "outbox_oldest_pending_age_seconds",
                "Lag: age of the oldest pending event; 0 without one.",
                seconds(self.oldest_pending_age_seconds),
            ),
            (
                "outbox_relays_alive",
                "Relays all of whose threads made progress in the last 30 s.",
                self.relays_alive.to_string(),
            ),
            (
                "outbox_relays_paused",
                "Living relays that paused a destination or the broker.",
                self.relays_paused.to_string(),
            ),
            (
                "outbox_oldest_dead_age_seconds",
                "Time since the longest-dead event died; 0 without one.",
                seconds(self.oldest_dead_age_seconds),
            ),
        ]
    }

    fn counters(&self) -> [(&'static str, &'static str, u64); 4] {
        [
            ("outbox_published_total", "Events marked as published.", self.published_total),
            (
                "outbox_retried_total",
                "Failures that were put off for another attempt.",
                self.retried_total,
            ),
            ("outbox_dead_lettered_total", "Events marked as dead.", self.dead_lettered_total),
            (
                "outbox_lease_lost_total",
                "Events whose verdict or renewal came too late.",
                self.lease_lost_total,
            ),
        ]
    }
}

fn family(text: &mut String, name: &str, kind: &str, help: &str, value: &str) {
    head(text, name, kind, help);
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{name} {value}");
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// A gauge of time is a number at or above zero, whatever was read: an alert must be able to compare it.
fn seconds(value: f64) -> String {
    if value.is_finite() && value > 0.0 { value.to_string() } else { "0".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_numbers_only() {
        let mut snapshot =
            Snapshot { pending_rows: 3, oldest_pending_age_seconds: 7.5, ..Snapshot::default() };
        let text = snapshot.render();
        assert!(
            text.contains("# TYPE outbox_pending_rows gauge\noutbox_pending_rows 3\n"),
            "{text}"
        );
        assert!(text.contains("\noutbox_oldest_pending_age_seconds 7.5\n"), "{text}");
        assert!(
            text.contains("# TYPE outbox_published_total counter\noutbox_published_total 0\n"),
            "{text}"
        );
        for odd in [f64::NAN, f64::INFINITY, -1.0, -0.0] {
            snapshot.oldest_pending_age_seconds = odd;
            assert!(snapshot.render().contains("\noutbox_oldest_pending_age_seconds 0\n"), "{odd}");
        }
    }
}
