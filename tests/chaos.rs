//! Chaos: relays, PostgreSQL, RabbitMQ and the network between them are killed, frozen and cut off by a schedule that a seed
//! decides, while writers append; afterwards a checker proves from what committed and what arrived that the contract was kept.
//!
//! `./run chaos` runs it for longer. The same seed gives the same schedule, but not the same race.
#![cfg(all(feature = "rabbitmq", feature = "cli"))]
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod common;

#[path = "chaos/mod.rs"]
mod chaos;

#[test]
fn the_contract_holds_in_chaos() {
    common::log();
    chaos::run(&chaos::Options::from_environment());
}
