//! Which dead letters a call is about. There is no filter that names nothing by accident.

use std::time::Duration;

use postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::error::Error;
use crate::store::EventRef;

/// Which dead letters. There is no empty one: name something with [`Filter::builder`], or say [`Filter::everything`].
#[derive(Debug, Clone, PartialEq)]
pub struct Filter {
    /// Both are set or neither.
    ids: Option<Vec<i64>>,
    event_ids: Option<Vec<Uuid>>,
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    event_type: Option<String>,
    reason: Option<String>,
    older_than: Option<f64>,
    younger_than: Option<f64>,
}

/// Collects conditions, all of which must hold; [`build`](Self::build) refuses to go without any.
#[derive(Debug, Clone)]
pub struct FilterBuilder(Filter);

impl Filter {
    /// Every dead letter.
    pub fn everything() -> Self {
        Self {
            ids: None,
            event_ids: None,
            aggregate_type: None,
            aggregate_id: None,
            event_type: None,
            reason: None,
            older_than: None,
            younger_than: None,
        }
    }

    /// A filter by what it names.
    pub fn builder() -> FilterBuilder {
        FilterBuilder(Self::everything())
    }

    /// These events. An empty list matches none.
    pub fn events(events: impl IntoIterator<Item = EventRef>) -> Self {
        Self::builder().events(events).0
    }

    pub(super) fn parameters(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        vec![
            (&self.ids, Type::INT8_ARRAY),
            (&self.event_ids, Type::UUID_ARRAY),
            (&self.aggregate_type, Type::TEXT),
            (&self.aggregate_id, Type::TEXT),
            (&self.event_type, Type::TEXT),
            (&self.reason, Type::TEXT),
            (&self.older_than, Type::FLOAT8),
            (&self.younger_than, Type::FLOAT8),
        ]
    }
}

impl FilterBuilder {
    /// These events, by outbox id or event id. An empty list matches none.
    pub fn events(mut self, events: impl IntoIterator<Item = EventRef>) -> Self {
        let events: Vec<_> = events.into_iter().collect();
        self.0.ids = Some(events.iter().filter_map(EventRef::id).collect());
        self.0.event_ids = Some(events.iter().filter_map(EventRef::event_id).collect());
        self
    }

    /// Events of this aggregate.
    pub fn aggregate(
        mut self,
        aggregate_type: impl Into<String>,
        aggregate_id: impl Into<String>,
    ) -> Self {
        self.0.aggregate_type = Some(aggregate_type.into());
        self.0.aggregate_id = Some(aggregate_id.into());
        self
    }

    /// Events of aggregates of this type.
    pub fn aggregate_type(mut self, aggregate_type: impl Into<String>) -> Self {
        self.0.aggregate_type = Some(aggregate_type.into());
        self
    }

    /// Events of this type.
    pub fn event_type(mut self, event_type: impl Into<String>) -> Self {
        self.0.event_type = Some(event_type.into());
        self
    }

    /// Events whose reason has this text in it, letter by letter.
    pub fn reason(mut self, part: impl Into<String>) -> Self {
        self.0.reason = Some(part.into());
        self
    }

    /// Events that died at least this long ago.
    pub fn older_than(mut self, age: Duration) -> Self {
        self.0.older_than = Some(seconds(age));
        self
    }

    /// Events that died less than this ago.
    pub fn younger_than(mut self, age: Duration) -> Self {
        self.0.younger_than = Some(seconds(age));
        self
    }

    /// The filter.
    ///
    /// # Errors
    /// When nothing, or only an empty reason, was named: that would be every dead letter by accident.
    pub fn build(self) -> Result<Filter, Error> {
        let unnamed = Filter {
            reason: self.0.reason.clone().filter(|part| part.is_empty()),
            ..Filter::everything()
        };
        if self.0 == unnamed {
            return Err(Error::invalid_config(
                "no dead letters were named; give events, an aggregate, a type, a part of the reason or an age, or ask \
                 for everything by name",
            ));
        }
        Ok(self.0)
    }
}

/// At most a thousand years, which an interval can hold.
fn seconds(age: Duration) -> f64 {
    age.as_secs_f64().min(1_000.0 * 365.25 * 86_400.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_filter_is_empty_by_accident() {
        for builder in [Filter::builder(), Filter::builder().reason("")] {
            let error = builder.build().expect_err("an empty filter").to_string();
            assert!(error.contains("no dead letters were named"), "{error}");
        }
        assert!(Filter::builder().reason("timeout").build().is_ok());
        let nothing = Filter::events([]);
        assert_ne!(nothing, Filter::everything());
    }
}
