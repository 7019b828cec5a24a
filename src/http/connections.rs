//! Accepts connections, and sees to it that none stays for long.
//!
//! A connection is *reading* until its request is complete, then *answering*. Only a reading one is ever cut off for a
//! newer one: who has sent a request gets the answer.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tiny_http::{HTTPVersion, Header, Method, Response, StatusCode};

use super::{HEAD_TIMEOUT, MAX_CONNECTIONS, MAX_HEAD_BYTES, Page, Pages, text};

/// How long a client may take to read its answer, which fits into the socket's buffer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long, and how much, what a client still sends is read, so that the answer is not lost to a reset.
const LINGER: Duration = Duration::from_millis(250);
const LINGER_BYTES: usize = 64 * 1024;
/// A request needs little.
const STACK_BYTES: usize = 256 * 1024;

pub(super) struct Connections {
    pages: Pages,
    open: Mutex<VecDeque<Open>>,
    closed: AtomicBool,
}

struct Open {
    id: u64,
    stream: TcpStream,
    is_reading: bool,
}

impl Connections {
    pub(super) fn new(pages: Pages) -> Self {
        Self { pages, open: Mutex::default(), closed: AtomicBool::new(false) }
    }

    /// Accepts until [`close`](Self::close).
    pub(super) fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for id in 0.. {
            let accepted = listener.accept();
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let started = accepted.and_then(|(stream, _)| self.start(id, stream));
            if let Err(error) = started {
                // Out of file descriptors or threads: it passes, and must not become a busy loop.
                log::warn!("HTTP connection refused: {error}");
                thread::sleep(Duration::from_millis(50));
            }
        }
    }

    fn start(self: &Arc<Self>, id: u64, stream: TcpStream) -> io::Result<()> {
        let handle = stream.try_clone()?;
        let mut open = self.open();
        if open.len() >= MAX_CONNECTIONS {
            // Closed unanswered where every other is being answered: that many scrapes at once are no monitoring.
            let Some(oldest) = open.iter().position(|one| one.is_reading) else { return Ok(()) };
            if let Some(oldest) = open.remove(oldest) {
                let _ = oldest.stream.shutdown(Shutdown::Both);
            }
        }
        open.push_back(Open { id, stream: handle, is_reading: true });
        drop(open);
        let connections = Arc::clone(self);
        let serving = move || {
            let guard = Guard { connections: &connections, id };
            if let Err(error) = connections.serve(id, &stream) {
                log::debug!("HTTP connection lost: {error}");
            }
            drop(guard);
        };
        let thread = thread::Builder::new().name("http-client".into()).stack_size(STACK_BYTES);
        thread.spawn(serving).map(drop).inspect_err(|_| self.forget(id))
    }

    fn serve(&self, id: u64, stream: &TcpStream) -> io::Result<()> {
        let head = match read_head(stream, Instant::now() + HEAD_TIMEOUT) {
            Ok(head) => head,
            Err(error) if is_timeout(&error) => {
                return answer(stream, text(408, "the request was not complete in time\n"), false);
            }
            Err(error) => return Err(error),
        };
        if !self.is_answering(id) {
            return Ok(());
        }
        let (page, is_head) = self.page(head.as_deref());
        answer(stream, page, is_head)
    }

    fn page(&self, head: Option<&[u8]>) -> (Page, bool) {
        let Some(head) = head else {
            return (text(431, "the request has too many headers\n"), false);
        };
        let line = head.split(|&byte| byte == b'\n').next().unwrap_or(head);
        let line = std::str::from_utf8(line).unwrap_or_default().trim_end();
        let mut words = line.split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return (text(400, "this is not an HTTP request\n"), false);
        };
        if !version.starts_with("HTTP/1.") {
            return (text(505, "HTTP/1.0 and HTTP/1.1 are spoken here\n"), false);
        }
        let path = target.split(['?', '#']).next().unwrap_or(target);
        match method.parse() {
            Ok(Method::Get) => (self.pages.get(path), false),
            Ok(Method::Head) => (self.pages.get(path), true),
            _ => (text(405, "only GET and HEAD are answered\n"), false),
        }
    }

    /// Marks a connection as answering. False where it was cut off for a newer one.
    fn is_answering(&self, id: u64) -> bool {
        let mut open = self.open();
        let one = open.iter_mut().find(|one| one.id == id);
        one.map(|one| one.is_reading = false).is_some()
    }

    fn forget(&self, id: u64) {
        self.open().retain(|one| one.id != id);
    }

    /// Ends [`accept`](Self::accept) and every connection.
    pub(super) fn close(&self, mut addr: SocketAddr) {
        self.closed.store(true, Ordering::Release);
        if addr.ip().is_unspecified() {
            addr.set_ip(match addr {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        // Wakes the accepting thread.
        let _ = TcpStream::connect_timeout(&addr, Duration::from_secs(1));
        for one in self.open().drain(..) {
            let _ = one.stream.shutdown(Shutdown::Both);
        }
    }

    fn open(&self) -> MutexGuard<'_, VecDeque<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets the connection however its thread ends.
struct Guard<'a> {
    connections: &'a Connections,
    id: u64,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.connections.forget(self.id);
    }
}

/// The request line and the headers; `None` where they are too long. What follows them is not read: a GET has no body.
fn read_head(mut stream: &TcpStream, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let read = match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        head.extend_from_slice(&buffer[..read]);
        if head.windows(4).any(|end| end == b"\r\n\r\n") {
            return Ok(Some(head));
        }
        if head.len() > MAX_HEAD_BYTES {
            return Ok(None);
        }
    }
}

fn answer(mut stream: &TcpStream, page: Page, is_head: bool) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut response = Response::from_string(page.body).with_status_code(StatusCode(page.status));
    let allow = (page.status == 405).then_some(("Allow", "GET, HEAD"));
    let headers = [
        ("Content-Type", page.content_type),
        ("Cache-Control", "no-store"),
        ("Server", "pg-outbox"),
    ];
    for (name, value) in headers.into_iter().chain(allow) {
        if let Ok(header) = Header::from_bytes(name, value) {
            response.add_header(header);
        }
    }
    // As HTTP/1.0, which says that the connection ends with the answer.
    let mut bytes = Vec::new();
    response.raw_print(&mut bytes, HTTPVersion(1, 0), &[], is_head, None)?;
    io::Write::write_all(&mut stream, &bytes)?;
    stream.shutdown(Shutdown::Write)?;
    linger(stream);
    Ok(())
}

fn linger(mut stream: &TcpStream) {
    let deadline = Instant::now() + LINGER;
    let (mut buffer, mut total) = ([0; 4096], 0);
    while total < LINGER_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            return;
        }
        match stream.read(&mut buffer) {
            Ok(read) if read > 0 => total += read,
            _ => return,
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}
