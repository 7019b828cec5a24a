//! The test harness itself: what it promises to the other tests, and that nothing outlives them.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use common::process::{self, free_port, is_running, signal};
use common::proxy::{Direction, Mode, Proxy};
use common::{Database, Rabbit, Server, eventually};
use postgres::{Client, NoTls};
use serde_json::json;

const SOON: Duration = Duration::from_secs(10);

#[test]
fn a_database_is_new_and_goes_with_its_test() {
    let server = Server::start();
    let (first, second) = (Database::create_on(&server), Database::create_on(&server));
    let id = first.append("order", "1", "placed", b"\0bytes");
    assert_eq!(first.status_of(id), "pending");
    assert_eq!(first.append_many(3, 4).len(), 12);
    assert_eq!((first.count("true"), second.count("true")), (13, 0));
    let mut admin = Client::connect(&server.url("postgres"), NoTls).unwrap();
    let mut left = || -> i64 {
        admin
            .query_one("SELECT count(*) FROM pg_database WHERE datname LIKE 'test%'", &[])
            .unwrap()
            .get(0)
    };
    assert_eq!(left(), 2);
    let still_connected = first.client();
    drop((first, second));
    assert_eq!(left(), 0);
    drop(still_connected);
}

#[test]
fn shifting_moves_every_time_and_leaves_the_missing_ones() {
    let db = Database::create();
    db.append("order", "1", "placed", b"{}");
    db.execute(
        "UPDATE outbox.outbox SET locked_until = created_at, retry_since = created_at;
         INSERT INTO outbox.outbox_relay (relay_id, worker) VALUES ('relay-a', 0);
         INSERT INTO outbox.outbox_wakeup (relay_id, until) VALUES ('relay-a', now())",
    );
    db.shift(Duration::from_millis(3_600_500));
    let gone = "BETWEEN interval '3600.5 s' AND interval '3700 s'";
    let moved = format!(
        "now() - created_at {gone} AND locked_until = created_at AND retry_since = created_at
         AND next_attempt_at = created_at AND published_at IS NULL AND died_at IS NULL
         AND EXISTS (SELECT FROM outbox.outbox_relay WHERE now() - heartbeat_at {gone} AND now() - started_at {gone})
         AND EXISTS (SELECT FROM outbox.outbox_wakeup WHERE now() - until {gone})"
    );
    assert_eq!(db.count(&moved), 1);
}

#[test]
fn a_crashed_postgres_keeps_what_was_committed() {
    let mut server = Server::start();
    let db = Database::create_on(&server);
    let id = db.append("order", "1", "placed", b"{}");
    let (mut client, before) = (db.client(), server.pid());
    server.restart_immediate();
    assert!(client.simple_query("SELECT 1").is_err());
    assert_ne!(server.pid(), before);
    assert_eq!(db.status_of(id), "pending");
    server.stop();
    assert!(db.factory()().is_err());
    server.start_again();
    assert_eq!(db.count("true"), 1);
    let folder = server.folder().to_owned();
    assert!(!living_in(&folder).is_empty());
    drop((db, server));
    assert_gone(&folder);
}

#[test]
fn a_frozen_postgres_is_silent_until_it_thaws() {
    let server = Server::start();
    let mut client = Client::connect(&server.url("postgres"), NoTls).unwrap();
    server.freeze();
    let asked = std::thread::spawn(move || client.simple_query("SELECT 1").is_ok());
    let states = || {
        let family = process::children(server.pid()).into_iter().chain([server.pid()]);
        family
            .map(|pid| fs::read_to_string(format!("/proc/{pid}/status")).unwrap())
            .collect::<Vec<_>>()
    };
    eventually("all are stopped", SOON, || {
        states().iter().all(|status| status.contains("State:\tT"))
    });
    assert!(!asked.is_finished());
    server.thaw();
    assert!(asked.join().unwrap());
    server.set("default_transaction_read_only = on");
    eventually("a new setting is in force", SOON, || {
        let mut client = Client::connect(&server.url("postgres"), NoTls).unwrap();
        client.batch_execute("CREATE TABLE refused ()").is_err()
    });
}

#[test]
fn a_durable_queue_outlives_its_broker() {
    let mut rabbit = Rabbit::start();
    rabbit.route("orders");
    let publish = |payload: &str, mode: u8| {
        let body = json!({"routing_key": "placed", "payload": payload, "payload_encoding": "base64",
                          "properties": {"message_id": "one", "delivery_mode": mode, "headers": {"n": "v"}}});
        let answer = rabbit.request("POST", "/api/exchanges/%2f/orders/publish", Some(body));
        assert_eq!(answer["routed"], true);
    };
    publish("AP+A", 2);
    publish("aGVsbG8=", 2);
    publish("", 1);
    rabbit.stop();
    assert!(std::net::TcpStream::connect(("127.0.0.1", rabbit.port())).is_err());
    rabbit.start_again();
    let first = &rabbit.get("orders", 1)[0];
    assert_eq!((first.exchange.as_str(), first.routing_key.as_str()), ("orders", "placed"));
    assert_eq!(first.payload, [0, 0xff, 0x80]);
    assert_eq!(first.properties["message_id"], "one");
    assert_eq!(first.properties["headers"]["n"], "v");
    assert_eq!(rabbit.get("orders", 10).last().unwrap().payload, b"hello");
    rabbit.block();
    rabbit.unblock();
    assert!(rabbit.ctl(&["list_queues", "name"]).contains("orders"));
    let folder = rabbit.folder().to_owned();
    assert!(!living_in(&folder).is_empty());
    drop(rabbit);
    assert_gone(&folder);
}

/// Not a test of its own: the process that the last one kills.
#[test]
#[ignore = "run by nothing_outlives_a_process_that_is_killed"]
fn servers_of_a_process_that_is_killed() {
    let folder = PathBuf::from(env::var_os("TMPDIR").expect("run by another test"));
    let (server, _rabbit) = (Server::start(), Rabbit::start());
    server.freeze();
    fs::write(folder.join("ready"), "").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn nothing_outlives_a_process_that_is_killed() {
    let folder = env::temp_dir().join(format!("pg-outbox-child-{:016x}", fastrand::u64(..)));
    fs::create_dir(&folder).unwrap();
    let mut child = Command::new(env::current_exe().unwrap());
    child
        .args(["--ignored", "--exact", "servers_of_a_process_that_is_killed"])
        .env("TMPDIR", &folder);
    let mut child = child.stdout(Stdio::null()).spawn().unwrap();
    eventually("its servers run", 12 * SOON, || folder.join("ready").exists());
    signal(child.id(), "KILL");
    child.wait().unwrap();
    eventually("its servers end", 3 * SOON, || living_in(&folder).is_empty());
    let left = || fs::read_dir(&folder).unwrap().count();
    eventually("their folders go, and only the sign stays", SOON, || left() == 1);
    fs::remove_dir_all(&folder).unwrap();
}

#[track_caller]
fn assert_gone(folder: &Path) {
    // Erlang's helpers end by themselves once the broker is gone.
    eventually("all have ended", SOON, || living_in(folder).is_empty());
    assert!(!folder.exists());
}

/// The processes that were started with this folder in their arguments or in their environment.
fn living_in(folder: &Path) -> Vec<u32> {
    let folder = folder.to_str().unwrap();
    let says = |pid: u32, file| {
        let text = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&text).contains(folder)
    };
    let lives = |pid: &u32| is_running(*pid) && (says(*pid, "cmdline") || says(*pid, "environ"));
    process::all().filter(lives).collect()
}

/// A server that sends back what it gets, and the proxy in front of it.
fn behind_a_proxy() -> (Proxy, impl Fn() -> TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap().port());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    let port = proxy.port();
    let connect = move || {
        let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        client
    };
    (proxy, connect)
}

/// What comes back within the client's patience: `None` for nothing, empty for the end.
fn says(mut client: &TcpStream, word: &[u8]) -> Option<Vec<u8>> {
    let _ = client.write_all(word);
    hears(client)
}

fn hears(mut client: &TcpStream) -> Option<Vec<u8>> {
    let mut answer = [0; 64];
    match client.read(&mut answer) {
        Ok(length) => Some(answer[..length].to_vec()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(_) => Some(Vec::new()),
    }
}

fn some(word: &[u8]) -> Option<Vec<u8>> {
    Some(word.to_vec())
}

#[test]
fn a_proxy_carries_stalls_and_resets() {
    let (proxy, connect) = behind_a_proxy();
    let client = connect();
    assert_eq!(says(&client, b"one"), some(b"one"));
    proxy.set(Mode::Stall);
    assert_eq!(says(&client, b"two"), None);
    let late = connect();
    assert_eq!(says(&late, b"late"), None);
    proxy.set(Mode::Delay(Duration::from_millis(1)));
    eventually("what was stalled goes on", SOON, || hears(&client) == some(b"two"));
    eventually("and what came meanwhile", SOON, || hears(&late) == some(b"late"));
    proxy.set(Mode::Pass);
    proxy.reset();
    assert_eq!((says(&client, b"three"), proxy.connections()), (some(b""), 0));
    assert_eq!(says(&connect(), b"four"), some(b"four"));
}

#[test]
fn a_proxy_loses_bytes_and_never_goes_on_after_a_hole() {
    for direction in [Direction::ToServer, Direction::ToClient] {
        let (proxy, connect) = behind_a_proxy();
        let (client, idle) = (connect(), connect());
        assert_eq!((says(&client, b"one"), says(&idle, b"idle")), (some(b"one"), some(b"idle")));
        proxy.set(Mode::Drop(direction));
        assert_eq!(says(&client, b"two"), None, "{direction:?}");
        proxy.set(Mode::Pass);
        assert_eq!(says(&client, b"three"), some(b""), "{direction:?}");
        assert_eq!(says(&idle, b"idle"), some(b"idle"), "nothing of it was lost");
    }
}

#[test]
fn a_proxy_swallows_a_reply_and_ends_the_connection() {
    let (proxy, connect) = behind_a_proxy();
    let client = connect();
    assert_eq!(says(&client, b"one"), some(b"one"));
    proxy.swallow_replies(1);
    assert_eq!(says(&client, b"two"), some(b""));
    assert_eq!(says(&connect(), b"three"), some(b"three"));
}

#[test]
fn a_proxy_ends_with_its_value_and_without_its_server() {
    let port = free_port();
    let proxy = Proxy::start(port);
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_or(0), 0, "nobody is there");
    let (proxy, connect) = behind_a_proxy();
    let client = connect();
    assert_eq!(says(&client, b"one"), some(b"one"));
    let port = proxy.port();
    drop(proxy);
    assert_eq!(says(&client, b"two"), some(b""));
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}
