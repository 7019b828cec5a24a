//! `status`, `why`, `metrics` and `prune`: one question to the database each.

use std::io::IsTerminal;
use std::thread;
use std::time::Duration;

use pg_outbox::store::status::{Condition, RelayRow, Status};
use pg_outbox::store::{self};
use pg_outbox::{Moment, Schema, rfc3339};
use serde_json::{Value, json};

use super::args::{PruneArgs, StatusArgs, WhyArgs};
use super::database::Target;
use super::failure::{Code, Failure};
use super::output;

const WATCH_INTERVAL: Duration = Duration::from_secs(2);
const METRICS_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn status(target: &Target, args: &StatusArgs) -> Result<Code, Failure> {
    let schema = target.schema()?;
    let render = |status: &Status| {
        let screen = args.watch && !args.json && std::io::stdout().is_terminal();
        let clear = if screen { "\x1b[H\x1b[2J" } else { "" };
        if args.json {
            format!("{}\n", as_json(status))
        } else {
            clear.to_owned() + &as_text(status)
        }
    };
    if args.watch {
        return watch(target, &schema, render);
    }
    let status = store::status::status(&mut target.connect()?, &schema)?;
    output::print(&render(&status))?;
    let is_healthy = status.assess().condition == Condition::Healthy;
    Ok(if is_healthy { Code::Ok } else { Code::Unhealthy })
}

/// Goes on while the database is away, which is when somebody watches, and ends with its reader. What cannot be so at the start
/// (no such database, no outbox) ends it as well.
fn watch(
    target: &Target,
    schema: &Schema,
    render: impl Fn(&Status) -> String,
) -> Result<Code, Failure> {
    let mut client = Some(target.connect()?);
    let mut seen = false;
    loop {
        let read = match client.take() {
            Some(client) => Ok(client),
            None => target.connect(),
        }
        .and_then(|mut client| {
            let status = store::status::status(&mut client, schema)?;
            Ok((client, status))
        });
        let text = match read {
            Ok((session, status)) => {
                (client, seen) = (Some(session), true);
                render(&status)
            }
            Err(failure) if seen => {
                // Not on standard output, where a program may read JSON.
                eprintln!("pg-outbox: {}", output::line(&failure.message));
                String::new()
            }
            Err(failure) => return Err(failure),
        };
        if !output::print_on(&text)? {
            return Ok(Code::Ok);
        }
        thread::sleep(WATCH_INTERVAL);
    }
}

fn as_text(status: &Status) -> String {
    let s = &status.snapshot;
    let rows = [
        [
            "pending".into(),
            s.pending_rows.to_string(),
            oldest(s.pending_rows, s.oldest_pending_age_seconds),
        ],
        ["  leased".into(), s.leased_rows.to_string(), String::new()],
        ["  retrying".into(), s.retrying_rows.to_string(), String::new()],
        ["  held".into(), s.held_rows.to_string(), String::new()],
        ["dead".into(), s.dead_rows.to_string(), oldest(s.dead_rows, s.oldest_dead_age_seconds)],
    ];
    let relays: Vec<_> = status.relays.iter().map(relay_cells).collect();
    let mut text = format!("{}\n\n", output::line(&status.assess().to_string()));
    text.push_str(&output::table(["EVENTS", "", ""], &rows, 60));
    if relays.is_empty() {
        text.push_str("\nno relay has run yet\n");
        return text;
    }
    text.push('\n');
    text.push_str(&output::table(
        ["RELAY", "THREAD", "STATE", "HEARTBEAT", "PUBLISHED", "RETRIED", "DEAD", "LEASES LOST"],
        &relays,
        60,
    ));
    text
}

fn oldest(rows: u64, seconds: f64) -> String {
    if rows == 0 { String::new() } else { format!("oldest for {}", age(seconds)) }
}

fn relay_cells(relay: &RelayRow) -> [String; 8] {
    let state = match (&relay.heartbeat, relay.alive, relay.paused_types.is_empty()) {
        (None, ..) => "stopped".into(),
        (_, false, _) => "not alive".into(),
        (_, true, true) => "alive".into(),
        (_, true, false) => {
            format!("paused {}", relay.paused_types.join(",").replace('*', "broker"))
        }
    };
    let thread =
        if relay.worker == 0 { "claimer".into() } else { format!("publisher-{}", relay.worker) };
    let heartbeat =
        relay.heartbeat.map_or("-".into(), |beat| format!("{} ago", age(beat.seconds_ago)));
    let counts = [relay.published, relay.retried, relay.dead_lettered, relay.lease_lost]
        .map(|n| n.to_string());
    let [published, retried, dead, lost] = counts;
    [relay.relay_id.clone(), thread, state, heartbeat, published, retried, dead, lost]
}

/// Seconds for people.
pub(super) fn age(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default().as_secs();
    match whole {
        0..120 => format!("{whole} s"),
        120..7_200 => format!("{} min", whole / 60),
        7_200..172_800 => format!("{} h", whole / 3_600),
        _ => format!("{} days", whole / 86_400),
    }
}

fn as_json(status: &Status) -> Value {
    let (s, verdict) = (&status.snapshot, status.assess());
    let relays: Vec<_> = status.relays.iter().map(|relay| {
        json!({
            "relay_id": relay.relay_id, "worker": relay.worker, "alive": relay.alive,
            "started_at": at(Some(relay.started)), "heartbeat_at": at(relay.heartbeat),
            "paused_types": relay.paused_types, "paused_reason": relay.paused_reason, "paused_since": at(relay.paused_since),
            "published": relay.published, "retried": relay.retried, "dead_lettered": relay.dead_lettered,
            "lease_lost": relay.lease_lost,
        })
    }).collect();
    json!({
        "health": verdict.condition.to_string(),
        "reasons": verdict.reasons,
        "metrics": {
            "pending_rows": s.pending_rows, "retrying_rows": s.retrying_rows, "leased_rows": s.leased_rows,
            "held_rows": s.held_rows, "dead_rows": s.dead_rows,
            "oldest_pending_age_seconds": s.oldest_pending_age_seconds, "oldest_dead_age_seconds": s.oldest_dead_age_seconds,
            "dying_within_1h_rows": s.dying_within_1h_rows, "dying_within_6h_rows": s.dying_within_6h_rows,
            "relays_alive": s.relays_alive, "relays_paused": s.relays_paused, "published_total": s.published_total,
            "retried_total": s.retried_total, "dead_lettered_total": s.dead_lettered_total, "lease_lost_total": s.lease_lost_total,
        },
        "relays": relays,
    })
}

/// A time for machines.
pub(super) fn at(moment: Option<Moment>) -> Option<String> {
    moment.map(|moment| rfc3339(moment.at))
}

pub(crate) fn why(target: &Target, args: &WhyArgs) -> Result<Code, Failure> {
    let why = store::why::why(&mut target.connect()?, &target.schema()?, &args.event)?;
    let why = why.ok_or_else(|| no_event(&args.event))?;
    output::print(&format!("{}\n", output::lines(&why.to_string())))?;
    Ok(Code::Ok)
}

/// For an event that is not there.
pub(super) fn no_event(event: &pg_outbox::EventRef) -> Failure {
    Failure::not_found(format!(
        "there is no event {event}; it may have been removed after its retention"
    ))
}

pub(crate) fn metrics(target: &Target) -> Result<Code, Failure> {
    let snapshot =
        store::status::scrape(&mut target.connect()?, &target.schema()?, METRICS_TIMEOUT)?;
    output::print(&snapshot.render())?;
    Ok(Code::Ok)
}

pub(crate) fn prune(target: &Target, args: &PruneArgs) -> Result<Code, Failure> {
    let schema = target.schema()?;
    let Some(retention) = args.retention.0 else {
        output::print("events are kept forever; nothing to remove\n")?;
        return Ok(Code::Ok);
    };
    let mut client = target.connect()?;
    store::check_schema(&mut client, &schema)?;
    if args.dry_run {
        let old = output::count(store::prunable(&mut client, &schema, retention)?);
        output::print(&format!("would remove {old}; nothing was changed\n"))?;
        return Ok(Code::Ok);
    }
    let (mut after, mut deleted) = (0, 0);
    loop {
        let pruned = store::prune(&mut client, &schema, retention, after)?;
        deleted += pruned.deleted;
        match pruned.next_after {
            Some(next) => after = next,
            None => break,
        }
    }
    output::print(&format!("removed {}\n", output::count(deleted)))?;
    Ok(Code::Ok)
}
