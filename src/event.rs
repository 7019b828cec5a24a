//! What an event is: [`NewEvent`] on its way in, [`Event`] on its way out, and the limits of both.
//!
//! The limits are counted in bytes. They are checked here, before anything is sent, and once more in the
//! database (lengths by `CHECK` constraints, characters and headers by the append functions of `schema.sql`), which holds for
//! writers in other languages. Both name the limit.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use crate::error::Error;

/// Longest aggregate type, in bytes.
pub const MAX_AGGREGATE_TYPE_BYTES: usize = 255;
/// Longest aggregate id, in bytes.
pub const MAX_AGGREGATE_ID_BYTES: usize = 255;
/// Longest event type, in bytes.
pub const MAX_EVENT_TYPE_BYTES: usize = 255;
/// Longest content type, in bytes.
pub const MAX_CONTENT_TYPE_BYTES: usize = 255;
/// Longest header name, in bytes.
pub const MAX_HEADER_NAME_BYTES: usize = 255;
/// Largest sum of all header names and values of one event, in bytes.
pub const MAX_HEADERS_BYTES: usize = 16 * 1024;
/// Largest payload, in bytes (64 MiB).
pub const MAX_PAYLOAD_BYTES: usize = 64 * 1024 * 1024;
/// From 1970 to the start of the year 9999.
const YEAR_9999: Duration = Duration::from_secs(253_370_764_800);
/// Header names that start with this belong to the relay; a caller's header may not.
pub const RESERVED_HEADER_PREFIX: &str = "outbox-";

/// An event to append. Built in any order, checked when it is appended.
///
/// ```
/// use pg_outbox::NewEvent;
/// let placed = NewEvent::new("order", "42", "order.placed", br#"{"total":12}"#)
///     .header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
/// assert!(placed.check().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    pub(crate) event_id: Option<Uuid>,
    pub(crate) aggregate_type: String,
    pub(crate) aggregate_id: String,
    pub(crate) event_type: String,
    pub(crate) payload: Vec<u8>,
    pub(crate) content_type: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) not_before: Option<SystemTime>,
}

impl NewEvent {
    /// An event of one aggregate. The payload is carried unchanged, whatever its bytes are; its content type
    /// is `application/json` unless [`content_type`](Self::content_type) says otherwise.
    pub fn new(
        aggregate_type: impl Into<String>,
        aggregate_id: impl Into<String>,
        event_type: impl Into<String>,
        payload: impl Into<Vec<u8>>,
    ) -> Self {
        Self {
            event_id: None,
            aggregate_type: aggregate_type.into(),
            aggregate_id: aggregate_id.into(),
            event_type: event_type.into(),
            payload: payload.into(),
            content_type: "application/json".into(),
            headers: BTreeMap::new(),
            not_before: None,
        }
    }

    /// The MIME type of the payload. Default: `application/json`.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = content_type.into();
        self
    }

    /// Adds a header that travels with the event, such as `traceparent`. A second value for the same name
    /// replaces the first. Names that start with `outbox-` are refused by [`check`](Self::check).
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Uses the caller's id instead of one made by the database. It must be unique in the outbox.
    pub fn event_id(mut self, event_id: Uuid) -> Self {
        self.event_id = Some(event_id);
        self
    }

    /// Asks that the event go out no earlier than `time`, by the database's clock. Until then it holds the
    /// later events of its aggregate, as any pending event does. Its lag is measured from `time`.
    pub fn not_before(mut self, time: SystemTime) -> Self {
        self.not_before = Some(time);
        self
    }

    /// Checks every limit. [`append`](crate::append()) calls it; call it to find out earlier.
    ///
    /// # Errors
    /// Names the field, its limit, and what was found. The event is not changed.
    pub fn check(&self) -> Result<(), Error> {
        check_name("aggregate type", &self.aggregate_type, MAX_AGGREGATE_TYPE_BYTES)?;
        check_name("aggregate id", &self.aggregate_id, MAX_AGGREGATE_ID_BYTES)?;
        check_name("event type", &self.event_type, MAX_EVENT_TYPE_BYTES)?;
        check_name("content type", &self.content_type, MAX_CONTENT_TYPE_BYTES)?;
        let mut headers_bytes = 0;
        for (name, value) in &self.headers {
            check_name("header name", name, MAX_HEADER_NAME_BYTES)?;
            if name.to_ascii_lowercase().starts_with(RESERVED_HEADER_PREFIX) {
                return Err(Error::invalid_event(format!(
                    "header {name:?} starts with {RESERVED_HEADER_PREFIX:?}, which is reserved for the relay; rename it"
                )));
            }
            if value.contains(['\0', '\r', '\n']) {
                return Err(Error::invalid_event(format!(
                    "the value of header {name:?} has a NUL, CR or LF, which no broker can carry safely; encode it"
                )));
            }
            headers_bytes += name.len() + value.len();
        }
        // Beyond this the driver's arithmetic of times overflows.
        if self.not_before.is_some_and(|time| time < UNIX_EPOCH || time > UNIX_EPOCH + YEAR_9999) {
            return Err(Error::invalid_event(
                "not before must be a time from the year 1970 to 9999",
            ));
        }
        check_bytes("headers", headers_bytes, MAX_HEADERS_BYTES)?;
        check_bytes("payload", self.payload.len(), MAX_PAYLOAD_BYTES)
    }
}

fn check_name(what: &str, value: &str, limit: usize) -> Result<(), Error> {
    if value.is_empty() {
        return Err(Error::invalid_event(format!(
            "{what} is empty; 1 to {limit} bytes are allowed"
        )));
    }
    if value.contains(|c: char| c.is_ascii_control()) {
        return Err(Error::invalid_event(format!(
            "{what} has a control character (NUL, CR, LF and the like), which is not allowed"
        )));
    }
    check_bytes(what, value.len(), limit)
}

fn check_bytes(what: &str, found: usize, limit: usize) -> Result<(), Error> {
    if found > limit {
        return Err(Error::invalid_event(format!(
            "{what} has {found} bytes; at most {limit} are allowed"
        )));
    }
    Ok(())
}

/// A claimed event, as a publisher gets it. `#[non_exhaustive]`: make one for a test with [`Event::for_test`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// The outbox's own number. It grows within an aggregate (with gaps), so a consumer that keeps the last one
    /// of each aggregate recognises old news.
    pub id: i64,
    /// The id that stays the same in every delivery of this event. Give it to the broker as the message id.
    pub event_id: Uuid,
    /// What kind of thing the event is about, such as `order`. Also the event's *destination*.
    pub aggregate_type: String,
    /// Which one. Events of one aggregate go out in the order in which they were appended.
    pub aggregate_id: String,
    /// What happened, such as `order.placed`.
    pub event_type: String,
    /// The bytes that were appended, unchanged.
    pub payload: Vec<u8>,
    /// The MIME type of the payload.
    pub content_type: String,
    /// The caller's headers. See [`Event::message_headers`] for all that belong on the message.
    pub headers: BTreeMap<String, String>,
    /// When the event was appended, by the database's clock.
    pub created_at: SystemTime,
    /// Which attempt this is, counted at the claim; the first is 1.
    pub attempt: u32,
    /// True where an earlier attempt may have reached the broker: a claim that never came back, or a timeout.
    pub possible_duplicate: bool,
}

impl Event {
    /// An event with made-up values, for the tests of a publisher.
    pub fn for_test(id: i64, aggregate_id: &str, event_type: &str, payload: &[u8]) -> Self {
        Self {
            id,
            event_id: Uuid::from_u128(0x0192_0000_0000_7000_8000_0000_0000_0000 + id as u128),
            aggregate_type: "test".into(),
            aggregate_id: aggregate_id.into(),
            event_type: event_type.into(),
            payload: payload.to_vec(),
            content_type: "application/json".into(),
            headers: BTreeMap::new(),
            created_at: UNIX_EPOCH,
            attempt: 1,
            possible_duplicate: false,
        }
    }

    /// Every header of the message: the caller's, and the relay's own, which start with `outbox-` and are never
    /// overridden. A publisher that maps one of them to a field of the broker's (message id, content type)
    /// sends it both ways, so that a consumer finds the same names on every broker.
    ///
    /// | header | value |
    /// |---|---|
    /// | `outbox-event-id` | the event id (UUID) |
    /// | `outbox-event-type` | the event type |
    /// | `outbox-aggregate-type`, `outbox-aggregate-id` | the aggregate |
    /// | `outbox-sequence` | the outbox id, growing within an aggregate |
    /// | `outbox-created-at` | RFC 3339, UTC, microseconds |
    /// | `outbox-attempt` | 1 for the first |
    /// | `outbox-possible-duplicate` | `true`; absent otherwise |
    pub fn message_headers(&self) -> Vec<(String, String)> {
        let own = [
            ("event-id", self.event_id.to_string()),
            ("event-type", self.event_type.clone()),
            ("aggregate-type", self.aggregate_type.clone()),
            ("aggregate-id", self.aggregate_id.clone()),
            ("sequence", self.id.to_string()),
            ("created-at", rfc3339(self.created_at)),
            ("attempt", self.attempt.to_string()),
        ];
        let reserved = |name: &str| name.to_ascii_lowercase().starts_with(RESERVED_HEADER_PREFIX);
        let callers = self.headers.iter().filter(|(name, _)| !reserved(name));
        let mut all: Vec<_> = callers.map(|(n, v)| (n.clone(), v.clone())).collect();
        all.extend(own.map(|(name, value)| (format!("{RESERVED_HEADER_PREFIX}{name}"), value)));
        if self.possible_duplicate {
            all.push((format!("{RESERVED_HEADER_PREFIX}possible-duplicate"), "true".into()));
        }
        all
    }
}

/// A time as RFC 3339 in UTC with microseconds, such as `2026-12-01T08:30:00.000000Z`.
///
/// The date is computed by the "days from civil" inverse of the proleptic Gregorian calendar, so that the
/// library needs no date crate.
pub fn rfc3339(time: SystemTime) -> String {
    let micros: i128 = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => after.as_micros() as i128,
        Err(before) => -(before.duration().as_micros() as i128),
    };
    let (days, in_day) = (micros.div_euclid(86_400_000_000), micros.rem_euclid(86_400_000_000));
    // Years run from March, so that the leap day is the last of its year; eras have 400 years = 146,097 days.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + i128::from(month <= 2);
    let clock = Duration::from_micros(in_day as u64);
    let seconds = clock.as_secs();
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:06}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        clock.subsec_micros()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> NewEvent {
        NewEvent::new("order", "42", "placed", *b"{}")
    }

    #[test]
    fn limits_are_in_bytes_and_named() {
        assert!(NewEvent::new("x".repeat(255), "1", "t", *b"").check().is_ok());
        let error = NewEvent::new("é".repeat(128), "1", "t", *b"").check().unwrap_err().to_string();
        assert!(error.contains("aggregate type has 256 bytes; at most 255"), "{error}");
        let error = NewEvent::new("order", "", "t", *b"").check().unwrap_err().to_string();
        assert!(error.contains("aggregate id is empty; 1 to 255"), "{error}");
        let error = NewEvent::new("order", "a\0b", "t", *b"").check().unwrap_err().to_string();
        assert!(error.contains("aggregate id has a control character"), "{error}");
        let never = UNIX_EPOCH + Duration::from_secs(1 << 40);
        let error = event().not_before(never).check().unwrap_err().to_string();
        assert!(error.contains("the year 1970 to 9999"), "{error}");
        assert!(event().not_before(SystemTime::now()).check().is_ok());
        let big = NewEvent::new("order", "1", "t", vec![0; MAX_PAYLOAD_BYTES + 1]);
        assert!(big.check().unwrap_err().to_string().contains("payload has 67108865 bytes"));
    }

    #[test]
    fn headers_are_checked() {
        assert!(event().header("traceparent", "00-é💥").check().is_ok());
        for (name, value, expected) in [
            ("Outbox-Event-Id", "x", "reserved"),
            ("x", "a\r\nX-Injected: 1", "NUL, CR or LF"),
            ("", "x", "header name is empty"),
            ("a\nb", "x", "control character"),
        ] {
            let error = event().header(name, value).check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = event().header("x", "y".repeat(MAX_HEADERS_BYTES)).check().unwrap_err();
        assert!(error.to_string().contains("headers has 16385 bytes; at most 16384"), "{error}");
    }

    #[test]
    fn own_headers_win() {
        let mut event = Event::for_test(7, "a", "placed", b"");
        event.headers.insert("OUTBOX-EVENT-ID".into(), "forged".into());
        event.headers.insert("traceparent".into(), "t".into());
        let headers: BTreeMap<_, _> = event.message_headers().into_iter().collect();
        assert_eq!(headers["outbox-event-id"], event.event_id.to_string());
        assert_eq!(headers["outbox-sequence"], "7");
        assert_eq!(headers["traceparent"], "t");
        assert!(!headers.contains_key("OUTBOX-EVENT-ID"));
        assert!(!headers.contains_key("outbox-possible-duplicate"));
        event.possible_duplicate = true;
        assert!(
            event.message_headers().contains(&("outbox-possible-duplicate".into(), "true".into()))
        );
    }

    #[test]
    fn rfc3339_of_known_times() {
        let at = |secs| rfc3339(UNIX_EPOCH + Duration::from_secs(secs));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(951_827_696), "2000-02-29T12:34:56.000000Z");
        assert_eq!(at(4_107_542_399), "2100-02-28T23:59:59.000000Z");
        assert_eq!(rfc3339(UNIX_EPOCH - Duration::from_micros(1)), "1969-12-31T23:59:59.999999Z");
    }
}
