//! The numbers of one scrape and their Prometheus text. No I/O: [`scrape`](crate::store::status::scrape) reads them.
//!
//! Every number comes from the tables in one statement, so that a restart resets none and two relays never know half
//! each. There are no labels but the version and the histogram's `le`: the metrics say how much, `dead-letters list` says which.

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
    /// Pending events that have failed and whose transient window ends within 1 h, or has ended: the next transient failure
    /// after that kills them.
    pub dying_within_1h_rows: u64,
    /// The same within 6 h, those within 1 h included.
    pub dying_within_6h_rows: u64,
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
    /// Published events by their latency, one count for each of [`LATENCY_BUCKETS`] and one for what took longer. They
    /// are written with the verdict that they count, so their sum is `published_total`.
    pub latency: [u64; LATENCY_BUCKETS.len() + 1],
    /// The sum of those latencies.
    pub latency_seconds_sum: f64,
}

/// Upper ends, in seconds, of the buckets of the delivery latency: from the append, or the time that the writer asked for, to
/// the verdict. The tenth and eleventh are the two parts of the alert on the lag.
pub const LATENCY_BUCKETS: [f64; 13] =
    [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 3_600.0, 86_400.0];

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
        self.render_latency(&mut text);
        head(&mut text, "outbox_build_info", "gauge", "1, with the version that rendered this.");
        text.push_str(concat!(
            "outbox_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\"} 1\n"
        ));
        text
    }

    fn render_latency(&self, text: &mut String) {
        const NAME: &str = "outbox_delivery_latency_seconds";
        head(
            text,
            NAME,
            "histogram",
            "Time from append, or from the time the writer asked for, to the verdict.",
        );
        let mut total = 0;
        for (count, end) in
            self.latency.iter().zip(LATENCY_BUCKETS.map(Some).into_iter().chain([None]))
        {
            total += count;
            let end = end.map_or("+Inf".into(), |end| end.to_string());
            let _ = writeln!(text, "{NAME}_bucket{{le=\"{end}\"}} {total}");
        }
        let _ = writeln!(
            text,
            "{NAME}_sum {}\n{NAME}_count {total}",
            seconds(self.latency_seconds_sum)
        );
    }

    fn gauges(&self) -> [(&'static str, &'static str, String); 11] {
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
            (
                "outbox_dying_within_1h_rows",
                "Failing events whose window ends within 1 h: they die unless they are published.",
                self.dying_within_1h_rows.to_string(),
            ),
            (
                "outbox_dying_within_6h_rows",
                "Failing events whose window ends within 6 h.",
                self.dying_within_6h_rows.to_string(),
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
