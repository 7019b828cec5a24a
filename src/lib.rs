//! A transactional-outbox relay for PostgreSQL, for programs that block.
//!
//! A service changes its database and has to tell the world. It appends the event to an *outbox* table in the same
//! transaction; this relay publishes the table to a broker, from plain threads, with no async runtime of its own.
//!
//! # What it promises
//!
//! Every event whose transaction commits is, at any moment, exactly one of
//!
//! | state | meaning |
//! |---|---|
//! | **pending** | waiting for its turn: not yet due, leased, being retried, or *held* behind an earlier event of its aggregate |
//! | **published** | the broker has confirmed it |
//! | **dead** | out of chances, with a reason that a person can read; holds its aggregate until a person decides |
//! | **discarded** | closed by a person, with a note of who and why |
//!
//! Nothing is lost silently and nothing is retried for ever; the metrics report each of these. Delivery is
//! at-least-once: a duplicate carries the same event id, and is marked where the relay knows that it may be one. Order
//! holds per aggregate among first deliveries. There is no order between aggregates and no exactly-once. An event whose
//! transaction rolls back is never published. Times are compared on the database's clock only.
//!
//! # How an event travels
//!
//! ```text
//!  append ----> claim --------> lease ----------> publish -------> verdict
//!  writer's     one statement,  renewed before    in waves, one    one statement with its counters,
//!  transaction  committed       each wave         event of each    fenced by the lease id
//!                               that needs it     aggregate        published / retry / dead / released
//! ```
//!
//! | room | what is in it |
//! |---|---|
//! | [`append()`], [`append_all`], [`Outbox`] | the writer's door: an event in the caller's transaction |
//! | [`store`] | every SQL statement, and the operators' calls: migrate, dead letters, why, status |
//! | [`Publisher`] | the door to a broker; [`publisher`] has those that are compiled in |
//! | [`Relay`] | the threads: claimer, workers, listener, janitor |
//! | [`policy`] | what a failure is evidence of, and what it costs |
//! | [`RelayConfig`] | the settings, and the relations between them |
//!
//! # Ten lines
//!
//! ```no_run
//! use pg_outbox::{NewEvent, Relay, RelayConfig, StdoutPublisher, append};
//! use postgres::{Client, NoTls};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let connect = || Client::connect("host=localhost user=app", NoTls);
//!     pg_outbox::store::migrate(&mut connect()?, &pg_outbox::Schema::default())?;
//!     let relay = Relay::new(RelayConfig::builder("app-1").build()?, connect, |_| StdoutPublisher::new()).start();
//!
//!     let mut client = connect()?;
//!     let mut tx = client.transaction()?;
//!     append(&mut tx, &NewEvent::new("order", "42", "order.placed", r#"{"total":12}"#))?;
//!     tx.commit()?;
//!
//!     relay.stop(); // finishes what is in progress, releases the rest
//!     println!("{}", relay.join()?);
//!     Ok(())
//! }
//! ```
//!
//! The library logs through [`log`], installs no logger and no signal handler, and starts no thread before
//! [`Relay::run`] or [`Relay::start`].

pub mod append;
pub mod config;
mod error;
mod event;
#[cfg(feature = "cli")]
pub mod http;
pub mod metrics;
mod moment;
pub mod policy;
pub mod publisher;
pub mod relay;
pub mod store;

pub use append::{Outbox, append, append_all};
pub use config::{RelayConfig, RelayConfigBuilder};
#[doc(hidden)]
pub use error::describe;
pub use error::{BoxError, Error};
pub use event::*;
pub use moment::Moment;
pub use policy::{Decision, FailureKind, FailureScope, History, Policy, PublishError};
pub use publisher::{
    Outcomes, Publisher, ScriptedBroker, ScriptedPublisher, StdoutPublisher, publish_each,
};
pub use relay::{BrokerHealth, Health, Relay, RunReport, RunningRelay, StopHandle, ThreadHealth};
pub use store::{EventRef, Schema};
