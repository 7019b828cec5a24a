//! A transactional-outbox relay for PostgreSQL, for programs that block.

pub mod append;
pub mod config;
mod error;
mod event;
pub mod metrics;
mod moment;
pub mod policy;
pub mod publisher;
pub mod relay;
pub mod store;

pub use append::{Outbox, append, append_all};
pub use config::{RelayConfig, RelayConfigBuilder};
pub use error::{BoxError, Error};
pub use event::*;
pub use moment::Moment;
pub use policy::{Decision, FailureKind, FailureScope, History, Policy, PublishError};
pub use publisher::{
    Outcomes, Publisher, ScriptedBroker, ScriptedPublisher, StdoutPublisher, publish_each,
};
pub use relay::{Health, Relay, RunReport, RunningRelay, StopHandle, ThreadHealth};
pub use store::{EventRef, Schema};
