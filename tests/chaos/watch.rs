//! Two who look on: one samples the relays' sessions, the other is the operator who deals with dead letters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use pg_outbox::store::dead_letters::{self, Filter};
use pg_outbox::{Error, Schema};
use postgres::{Client, NoTls};

use super::faults::Chaos;
use super::writers::POISON;

/// A relay that starts looks for a transaction pooler, and holds an otherwise empty transaction for two round trips. It has no
/// claim yet and locks nothing.
const IDLE: &str = "SELECT application_name || ': ' || query FROM pg_stat_activity
  WHERE application_name LIKE 'chaos-relay-%' AND state LIKE 'idle in transaction%'
    AND NOT (backend_xid IS NULL AND query IN ('BEGIN', 'START TRANSACTION', 'SELECT pg_backend_pid()'))";

#[derive(Debug, Default)]
pub struct Seen {
    pub samples: AtomicU64,
    pub requeued: AtomicU64,
    pub discarded: AtomicU64,
}

/// Samples the relays' sessions: none may ever be idle in a transaction.
pub fn sample(chaos: &Chaos, url: &str, seen: &Seen) {
    let mut client = None;
    while !chaos.is_over() {
        thread::sleep(Duration::from_millis(100));
        if client.is_none() {
            client = connect(url);
        }
        let Some(open) = &mut client else { continue };
        match open.query(IDLE, &[]) {
            Ok(rows) => {
                seen.samples.fetch_add(1, Ordering::Relaxed);
                for row in rows {
                    chaos.incident(format!("idle in transaction: {}", row.get::<_, String>(0)));
                }
            }
            Err(_) => client = None,
        }
    }
}

/// Requeues what died of too many crashes, and discards what is too large at times, so that aggregates go on. What was
/// requeued may die again.
pub fn operate(chaos: &Chaos, url: &str, seed: u64, seen: &Seen) {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x4f);
    let mut next = 8_000;
    while !chaos.is_over() {
        thread::sleep(Duration::from_millis(100));
        if chaos.clock.now() < next {
            continue;
        }
        next = chaos.clock.now() + rng.u64(5_000..15_000);
        let Some(mut client) = connect(url) else { continue };
        // An outage in between is no harm: the trigger has counted what was done.
        if let Err(error) = deal(&mut client, rng.u32(..3), seen) {
            log::info!("the operator could not work: {error}");
        }
    }
}

fn deal(client: &mut Client, what: u32, seen: &Seen) -> Result<(), Error> {
    let schema = Schema::default();
    if what == 0 {
        let poison = Filter::builder().event_type(POISON).build()?;
        let gone = dead_letters::discard(client, &schema, &poison, "chaos", "too large")?;
        seen.discarded.fetch_add(gone.len() as u64, Ordering::Relaxed);
    } else {
        let back = dead_letters::requeue(client, &schema, &Filter::everything(), None)?;
        seen.requeued.fetch_add(back.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}

fn connect(url: &str) -> Option<Client> {
    let mut config: postgres::Config = url.parse().expect("a URL");
    config.connect_timeout(Duration::from_secs(3));
    let mut client = config.connect(NoTls).ok()?;
    client.batch_execute("SET statement_timeout = '20s'").ok()?;
    Some(client)
}
