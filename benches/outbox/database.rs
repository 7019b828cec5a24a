//! The server that `./run bench` started, and a database of its own for each measurement.

use pg_outbox::Schema;
use postgres::{Client, NoTls};

use super::{Result, machine};

/// Where `./run bench` says that the server is.
const VARIABLE: &str = "PG_OUTBOX_BENCH_DATABASE_URL";

#[derive(Clone)]
pub(crate) struct Server {
    /// Ends with the name of a database.
    url: String,
}

/// Dropped with everything in it at the end.
pub(crate) struct Database {
    server: Server,
    name: String,
    pub(crate) url: String,
}

impl Server {
    pub(crate) fn from_environment() -> Result<Self> {
        let url = std::env::var(VARIABLE)
            .map_err(|_| format!("{VARIABLE} is not set; start this with ./run bench"))?;
        Ok(Self { url })
    }

    fn connect(&self) -> Result<Client> {
        Ok(Client::connect(&self.url, NoTls)?)
    }

    /// What the figures depend on, for the reader of the table.
    pub(crate) fn conditions(&self) -> Result<Vec<String>> {
        let mut client = self.connect()?;
        let mut setting = |name: &str| -> Result<String> {
            Ok(client.query_one("SELECT current_setting($1)", &[&name])?.get(0))
        };
        let mut conditions = vec![format!("PostgreSQL {}", setting("server_version")?)];
        for name in ["fsync", "synchronous_commit", "shared_buffers", "max_wal_size"] {
            conditions.push(format!("{name} {}", setting(name)?));
        }
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        conditions.push(format!("{cores} cores"));
        Ok(conditions)
    }

    /// The server's first process, where it runs on this machine.
    pub(crate) fn pid(&self) -> Option<u32> {
        let row = self.connect().ok()?.query_one("SELECT pg_backend_pid()", &[]).ok()?;
        machine::parent(u32::try_from(row.get::<_, i32>(0)).ok()?)
    }

    /// A new database with an empty outbox.
    pub(crate) fn database(&self) -> Result<Database> {
        let name = format!("bench_{:08x}", fastrand::u32(..));
        let mut client = self.connect()?;
        client.batch_execute(&format!("CREATE DATABASE {name}"))?;
        let base = self.url.rsplit_once('/').map_or(self.url.as_str(), |(base, _)| base);
        let url = format!("{base}/{name}");
        let database = Database { server: self.clone(), name, url };
        let mut client = database.connect()?;
        pg_outbox::store::migrate(&mut client, &Schema::default())?;
        // It is there only where the server has it preloaded.
        let _ = client.batch_execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements");
        Ok(database)
    }
}

/// Events to fill a database with, as one insert.
pub(crate) struct Fill<'a> {
    pub(crate) events: u32,
    pub(crate) aggregates: u32,
    /// Of the aggregates' names, so that several fills do not meet.
    pub(crate) prefix: &'a str,
    /// Bytes of the padding in the payload; 215 make about 250 in all.
    pub(crate) padding: u32,
    /// Columns of the row and their values, over `i`, the event's number from 0.
    pub(crate) columns: &'a str,
    pub(crate) values: &'a str,
}

impl Default for Fill<'_> {
    fn default() -> Self {
        Self { events: 0, aggregates: 1, prefix: "k", padding: 215, columns: "", values: "" }
    }
}

impl Database {
    pub(crate) fn connect(&self) -> Result<Client> {
        Ok(Client::connect(&self.url, NoTls)?)
    }

    /// Seconds of processor time of the whole server, so far.
    pub(crate) fn server_seconds(&self) -> f64 {
        machine::tree_seconds(&self.server.pid().into_iter().collect::<Vec<_>>())
    }

    /// Inserts events. Event `i` is of aggregate `i` modulo their number.
    pub(crate) fn fill(&self, fill: &Fill<'_>) -> Result<()> {
        let Fill { events, aggregates, prefix, padding, columns, values } = fill;
        let (comma_columns, comma_values) = if columns.is_empty() {
            (String::new(), String::new())
        } else {
            (format!(", {columns}"), format!(", {values}"))
        };
        self.connect()?.batch_execute(&format!(
            "INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload{comma_columns})
             SELECT outbox.outbox_new_event_id(), 'order', '{prefix}' || i % {aggregates}, 'order.placed',
                    convert_to(json_build_object('seq', i, 'key', '{prefix}' || i % {aggregates},
                                                 'pad', repeat('x', {padding}))::text, 'UTF8'){comma_values}
               FROM generate_series(0, {events} - 1) AS i ORDER BY i"
        ))?;
        Ok(())
    }

    /// Puts the database at rest before a measurement.
    pub(crate) fn settle(&self) -> Result<()> {
        let mut client = self.connect()?;
        client.batch_execute("VACUUM ANALYZE")?;
        client.batch_execute("CHECKPOINT")?;
        Ok(())
    }

    pub(crate) fn execute(&self, sql: &str) -> Result<()> {
        Ok(self.connect()?.batch_execute(sql)?)
    }

    pub(crate) fn count(&self, sql: &str) -> Result<i64> {
        Ok(self.connect()?.query_one(sql, &[])?.get(0))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Ok(mut client) = self.server.connect() {
            let _ = client.batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.name));
        }
    }
}
