//! RabbitMQ end to end, against the same client publishing the same bodies from memory with confirms.
//!
//! Both use a durable queue that nobody reads, persistent messages, and as many connections.

use std::time::{Duration, Instant};

use futures_lite::future::block_on;
use lapin::options::{
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueuePurgeOptions,
};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties, ExchangeKind};
use pg_outbox::publisher::rabbitmq::{RabbitMqConfig, RabbitMqPublisher};
use pg_outbox::{Event, Outcomes, Publisher};

use super::database::Fill;
use super::drain::{self, Drain};
use super::machine::Others;
use super::producer::payload;
use super::relay::Settings;
use super::report::{Goal, Row, median};
use super::{Bench, Result};

/// Where `./run bench` says that the broker is.
const VARIABLE: &str = "PG_OUTBOX_BENCH_RABBITMQ_URL";
const NAME: &str = "bench";
/// Publishers at once, as in a relay by default.
const CONNECTIONS: usize = 2;

pub(crate) fn publisher(url: &str) -> RabbitMqPublisher {
    let config = RabbitMqConfig::builder(url).exchange(NAME).build();
    RabbitMqPublisher::new(config.expect("the settings of the bench"))
}

fn url() -> Option<String> {
    std::env::var(VARIABLE).ok()
}

fn settings(index: usize) -> Settings {
    Settings { rabbitmq: url(), ..drain::settings(index) }
}

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let Some(url) = url() else {
        eprintln!("  left out: no RabbitMQ ({VARIABLE} is not set)");
        return Ok(());
    };
    let others = Others::watch(&bench.server.pid().into_iter().collect::<Vec<_>>());
    let events = bench.args.events;
    // Waves of a batch, which is the most that a relay sends at once, and of what it sends from runs of five.
    let mut best = 0.0;
    for wave in [500, 100] {
        let rates = (0..bench.args.repeat)
            .map(|_| declare(&url).and_then(|()| from_memory(&url, events, wave)))
            .collect::<Result<_>>()?;
        let (rate, spread) = median(rates);
        best = f64::max(best, rate);
        let name = format!("RabbitMQ from memory, waves of {wave}");
        bench.row(Row::new(name, rate, "events/s").notes(spread));
    }
    let mut rates = Vec::new();
    for _ in 0..bench.args.repeat {
        declare(&url)?;
        let database = bench.server.database()?;
        database.fill(&Fill { events, aggregates: bench.args.aggregates, ..Fill::default() })?;
        database.settle()?;
        let drain = Drain { events, processes: 1, settings, patience: Duration::from_secs(300) };
        rates.push(drain.run(&database)?.rate);
    }
    let (rate, spread) = median(rates);
    let row = Row::new("RabbitMQ end to end", rate, "events/s").ratio(rate / best, "from memory");
    bench.row(row.goal(Goal::AtLeast(0.7)).notes(spread).notes(others.note()));
    Ok(())
}

/// An exchange, and an empty queue that gets everything.
fn declare(url: &str) -> Result<()> {
    block_on(async {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let none = FieldTable::default;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        channel.exchange_declare(NAME.into(), ExchangeKind::Topic, durable, none()).await?;
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(NAME.into(), durable, none()).await?;
        let bind = QueueBindOptions::default();
        channel.queue_bind(NAME.into(), NAME.into(), "#".into(), bind, none()).await?;
        channel.queue_purge(NAME.into(), QueuePurgeOptions::default()).await?;
        connection.close(200, "done".into()).await?;
        Ok(())
    })
}

/// Each connection sends its share in waves and waits for the confirms of each.
fn from_memory(url: &str, events: u32, wave: usize) -> Result<f64> {
    let share = events as usize / CONNECTIONS;
    let mut threads = Vec::new();
    let started = Instant::now();
    for index in 0..CONNECTIONS {
        let mut publisher = publisher(url);
        threads.push(std::thread::spawn(move || -> Result<()> {
            let mut sent = 0;
            while sent < share {
                let ids = sent..share.min(sent + wave);
                sent = ids.end;
                let events: Vec<Event> = ids.map(|id| event(index * share + id)).collect();
                let mut outcomes = Outcomes::new(events.len());
                publisher.publish(&events, Instant::now() + Duration::from_secs(10), &mut outcomes);
                if let Some(Err(error)) =
                    (0..events.len()).find_map(|i| outcomes.get(i).filter(|r| r.is_err()))
                {
                    return Err(error.reason().to_owned().into());
                }
            }
            Ok(())
        }));
    }
    for thread in threads {
        thread.join().map_err(|_| "a publisher panicked")??;
    }
    Ok((share * CONNECTIONS) as f64 / started.elapsed().as_secs_f64())
}

fn event(id: usize) -> Event {
    Event::for_test(id as i64, &format!("k{}", id % 10_000), "order.placed", &payload(id as u64))
}
