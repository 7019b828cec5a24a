//! A time of the database with its distance from now, by the same clock: the host's clock is never compared.

use std::fmt;
use std::time::{Duration, SystemTime};

use crate::event::rfc3339;

/// A time of the database and how far it was from the database's "now" when it was read.
///
/// Displays as `2026-12-01T08:30:00.000000Z (4 min ago)` or `... (in 12 s)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// The time.
    pub at: SystemTime,
    /// Seconds since then; negative while it lies ahead.
    pub seconds_ago: f64,
}

impl Moment {
    /// Both times by the database's clock.
    pub(crate) fn new(at: SystemTime, now: SystemTime) -> Self {
        let seconds_ago = match now.duration_since(at) {
            Ok(past) => past.as_secs_f64(),
            Err(ahead) => -ahead.duration().as_secs_f64(),
        };
        Self { at, seconds_ago }
    }

    /// How long ago; zero while it lies ahead.
    pub fn age(&self) -> Duration {
        Duration::try_from_secs_f64(self.seconds_ago).unwrap_or_default()
    }

    /// Whether it lies ahead.
    pub fn is_ahead(&self) -> bool {
        self.seconds_ago < 0.0
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let span = span(self.seconds_ago.abs());
        if self.is_ahead() {
            write!(f, "{} (in {span})", rfc3339(self.at))
        } else {
            write!(f, "{} ({span} ago)", rfc3339(self.at))
        }
    }
}

/// A number of seconds for people, in the largest unit that leaves two figures.
pub(crate) fn span(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3_600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    #[test]
    fn shows_the_time_and_the_distance() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000);
        let past = Moment::new(UNIX_EPOCH + Duration::from_secs(760), now);
        assert_eq!(past.to_string(), "1970-01-01T00:12:40.000000Z (4 min ago)");
        assert_eq!(past.age(), Duration::from_secs(240));
        let ahead = Moment::new(UNIX_EPOCH + Duration::from_secs(1_012), now);
        assert_eq!(ahead.to_string(), "1970-01-01T00:16:52.000000Z (in 12 s)");
        assert!(ahead.is_ahead());
        assert_eq!(ahead.age(), Duration::ZERO);
    }

    #[test]
    fn spans_keep_two_figures() {
        let cases = [
            (0.25, "0.2 s"),
            (42.4, "42 s"),
            (600.0, "10 min"),
            (86_400.0, "24 h"),
            (1e6, "12 days"),
        ];
        for (seconds, text) in cases {
            assert_eq!(span(seconds), text);
        }
    }
}
