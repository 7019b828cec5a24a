//! PostgreSQL for tests: a database each, and servers that may be stopped, killed and frozen.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pg_outbox::{NewEvent, Schema};
use postgres::{Client, NoTls};
use uuid::Uuid;

use super::process::{Nest, children, find, free_port, is_root, run, signal};
use super::wait::eventually;

const START: Duration = Duration::from_secs(60);

/// A database of one test, dropped with it.
pub struct Database {
    name: String,
    admin_url: String,
    // Dropped after the database; only set when the test has a server of its own.
    server: Option<Server>,
}

impl Database {
    /// A new database with an outbox in the schema `outbox`.
    pub fn create() -> Self {
        Self::create_empty().migrated()
    }

    /// A new database without an outbox.
    pub fn create_empty() -> Self {
        match std::env::var("PG_OUTBOX_TEST_DATABASE_URL") {
            Ok(url) => Self::create_at(url, None),
            Err(_) => {
                let server = Server::start();
                Self::create_at(server.url("postgres"), Some(server))
            }
        }
    }

    /// A new database with an outbox on a server of the test's own.
    pub fn create_on(server: &Server) -> Self {
        Self::create_at(server.url("postgres"), None).migrated()
    }

    fn create_at(admin_url: String, server: Option<Server>) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{}_{number}_{}", std::process::id(), fastrand::u32(..));
        let mut admin = Client::connect(&admin_url, NoTls).expect("the test server answers");
        admin.batch_execute(&format!("CREATE DATABASE {name}")).expect("a database can be created");
        Self { name, admin_url, server }
    }

    fn migrated(self) -> Self {
        pg_outbox::store::migrate(&mut self.client(), &Schema::default())
            .expect("the outbox can be created");
        self
    }

    /// The URL of the database, for a superuser.
    pub fn url(&self) -> String {
        with_database(&self.admin_url, &self.name)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A new connection.
    pub fn client(&self) -> Client {
        Client::connect(&self.url(), NoTls).expect("the test database answers")
    }

    /// A source of new connections.
    pub fn factory(
        &self,
    ) -> impl Fn() -> Result<Client, postgres::Error> + Clone + Send + Sync + 'static + use<> {
        let url = self.url();
        move || Client::connect(&url, NoTls)
    }

    /// Moves every timestamp of the outbox into the past, which nothing can tell from waiting, since times are only ever
    /// compared with the database's clock.
    pub fn shift(&self, by: Duration) {
        let mut client = self.client();
        let columns = client
            .query(
                "SELECT table_name::text, string_agg(format('%1$I = %1$I - $1 * interval ''1 second''', column_name), ', ')
                   FROM information_schema.columns
                  WHERE table_schema = 'outbox' AND data_type = 'timestamp with time zone'
                    AND table_name IN ('outbox', 'outbox_relay', 'outbox_wakeup') GROUP BY table_name",
                &[],
            )
            .expect("the columns can be read");
        let mut transaction = client.transaction().expect("a transaction");
        for row in columns {
            let (table, changes): (String, String) = (row.get(0), row.get(1));
            let changes = changes.replace("$1", &by.as_secs_f64().to_string());
            transaction
                .batch_execute(&format!("UPDATE outbox.{table} SET {changes}"))
                .expect("times can be moved");
        }
        transaction.commit().expect("times can be moved");
    }

    /// Appends one event through the SQL function.
    pub fn append(
        &self,
        aggregate_type: &str,
        aggregate_id: &str,
        event_type: &str,
        payload: &[u8],
    ) -> Uuid {
        let row = self.client().query_one(
            "SELECT outbox.outbox_append($1, $2, $3, $4::bytea)",
            &[&aggregate_type, &aggregate_id, &event_type, &payload],
        );
        row.expect("the event can be appended").get(0)
    }

    /// Appends `per_aggregate` events for each of `aggregates` orders `k0`, `k1`, ... in one transaction, round robin,
    /// with their number in the aggregate as the payload.
    pub fn append_many(&self, aggregates: usize, per_aggregate: usize) -> Vec<Uuid> {
        let event = |i: usize| {
            let (sequence, key) = (i / aggregates, i % aggregates);
            NewEvent::new("order", format!("k{key}"), "placed", sequence.to_string())
        };
        let events: Vec<_> = (0..aggregates * per_aggregate).map(event).collect();
        let mut client = self.client();
        let mut transaction = client.transaction().expect("a transaction");
        let ids = pg_outbox::append_all(&mut transaction, &events).expect("events can be appended");
        transaction.commit().expect("events can be appended");
        ids
    }

    /// The status of an event.
    pub fn status_of(&self, event_id: Uuid) -> String {
        let row = self
            .client()
            .query_one("SELECT status FROM outbox.outbox WHERE event_id = $1", &[&event_id]);
        row.expect("the event exists").get(0)
    }

    /// How many events match a condition.
    pub fn count(&self, condition: &str) -> i64 {
        let sql = format!("SELECT count(*) FROM outbox.outbox WHERE {condition}");
        self.client().query_one(&sql, &[]).expect("events can be counted").get(0)
    }

    /// Runs statements.
    pub fn execute(&self, sql: &str) {
        self.client().batch_execute(sql).expect("the statements run");
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Ok(mut admin) = Client::connect(&self.admin_url, NoTls) {
            let _ =
                admin.batch_execute(&format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name));
        }
    }
}

fn with_database(url: &str, name: &str) -> String {
    let (base, query) = url.split_once('?').map_or((url, ""), |(base, query)| (base, query));
    let base = &base[..base.rfind('/').expect("the URL has a database")];
    let separator = if query.is_empty() { "" } else { "?" };
    format!("{base}/{name}{separator}{query}")
}

/// Ends the server whose process id is in the file `pid`, frozen or not. The postmaster gets the chance to remove its
/// shared memory.
const ENDING: &str = r#"
read -r pid < pid || exit
kill -s CONT "$pid" $(grep -ls "^PPid:[[:space:]]*$pid\$" /proc/[0-9]*/status | cut -d/ -f3)
kill -s QUIT "$pid"
for _ in $(seq 100); do kill -s 0 "$pid" && sleep 0.05 || exit; done
kill -s KILL "$pid"
"#;

/// A server of one test's own, which ends with it.
pub struct Server {
    binaries: PathBuf,
    port: u16,
    process: Option<Child>,
    nest: Nest,
}

impl Server {
    /// A new cluster on a random port, without durability: a test that kills it relies on the kernel's page cache.
    pub fn start() -> Self {
        let nest = Nest::new("postgres", ENDING);
        let mut server = Self { binaries: find_binaries(), port: free_port(), process: None, nest };
        if is_root() {
            run(Command::new("chown").arg("postgres:postgres").arg(server.nest.folder()));
        }
        run(server.command("initdb").args([
            "-A",
            "trust",
            "-U",
            "postgres",
            "-E",
            "UTF8",
            "--locale=C",
            "-N",
            "-D",
            "data",
        ]));
        server.start_again();
        server
    }

    /// The URL of a database of this server.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where it lives until it ends.
    pub fn folder(&self) -> &Path {
        self.nest.folder()
    }

    /// Starts it and waits until it answers.
    pub fn start_again(&mut self) {
        assert!(self.process.is_none(), "the server is running");
        let log = self.nest.log();
        let mut command = self.command("postgres");
        command.args(["-D", "data", "-p", &self.port.to_string()]);
        for setting in [
            "listen_addresses=127.0.0.1",
            "fsync=off",
            "full_page_writes=off",
            "shared_buffers=32MB",
            "max_connections=100",
            "log_line_prefix=%m [%p] %a ",
        ] {
            command.args(["-c", setting]);
        }
        command.arg("-c").arg(format!("unix_socket_directories={}", self.nest.folder().display()));
        command.stdout(log.try_clone().expect("a handle")).stderr(log).stdin(Stdio::null());
        let process = self.process.insert(command.spawn().expect("the server can be started"));
        self.nest.write("pid", &format!("{}\n", process.id()));
        let url = self.url("postgres");
        eventually("the server answers", START, || {
            let process = self.process.as_mut().expect("it was started");
            let ended = process.try_wait().expect("a child");
            assert!(ended.is_none(), "PostgreSQL ended at once: {}", self.nest.log_tail());
            Client::connect(&url, NoTls).is_ok()
        });
    }

    /// Stops it at once, as a crash does, and waits until it is gone.
    pub fn stop(&mut self) {
        self.thaw();
        if let Some(mut process) = self.process.take() {
            signal(process.id(), "QUIT");
            process.wait().expect("a child");
            self.nest.write("pid", "");
        }
    }

    /// A crash and a restart.
    pub fn restart_immediate(&mut self) {
        self.stop();
        self.start_again();
    }

    /// The postmaster's process id.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the server is running").id()
    }

    /// Stops every process of the server from running, as a host that hangs does. Connections stay open.
    pub fn freeze(&self) {
        self.signal_all("STOP");
    }

    pub fn thaw(&self) {
        self.signal_all("CONT");
    }

    fn signal_all(&self, name: &str) {
        if let Some(process) = &self.process {
            let pid = process.id();
            std::iter::once(pid).chain(children(pid)).for_each(|pid| signal(pid, name));
        }
    }

    /// Changes a setting and reloads, such as `default_transaction_read_only = on`.
    pub fn set(&self, setting: &str) {
        let mut client = Client::connect(&self.url("postgres"), NoTls).expect("the server answers");
        client.batch_execute("SET default_transaction_read_only = off").expect("a session setting");
        client.batch_execute(&format!("ALTER SYSTEM SET {setting}")).expect("a setting");
        client.batch_execute("SELECT pg_reload_conf()").expect("a reload");
    }

    /// A command that runs as a user whom PostgreSQL accepts: it refuses root.
    fn command(&self, program: &str) -> Command {
        let program = self.binaries.join(program);
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"])
                .arg(program);
            command
        } else {
            Command::new(program)
        };
        command.current_dir(self.nest.folder()).env_remove("LC_ALL");
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn find_binaries() -> PathBuf {
    let mut installed: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.flatten().map(|entry| entry.path().join("bin")).collect())
        .unwrap_or_default();
    installed.sort();
    let first = std::env::var_os("PGBIN").map(PathBuf::from);
    let places = first.into_iter().chain(installed.into_iter().rev()).collect();
    find(places, &["initdb", "postgres"]).unwrap_or_else(|| {
        super::missing(
            "PostgreSQL server",
            "install postgresql, or set PGBIN to the folder that has initdb and postgres",
        )
    })
}
