//! One connection to RabbitMQ with one channel in confirm mode. Every step is bounded by a deadline.
//!
//! The client library (`lapin`) works on futures and runs each connection on a thread of its own. This file is where
//! that ends: [`until`] drives a future on the calling thread and gives up at a deadline, and [`Socket`] keeps a
//! second handle of the TCP stream. Cutting the stream is the only way to end the library's thread for sure: it waits
//! without a limit for a handshake that never comes, and while the broker blocks the connection it writes nothing,
//! its own goodbye included.
//!
//! A link goes from *usable* to *spent* (its channel cannot be reused, the connection is kept to hear of the end of a
//! block) or *broken*. Dropping it says goodbye if it is not broken, for at most [`GOODBYE`], and cuts the stream.

use std::fs;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use futures_lite::Stream;
use lapin::options::{ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::tcp::{AsyncTcpStream, OwnedTLSConfig};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, Event as Notice, ExchangeKind};

use super::classify;
use super::config::RabbitMqConfig;
use crate::policy::PublishError;

/// How long a goodbye may take.
const GOODBYE: Duration = Duration::from_millis(500);

type Notices = Pin<Box<dyn Stream<Item = Notice> + Send>>;

/// A connection, its channel, and what the broker is known to take on them.
pub(super) struct Link {
    connection: Connection,
    pub(super) channel: Channel,
    notices: Notices,
    socket: Socket,
    blocked: Option<String>,
    spent: bool,
    broken: bool,
    /// The largest payload that the broker has taken on this connection.
    pub(super) proven: Option<usize>,
    /// The broker's limit on payloads, once it has named it.
    pub(super) limit: Option<usize>,
}

impl Link {
    /// Connects, logs in and opens the channel.
    pub(super) fn open(config: &RabbitMqConfig, deadline: Instant) -> Result<Self, PublishError> {
        let deadline = deadline.min(Instant::now() + config.connect_timeout);
        let refuse = |error: &lapin::Error| classify::connecting(config, error);
        let runtime = lapin::runtime::default_runtime().map_err(|error| refuse(&error))?;
        let (socket, dialled) = (Socket::default(), config.clone());
        let thread_socket = socket.clone();
        let properties = ConnectionProperties::default()
            .with_connection_name(config.connection_name.as_str().into());
        let opening = async {
            let dial = async move |_, _| {
                // Runs on the library's thread, so it may block.
                let tls = tls(&dialled)?;
                let stream = dial(&dialled, deadline)?;
                thread_socket.keep(&stream)?;
                let stream = AsyncTcpStream::Plain(stream.try_into()?);
                if !dialled.uses_tls() {
                    return Ok(stream);
                }
                Ok(stream.into_tls(&dialled.uri.authority.host, tls.as_ref()).await?)
            };
            let connection =
                Connection::connector(config.uri.clone(), runtime, dial, properties).await?;
            let notices: Notices = Box::pin(connection.events_listener());
            let channel = open_channel(&connection).await?;
            lapin::Result::Ok((connection, notices, channel))
        };
        let opened = until(deadline, opening);
        match opened {
            Some(Ok((connection, notices, channel))) => Ok(Self {
                connection,
                channel,
                notices,
                socket,
                blocked: None,
                spent: false,
                broken: false,
                proven: None,
                limit: None,
            }),
            failed => {
                socket.cut();
                Err(failed
                    .and_then(Result::err)
                    .map_or_else(|| classify::connecting_timed_out(config), |error| refuse(&error)))
            }
        }
    }

    /// Whether the connection stands. An idle connection that was closed meanwhile shows here.
    pub(super) fn is_connected(&self) -> bool {
        !self.broken && !self.spent && self.connection.status().connected()
    }

    /// Why the broker takes nothing from this connection at the moment, in its own words.
    pub(super) fn blocked(&mut self) -> Option<String> {
        let mut context = Context::from_waker(Waker::noop());
        let _ = self.poll_blocked(&mut context);
        let status = self.connection.status();
        if !(status.connected() && status.blocked()) {
            self.blocked = None;
            return None;
        }
        Some(self.blocked.clone().unwrap_or_else(|| "no reason given".into()))
    }

    /// Ready once the broker says that it blocks the connection. Reads every notice that has come.
    fn poll_blocked(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut blocked = Poll::Pending;
        while let Poll::Ready(Some(notice)) = self.notices.as_mut().poll_next(context) {
            if let Notice::ConnectionBlocked(reason) = notice {
                self.blocked = Some(reason);
                blocked = Poll::Ready(());
            }
        }
        blocked
    }

    /// Drives `work` to its end, to the deadline or to the broker's notice of a block, whichever comes first.
    pub(super) fn drive(&mut self, work: impl Future<Output = ()>, deadline: Instant) -> Halt {
        let mut work = pin!(work);
        let halted = until(
            deadline,
            poll_fn(|context| {
                if work.as_mut().poll(context).is_ready() {
                    return Poll::Ready(Halt::Finished);
                }
                self.poll_blocked(context).map(|()| Halt::Blocked)
            }),
        );
        halted.unwrap_or(Halt::Deadline)
    }

    /// Opens another channel in place of one that the broker has closed. False when that cannot be had: what was on its
    /// way when a channel was closed can make the broker close the whole connection, so only a new one is of use then.
    pub(super) fn ensure_channel(&mut self, deadline: Instant) -> bool {
        if self.channel.status().connected() {
            return true;
        }
        match until(deadline, open_channel(&self.connection)) {
            Some(Ok(channel)) => {
                self.channel = channel;
                true
            }
            failed => {
                log::debug!("RabbitMQ: no other channel could be opened: {failed:?}");
                self.break_off();
                false
            }
        }
    }

    /// Asks the broker whether the exchange is there. A refusal closes the channel.
    pub(super) fn find_exchange(
        &self,
        exchange: &str,
        deadline: Instant,
    ) -> Option<lapin::Result<()>> {
        let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        let (kind, none) = (ExchangeKind::Topic, FieldTable::default());
        until(deadline, self.channel.exchange_declare(exchange.into(), kind, options, none))
    }

    /// The largest frame that both sides agreed on, in bytes.
    pub(super) fn frame_max(&self) -> usize {
        self.connection.configuration().frame_max() as usize
    }

    /// Keeps the connection only to hear when the broker unblocks it: events are in flight on the channel that were
    /// given up, and their late confirms must not meet those of other events.
    pub(super) fn spend(&mut self) {
        self.spent = true;
    }

    /// Gives the connection up without a goodbye. What the library has not yet written is never sent.
    pub(super) fn break_off(&mut self) {
        self.broken = true;
        self.socket.cut();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let status = self.connection.status();
        if !self.broken && status.connected() && !status.blocked() {
            let _ = until(Instant::now() + GOODBYE, self.connection.close(200, "OK".into()));
        }
        self.socket.cut();
    }
}

/// How [`Link::drive`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Halt {
    Finished,
    Blocked,
    Deadline,
}

async fn open_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

/// Tries every address of the host, each with its share of the time that is left.
fn dial(config: &RabbitMqConfig, deadline: Instant) -> io::Result<TcpStream> {
    let authority = &config.uri.authority;
    let addresses: Vec<_> = (authority.host.as_str(), authority.port).to_socket_addrs()?.collect();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for (index, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = (left / (addresses.len() - index) as u32).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(address, share) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn tls(config: &RabbitMqConfig) -> io::Result<OwnedTLSConfig> {
    let Some(path) = &config.ca_file else { return Ok(OwnedTLSConfig::default()) };
    let because = |why: String| io::Error::other(format!("ca_file {}: {why}", path.display()));
    let pem = fs::read_to_string(path).map_err(|error| because(error.to_string()))?;
    if !pem.contains("-----BEGIN CERTIFICATE-----") {
        return Err(because("there is no certificate in PEM form in it".into()));
    }
    Ok(OwnedTLSConfig { identity: None, cert_chain: Some(pem) })
}

/// A second handle of the stream that the library owns, to end it from outside.
#[derive(Clone, Default)]
struct Socket(Arc<Mutex<Handle>>);

#[derive(Default)]
enum Handle {
    #[default]
    Awaited,
    Kept(TcpStream),
    Cut,
}

impl Socket {
    /// Keeps a handle; an error once the stream was cut, so that a late connect ends at once.
    fn keep(&self, stream: &TcpStream) -> io::Result<()> {
        let mut state = self.state();
        if matches!(*state, Handle::Cut) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        *state = Handle::Kept(stream.try_clone()?);
        Ok(())
    }

    fn cut(&self) {
        if let Handle::Kept(stream) = std::mem::replace(&mut *self.state(), Handle::Cut) {
            let _ = stream.shutdown(Shutdown::Both); // fails only where it is down already
        }
    }

    fn state(&self) -> MutexGuard<'_, Handle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drives a future on this thread; `None` when the deadline comes first. The future is polled at least once.
pub(super) fn until<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Some(value);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_future_is_driven_until_it_is_ready_or_the_deadline() {
        assert_eq!(until(Instant::now(), async { 1 }), Some(1));
        let start = Instant::now();
        assert_eq!(until(start + Duration::from_millis(20), std::future::pending::<()>()), None);
        assert!(start.elapsed() >= Duration::from_millis(20));
        let mut woken = false;
        let wakes_itself = poll_fn(|context| {
            if std::mem::replace(&mut woken, true) {
                return Poll::Ready(2);
            }
            let waker = context.waker().clone();
            thread::spawn(move || waker.wake());
            Poll::Pending
        });
        assert_eq!(until(Instant::now() + Duration::from_secs(10), wakes_itself), Some(2));
    }
}
