//! What a measurement cost the database: statements, WAL, dead rows, and how long the claim and the verdict took.

use postgres::Client;

use super::report::amount;
use super::{Result, database::Database};

/// The state before.
pub(crate) struct Meter {
    wal: i64,
    server_seconds: f64,
}

#[derive(Debug, Default, Clone)]
pub(crate) struct Costs {
    /// Statements of the relays; missing where the server has no pg_stat_statements.
    pub(crate) statements: Option<f64>,
    pub(crate) claims: f64,
    /// Mean execution time in the server.
    pub(crate) claim_ms: f64,
    pub(crate) verdict_ms: f64,
    pub(crate) wal_bytes: f64,
    /// Processor time, which other programs change much less than the clock.
    pub(crate) server_seconds: f64,
    /// Row versions that were superseded or deleted, and the share that spared the indexes.
    pub(crate) dead_rows: f64,
    pub(crate) hot_share: f64,
}

/// With the mark [`OWN`].
const WAL: &str = "SELECT (pg_current_wal_lsn() - '0/0')::bigint /* bench */";
/// A mark on this program's own statements while relays run, so that they are not counted.
pub(crate) const OWN: &str = "/* bench */";

impl Meter {
    pub(crate) fn start(database: &Database) -> Result<Self> {
        let mut client = database.connect()?;
        client.batch_execute("SELECT pg_stat_reset()")?;
        let _ = client.batch_execute("SELECT pg_stat_statements_reset()");
        let wal = client.query_one(WAL, &[])?.get(0);
        Ok(Self { wal, server_seconds: database.server_seconds() })
    }

    /// Read after the relays have gone: a server process reports its figures at its end.
    pub(crate) fn stop(&self, database: &Database) -> Result<Costs> {
        let mut client = database.connect()?;
        let server_seconds = database.server_seconds() - self.server_seconds;
        let wal: i64 = client.query_one(WAL, &[])?.get(0);
        let wal_bytes = (wal - self.wal) as f64;
        let mut costs = Costs { wal_bytes, server_seconds, ..Costs::default() };
        let row = client.query_one(
            "SELECT (n_tup_upd + n_tup_del)::float8, n_tup_hot_upd::float8 / greatest(1, n_tup_upd)
               FROM pg_stat_all_tables WHERE relid = 'outbox.outbox'::regclass",
            &[],
        )?;
        (costs.dead_rows, costs.hot_share) = (row.get(0), row.get(1));
        costs.read_statements(&mut client);
        Ok(costs)
    }
}

impl Costs {
    fn read_statements(&mut self, client: &mut Client) {
        let sql = format!(
            "SELECT sum(calls)::float8,
                    sum(calls) FILTER (WHERE is_claim)::float8,
                    (sum(total_exec_time) FILTER (WHERE is_claim) / sum(calls) FILTER (WHERE is_claim))::float8,
                    (sum(total_exec_time) FILTER (WHERE is_verdict) / sum(calls) FILTER (WHERE is_verdict))::float8
               FROM (SELECT *, query LIKE '%SKIP LOCKED%' AS is_claim, query LIKE '%dead_lettered%' AS is_verdict
                       FROM pg_stat_statements
                      WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
                        AND query NOT LIKE '%{OWN}%' AND query NOT LIKE '%pg_stat_%' AND query NOT LIKE 'SET %') AS s"
        );
        let Ok(row) = client.query_one(&sql, &[]) else { return };
        let figure = |column: usize| row.get::<_, Option<f64>>(column).unwrap_or(f64::NAN);
        self.statements = row.get(0);
        (self.claims, self.claim_ms, self.verdict_ms) = (figure(1), figure(2), figure(3));
    }

    /// For the notes of a row.
    pub(crate) fn notes(&self, events: u32) -> Vec<String> {
        let each = |total: f64| total / f64::from(events);
        let mut notes = Vec::new();
        if let Some(statements) = self.statements {
            notes.push(format!(
                "{:.4} statements, {:.0} bytes of WAL and {:.2} dead rows an event ({:.0} % HOT)",
                each(statements),
                each(self.wal_bytes),
                each(self.dead_rows),
                self.hot_share * 100.0
            ));
            notes.push(format!(
                "{} claims of {} ms, verdicts of {} ms",
                amount(self.claims),
                amount(self.claim_ms),
                amount(self.verdict_ms)
            ));
        }
        notes
    }
}
