//! `run`: the relay, its endpoint, and the signals that stop them.
//!
//! The first signal asks the relay to stop, and starts a watch that ends the process should the relay not keep its time. A
//! second leaves at once, and the events in flight come back when their leases lapse. One that comes within a moment of the
//! first is the same wish: supervisors signal the process and then its group.

use std::process;
use std::thread;
use std::time::{Duration, Instant};

use pg_outbox::http::{self, HttpServer};
use pg_outbox::{Health, Relay, StopHandle};
use postgres::{Config, NoTls};

use super::args::{Listen, RunArgs};
use super::broker::Broker;
use super::database::Target;
use super::failure::{Code, Failure};
use super::{logger, settings};

/// What the exit code of a process that was interrupted is by custom.
const INTERRUPTED: i32 = 130;
/// Signals within this are one.
const SAME_WISH: Duration = Duration::from_secs(1);
/// How much later than `shutdown_timeout` the watch ends the process.
const GRACE: Duration = Duration::from_secs(2);
/// A scrape must not wait for long.
const SCRAPE_CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

pub(crate) fn run(target: &Target, args: &RunArgs) -> Result<Code, Failure> {
    logger::start(&args.log_level);
    let config = settings::relay_config(&target.connection.schema, &args.relay.settings)?;
    let broker = Broker::from_args(&args.relay)?;
    let database = target.config()?;
    let (connecting, shutdown_timeout) = (database.clone(), config.shutdown_timeout());
    log::info!("events go from {} to {}", super::database::address(&database), broker.name());
    let relay = Relay::new(config, move || connecting.connect(NoTls), move |_| broker.publisher());
    stop_on_signals(relay.stop_handle(), shutdown_timeout)?;
    let server = serve(target, args.listen, database, relay.health())?;
    let ended = relay.run();
    drop(server);
    ended?;
    Ok(Code::Ok)
}

fn serve(
    target: &Target,
    listen: Listen,
    mut database: Config,
    health: Health,
) -> Result<Option<HttpServer>, Failure> {
    let Some(addr) = listen.0 else { return Ok(None) };
    if !addr.ip().is_loopback() {
        log::warn!("the endpoint on {addr} can be read by everybody who reaches that address");
    }
    let timeout = database.get_connect_timeout().copied().unwrap_or(SCRAPE_CONNECT_TIMEOUT);
    database.connect_timeout(timeout.min(SCRAPE_CONNECT_TIMEOUT));
    database.tcp_user_timeout(http::SCRAPE_TIMEOUT);
    let server = http::serve(addr, target.schema()?, move || database.connect(NoTls), Some(health));
    let server = server.map_err(|error| {
        Failure::failed(format!("listening on {addr}: {error}; choose another --listen, or off"))
    })?;
    log::info!("metrics are at http://{}/metrics", server.local_addr());
    Ok(Some(server))
}

fn stop_on_signals(stop: StopHandle, shutdown_timeout: Duration) -> Result<(), Failure> {
    let mut first: Option<Instant> = None;
    let handler = move || {
        if let Some(first) = first {
            if first.elapsed() < SAME_WISH {
                return;
            }
            log::warn!(
                "interrupted again: leaving at once; what was in flight comes back when its lease lapses"
            );
            process::exit(INTERRUPTED);
        }
        first = Some(Instant::now());
        log::info!("stopping; a second signal leaves at once");
        stop.stop();
        watch(shutdown_timeout);
    };
    ctrlc::set_handler(handler)
        .map_err(|error| Failure::failed(format!("waiting for signals: {error}")))
}

/// Ends the process when the relay has not, for whatever reason, a while after it should have.
fn watch(shutdown_timeout: Duration) {
    thread::spawn(move || {
        thread::sleep(shutdown_timeout + GRACE);
        log::error!(
            "the relay has not stopped within {shutdown_timeout:?}; leaving, and what was in flight comes back"
        );
        process::exit(Code::Failed as i32);
    });
}
