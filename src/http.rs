//! The HTTP endpoint: `/metrics`, `/healthz`, `/readyz` and `/`, for `curl` and for Prometheus.
//!
//! | page | 200 | 503 |
//! |---|---|---|
//! | `/metrics` | the metrics of the outbox, read from its tables | the database cannot be read: the reason, and no figure |
//! | `/healthz` | every thread of the relay makes progress | one has ended or hangs |
//! | `/readyz` | the relay has a database it can write to, and a broker that answers | why not |
//!
//! Everything has a bound, so that no client can stop a scrape or the relay. tiny_http's own server (0.12) has no timeout
//! and a thread for every client, so connections are accepted here and only its types and its response writer are used:
//!
//! - a connection has [`HEAD_TIMEOUT`] in all for its request, however slowly it sends, and at most [`MAX_HEAD_BYTES`];
//! - there are at most [`MAX_CONNECTIONS`]; one more cuts off the oldest that has not sent its request yet;
//! - one scrape runs at a time, on a thread and a connection of its own; who asks meanwhile waits for its answer, for at
//!   most [`SCRAPE_TIMEOUT`], and an answer serves everybody for [`SCRAPE_CACHE`];
//! - each connection gets one answer and is closed.

mod connections;
mod scraper;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use postgres::Client;

use crate::error::BoxError;
use crate::relay::Health;
use crate::store::Schema;
use connections::Connections;
use scraper::Scraper;

/// How long a client may take to send its request.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest request line and headers.
pub const MAX_HEAD_BYTES: usize = 8 * 1024;
/// Connections at a time.
pub const MAX_CONNECTIONS: usize = 64;
/// How long the database may take to answer a scrape.
pub const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an answer is served again.
pub const SCRAPE_CACHE: Duration = Duration::from_secs(1);
/// The same for one that counted very many events.
pub const SCRAPE_CACHE_MAX: Duration = Duration::from_secs(15);

/// Serves the pages on `addr` until the server is dropped. Loopback is for the machine itself; on any other address the
/// pages can be read by everybody who reaches it. `connect` opens the connection that the metrics are read through;
/// `health` is the relay's, or `None` where there is no relay in this process.
///
/// # Errors
/// When the address cannot be listened on.
pub fn serve<C, E>(
    addr: impl ToSocketAddrs,
    schema: Schema,
    connect: C,
    health: Option<Health>,
) -> io::Result<HttpServer>
where
    C: Fn() -> Result<Client, E> + Send + Sync + 'static,
    E: Into<BoxError>,
{
    let listener = TcpListener::bind(addr)?;
    let addr = listener.local_addr()?;
    let scraper = Scraper::new(schema, move || connect().map_err(Into::into));
    let connections = Arc::new(Connections::new(Pages { scraper, health }));
    let accepting = Arc::clone(&connections);
    let thread =
        thread::Builder::new().name("http".into()).spawn(move || accepting.accept(&listener))?;
    Ok(HttpServer { addr, connections, thread: Some(thread) })
}

/// A running endpoint. Dropping it closes the port and every connection.
pub struct HttpServer {
    addr: SocketAddr,
    connections: Arc<Connections>,
    thread: Option<JoinHandle<()>>,
}

impl HttpServer {
    /// The address that it listens on, with the port that was chosen where 0 was asked for.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.connections.close(self.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for HttpServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpServer").field("addr", &self.addr).finish_non_exhaustive()
    }
}

/// An answer before it is put into HTTP.
struct Page {
    status: u16,
    content_type: &'static str,
    body: String,
}

const TEXT: &str = "text/plain; charset=utf-8";
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

const INDEX: &str = "pg-outbox\n\n/metrics  the metrics, in the Prometheus text format\n\
                     /healthz  whether the threads of the relay make progress\n\
                     /readyz   whether the relay has its database and its broker\n";

/// What there is to see.
struct Pages {
    scraper: Arc<Scraper>,
    health: Option<Health>,
}

impl Pages {
    fn get(&self, path: &str) -> Page {
        match path {
            "/" => text(200, INDEX),
            "/metrics" => match self.scraper.metrics() {
                Ok(body) => Page { status: 200, content_type: METRICS, body },
                Err(reason) => text(503, &format!("{reason}\n")),
            },
            "/healthz" => self.healthz(),
            "/readyz" => self.readyz(),
            _ => text(404, "there are /metrics, /healthz, /readyz and /\n"),
        }
    }

    fn healthz(&self) -> Page {
        let threads = self.health.as_ref().map(Health::threads).unwrap_or_default();
        let (mut body, mut status) = (String::new(), 200);
        for thread in threads {
            let state = match (thread.alive, thread.late) {
                (false, _) => "has ended".into(),
                (true, true) => format!("made no progress for {:.0?}", thread.since_progress),
                (true, false) => "is fine".into(),
            };
            if !thread.alive || thread.late {
                status = 503;
            }
            body.push_str(&format!("{} {state}\n", thread.name));
        }
        body.insert_str(0, if status == 200 { "ok\n" } else { "not healthy\n" });
        text(status, &body)
    }

    fn readyz(&self) -> Page {
        let Some(health) = &self.health else { return text(200, "ready\n") };
        let (database, broker) = (health.database(), health.broker());
        let ready = database.is_ok() && broker.is_ready();
        let verdict = if ready { "ready" } else { "not ready" };
        let database = database.err().unwrap_or_else(|| "ok".into());
        let body = format!("{verdict}\ndatabase: {database}\nbroker: {broker}\n");
        text(if ready { 200 } else { 503 }, &body)
    }
}

fn text(status: u16, body: &str) -> Page {
    Page { status, content_type: TEXT, body: body.into() }
}
