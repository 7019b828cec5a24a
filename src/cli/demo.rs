//! `demo`: the life of an outbox, played by the real relay against a broker that fails on cue.
//!
//! The stage is a schema of its own, a broker in memory and an endpoint on a random port; all are gone at the end, however
//! the demo ends. Everything that is told is checked first: an event that did not go the way the story says ends the demo
//! with an error.

mod stage;
mod tell;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pg_outbox::store::dead_letters::{self, EventDetails, Filter};
use pg_outbox::store::why::why;
use pg_outbox::{EventRef, FailureKind, NewEvent, Outbox, PublishError, ScriptedBroker};
use uuid::Uuid;

use super::args::DemoArgs;
use super::database::Target;
use super::dead_letters::letter_table;
use super::failure::{Code, Failure};
use stage::{Pass, Stage};
use tell::Teller;

/// The longest that one step of the story may take.
const STEP: Duration = Duration::from_secs(20);
/// What every check says when it fails.
const WRONG: &str = "the story did not happen as told";

const TIMEOUT: &str = "no confirm from the broker in time";
const REJECTED: &str = "schema registry: order.placed v2 needs the field \"currency\"";

pub(crate) fn demo(target: &Target, args: &DemoArgs) -> Result<Code, Failure> {
    let broker = ScriptedBroker::new();
    let mut stage = Stage::build(target.config()?, &args.demo_schema)?;
    let mut story = Story { broker, teller: Teller::new(), names: BTreeMap::new() };
    let told = story.play(&mut stage);
    stage.tear_down().and(told)?;
    story
        .teller
        .say("The demo's schema is dropped. Everything above happened, and was checked.")?;
    Ok(Code::Ok)
}

struct Story {
    broker: ScriptedBroker,
    teller: Teller,
    /// The events by id, such as "A placed".
    names: BTreeMap<Uuid, String>,
}

impl Story {
    fn play(&mut self, stage: &mut Stage) -> Result<(), Failure> {
        self.write_orders(stage)?;
        self.set_the_cues()?;
        self.teller.say("The relay starts.")?;
        stage.start_relay(&self.broker)?;
        self.follow(stage, "A paid", &[])?;
        self.look_at_the_dead(stage)?;
        self.teller.metrics(&stage.metrics(&[
            ("outbox_pending_rows", 1),
            ("outbox_held_rows", 1),
            ("outbox_dead_rows", 1),
            ("outbox_retrying_rows", 0),
            ("outbox_relays_alive", 1),
            ("outbox_published_total", 3),
            ("outbox_retried_total", 2),
            ("outbox_dead_lettered_total", 1),
            ("outbox_lease_lost_total", 0),
        ])?)?;
        self.requeue(stage)?;
        self.follow(stage, "B paid", &["A placed", "A paid", "C placed"])?;
        self.teller.metrics(&stage.metrics(&[
            ("outbox_pending_rows", 0),
            ("outbox_held_rows", 0),
            ("outbox_dead_rows", 0),
            ("outbox_published_total", 5),
            ("outbox_retried_total", 2),
            ("outbox_dead_lettered_total", 1),
            ("outbox_relays_alive", 1),
        ])?)?;
        let report = stage.stop_relay()?;
        self.teller.say(&format!("The relay is stopped: {report}."))?;
        self.check_deliveries()
    }

    /// Each order and its events are written in one transaction.
    fn write_orders(&mut self, stage: &mut Stage) -> Result<(), Failure> {
        self.teller.say("Three orders are written, each in one transaction with its events:")?;
        for (order, events) in
            [("A", &["placed", "paid"][..]), ("B", &["placed", "paid"]), ("C", &["placed"])]
        {
            let news: Vec<_> = events
                .iter()
                .map(|event| {
                    let payload = format!(r#"{{"order":"{order}","total":12.50}}"#);
                    NewEvent::new("order", order, format!("order.{event}"), payload)
                })
                .collect();
            let outbox = Outbox::in_schema(stage.schema().clone());
            let ids = stage.write_order(order, &outbox, &news)?;
            for (id, event) in ids.iter().zip(events) {
                self.names.insert(*id, format!("{order} {event}"));
            }
            self.teller.line(&format!("order {order}: {}", events.join(", ")))?;
        }
        Ok(())
    }

    fn set_the_cues(&self) -> Result<(), Failure> {
        let is = |order: &'static str| {
            move |event: &pg_outbox::Event| {
                event.aggregate_id == order && event.event_type == "order.placed"
            }
        };
        for _ in 0..2 {
            self.broker.fail_next(is("A"), PublishError::transient(TIMEOUT).in_doubt());
        }
        self.broker.fail_always(is("B"), PublishError::permanent(REJECTED));
        self.teller.say(
            "The broker will time out twice on A placed, and its schema registry rejects B placed.",
        )
    }

    /// Tells every pass until the event called `last` is published. Those of `done` must not come again.
    fn follow(&mut self, stage: &mut Stage, last: &str, done: &[&str]) -> Result<(), Failure> {
        let deadline = Instant::now() + STEP;
        loop {
            let pass = stage.next_pass(deadline)?;
            let events = stage.settled(&pass, deadline)?;
            self.tell_pass(&pass, &events)?;
            if events.iter().any(|event| done.contains(&self.name(event.event_id))) {
                return Err(Failure::failed(format!("{WRONG}: something was published twice")));
            }
            self.tell_waiting(stage)?;
            stage.go_on();
            if events
                .iter()
                .any(|event| self.name(event.event_id) == last && event.status == "published")
            {
                return Ok(());
            }
        }
    }

    fn name(&self, id: Uuid) -> &str {
        self.names.get(&id).map_or("an unknown event", String::as_str)
    }

    fn tell_pass(&mut self, pass: &Pass, events: &[EventDetails]) -> Result<(), Failure> {
        self.teller.pass(&format!("pass {}", pass.number))?;
        for (event, outcome) in events.iter().zip(&pass.outcomes) {
            let name = self.name(event.event_id).to_owned();
            let attempt = event.attempts;
            match (outcome, event.status.as_str()) {
                (Ok(()), "published") => {
                    self.teller.good(&name, &format!("published, at attempt {attempt}"))?
                }
                (Err(error), "dead") if error.kind() == FailureKind::Permanent => {
                    self.teller
                        .bad(&name, &format!("rejected, so dead at once: {}", error.reason()))?;
                }
                (Err(error), "pending") if event.retry_since.is_some() => {
                    let wait = -event.next_attempt.seconds_ago.min(0.0);
                    let text = format!(
                        "attempt {attempt} failed, tried again in {wait:.1} s: {}",
                        error.reason()
                    );
                    self.teller.warn(&name, &text)?;
                }
                (outcome, status) => {
                    return Err(Failure::failed(format!(
                        "{WRONG}: {name} is {status} after {outcome:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// What could not go out in this pass because of an earlier event of its order.
    fn tell_waiting(&mut self, stage: &mut Stage) -> Result<(), Failure> {
        use pg_outbox::store::why::Answer;
        for (id, name) in &self.names {
            let (client, schema) = stage.database();
            let Some(why) = why(client, schema, &EventRef::from(*id))? else { continue };
            match why.answer {
                Answer::Held { .. } => {
                    self.teller.held(name, "held behind a dead event of its order")?
                }
                Answer::Behind { .. } => {
                    self.teller.held(name, "waits behind an earlier event of its order")?
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn look_at_the_dead(&mut self, stage: &mut Stage) -> Result<(), Failure> {
        let (client, schema) = stage.database();
        let letters = dead_letters::list(client, schema, &Filter::everything(), None, 10)?;
        let is_b = letters.len() == 1
            && letters
                .iter()
                .all(|one| one.aggregate_id == "B" && one.held == 1 && one.reason == REJECTED);
        if !is_b {
            return Err(Failure::failed(format!("{WRONG}: the dead letters are {letters:?}")));
        }
        self.teller.say("A went out in order, and C did not wait for anybody. The dead letters, and what they hold:")?;
        self.teller.block(&letter_table(&letters))
    }

    fn requeue(&mut self, stage: &mut Stage) -> Result<(), Failure> {
        self.broker.mend();
        self.teller.say("Somebody registers the missing schema, and requeues B placed:")?;
        let (client, schema) = stage.database();
        let filter = Filter::builder().reason("schema registry").build()?;
        let requeued = dead_letters::requeue(client, schema, &filter, None)?;
        match requeued.as_slice() {
            [id] if self.name(*id) == "B placed" => {
                self.teller.line("dead-letters requeue --reason 'schema registry': 1 event")
            }
            ids => Err(Failure::failed(format!("{WRONG}: requeued {ids:?}"))),
        }
    }

    /// What the broker got, in the order in which it got it.
    fn check_deliveries(&self) -> Result<(), Failure> {
        let deliveries = self.broker.deliveries();
        let of = |order: &str| -> Vec<String> {
            let events = deliveries.iter().filter(|event| event.aggregate_id == order);
            events.map(|event| event.event_type.clone()).collect()
        };
        let both = ["order.placed", "order.paid"];
        let in_order = of("A") == both
            && of("B") == both
            && of("C") == ["order.placed"]
            && deliveries.len() == 5;
        let first = deliveries.iter().find(|event| event.aggregate_id == "A");
        let marked = first.is_some_and(|event| event.attempt == 3 && event.possible_duplicate);
        if !in_order || !marked {
            return Err(Failure::failed(format!("{WRONG}: the broker got {deliveries:?}")));
        }
        self.teller.say(
            "The broker got five events, each order's in its order. A placed came with attempt 3 and marked as a possible \
             duplicate, since a timeout does not say whether it arrived.",
        )
    }
}
