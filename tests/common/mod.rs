//! What the tests share: real servers, a database for each test, and waiting with a deadline.
//!
//! PostgreSQL is the server that `PG_OUTBOX_TEST_DATABASE_URL` names (a superuser's URL; `./run test` sets it), or else one that
//! the test starts and stops itself from the machine's binaries (`PGBIN`, `/usr/lib/postgresql/*/bin`, `PATH`). RabbitMQ is always
//! started by the test. A server that is missing fails the test, with its name; nothing is skipped.
#![allow(dead_code, unused_imports, missing_docs, clippy::unwrap_used, unreachable_pub)]

pub mod driver;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod rabbitmq;
pub mod wait;

pub use self::postgres::{Database, Server};
pub use rabbitmq::{Delivery, Rabbit};
pub use wait::eventually;

/// Ends a test for which a server is missing: as a failure, with its name.
pub fn missing(server: &str, how: &str) -> ! {
    panic!("no {server} was found: {how}");
}

/// A log on standard error for tests that are run with `RUST_LOG` set.
pub fn log() {
    let _ = env_logger::builder().is_test(true).try_init();
}
