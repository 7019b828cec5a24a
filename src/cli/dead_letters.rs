//! `dead-letters`: what died, why, and what to do about it.

use pg_outbox::store::dead_letters::{self, DeadLetter, EventDetails, Filter, ReasonGroup};
use postgres::Client;
use serde_json::{Value, json};
use uuid::Uuid;

use super::args::{DeadLettersCommand, DiscardArgs, FilterArgs, ListArgs, RequeueArgs, ShowArgs};
use super::canary::Canary;
use super::database::Target;
use super::failure::{Code, Failure};
use super::output::{self, print};
use super::status::{age, at, no_event};

/// Longest cell of a table.
const WIDTH: usize = 60;
/// Lines that a dry run shows.
const DRY_RUN_LINES: u32 = 100;

pub(crate) fn dead_letters(target: &Target, command: DeadLettersCommand) -> Result<Code, Failure> {
    match command {
        DeadLettersCommand::List(args) => list(target, &args),
        DeadLettersCommand::Show(args) => show(target, &args),
        DeadLettersCommand::Requeue(args) => requeue(target, &args),
        DeadLettersCommand::Discard(args) => discard(target, &args),
    }
}

/// The filter; `None` where nothing was named.
fn filter(args: &FilterArgs) -> Result<Option<Filter>, Failure> {
    if args.all {
        return Ok(Some(Filter::everything()));
    }
    let mut named = false;
    let mut filter = Filter::builder();
    if !args.events.is_empty() {
        (filter, named) = (filter.events(args.events.iter().copied()), true);
    }
    match (&args.aggregate_type, &args.aggregate_id) {
        (Some(kind), Some(id)) => (filter, named) = (filter.aggregate(kind, id), true),
        (Some(kind), None) => (filter, named) = (filter.aggregate_type(kind), true),
        _ => {}
    }
    if let Some(kind) = &args.event_type {
        (filter, named) = (filter.event_type(kind), true);
    }
    if let Some(reason) = &args.reason {
        (filter, named) = (filter.reason(reason), true);
    }
    if let Some(age) = args.older_than {
        (filter, named) = (filter.older_than(age), true);
    }
    if let Some(age) = args.younger_than {
        (filter, named) = (filter.younger_than(age), true);
    }
    if named { Ok(Some(filter.build()?)) } else { Ok(None) }
}

fn required(args: &FilterArgs) -> Result<Filter, Failure> {
    filter(args)?.ok_or_else(|| {
        Failure::usage("say which dead letters: by id, --aggregate-type, --event-type, --reason, --older-than, --younger-than, or --all")
    })
}

fn list(target: &Target, args: &ListArgs) -> Result<Code, Failure> {
    let (schema, filter) =
        (target.schema()?, filter(&args.filter)?.unwrap_or_else(Filter::everything));
    let mut client = target.connect()?;
    let text = if args.group {
        let mut groups = dead_letters::groups(&mut client, &schema, &filter)?;
        groups.truncate(args.limit as usize);
        if args.json { json_lines(groups.iter().map(group_json)) } else { group_table(&groups) }
    } else {
        let letters = dead_letters::list(&mut client, &schema, &filter, args.after, args.limit)?;
        let is_full = letters.len() == args.limit as usize;
        let next = letters.last().filter(|_| is_full && !args.json).map(|last| last.id);
        let mut text = if args.json {
            json_lines(letters.iter().map(letter_json))
        } else {
            letter_table(&letters)
        };
        if let Some(last) = next {
            text.push_str(&format!("There may be more: go on with --after {last}\n"));
        }
        text
    };
    let empty = text.is_empty() && !args.json;
    print(if empty { "no dead letters\n" } else { &text })?;
    Ok(Code::Ok)
}

fn json_lines(values: impl Iterator<Item = Value>) -> String {
    values.map(|value| format!("{value}\n")).collect()
}

/// One line an event; nothing without any.
pub(super) fn letter_table(letters: &[DeadLetter]) -> String {
    if letters.is_empty() {
        return String::new();
    }
    let rows: Vec<_> = letters
        .iter()
        .map(|letter| {
            let since = letter.held_since.map(|since| format!(" for {}", age(since.seconds_ago)));
            [
                letter.id.to_string(),
                format!("{} {}", letter.aggregate_type, letter.aggregate_id),
                letter.event_type.clone(),
                format!("{} ago", age(letter.died.seconds_ago)),
                letter.attempts.to_string(),
                format!("{}{}", letter.held, since.unwrap_or_default()),
                letter.reason.clone(),
            ]
        })
        .collect();
    output::table(["ID", "AGGREGATE", "EVENT", "DIED", "ATTEMPTS", "HOLDS", "REASON"], &rows, WIDTH)
}

fn letter_json(letter: &DeadLetter) -> Value {
    json!({
        "id": letter.id, "event_id": letter.event_id.to_string(), "aggregate_type": letter.aggregate_type,
        "aggregate_id": letter.aggregate_id, "event_type": letter.event_type, "reason": letter.reason,
        "attempts": letter.attempts, "died_at": at(Some(letter.died)), "created_at": at(Some(letter.created)),
        "held": letter.held, "held_since": at(letter.held_since),
    })
}

fn group_table(groups: &[ReasonGroup]) -> String {
    if groups.is_empty() {
        return String::new();
    }
    let rows: Vec<_> = groups
        .iter()
        .map(|group| {
            [
                group.count.to_string(),
                group.held.to_string(),
                format!("{} ago", age(group.oldest.seconds_ago)),
                group.example.to_string(),
                group.reason.clone(),
            ]
        })
        .collect();
    output::table(["DEAD", "HOLD", "OLDEST DIED", "EXAMPLE", "REASON"], &rows, WIDTH + 20)
}

fn group_json(group: &ReasonGroup) -> Value {
    json!({
        "reason": group.reason, "count": group.count, "held": group.held, "oldest_died_at": at(Some(group.oldest)),
        "example": group.example,
    })
}

fn show(target: &Target, args: &ShowArgs) -> Result<Code, Failure> {
    let details = dead_letters::show(&mut target.connect()?, &target.schema()?, &args.event)?;
    let details = details.ok_or_else(|| no_event(&args.event))?;
    print(&if args.json {
        format!("{}\n", details_json(&details))
    } else {
        details_text(&details)
    })?;
    Ok(Code::Ok)
}

fn details_json(e: &EventDetails) -> Value {
    let mut value = json!({
        "id": e.id, "event_id": e.event_id.to_string(), "aggregate_type": e.aggregate_type, "aggregate_id": e.aggregate_id,
        "event_type": e.event_type, "status": e.status, "content_type": e.content_type, "headers": e.headers,
        "attempts": e.attempts, "unexplained_failures": e.unexplained_failures, "in_doubt": e.in_doubt,
        "last_error": e.last_error, "discard_note": e.discard_note, "locked_by": e.locked_by, "lease_id": e.lease_id,
        "locked_until": at(e.locked_until), "created_at": at(Some(e.created)), "not_before": at(e.not_before),
        "next_attempt_at": at(Some(e.next_attempt)), "retry_since": at(e.retry_since), "published_at": at(e.published),
        "died_at": at(e.died), "discarded_at": at(e.discarded),
    });
    let (name, payload) = output::payload(&e.payload);
    value[name] = json!(payload);
    value
}

fn details_text(e: &EventDetails) -> String {
    let times = [
        ("appended", Some(e.created)),
        ("not before", e.not_before),
        ("next attempt", Some(e.next_attempt)),
        ("failing since", e.retry_since),
        ("leased until", e.locked_until),
        ("published", e.published),
        ("died", e.died),
        ("discarded", e.discarded),
    ];
    let texts = [
        ("last error", &e.last_error),
        ("discarded by", &e.discard_note),
        ("leased by", &e.locked_by),
    ];
    let (form, payload) = output::payload(&e.payload);
    let mut fields = vec![
        ("id", e.id.to_string()),
        ("event id", e.event_id.to_string()),
        ("aggregate", format!("{} {}", e.aggregate_type, e.aggregate_id)),
        ("event", e.event_type.clone()),
        ("status", e.status.clone()),
        (
            "attempts",
            format!("{}, of them unexplained failures: {}", e.attempts, e.unexplained_failures),
        ),
        (
            "may be known",
            if e.in_doubt {
                "yes: an attempt may have reached the broker".into()
            } else {
                "no".into()
            },
        ),
    ];
    fields.extend(times.into_iter().filter_map(|(name, time)| Some((name, time?.to_string()))));
    fields.extend(texts.into_iter().filter_map(|(name, text)| Some((name, text.clone()?))));
    fields.extend(e.headers.iter().map(|(name, value)| ("header", format!("{name}: {value}"))));
    fields.push(("content type", e.content_type.clone()));
    fields.push(if form == "payload" { ("payload", payload) } else { ("payload hex", payload) });
    fields.iter().map(|(name, value)| format!("{name:14}{}\n", output::line(value))).collect()
}

fn requeue(target: &Target, args: &RequeueArgs) -> Result<Code, Failure> {
    let (schema, filter) = (target.schema()?, required(&args.filter)?);
    let mut client = target.connect()?;
    if args.dry_run {
        return dry_run(&mut client, target, &filter, args.limit, "requeued");
    }
    if args.canary {
        let (limit, patience) = (args.limit, args.wait);
        return Canary { schema: &schema, filter: &filter, limit, patience }.requeue(&mut client);
    }
    let ids = dead_letters::requeue(&mut client, &schema, &filter, args.limit)?;
    report(&ids, "requeued")
}

fn discard(target: &Target, args: &DiscardArgs) -> Result<Code, Failure> {
    let (schema, filter) = (target.schema()?, required(&args.filter)?);
    let by = args.by.clone().or_else(|| std::env::var("USER").ok()).filter(|by| !by.is_empty());
    let by = by.ok_or_else(|| Failure::usage("who discards is not known; give --by"))?;
    let mut client = target.connect()?;
    if args.dry_run {
        return dry_run(&mut client, target, &filter, None, "discarded");
    }
    let ids = dead_letters::discard(&mut client, &schema, &filter, &by, &args.note)?;
    report(&ids, "discarded")
}

fn report(ids: &[Uuid], done: &str) -> Result<Code, Failure> {
    if ids.is_empty() {
        return Err(Failure::not_found(format!("no dead letter matched; nothing was {done}")));
    }
    let list: String = ids.iter().map(|id| format!("{id}\n")).collect();
    print(&format!("{list}{done} {}\n", output::count(ids.len() as u64)))?;
    Ok(Code::Ok)
}

fn dry_run(
    client: &mut Client,
    target: &Target,
    filter: &Filter,
    limit: Option<u32>,
    done: &str,
) -> Result<Code, Failure> {
    let schema = target.schema()?;
    let shown = limit.unwrap_or(DRY_RUN_LINES).min(DRY_RUN_LINES);
    let letters = dead_letters::list(client, &schema, filter, None, shown)?;
    if letters.is_empty() {
        return Err(Failure::not_found(format!("no dead letter matches; nothing would be {done}")));
    }
    let all: u64 =
        dead_letters::groups(client, &schema, filter)?.iter().map(|group| group.count).sum();
    let would = all.min(limit.map_or(u64::MAX, u64::from));
    let more = if would > letters.len() as u64 { "...\n" } else { "" };
    print(&format!(
        "{}{more}would have {done} {}; nothing was changed\n",
        letter_table(&letters),
        output::count(would)
    ))?;
    Ok(Code::Ok)
}
