//! `dead-letters requeue --canary`: one is put back first, and the rest only while all goes well.
//!
//! Each step puts some back and waits until each of them is published. It ends at the first that dies again, that another dead event
//! holds, or that has no verdict in time; then nothing more is put back. What was put back stays with the relay, so an interruption
//! does no harm. The letters are those that were dead at the start: one that dies meanwhile is not touched.

use std::thread;
use std::time::{Duration, Instant};

use pg_outbox::store::dead_letters::{self, Filter, Unsettled};
use pg_outbox::{EventRef, Schema, store};
use postgres::Client;

use super::failure::{Code, Failure};
use super::output::{self, count, print};

/// How many are put back at most after one, ten, a hundred.
const LARGEST_STEP: usize = 1_000;
/// Between two looks at the events that were put back.
const LOOK: Duration = Duration::from_millis(200);

/// Which, how many at most, and how long each step may take.
pub(crate) struct Canary<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) filter: &'a Filter,
    pub(crate) limit: Option<u32>,
    pub(crate) patience: Duration,
}

/// What became of a step.
enum Step {
    Published,
    Stopped(String),
}

impl Canary<'_> {
    pub(crate) fn requeue(&self, client: &mut Client) -> Result<Code, Failure> {
        let ids = dead_letters::matching_ids(client, self.schema, self.filter, self.limit)?;
        if ids.is_empty() {
            return Err(Failure::not_found("no dead letter matched; nothing was requeued"));
        }
        if store::status::status(client, self.schema)?.snapshot.relays_alive == 0 {
            return Err(Failure::failed(
                "no relay is alive, so a canary would wait in vain; nothing was requeued; start one with `pg-outbox run`",
            ));
        }
        let (mut left, mut size, mut done) = (ids.as_slice(), 1, 0);
        while !left.is_empty() {
            let (step, rest) = left.split_at(size.min(left.len()));
            let events = Filter::events(step.iter().copied().map(EventRef::from));
            // Fewer where somebody else took some of them meanwhile; those are waited for like the others.
            let requeued = dead_letters::requeue(client, self.schema, &events, None)?.len() as u64;
            print(&format!("requeued {}, waiting until published\n", count(requeued)))?;
            if let Step::Stopped(why) = self.wait(client, step)? {
                print(&format!(
                    "stopped: {}; not put back: {}\n",
                    output::line(&why),
                    count(rest.len() as u64)
                ))?;
                return Ok(Code::Unhealthy);
            }
            done += requeued;
            (left, size) = (rest, (size * 10).min(LARGEST_STEP));
        }
        print(&format!("requeued {}, all published\n", count(done)))?;
        Ok(Code::Ok)
    }

    fn wait(&self, client: &mut Client, ids: &[i64]) -> Result<Step, Failure> {
        let deadline = Instant::now() + self.patience;
        loop {
            let open = dead_letters::unsettled(client, self.schema, ids)?;
            let Some(first) = open.first() else { return Ok(Step::Published) };
            if let Some(why) = open.iter().find_map(hopeless) {
                return Ok(Step::Stopped(why));
            }
            if Instant::now() >= deadline {
                return Ok(Step::Stopped(late(first, open.len(), self.patience)));
            }
            thread::sleep(LOOK.min(deadline.saturating_duration_since(Instant::now())));
        }
    }
}

/// Why an event will not be published by waiting.
fn hopeless(event: &Unsettled) -> Option<String> {
    match (event.is_dead, event.behind) {
        (true, _) => Some(format!("event {} died again: {}", event.id, event.last_error)),
        (false, Some(head)) => Some(format!(
            "event {} waits behind the dead event {head} of its aggregate; requeue or discard that one first",
            event.id
        )),
        _ => None,
    }
}

fn late(first: &Unsettled, open: usize, patience: Duration) -> String {
    let tried = match first.attempts {
        0 => "has not been tried yet".into(),
        _ => format!("is being retried: {}", first.last_error),
    };
    format!(
        "after {} {} not published; event {} {tried}; see `pg-outbox why {}`",
        humantime::format_duration(patience),
        if open == 1 { "1 event is".into() } else { format!("{open} events are") },
        first.id,
        first.id
    )
}
