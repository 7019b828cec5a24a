//! A TCP proxy for tests that does to a connection what a bad network does.
//!
//! It listens on a port of its own and carries bytes to and from one server, two threads a connection. What it does is
//! a [`Mode`] that holds for all of its connections, those that are open included, and may be changed at any time:
//!
//! | mode | a client sees |
//! |---|---|
//! | `Pass` | the server |
//! | `Delay` | the server, each piece (at most 16 KiB) late by that much, each way |
//! | `Stall` | connections that are accepted and say nothing, as with a server that hangs; nothing is lost |
//! | `Drop` | one direction goes nowhere, without an error, as behind a router that has forgotten the connection |
//!
//! TCP never goes on after a hole, so a connection that has lost a byte never carries one again in that direction, and is
//! ended when the mode changes. [`Proxy::reset`] ends all connections at once; what was under way is lost.
//! [`Proxy::swallow_replies`] loses the next bytes of the server's answers and then ends the connection that lost them:
//! the server has done what it was asked, and the client never hears of it.
//!
//! While the server is down, connections are accepted and closed at once. Dropping the proxy ends everything.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// What happens to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Pass,
    Delay(Duration),
    Stall,
    Drop(Direction),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    ToClient,
}

pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

struct Shared {
    server: u16,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    mode: Mode,
    /// Bytes of answers still to be lost.
    swallow: usize,
    /// Open connections, by number: both ends, and whether one direction has a hole.
    connections: Vec<Connection>,
    next_number: u64,
    is_closing: bool,
}

struct Connection {
    number: u64,
    client: TcpStream,
    server: TcpStream,
    has_hole: bool,
}

impl Proxy {
    /// A proxy in front of a port of this machine, in mode `Pass`.
    pub fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let state = State {
            mode: Mode::Pass,
            swallow: 0,
            connections: Vec::new(),
            next_number: 0,
            is_closing: false,
        };
        let shared = Arc::new(Shared { server, state: Mutex::new(state), changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        let listener = thread::spawn(move || accepting.accept(&listener));
        Self { port, shared, listener: Some(listener) }
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes what happens to bytes from now on. Connections that have lost some are ended.
    pub fn set(&self, mode: Mode) {
        let mut state = self.shared.lock();
        state.mode = mode;
        state.end(|connection| connection.has_hole);
        self.shared.changed.notify_all();
    }

    /// Ends every connection.
    pub fn reset(&self) {
        self.shared.lock().end(|_| true);
        self.shared.changed.notify_all();
    }

    /// Loses the next `bytes` of answers, of whichever connections they come on, and ends those.
    pub fn swallow_replies(&self, bytes: usize) {
        self.shared.lock().swallow = bytes;
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.shared.lock().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.reset();
        // The listener wakes up for this one, and ends.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

impl State {
    fn end(&mut self, which: impl Fn(&Connection) -> bool) {
        for connection in self.connections.iter().filter(|connection| which(connection)) {
            let _ = connection.client.shutdown(Shutdown::Both);
            let _ = connection.server.shutdown(Shutdown::Both);
        }
        self.connections.retain(|connection| !which(connection));
    }
}

/// What becomes of a piece.
#[derive(PartialEq)]
enum Fate {
    Carry,
    Lose,
    End,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if self.lock().is_closing {
                return;
            }
            // A server that is down: the client's end is dropped, and so closed.
            if let (Ok(client), Ok(server)) =
                (client, TcpStream::connect(("127.0.0.1", self.server)))
            {
                self.open(client, server);
            }
        }
    }

    fn open(self: &Arc<Self>, client: TcpStream, server: TcpStream) {
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let copy = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
        let mut state = self.lock();
        let number = state.next_number;
        state.next_number += 1;
        let ways = [
            (Direction::ToServer, copy(&client), copy(&server)),
            (Direction::ToClient, copy(&server), copy(&client)),
        ];
        state.connections.push(Connection { number, client, server, has_hole: false });
        drop(state);
        for (direction, from, to) in ways {
            let shared = Arc::clone(self);
            thread::spawn(move || {
                shared.carry(number, direction, from, to);
                shared.lock().end(|connection| connection.number == number);
                shared.changed.notify_all();
            });
        }
    }

    /// Carries one direction of one connection until an end is gone.
    fn carry(&self, number: u64, direction: Direction, mut from: TcpStream, mut to: TcpStream) {
        let mut piece = vec![0; 16 * 1024];
        loop {
            let Ok(length @ 1..) = from.read(&mut piece) else { return };
            match self.decide(number, direction, length) {
                Fate::Carry if to.write_all(&piece[..length]).is_err() => return,
                Fate::Carry | Fate::Lose => {}
                Fate::End => return,
            }
        }
    }

    /// Waits as the mode wants it, and says what becomes of the piece.
    fn decide(&self, number: u64, direction: Direction, length: usize) -> Fate {
        let mut state = self.lock();
        if let Mode::Delay(time) = state.mode {
            drop(state);
            thread::sleep(time);
            state = self.lock();
        }
        loop {
            let State { mode, swallow, connections, .. } = &mut *state;
            let Some(connection) = connections.iter_mut().find(|open| open.number == number) else {
                return Fate::End;
            };
            if *mode == Mode::Drop(direction) {
                connection.has_hole = true;
                return Fate::Lose;
            }
            if *mode == Mode::Stall {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if direction == Direction::ToClient && *swallow > 0 {
                *swallow = swallow.saturating_sub(length);
                return Fate::End;
            }
            return Fate::Carry;
        }
    }
}
