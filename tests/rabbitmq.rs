//! The RabbitMQ publisher against a real RabbitMQ: each row of its classification table, what it sends, and that
//! nothing counts as published before its confirm.
#![cfg(feature = "rabbitmq")]
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::process::free_port;
use common::{Delivery, Rabbit, eventually};
use pg_outbox::publisher::rabbitmq::{RabbitMqConfig, RabbitMqConfigBuilder, RabbitMqPublisher};
use pg_outbox::{Event, FailureKind, FailureScope, Outcomes, PublishError, Publisher};
use serde_json::json;

/// Held by each test: they count the threads and descriptors of the process.
static ALONE: Mutex<()> = Mutex::new(());

const PATIENCE: Duration = Duration::from_secs(20);

use FailureKind::{Permanent, Transient};
use FailureScope::{Broker, Destination, Event as OneEvent};

/// The outbox ids in the queue, in order, which leaves it empty.
fn ids(rabbit: &Rabbit, queue: &str) -> Vec<i64> {
    let mut ids = Vec::new();
    loop {
        let some = rabbit.get(queue, 10_000);
        if some.is_empty() {
            return ids;
        }
        ids.extend(some.iter().map(|got| headers(got)["outbox-sequence"].parse::<i64>().unwrap()));
    }
}

fn next(rabbit: &Rabbit, queue: &str) -> Delivery {
    rabbit.get(queue, 1).pop().expect("it was confirmed")
}

fn headers(got: &Delivery) -> BTreeMap<String, String> {
    serde_json::from_value(got.properties["headers"].clone()).expect("strings")
}

fn publisher(config: RabbitMqConfigBuilder) -> RabbitMqPublisher {
    RabbitMqPublisher::new(config.build().unwrap())
}

fn event(id: i64) -> Event {
    Event::for_test(id, &format!("aggregate-{id}"), "placed", b"{}")
}

fn events(ids: impl IntoIterator<Item = i64>) -> Vec<Event> {
    ids.into_iter().map(event).collect()
}

fn changed(id: i64, change: impl FnOnce(&mut Event)) -> Event {
    let mut event = event(id);
    change(&mut event);
    event
}

fn sized(id: i64, bytes: usize) -> Event {
    changed(id, |event| event.payload = vec![b'x'; bytes])
}

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

type Results = Vec<Result<(), PublishError>>;

fn publish_within(timeout: Duration, publisher: &mut RabbitMqPublisher, wave: &[Event]) -> Results {
    let mut outcomes = Outcomes::new(wave.len());
    let deadline = Instant::now() + timeout;
    publisher.publish(wave, deadline, &mut outcomes);
    let late = Instant::now().saturating_duration_since(deadline);
    assert!(late < Duration::from_millis(500), "returned {late:?} after its deadline");
    (0..wave.len()).map(|index| outcomes.get(index).expect("every slot is set").clone()).collect()
}

fn publish(publisher: &mut RabbitMqPublisher, wave: &[Event]) -> Results {
    publish_within(PATIENCE, publisher, wave)
}

#[track_caller]
fn assert_published(results: &Results) {
    assert!(
        results.iter().all(Result::is_ok),
        "{:?}",
        results.iter().find(|result| result.is_err())
    );
}

#[track_caller]
fn assert_failed(
    result: &Result<(), PublishError>,
    kind: FailureKind,
    scope: FailureScope,
    in_doubt: bool,
    words: &[&str],
) {
    let error = result.as_ref().expect_err("published");
    assert_eq!(
        (error.kind(), error.scope(), error.is_in_doubt()),
        (kind, scope, in_doubt),
        "{error:?}"
    );
    for word in words {
        assert!(error.reason().contains(word), "{word:?} is not in {:?}", error.reason());
    }
}

#[test]
fn what_one_broker_refuses_is_classified_as_documented() {
    let _alone = alone();
    let rabbit = Rabbit::start();
    messages_are_as_documented(&rabbit);
    bytes_and_headers_arrive_unchanged(&rabbit);
    waves_keep_the_order_of_an_aggregate(&rabbit);
    unroutable_events_come_back(&rabbit);
    a_returned_event_is_told_from_its_neighbours(&rabbit);
    a_full_queue_refuses_at_once(&rabbit);
    an_exchange_is_deleted_and_declared_again(&rabbit);
    too_large_payloads_are_refused_alone(&rabbit);
    long_routing_keys_are_never_cut(&rabbit);
    permissions_are_mended_without_a_loss(&rabbit);
    a_refused_login_kills_nothing(&rabbit);
    tls_is_verified(&rabbit);
}

fn messages_are_as_documented(rabbit: &Rabbit) {
    rabbit.route("documented");
    let config = RabbitMqConfig::builder(rabbit.url())
        .exchange("documented")
        .routing_key("{aggregate_type}.{event_type}");
    let mut publisher = publisher(config);
    publisher.check(Instant::now() + PATIENCE).unwrap().unwrap();
    let mut event = event(1);
    event.created_at += Duration::from_millis(1_700_000_000_500);
    event.headers.insert("traceparent".into(), "00-abc".into());
    event.possible_duplicate = true;
    assert_published(&publish(&mut publisher, &[event.clone()]));
    let message = next(rabbit, "documented");
    assert_eq!((&*message.exchange, &*message.routing_key), ("documented", "test.placed"));
    let expected = json!({
        "message_id": event.event_id.to_string(),
        "type": "placed",
        "content_type": "application/json",
        "delivery_mode": 2,
        "timestamp": 1_700_000_000,
        "headers": message.properties["headers"],
    });
    assert_eq!(message.properties, expected);
    assert_eq!(headers(&message), event.message_headers().into_iter().collect());
    assert_eq!(headers(&message)["outbox-possible-duplicate"], "true");
}

fn bytes_and_headers_arrive_unchanged(rabbit: &Rabbit) {
    rabbit.route("bytes");
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("bytes"));
    let payloads = [
        vec![],
        b"\0".to_vec(),
        b"a\0b\xff\xfe".to_vec(),
        (0..=255).cycle().take(1_000_000).collect(),
    ];
    let values = ["a\r\nX-Injected: 1", "nul\0", "\x7f", "💥", "", &"y".repeat(16_000)];
    for (id, payload) in payloads.iter().enumerate() {
        let sent = changed(id as i64, |event| event.payload.clone_from(payload));
        assert_published(&publish(&mut publisher, &[sent]));
        assert_eq!(next(rabbit, "bytes").payload, *payload);
    }
    for (id, value) in values.iter().enumerate() {
        let mut sent = event(id as i64);
        sent.headers.insert("hostile".into(), (*value).into());
        assert_published(&publish(&mut publisher, &[sent.clone()]));
        assert_eq!(headers(&next(rabbit, "bytes")), sent.message_headers().into_iter().collect());
    }
    let mut long_name = event(1);
    long_name.headers.insert("x".repeat(256), "y".into());
    let mut over_frame = event(2);
    over_frame.headers.insert("x".into(), "y".repeat(140_000));
    let results = publish(&mut publisher, &[long_name, over_frame, event(3)]);
    assert_failed(&results[0], Permanent, OneEvent, false, &["header name has 256 bytes", "255"]);
    assert_failed(
        &results[1],
        Permanent,
        OneEvent,
        false,
        &["headers take 140", "frame_max is 131072"],
    );
    assert_eq!((results[2].clone(), ids(rabbit, "bytes")), (Ok(()), vec![3]));
}

fn waves_keep_the_order_of_an_aggregate(rabbit: &Rabbit) {
    rabbit.route("order");
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("order"));
    for wave in 0..20 {
        assert_published(&publish(&mut publisher, &events(wave * 50..(wave + 1) * 50)));
    }
    assert_eq!(ids(rabbit, "order"), (0..1000).collect::<Vec<_>>());
}

fn unroutable_events_come_back(rabbit: &Rabbit) {
    rabbit.declare_exchange("unbound", "topic");
    let config = || RabbitMqConfig::builder(rabbit.url()).exchange("unbound");
    let mut publisher_ = publisher(config());
    let results = publish(&mut publisher_, &events(1..=3));
    for result in &results {
        assert_failed(
            result,
            Permanent,
            OneEvent,
            false,
            &["unroutable", "\"unbound\"", "\"placed\"", "312"],
        );
    }
    let results = publish(&mut publisher(config().retry_unroutable(true)), &events([1]));
    assert_failed(&results[0], Transient, OneEvent, false, &["unroutable"]);
    assert_published(&publish(&mut publisher(config().mandatory(false)), &events([1])));
    rabbit.declare_queue("unbound", json!({}));
    rabbit.bind("unbound", "unbound", "placed");
    assert_published(&publish(&mut publisher_, &events(1..=3)));
    assert_eq!(ids(rabbit, "unbound"), [1, 2, 3]);
}

fn a_returned_event_is_told_from_its_neighbours(rabbit: &Rabbit) {
    rabbit.declare_exchange("mixed", "topic");
    rabbit.declare_queue("mixed", json!({}));
    rabbit.bind("mixed", "mixed", "bound");
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("mixed"));
    for round in 0..20 {
        let bound = |id: i64| (id * 7 + round) % 3 == 0;
        let wave: Vec<_> = (0..100)
            .map(|id| {
                changed(id, |event| {
                    event.event_type = if bound(id) { "bound" } else { "loose" }.into()
                })
            })
            .collect();
        let results = publish(&mut publisher, &wave);
        for (id, result) in (0..100).zip(&results) {
            match result {
                Ok(()) => assert!(
                    bound(id),
                    "event {id} of round {round} was returned and counted as published"
                ),
                Err(error) => {
                    assert!(!bound(id), "event {id} of round {round} was taken: {error:?}")
                }
            }
        }
        assert_eq!(ids(rabbit, "mixed"), (0..100).filter(|&id| bound(id)).collect::<Vec<_>>());
    }
}

fn a_full_queue_refuses_at_once(rabbit: &Rabbit) {
    rabbit.declare_exchange("full", "topic");
    rabbit.declare_queue("full", json!({"x-max-length": 10, "x-overflow": "reject-publish"}));
    rabbit.bind("full", "full", "#");
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("full"));
    let start = Instant::now();
    let results = publish(&mut publisher, &events(1..=50));
    assert!(start.elapsed() < PATIENCE / 2, "waited for the deadline");
    let refused: Vec<_> = results.iter().filter(|result| result.is_err()).collect();
    assert_eq!(refused.len(), 40);
    refused.iter().for_each(|result| {
        assert_failed(result, Transient, Destination, false, &["queue is full"])
    });
    let taken: Vec<i64> =
        (1..=50).zip(&results).filter(|(_, result)| result.is_ok()).map(|(id, _)| id).collect();
    assert_eq!(ids(rabbit, "full"), taken);
    let mut left: Vec<i64> = (1..=50).filter(|id| !taken.contains(id)).collect();
    while !left.is_empty() {
        let ten: Vec<_> = left.drain(..10).collect();
        assert_published(&publish(&mut publisher, &events(ten.clone())));
        assert_eq!(ids(rabbit, "full"), ten);
    }
}

fn an_exchange_is_deleted_and_declared_again(rabbit: &Rabbit) {
    let words = ["no exchange 'gone'", "declare the exchange"];
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("gone"));
    let missing = publisher.check(Instant::now() + PATIENCE);
    assert_failed(&missing.unwrap(), Transient, Broker, false, &words);
    let results = publish(&mut publisher, &events(1..=3));
    results.iter().for_each(|result| assert_failed(result, Transient, Broker, false, &words));
    rabbit.route("gone");
    publisher.check(Instant::now() + PATIENCE).unwrap().unwrap();
    assert_published(&publish(&mut publisher, &events(1..=3)));
    assert_eq!(ids(rabbit, "gone"), [1, 2, 3]);
    rabbit.delete_exchange("gone");
    let start = Instant::now();
    let results = publish(&mut publisher, &events(4..=53));
    assert!(start.elapsed() < PATIENCE / 2, "waited for the deadline");
    for result in &results {
        let error = result.as_ref().expect_err("there is no exchange");
        assert_eq!((error.kind(), error.scope()), (Transient, Broker), "{error:?}");
        assert!(error.reason().contains(words[0]), "{error:?}");
    }
    rabbit.route("gone");
    assert_published(&publish(&mut publisher, &events(4..=53)));
    assert_eq!(ids(rabbit, "gone"), (4..=53).collect::<Vec<_>>());
}

fn too_large_payloads_are_refused_alone(rabbit: &Rabbit) {
    rabbit.route("size");
    let limit = |bytes: usize| {
        rabbit.ctl(&["eval", &format!("application:set_env(rabbit, max_message_size, {bytes}).")]);
    };
    limit(100_000);
    let builder = || RabbitMqConfig::builder(rabbit.url()).exchange("size");
    let mut publisher_ = publisher(builder());
    let wave = [
        event(0),
        sized(1, 99_999),
        sized(2, 20_000_000),
        sized(3, 100_000),
        sized(4, 100_001),
        event(5),
    ];
    for wave in [&wave[..], &wave[..]] {
        let results = publish(&mut publisher_, wave);
        for index in [0, 1, 3, 5] {
            assert_eq!(results[index], Ok(()), "event {index}");
        }
        assert_failed(&results[2], Permanent, OneEvent, false, &["20000000 bytes", "100000 bytes"]);
        assert_failed(&results[4], Permanent, OneEvent, false, &["100001 bytes", "100000 bytes"]);
        let mut arrived = ids(rabbit, "size");
        arrived.sort_unstable();
        assert_eq!(arrived, [0, 1, 3, 5], "each once");
    }
    // A limit that is lowered under a connection that has proven more closes the channel with others in flight.
    let mut publisher_ = publisher(builder());
    assert_published(&publish(&mut publisher_, &[sized(1, 100_000)]));
    limit(50_000);
    rabbit.delete_exchange("size");
    assert!(publish(&mut publisher_, &[event(1)])[0].is_err(), "the channel is another now");
    ids(rabbit, "size");
    rabbit.route("size");
    let results =
        publish(&mut publisher_, &[event(0), sized(1, 60_000), event(2), sized(3, 70_000)]);
    for (index, size) in [(1, "60000 bytes"), (3, "70000 bytes")] {
        assert_failed(&results[index], Permanent, OneEvent, false, &[size, "50000 bytes"]);
    }
    if results[0].is_err() {
        assert_failed(&results[0], Transient, OneEvent, true, &["sent beside an event"]);
    }
    assert_eq!((results[2].clone(), ids(rabbit, "size")), (Ok(()), vec![0, 2]));
    let known = publisher(builder().max_body_bytes(10));
    let results = publish(&mut { known }, &[sized(1, 11), event(2)]);
    assert_failed(&results[0], Permanent, OneEvent, false, &["11 bytes", "limit of 10 bytes"]);
    assert_eq!(results[1], Ok(()));
    limit(134_217_728);
    ids(rabbit, "size");
}

fn long_routing_keys_are_never_cut(rabbit: &Rabbit) {
    rabbit.route("keys");
    let config = RabbitMqConfig::builder(rabbit.url())
        .exchange("keys")
        .routing_key("{aggregate_id}.{event_type}");
    let mut publisher = publisher(config);
    let keyed = |id: i64, bytes: usize| {
        changed(id, |event| event.aggregate_id = "k".repeat(bytes - ".placed".len()))
    };
    let results =
        publish(&mut publisher, &[keyed(1, 255), keyed(2, 256), keyed(3, 300), keyed(4, 9)]);
    assert_failed(
        &results[1],
        Permanent,
        OneEvent,
        false,
        &["routing key has 256 bytes", "at most 255"],
    );
    assert_failed(
        &results[2],
        Permanent,
        OneEvent,
        false,
        &["routing key has 300 bytes", "at most 255"],
    );
    assert_eq!((&results[0], &results[3]), (&Ok(()), &Ok(())));
    let keys: Vec<_> = rabbit.get("keys", 10).iter().map(|got| got.routing_key.len()).collect();
    assert_eq!(keys, [255, 9]);
}

fn permissions_are_mended_without_a_loss(rabbit: &Rabbit) {
    rabbit.route("guarded");
    rabbit.ctl(&["add_user", "reader", "s3cret"]);
    rabbit.ctl(&["set_permissions", "-p", "/", "reader", ".*", "nothing", ".*"]);
    let url = rabbit.url().replace("guest:guest", "reader:s3cret");
    let mut publisher = publisher(RabbitMqConfig::builder(url).exchange("guarded"));
    let results = publish(&mut publisher, &events(1..=3));
    let words = ["access to exchange 'guarded'", "write permission"];
    results.iter().for_each(|result| assert_failed(result, Transient, Broker, false, &words));
    rabbit.ctl(&["set_permissions", "-p", "/", "reader", ".*", ".*", ".*"]);
    assert_published(&publish(&mut publisher, &events(1..=3)));
    rabbit.ctl(&["set_topic_permissions", "-p", "/", "reader", "guarded", "^good", ".*"]);
    let typed = |id: i64, kind: &str| changed(id, |event| event.event_type = kind.into());
    // On another connection, so that the broker's cache of permissions does not matter.
    rabbit.close_all_connections("mended");
    eventually("the connection is seen to be closed", PATIENCE, || {
        format!("{publisher:?}").contains("connected: false")
    });
    let results =
        publish(&mut publisher, &[typed(4, "good.a"), typed(5, "bad"), typed(6, "good.b")]);
    assert_failed(
        &results[1],
        Transient,
        Destination,
        false,
        &["access to topic 'bad'", "topic permission"],
    );
    assert_eq!((&results[0], &results[2]), (&Ok(()), &Ok(())));
    assert_eq!(ids(rabbit, "guarded"), [1, 2, 3, 4, 6]);
}

fn a_refused_login_kills_nothing(rabbit: &Rabbit) {
    for (from, to, expected) in [
        ("guest:guest", "guest:wr0ng", "check the user and the password"),
        ("/%2f", "/nowhere", "check the vhost"),
    ] {
        let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url().replace(from, to)));
        let results = publish(&mut publisher, &events(1..=2));
        results
            .iter()
            .for_each(|result| assert_failed(result, Transient, Broker, false, &[expected]));
        let shown =
            format!("{results:?}{publisher:?}{:?}", publisher.check(Instant::now() + PATIENCE));
        assert!(!shown.contains("wr0ng"), "{shown}");
    }
}

/// The broker has a certificate for `localhost` alone, of an authority that the system does not know.
fn tls_is_verified(rabbit: &Rabbit) {
    rabbit.route("secret");
    let folder = rabbit.folder();
    let path = |name: &str| folder.join(name).display().to_string();
    let openssl = |arguments: &str| {
        let mut command = Command::new("openssl");
        command.args(arguments.split_whitespace()).current_dir(folder);
        let output = command.output().expect("openssl is installed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    openssl(
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=test-ca -days 2",
    );
    openssl("req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=localhost");
    fs::write(folder.join("extensions"), "subjectAltName=DNS:localhost").unwrap();
    openssl(
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out server.pem",
    );
    openssl(
        "req -x509 -newkey rsa:2048 -nodes -keyout other.key -out other.pem -subj /CN=other-ca -days 2",
    );
    let port = free_port();
    rabbit.ctl(&["eval", &format!(
        "rabbit_networking:start_ssl_listener({{\"127.0.0.1\", {port}}}, [{{certfile, \"{}\"}}, {{keyfile, \"{}\"}}], 1).",
        path("server.pem"), path("server.key"),
    )]);
    let builder = |host: &str| {
        RabbitMqConfig::builder(format!("amqps://guest:guest@{host}:{port}/%2f")).exchange("secret")
    };
    let mut trusted = publisher(builder("localhost").ca_file(path("ca.pem")));
    trusted.check(Instant::now() + PATIENCE).unwrap().unwrap();
    assert_published(&publish(&mut trusted, &[sized(1, 300_000), event(2)]));
    assert_eq!(ids(rabbit, "secret"), [1, 2]);
    for (builder, expected) in [
        (builder("127.0.0.1").ca_file(path("ca.pem")), "certificate"),
        (builder("localhost").ca_file(path("other.pem")), "certificate"),
        (builder("localhost"), "certificate"),
        (builder("localhost").ca_file(path("missing.pem")), "missing.pem"),
        (builder("localhost").ca_file(path("server.key")), "no certificate in PEM form"),
    ] {
        let results = publish(&mut publisher(builder), &events([3]));
        assert_failed(
            &results[0],
            Transient,
            Broker,
            false,
            &["cannot connect to RabbitMQ", expected],
        );
    }
    assert_eq!(ids(rabbit, "secret"), [0; 0]);
}

#[test]
fn a_broker_that_goes_away_loses_nothing() {
    let _alone = alone();
    let mut rabbit = Rabbit::start();
    a_frozen_broker_is_cut_at_the_deadline(&rabbit);
    a_crash_of_the_channel_is_nobodys_fault(&rabbit);
    a_block_pauses_and_ends_by_itself(&rabbit);
    fifty_closed_connections_leave_nothing_behind(&rabbit);
    a_restart_in_the_middle_of_a_wave(&mut rabbit, Rabbit::kill);
    a_restart_in_the_middle_of_a_wave(&mut rabbit, Rabbit::stop);
}

/// The broker falls silent with events in flight.
fn a_frozen_broker_is_cut_at_the_deadline(rabbit: &Rabbit) {
    rabbit.route("frozen");
    let proxy = Proxy::to(&rabbit.url());
    let mut publisher = publisher(RabbitMqConfig::builder(proxy.url.clone()).exchange("frozen"));
    assert_published(&publish(&mut publisher, &events([0])));
    let before = (threads(), descriptors());
    proxy.frozen.store(true, Ordering::SeqCst);
    let results = publish_within(Duration::from_millis(300), &mut publisher, &events(1..=9));
    for result in &results {
        assert_failed(result, Transient, Broker, true, &["no confirm", "deadline"]);
    }
    // A late confirm must not be taken for another event's: the connection is given up while it still stands.
    assert!(format!("{publisher:?}").contains("connected: false"), "{publisher:?}");
    eventually("the library's thread has ended", PATIENCE, || threads() < before.0);
    proxy.frozen.store(false, Ordering::SeqCst);
    assert_published(&publish(&mut publisher, &events(1..=9)));
    let arrived = ids(rabbit, "frozen");
    assert_eq!(
        arrived.iter().rev().take(9).rev().copied().collect::<Vec<_>>(),
        (1..=9).collect::<Vec<_>>()
    );
    eventually("the old connection is gone", PATIENCE, || {
        threads() <= before.0 && descriptors() <= before.1
    });
}

/// The broker itself fails with events in flight: it closes the connection with 541, which explains nothing.
fn a_crash_of_the_channel_is_nobodys_fault(rabbit: &Rabbit) {
    rabbit.route("fault");
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("fault"));
    assert_published(&publish(&mut publisher, &events([0])));
    let kill = "[exit(Pid, kill) || Pid <- rabbit_channel:list()].";
    let mut failed = Vec::new();
    for _ in 0..10 {
        thread::scope(|scope| {
            let killing = scope.spawn(|| rabbit.ctl(&["eval", kill]));
            while !killing.is_finished() {
                failed.extend(
                    publish(&mut publisher, &events(1..=200)).into_iter().filter_map(Result::err),
                );
            }
        });
        if !failed.is_empty() {
            break;
        }
    }
    assert!(!failed.is_empty(), "no channel was killed with events in flight");
    for error in &failed {
        assert_ne!(error.kind(), Permanent, "{error:?}");
        assert!(
            error.is_in_doubt() && (failed.len() == 1 || error.kind() == Transient),
            "{error:?}"
        );
    }
    eventually("it publishes again", PATIENCE, || {
        publish(&mut publisher, &events(1..=200)).iter().all(Result::is_ok)
    });
}

fn a_block_pauses_and_ends_by_itself(rabbit: &Rabbit) {
    rabbit.route("blocked");
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("blocked"));
    assert_published(&publish(&mut publisher, &events([0])));
    rabbit.block();
    let mut confirmed = vec![0];
    let mut note = |ids: std::ops::RangeInclusive<i64>, results: &Results| {
        confirmed.extend(ids.zip(results).filter(|(_, result)| result.is_ok()).map(|(id, _)| id));
    };
    // The broker says so at the first publish that it meets after the alarm.
    let start = Instant::now();
    let mut last = 0;
    let in_flight = loop {
        let ids = last + 1..=last + 50;
        let results = publish(&mut publisher, &events(ids.clone()));
        note(ids, &results);
        last += 50;
        if results.iter().any(Result::is_err) {
            break results;
        }
        assert!(start.elapsed() < PATIENCE, "never blocked");
    };
    for result in in_flight.iter().filter(|result| result.is_err()) {
        let error = result.as_ref().unwrap_err();
        assert_eq!((error.kind(), error.scope()), (Transient, Broker), "{error:?}");
        assert!(error.reason().contains("blocks publishers: low on memory"), "{error:?}");
    }
    // From now on nothing is sent and nobody waits.
    for _ in 0..20 {
        let start = Instant::now();
        let results = publish(&mut publisher, &events(1000..=1009));
        assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
        results
            .iter()
            .for_each(|result| assert_failed(result, Transient, Broker, false, &["low on memory"]));
        let checked = publisher.check(Instant::now() + PATIENCE);
        assert_failed(&checked.unwrap(), Transient, Broker, false, &["low on memory"]);
    }
    rabbit.unblock();
    eventually("the publisher resumes by itself", PATIENCE, || {
        publish(&mut publisher, &events([2000]))[0].is_ok()
    });
    let arrived = ids(rabbit, "blocked");
    assert!(confirmed.iter().all(|id| arrived.contains(id)), "a confirmed event is missing");
    assert!(!arrived.contains(&1000), "an event went out that was said not to be sent");
    // A publisher that is dropped while it is blocked leaves neither its thread nor its socket behind.
    let before = (threads(), descriptors());
    rabbit.block();
    let mut held = publisher_of_blocked(rabbit);
    drop(publisher);
    drop(held.take());
    eventually("what blocked publishers held is gone", PATIENCE, || {
        threads() < before.0 && descriptors() < before.1
    });
    rabbit.unblock();
}

fn publisher_of_blocked(rabbit: &Rabbit) -> Option<RabbitMqPublisher> {
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("blocked"));
    eventually("blocked", PATIENCE, || publish(&mut publisher, &events([3000]))[0].is_err());
    Some(publisher)
}

fn fifty_closed_connections_leave_nothing_behind(rabbit: &Rabbit) {
    rabbit.route("closed");
    let mut publisher = publisher(RabbitMqConfig::builder(rabbit.url()).exchange("closed"));
    let start = Instant::now();
    while publish(&mut publisher, &events([0]))[0].is_err() {
        assert!(start.elapsed() < PATIENCE, "never published");
    }
    let before = (threads(), descriptors());
    // The broker's side waits for a connection and closes it, as its operator would, fifty times.
    let close = r#"
        Close = fun Close(0) -> done;
                    Close(N) -> case rabbit_networking:connections() of
                        [] -> timer:sleep(5), Close(N);
                        All -> rabbit_networking:close_connections(All, "maintenance"), timer:sleep(20), Close(N - 1)
                    end end,
        Close(50)."#;
    thread::scope(|scope| {
        let closing = scope.spawn(|| rabbit.ctl(&["eval", close]));
        while !closing.is_finished() {
            if let Err(error) = &publish(&mut publisher, &events([1]))[0] {
                assert_eq!((error.kind(), error.scope()), (Transient, Broker), "{error:?}");
            }
            thread::sleep(Duration::from_millis(1));
        }
        assert!(closing.join().unwrap().contains("done"));
    });
    eventually("it publishes again", PATIENCE, || publish(&mut publisher, &events([2]))[0].is_ok());
    eventually("threads and descriptors are flat", PATIENCE, || {
        threads() <= before.0 && descriptors() <= before.1
    });
}

fn a_restart_in_the_middle_of_a_wave(rabbit: &mut Rabbit, end: impl FnOnce(&mut Rabbit)) {
    rabbit.route("crash");
    let url = rabbit.url();
    let (report, reports) = mpsc::channel();
    let (stop, stopped) = mpsc::channel::<()>();
    let sender = thread::spawn(move || {
        let mut publisher = publisher(RabbitMqConfig::builder(url).exchange("crash"));
        let mut confirmed = Vec::new();
        let mut next = 0;
        let mut failed = false;
        while stopped.try_recv().is_err() {
            let ids = next..next + 200;
            let results = publish(&mut publisher, &events(ids.clone()));
            for (id, result) in ids.zip(&results) {
                match result {
                    Ok(()) => confirmed.push(id),
                    Err(error) => {
                        assert_eq!((error.kind(), error.scope()), (Transient, Broker), "{error:?}");
                        failed = true;
                    }
                }
            }
            next += 200;
            report.send((confirmed.len(), failed)).unwrap();
            if failed {
                thread::sleep(Duration::from_millis(50));
            }
        }
        confirmed
    });
    let wait = |what: &str, done: &dyn Fn((usize, bool)) -> bool| {
        let start = Instant::now();
        while !done(reports.recv_timeout(PATIENCE).expect(what)) {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        }
    };
    wait("events go out", &|(confirmed, _)| confirmed >= 1000);
    end(rabbit);
    wait("the loss is noticed", &|(_, failed)| failed);
    rabbit.start_again();
    let known = reports.try_iter().last().map_or(0, |(confirmed, _)| confirmed);
    wait("events go out again", &|(confirmed, _)| confirmed > known + 200);
    stop.send(()).unwrap();
    let confirmed = sender.join().unwrap();
    let arrived: HashSet<_> = ids(rabbit, "crash").into_iter().collect();
    let missing: Vec<_> = confirmed.iter().filter(|id| !arrived.contains(id)).collect();
    assert!(missing.is_empty(), "confirmed, but lost by a crash: {missing:?}");
}

#[test]
fn a_broker_that_is_not_there_is_broker_trouble() {
    let _alone = alone();
    let refused = RabbitMqConfig::builder(format!("amqp://u:s3cret@127.0.0.1:{}", free_port()));
    let results = publish(&mut publisher(refused), &events(1..=2));
    results.iter().for_each(|result| {
        assert_failed(result, Transient, Broker, false, &["cannot connect", "refused"])
    });
    let nowhere = RabbitMqConfig::builder("amqp://u:s3cret@host.invalid");
    let results = publish(&mut publisher(nowhere), &events([1]));
    assert_failed(
        &results[0],
        Transient,
        Broker,
        false,
        &["cannot connect to RabbitMQ at host.invalid:5672"],
    );
    assert!(!format!("{results:?}").contains("s3cret"));
}

/// A host that takes connections and never says a word, over TCP and TLS: bounded, and nothing is left behind.
#[test]
fn a_silent_broker_is_given_up_at_the_deadline() {
    let _alone = alone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut baseline = None;
    for round in 0..20 {
        let scheme = if round % 2 == 0 { "amqp" } else { "amqps" };
        let config = RabbitMqConfig::builder(format!("{scheme}://{address}"));
        let results =
            publish_within(Duration::from_millis(100), &mut publisher(config), &events([1]));
        assert_failed(&results[0], Transient, Broker, false, &["no connection to RabbitMQ"]);
        if round == 3 {
            baseline = Some((threads(), descriptors()));
        }
    }
    let (threads_before, descriptors_before) = baseline.unwrap();
    eventually("threads and descriptors are flat", PATIENCE, || {
        threads() <= threads_before && descriptors() <= descriptors_before
    });
}

/// A road to the broker that can be frozen: bytes stop, and nothing is closed.
struct Proxy {
    url: String,
    frozen: Arc<AtomicBool>,
}

impl Proxy {
    fn to(url: &str) -> Self {
        let (front, host) = url.rsplit_once('@').unwrap();
        let (address, vhost) = host.split_once('/').unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("{front}@{}/{vhost}", listener.local_addr().unwrap());
        let frozen = Arc::new(AtomicBool::new(false));
        let (address, switch) = (address.to_owned(), frozen.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&address).unwrap());
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let switch = switch.clone();
                    thread::spawn(move || pass(from, to, &switch));
                }
            }
        });
        Self { url, frozen }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, frozen: &AtomicBool) {
    let mut buffer = [0; 65_536];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        while frozen.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}
