//! Crashes: real processes that die between confirm and verdict, or of an event.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Database, eventually};
use pg_outbox::{Event, Outcomes, Publisher, Relay, RelayConfig, ScriptedBroker};
use postgres::{Client, NoTls};

const LAPSE: Duration = Duration::from_secs(31);
const SOON: Duration = Duration::from_secs(30);

/// A broker that outlives its clients: a file with one line for each thing that happened.
struct Broker {
    file: PathBuf,
}

impl Broker {
    fn new() -> Self {
        let name = format!("pg-outbox-test-{}", fastrand::u64(..));
        let file = std::env::temp_dir().join(name);
        File::create_new(&file).unwrap();
        Self { file }
    }

    /// Lines of one kind: the words after it.
    fn lines(&self, kind: &str) -> Vec<Vec<String>> {
        let text = fs::read_to_string(&self.file).unwrap();
        let words = text.lines().map(|line| line.split(' ').map(str::to_owned).collect());
        words
            .filter(|words: &Vec<String>| words[0] == kind)
            .map(|words| words[1..].into())
            .collect()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file);
    }
}

/// Writes to the file and dies as it is told. A wave with a poisonous event kills before anything of it is sent.
struct FatalPublisher {
    file: File,
    dies_after_confirm: bool,
}

impl FatalPublisher {
    fn write(&mut self, kind: &str, event: &Event) {
        let line = format!("{kind} {} {}\n", event.event_id, event.possible_duplicate);
        self.file.write_all(line.as_bytes()).unwrap();
    }
}

impl Publisher for FatalPublisher {
    fn publish(&mut self, wave: &[Event], _: Instant, outcomes: &mut Outcomes) {
        if let Some(poison) = wave.iter().find(|event| event.event_type == "poison") {
            self.write("killed", poison);
            std::process::abort();
        }
        for (index, event) in wave.iter().enumerate() {
            self.write("confirmed", event);
            outcomes.published(index);
        }
        if self.dies_after_confirm {
            std::process::abort();
        }
    }
}

/// Not a test, but the process that the tests here start: a relay, until its standard input is closed.
#[test]
fn child() {
    let Ok(url) = std::env::var("PG_OUTBOX_TEST_CHILD_URL") else { return };
    let setting = |name: &str| std::env::var(format!("PG_OUTBOX_TEST_CHILD_{name}")).unwrap();
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
    let number = |name| setting(name).parse().unwrap();
    let config = RelayConfig::builder("relay-a")
        .workers(number("WORKERS"))
        .batch_size(number("BATCH"))
        .poll_interval(Duration::from_millis(20))
        .wake_ups(false)
        .retention(None)
        .build();
    let relay = Relay::new(
        config.unwrap(),
        move || Client::connect(&url, NoTls),
        move |_| FatalPublisher {
            file: File::options().append(true).open(setting("FILE")).unwrap(),
            dies_after_confirm: setting("DIES_AFTER_CONFIRM") == "true",
        },
    );
    relay.run().unwrap();
}

/// The process, killed with this.
struct Process(Child);

impl Process {
    fn start(db: &Database, broker: &Broker, shape: &Shape) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--nocapture", "--test-threads=1"]);
        command.env("PG_OUTBOX_TEST_CHILD_URL", db.url());
        command.env("PG_OUTBOX_TEST_CHILD_FILE", &broker.file);
        command.env("PG_OUTBOX_TEST_CHILD_WORKERS", shape.workers.to_string());
        command.env("PG_OUTBOX_TEST_CHILD_BATCH", shape.batch.to_string());
        command
            .env("PG_OUTBOX_TEST_CHILD_DIES_AFTER_CONFIRM", shape.dies_after_confirm.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn is_dead(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Shape {
    workers: usize,
    batch: usize,
    dies_after_confirm: bool,
}

#[test]
fn killed_between_confirm_and_verdict_is_delivered_again_and_marked() {
    let db = Database::create();
    let ids: BTreeSet<String> = db.append_many(10, 3).iter().map(ToString::to_string).collect();
    let file = Broker::new();
    let shape = Shape { workers: 1, batch: 100, dies_after_confirm: true };
    let mut process = Process::start(&db, &file, &shape);
    eventually("it dies after its first confirm", SOON, || process.is_dead());
    let first = file.lines("confirmed");
    assert_eq!(first.len(), 10, "the first event of each aggregate");
    assert!(first.iter().all(|words| words[1] == "false"), "{first:?}");
    assert_eq!(db.count("status = 'pending' AND locked_by = 'relay-a'"), 30);

    let broker = ScriptedBroker::new();
    let publishers = broker.clone();
    let config = RelayConfig::builder("relay-b").poll_interval(Duration::from_millis(20)).build();
    db.shift(LAPSE);
    let relay = Relay::new(config.unwrap(), db.factory(), move |_| publishers.publisher()).start();
    eventually("all are published", SOON, || db.count("status = 'published'") == 30);
    assert_eq!(db.count("attempts = 2 AND unexplained_failures = 1"), 30);
    relay.stop();
    relay.join().unwrap();
    let again = broker.deliveries();
    assert_eq!(again.len(), 30);
    assert!(again.iter().all(|event| event.possible_duplicate), "each may have been sent");
    let again_ids: BTreeSet<String> =
        again.iter().map(|event| event.event_id.to_string()).collect();
    assert_eq!(again_ids, ids);
    assert!(first.iter().all(|words| ids.contains(&words[0])), "the same ids as the first time");
    for key in 0..10 {
        let of_key = again.iter().filter(|event| event.aggregate_id == format!("k{key}"));
        let order: Vec<_> = of_key.map(|event| event.payload.clone()).collect();
        assert_eq!(order, [b"0", b"1", b"2"], "k{key}");
    }
}

/// Starts the relay again and again until nothing can be published any more. Returns how often it died.
fn restart_until_done(db: &Database, broker: &Broker, shape: &Shape, traffic: usize) -> usize {
    let deadline = Instant::now() + SOON;
    let mut deaths = 0;
    loop {
        let mut process = Process::start(db, broker, shape);
        let is_done = || db.count("status = 'pending' AND event_type <> 'behind'") == 0;
        while !process.is_dead() && !is_done() {
            assert!(Instant::now() < deadline, "not done after {deaths} deaths");
            std::thread::sleep(Duration::from_millis(20));
        }
        if !process.is_dead() {
            return deaths;
        }
        deaths += 1;
        // Others go on writing, and the leases of the dead lapse.
        for number in 0..traffic {
            db.append("order", &format!("later-{deaths}-{number}"), "placed", b"{}");
        }
        db.shift(LAPSE);
    }
}

fn poison(workers: usize, batch: usize, traffic: usize) {
    let db = Database::create();
    db.append_many(50, 1);
    let poison = db.append("order", "poisoned", "poison", b"{}");
    db.append_many(49, 1);
    db.append("order", "poisoned", "behind", b"{}");
    let broker = Broker::new();
    let shape = Shape { workers, batch, dies_after_confirm: false };
    let deaths = restart_until_done(&db, &broker, &shape, traffic);
    assert_eq!(deaths, 3);
    let killed = broker.lines("killed");
    assert_eq!(killed.len(), 3, "a fourth relay published it: {killed:?}");
    assert!(killed.iter().all(|words| words[0] == poison.to_string()));
    assert_eq!(killed[0][1], "false");
    assert_eq!(killed[2][1], "true");
    assert_eq!(db.count("status = 'dead'"), 1, "neighbours died with it");
    assert_eq!(db.status_of(poison), "dead");
    let reason: String = db
        .client()
        .query_one("SELECT last_error FROM outbox.outbox WHERE event_id = $1", &[&poison])
        .unwrap()
        .get(0);
    assert!(reason.contains("3 unexplained failures"), "{reason}");
    let others = 99 + 3 * traffic as i64;
    assert_eq!(db.count("status = 'published'"), others);
    assert_eq!(db.count("status = 'pending'"), 1, "what is behind it is held");
    let confirmed: BTreeSet<_> = broker.lines("confirmed").into_iter().collect();
    assert_eq!(confirmed.len() as i64, others);
}

#[test]
fn an_event_that_kills_its_process_dies_alone() {
    poison(1, 500, 0);
}

#[test]
fn an_event_that_kills_its_process_dies_alone_beside_others() {
    poison(2, 40, 20);
}

/// One more failure kills it, so nothing may share the blame: no other event of the relay is in flight meanwhile.
#[test]
fn an_event_with_its_last_chance_is_published_alone() {
    let db = Database::create();
    db.append_many(40, 5);
    let last = db.append("order", "suspect", "last chance", b"{}");
    db.append_many(40, 5);
    db.execute(&format!(
        "UPDATE outbox.outbox SET unexplained_failures = 2 WHERE event_id = '{last}'"
    ));
    let broker = ScriptedBroker::new();
    let (in_flight, company) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let most = Arc::clone(&company);
    broker.on_publish(move |wave| {
        in_flight.fetch_add(wave.len(), Ordering::SeqCst);
        let is_last = wave.iter().any(|event| event.event_type == "last chance");
        for _ in 0..if is_last { 100 } else { 5 } {
            if is_last {
                most.fetch_max(in_flight.load(Ordering::SeqCst), Ordering::SeqCst);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        in_flight.fetch_sub(wave.len(), Ordering::SeqCst);
    });
    let publishers = broker.clone();
    let config = RelayConfig::builder("relay-a").workers(3).batch_size(20).build().unwrap();
    let relay = Relay::new(config, db.factory(), move |_| publishers.publisher()).start();
    eventually("all are published", SOON, || db.count("status = 'published'") == 401);
    relay.stop();
    relay.join().unwrap();
    assert_eq!(company.load(Ordering::SeqCst), 1, "events in flight, this one included");
}
