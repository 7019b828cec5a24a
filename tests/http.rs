//! The HTTP endpoint: what its pages say, and that no client can hold up a scrape or the relay.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Database, Server, eventually};
use pg_outbox::http::{self, HttpServer};
use pg_outbox::{Relay, RelayConfig, Schema, ScriptedBroker};
use postgres::{Client, NoTls};

const SECOND: Duration = Duration::from_secs(1);

struct Answer {
    status: u16,
    head: String,
    body: String,
}

fn request(addr: SocketAddr, text: &str) -> Answer {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(20 * SECOND)).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    read_answer(stream)
}

fn read_answer(mut stream: TcpStream) -> Answer {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect("an HTTP answer");
    let status = head.split(' ').nth(1).expect("a status").parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: body.into() }
}

fn get(addr: SocketAddr, path: &str) -> Answer {
    request(addr, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"))
}

fn serve(database: &Database) -> HttpServer {
    http::serve("127.0.0.1:0", Schema::default(), database.factory(), None).unwrap()
}

#[test]
fn pages_and_methods() {
    let database = Database::create();
    let server = serve(&database);
    let addr = server.local_addr();
    let metrics = get(addr, "/metrics");
    assert_eq!(metrics.status, 200, "{}", metrics.body);
    assert!(
        metrics.head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"),
        "{}",
        metrics.head
    );
    assert!(metrics.body.contains("\noutbox_pending_rows 0\n"), "{}", metrics.body);
    assert!(metrics.body.ends_with('\n'));
    assert_eq!(get(addr, "/metrics?x=1").status, 200);
    assert_eq!(get(addr, "/healthz").status, 200);
    assert_eq!(get(addr, "/readyz").status, 200);
    assert!(get(addr, "/").body.contains("/metrics"));
    assert_eq!(get(addr, "/nothing").status, 404);
    let head = request(addr, "HEAD /metrics HTTP/1.0\r\n\r\n");
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    assert!(head.head.contains("content-length: "), "{}", head.head);
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "BREW"] {
        let body = "x".repeat(20_000);
        let answer =
            request(addr, &format!("{method} / HTTP/1.1\r\nContent-Length: 20000\r\n\r\n{body}"));
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.head.contains("allow: get, head"), "{}", answer.head);
    }
    assert_eq!(request(addr, "hello\r\n\r\n").status, 400);
    assert_eq!(request(addr, "GET / HTTP/2.0\r\n\r\n").status, 505);
    let long = request(addr, &format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(20_000)));
    assert_eq!(long.status, 431);
    drop(server);
    assert!(TcpStream::connect(addr).is_err(), "the port is closed with the server");
}

#[test]
fn the_reason_and_no_figure_without_a_database() {
    let empty = Database::create_empty();
    let server = serve(&empty);
    let answer = get(server.local_addr(), "/metrics");
    assert_eq!(answer.status, 503);
    assert!(answer.body.contains("pg-outbox migrate"), "{}", answer.body);
    assert!(!answer.body.contains("outbox_pending_rows"), "{}", answer.body);

    let url = "postgres://someone:s3cret@127.0.0.1:1/x";
    let server =
        http::serve("127.0.0.1:0", Schema::default(), move || Client::connect(url, NoTls), None);
    let answer = get(server.unwrap().local_addr(), "/metrics");
    assert_eq!(answer.status, 503);
    assert!(
        answer.body.contains("connecting to the database") && !answer.body.contains("s3cret"),
        "{}",
        answer.body
    );
}

#[test]
fn an_answer_serves_everybody_for_a_second() {
    let database = Database::create();
    let connects = Arc::new(AtomicUsize::new(0));
    let (counted, connect) = (Arc::clone(&connects), database.factory());
    let connect = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        connect()
    };
    let server = http::serve("127.0.0.1:0", Schema::default(), connect, None).unwrap();
    let addr = server.local_addr();
    let mut blocker = database.client();
    let mut lock = blocker.transaction().unwrap();
    lock.batch_execute("LOCK TABLE outbox.outbox IN ACCESS EXCLUSIVE MODE").unwrap();
    let askers: Vec<_> = (0..30).map(|_| thread::spawn(move || get(addr, "/metrics"))).collect();
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let mut watcher = database.client();
    let mut count = || watcher.query_one(waiting, &[]).unwrap().get::<_, i64>(0);
    eventually("a scrape waits", 5 * SECOND, || count() == 1);
    thread::sleep(SECOND / 2); // time for a second scrape to show up, if there were one
    assert_eq!(count(), 1, "one scrape at a time");
    lock.rollback().unwrap();
    let answers: Vec<_> = askers.into_iter().map(|asker| asker.join().unwrap()).collect();
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.body == answers[0].body));
    assert_eq!(connects.load(Ordering::SeqCst), 1);
    database.append("order", "1", "placed", b"{}");
    let line = "\noutbox_pending_rows 1\n";
    eventually("a new answer", 3 * SECOND, || get(addr, "/metrics").body.contains(line));
    assert_eq!(connects.load(Ordering::SeqCst), 1, "the connection is kept");
}

#[test]
fn an_answer_that_counted_many_events_serves_for_longer() {
    let database = Database::create();
    database.execute(
        "INSERT INTO outbox.outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT gen_random_uuid(), 'order', i::text, 'placed', '' FROM generate_series(1, 200000) AS i",
    );
    let server = serve(&database);
    let addr = server.local_addr();
    let asked = Instant::now();
    let many = "\noutbox_pending_rows 200000\n";
    assert!(get(addr, "/metrics").body.contains(many));
    database.append("order", "1", "placed", b"{}");
    eventually("a new answer", 20 * SECOND, || !get(addr, "/metrics").body.contains(many));
    // It cannot have come sooner, however slow the machine is: 15 µs for each event.
    assert!(asked.elapsed() >= 3 * SECOND, "{:?}", asked.elapsed());
}

#[test]
fn a_scrape_that_is_blocked_ends() {
    let database = Database::create();
    let server = serve(&database);
    let mut blocker = database.client();
    let mut lock = blocker.transaction().unwrap();
    lock.batch_execute("LOCK TABLE outbox.outbox IN ACCESS EXCLUSIVE MODE").unwrap();
    let started = Instant::now();
    let answer = get(server.local_addr(), "/metrics");
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(started.elapsed() < 8 * SECOND, "{:?}", started.elapsed());
    lock.rollback().unwrap();
    eventually("it answers again", 3 * SECOND, || {
        get(server.local_addr(), "/metrics").status == 200
    });
}

#[test]
fn a_database_that_hangs_or_restarts_is_said_and_overcome() {
    let mut server = Server::start();
    let database = Database::create_on(&server);
    let endpoint = serve(&database);
    let addr = endpoint.local_addr();
    assert_eq!(get(addr, "/metrics").status, 200);
    thread::sleep(http::SCRAPE_CACHE);
    server.freeze();
    let started = Instant::now();
    for _ in 0..2 {
        let answer = get(addr, "/metrics");
        assert_eq!(answer.status, 503);
        assert!(answer.body.contains("has not answered within 5s"), "{}", answer.body);
    }
    assert!(started.elapsed() < 14 * SECOND, "{:?}", started.elapsed());
    assert_eq!(get(addr, "/healthz").status, 200, "other pages go on");
    server.thaw();
    eventually("it answers again", 10 * SECOND, || get(addr, "/metrics").status == 200);
    server.restart_immediate();
    eventually("with a new session", 10 * SECOND, || get(addr, "/metrics").status == 200);
}

fn http_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim() == "http-client").count()
}

/// 200 clients: some silent, some half closed, most sending a byte now and then, for as long as the test lasts.
#[test]
fn two_hundred_slow_clients_stop_neither_a_scrape_nor_the_relay() {
    let database = Database::create();
    let broker = ScriptedBroker::new();
    let config =
        RelayConfig::builder("slow").poll_interval(Duration::from_millis(50)).build().unwrap();
    let publishing = broker.clone();
    let relay = Relay::new(config, database.factory(), move |_| publishing.publisher());
    let health = relay.health();
    let server =
        http::serve("127.0.0.1:0", Schema::default(), database.factory(), Some(health)).unwrap();
    let relay = relay.start();
    let addr = server.local_addr();
    eventually("ready", 20 * SECOND, || get(addr, "/readyz").status == 200);

    let mut clients: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(addr).unwrap()).collect();
    for client in &clients[..20] {
        client.shutdown(Shutdown::Write).unwrap();
    }
    let mut slowest = Duration::ZERO;
    for round in 0..20 {
        for client in &mut clients[40..] {
            let _ = client.write(b"G"); // cut off ones included
        }
        database.append("order", "1", "placed", format!("{round}").as_bytes());
        for path in ["/metrics", "/healthz", "/readyz"] {
            let started = Instant::now();
            let answer = get(addr, path);
            slowest = slowest.max(started.elapsed());
            assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        }
        // Those of other tests in this process among them; without the bound there would be 180.
        let threads = http_threads();
        assert!(threads < http::MAX_CONNECTIONS + 60, "{threads} threads");
    }
    assert!(slowest < SECOND, "the slowest answer took {slowest:?}");
    assert!(broker.wait_for(20, 10 * SECOND), "the relay has published {}", broker.published());
    let started = Instant::now();
    relay.stop();
    relay.join().unwrap();
    assert!(started.elapsed() < 5 * SECOND, "{:?}", started.elapsed());
    let started = Instant::now();
    drop(server);
    assert!(started.elapsed() < 2 * SECOND, "{:?}", started.elapsed());
}

#[test]
fn a_request_has_a_deadline_however_it_trickles_in() {
    let database = Database::create();
    let server = serve(&database);
    let stream = TcpStream::connect(server.local_addr()).unwrap();
    let mut writing = stream.try_clone().unwrap();
    let writer = thread::spawn(move || {
        // Until the other end has had enough.
        while writing.write_all(b"G").is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    let started = Instant::now();
    stream.set_read_timeout(Some(20 * SECOND)).unwrap();
    let mut text = String::new();
    // The end may be a reset, since the client goes on sending.
    let _ = (&stream).read_to_string(&mut text);
    assert!(text.is_empty() || text.contains(" 408 "), "{text}");
    let took = started.elapsed();
    assert!(
        took > http::HEAD_TIMEOUT - SECOND && took < http::HEAD_TIMEOUT + 2 * SECOND,
        "{took:?}"
    );
    stream.shutdown(Shutdown::Both).ok();
    writer.join().unwrap();
}

#[test]
fn health_and_readiness_follow_the_relay() {
    let database = Database::create();
    let broker = ScriptedBroker::new();
    let config =
        RelayConfig::builder("h").poll_interval(Duration::from_millis(50)).build().unwrap();
    let publishing = broker.clone();
    let relay = Relay::new(config, database.factory(), move |_| publishing.publisher());
    let server =
        http::serve("127.0.0.1:0", Schema::default(), database.factory(), Some(relay.health()))
            .unwrap();
    let addr = server.local_addr();
    assert_eq!(get(addr, "/readyz").status, 503, "not started");
    let relay = relay.start();
    eventually("ready", 20 * SECOND, || get(addr, "/readyz").status == 200);
    // The database is there a moment before the threads are.
    eventually("every thread is fine", 20 * SECOND, || {
        let health = get(addr, "/healthz");
        health.status == 200 && health.body.contains("claimer is fine")
    });
    broker.take_down(pg_outbox::PublishError::transient("refused").broker());
    database.append("order", "1", "placed", b"{}");
    eventually("the broker is missed", 10 * SECOND, || {
        let answer = get(addr, "/readyz");
        answer.status == 503 && answer.body.contains("broker: ") && answer.body.contains("refused")
    });
    assert_eq!(get(addr, "/healthz").status, 200, "a broker's outage is not the relay's death");
    broker.mend();
    eventually("ready again", 20 * SECOND, || get(addr, "/readyz").status == 200);
    relay.stop();
    relay.join().unwrap();
    assert_eq!(get(addr, "/healthz").status, 503, "its threads have ended");
}
