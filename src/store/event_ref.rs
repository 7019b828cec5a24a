//! How a person names an event: by its outbox id or by its event id.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

use crate::error::Error;

/// An event as a person names it. Parses from `42` or from a UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventRef {
    /// The outbox's own number.
    Id(i64),
    /// The id that every delivery carries.
    EventId(Uuid),
}

impl EventRef {
    pub(crate) fn id(&self) -> Option<i64> {
        match self {
            Self::Id(id) => Some(*id),
            Self::EventId(_) => None,
        }
    }

    pub(crate) fn event_id(&self) -> Option<Uuid> {
        match self {
            Self::Id(_) => None,
            Self::EventId(event_id) => Some(*event_id),
        }
    }
}

impl FromStr for EventRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        // The UUID first: one without hyphens may have digits only.
        if let Ok(event_id) = Uuid::parse_str(text) {
            return Ok(Self::EventId(event_id));
        }
        match text.parse::<i64>() {
            Ok(id) if id > 0 => Ok(Self::Id(id)),
            _ => Err(Error::invalid_config(format!(
                "{text:?} names no event; give its outbox id (a number such as 42) or its event id (a UUID such as \
                 01936f5e-8a2b-7c3d-9e4f-5a6b7c8d9e0f)"
            ))),
        }
    }
}

impl From<i64> for EventRef {
    fn from(id: i64) -> Self {
        Self::Id(id)
    }
}

impl From<Uuid> for EventRef {
    fn from(event_id: Uuid) -> Self {
        Self::EventId(event_id)
    }
}

impl fmt::Display for EventRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "{id}"),
            Self::EventId(event_id) => write!(f, "{event_id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_numbers_and_uuids_and_explains_the_rest() {
        assert_eq!("42".parse::<EventRef>().ok(), Some(EventRef::Id(42)));
        let uuid = "01936f5e-8a2b-7c3d-9e4f-5a6b7c8d9e0f";
        let parsed = uuid.parse::<EventRef>().expect("a UUID");
        assert_eq!(parsed.to_string(), uuid);
        let digits = "00000000000000000000000000000001".parse::<EventRef>().ok();
        assert_eq!(digits, Some(EventRef::EventId(Uuid::from_u128(1))));
        for wrong in ["", "0", "-1", "order-42", "9223372036854775808"] {
            let error = wrong.parse::<EventRef>().expect_err(wrong).to_string();
            assert!(error.contains("outbox id") && error.contains("UUID"), "{error}");
        }
    }
}
