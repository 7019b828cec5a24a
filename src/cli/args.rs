//! Every argument of every command, as clap reads them; those of `run` and `check` are in [`relay`].

mod relay;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{ArgGroup, Args, Parser, Subcommand};
use pg_outbox::EventRef;
use uuid::Uuid;

use super::values::{self, Retention};
pub(crate) use relay::{Listen, RelayArgs, RunArgs, SettingsArgs};

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    the database, the broker or the relay failed
  2    an argument or a setting makes no sense
  3    nothing matched: no such event, no such dead letter
  4    status or check found trouble, or a canary was stopped by it
  130  run was interrupted a second time and left at once

Database:
  Name it in DATABASE_URL (postgres://user:password@host:5432/database, or
  host=... user=...). PGHOST, PGPORT, PGUSER, PGPASSWORD, PGDATABASE, PGAPPNAME,
  PGCONNECT_TIMEOUT, PGOPTIONS, PGHOSTADDR, PGTARGETSESSIONATTRS and PGSSLMODE
  fill in what the URL leaves out.
  A password on the command line can be read by every user of the machine: put
  it into the environment or a file.

Start here:
  export DATABASE_URL=postgres://me@localhost/shop
  pg-outbox migrate
  pg-outbox append order 42 order.placed '{\"total\":12}'
  pg-outbox run --broker stdout";

/// A transactional-outbox relay for PostgreSQL.
#[derive(Debug, Parser)]
#[command(name = "pg-outbox", version, about, after_help = EXIT_CODES, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) connection: Connection,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Database")]
pub(crate) struct Connection {
    /// The database [env: DATABASE_URL]. With a password, set the variable or use the file instead
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) database_url: Option<String>,
    /// A file whose first line is the database URL
    #[arg(long, global = true, value_name = "FILE", env = "PG_OUTBOX_DATABASE_URL_FILE")]
    pub(crate) database_url_file: Option<PathBuf>,
    /// The schema of the outbox
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        default_value = "outbox",
        env = "PG_OUTBOX_SCHEMA"
    )]
    pub(crate) schema: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create the outbox in the database, or upgrade it
    Migrate(MigrateArgs),
    /// Look whether everything that `run` needs is there
    Check(RelayArgs),
    /// Publish events until stopped
    Run(RunArgs),
    /// Append events, for trials and scripts
    Append(AppendArgs),
    /// Say how the outbox is doing
    Status(StatusArgs),
    /// Say why an event has not gone out
    Why(WhyArgs),
    /// Look at dead events, put them back, or close them
    DeadLetters(DeadLettersArgs),
    /// Print the metrics as Prometheus reads them
    Metrics,
    /// Remove old published and discarded events now
    Prune(PruneArgs),
    /// Watch the life of an outbox, in a schema of its own that is dropped at the end
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Running it again changes nothing, and several at once do no harm. Grants can be given again at any time.

Examples:
  pg-outbox migrate
  pg-outbox migrate --grant-writer shop --grant-relay relay --grant-monitor prometheus
  pg-outbox migrate --print | psql")]
pub(crate) struct MigrateArgs {
    /// Print the SQL instead of running it
    #[arg(long)]
    pub(crate) print: bool,
    /// Only say what would be done
    #[arg(long, conflicts_with = "print")]
    pub(crate) dry_run: bool,
    /// Let this role append events, and nothing else
    #[arg(long, value_name = "ROLE")]
    pub(crate) grant_writer: Vec<String>,
    /// Let this role run the relay
    #[arg(long, value_name = "ROLE")]
    pub(crate) grant_relay: Vec<String>,
    /// Let this role read the metrics, and nothing else
    #[arg(long, value_name = "ROLE")]
    pub(crate) grant_monitor: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
All events of one call go into one transaction: they are appended together or not at all. The event ids are printed,
one a line, in the order of the input.

With --stdin each line is a JSON object:
  aggregate_type, aggregate_id, event_type   text, required
  payload                                    text, carried as it is; or payload_hex for bytes
  content_type, event_id, not_before         text, optional
  headers                                    an object of texts, optional
A payload that is JSON stands in a string, so that not a byte of it is changed.

Examples:
  pg-outbox append order 42 order.placed '{\"total\":12}' --header traceparent=00-4bf92f3577b34da6-01
  pg-outbox append image 7 image.stored --content-type image/png --payload-file picture.png
  date | pg-outbox append clock 1 tick --content-type text/plain --payload-file -
  echo '{\"aggregate_type\":\"order\",\"aggregate_id\":\"42\",\"event_type\":\"placed\",\"payload\":\"{}\"}' | pg-outbox append --stdin")]
#[command(group = ArgGroup::new("input").required(true).args(["aggregate_type", "stdin"]))]
pub(crate) struct AppendArgs {
    /// Kind of aggregate, such as order
    #[arg(requires = "aggregate_id")]
    pub(crate) aggregate_type: Option<String>,
    /// Which one, such as 42
    #[arg(requires = "event_type")]
    pub(crate) aggregate_id: Option<String>,
    /// What happened, such as order.placed
    pub(crate) event_type: Option<String>,
    /// The payload, as text
    #[arg(conflicts_with = "payload_file")]
    pub(crate) payload: Option<String>,
    /// A file with the payload; `-` for standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) payload_file: Option<PathBuf>,
    /// The MIME type of the payload
    #[arg(long, value_name = "TYPE", default_value = "application/json")]
    pub(crate) content_type: String,
    /// A header that travels with the event; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = values::header)]
    pub(crate) header: Vec<(String, String)>,
    /// The event id, instead of a new one
    #[arg(long, value_name = "UUID")]
    pub(crate) event_id: Option<Uuid>,
    /// Not to go out before this: a time (2026-12-01T08:30:00Z) or a duration from now (5m)
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    pub(crate) not_before: Option<SystemTime>,
    /// Read events from standard input, a JSON object a line
    #[arg(long)]
    pub(crate) stdin: bool,
    /// Append, say how many, and take it back
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Exits with 4 unless everything is healthy, so that a script can ask.

Examples:
  pg-outbox status
  pg-outbox status --json | jq .metrics.pending_rows
  pg-outbox status --watch")]
pub(crate) struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Print it again every two seconds, until interrupted
    #[arg(long)]
    pub(crate) watch: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pg-outbox why 42
  pg-outbox why 01936f5e-8a2b-7c3d-9e4f-5a6b7c8d9e0f")]
pub(crate) struct WhyArgs {
    /// The outbox id (a number) or the event id (a UUID)
    #[arg(value_name = "ID")]
    pub(crate) event: EventRef,
}

#[derive(Debug, Args)]
pub(crate) struct DeadLettersArgs {
    #[command(subcommand)]
    pub(crate) command: DeadLettersCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeadLettersCommand {
    /// List them, oldest id first, with how many events each holds back
    List(ListArgs),
    /// Show everything of one event, dead or not
    Show(ShowArgs),
    /// Make them pending again, with a new budget
    Requeue(RequeueArgs),
    /// Close them for good, with a note; what they held goes out
    Discard(DiscardArgs),
}

/// Which dead letters; all that is given must hold.
#[derive(Debug, Args)]
#[command(next_help_heading = "Which")]
pub(crate) struct FilterArgs {
    /// Outbox ids or event ids
    #[arg(value_name = "ID")]
    pub(crate) events: Vec<EventRef>,
    /// Of aggregates of this type
    #[arg(long, value_name = "TYPE")]
    pub(crate) aggregate_type: Option<String>,
    /// Of this aggregate; needs --aggregate-type
    #[arg(long, value_name = "ID", requires = "aggregate_type")]
    pub(crate) aggregate_id: Option<String>,
    /// Of this event type
    #[arg(long, value_name = "TYPE")]
    pub(crate) event_type: Option<String>,
    /// Whose reason has this text in it
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// That died at least this long ago
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub(crate) older_than: Option<Duration>,
    /// That died less than this ago
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub(crate) younger_than: Option<Duration>,
    /// All of them
    #[arg(long, conflicts_with_all = ["events", "aggregate_type", "event_type", "reason", "older_than", "younger_than"])]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pg-outbox dead-letters list
  pg-outbox dead-letters list --group
  pg-outbox dead-letters list --reason 'schema registry' --older-than 1h --json")]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// One line for each reason, numbers aside, with a count
    #[arg(long)]
    pub(crate) group: bool,
    /// Most lines
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: u32,
    /// Go on after this outbox id, the last of the page before
    #[arg(long, value_name = "ID", conflicts_with = "group")]
    pub(crate) after: Option<i64>,
    /// Print JSON, an object a line
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// The outbox id (a number) or the event id (a UUID)
    #[arg(value_name = "ID")]
    pub(crate) event: EventRef,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Say which: by id, aggregate, type, reason or age, or --all. Exits with 3 when nothing matched.

Examples:
  pg-outbox dead-letters requeue 42
  pg-outbox dead-letters requeue --reason 'schema registry' --dry-run
  pg-outbox dead-letters requeue --aggregate-type order --aggregate-id 42
  pg-outbox dead-letters requeue --all --limit 1000
  pg-outbox dead-letters requeue --reason 'schema registry' --canary

With --canary one is put back first, then ten, a hundred, and a thousand at a time, each time only once those before are
published. It stops with 4 at the first that dies again, and puts no more back. It needs a living relay.")]
pub(crate) struct RequeueArgs {
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Most events, in the order of their ids [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
    /// One first, and the rest in steps while none dies again
    #[arg(long)]
    pub(crate) canary: bool,
    /// How long a step of --canary may take until all of it is published
    #[arg(long, value_name = "TIME", default_value = "2m", requires = "canary", value_parser = values::duration)]
    pub(crate) wait: Duration,
    /// Only say what would be put back
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Say which: by id, aggregate, type, reason or age, or --all. Exits with 3 when nothing matched.
A discarded event never goes out; the later events of its aggregate do.

Examples:
  pg-outbox dead-letters discard 42 --note 'order was cancelled by hand'
  pg-outbox dead-letters discard --event-type order.tested --note 'test data' --dry-run")]
pub(crate) struct DiscardArgs {
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Why; kept with the event
    #[arg(long, value_name = "TEXT")]
    pub(crate) note: String,
    /// Who; kept with the event [default: the user's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
    /// Only say what would be closed
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Pending and dead events are never removed. A running relay does this by itself, see run --retention.

Examples:
  pg-outbox prune
  pg-outbox prune --retention 24h --dry-run
  pg-outbox prune --retention 24h")]
pub(crate) struct PruneArgs {
    /// Remove what was published or discarded longer ago than this
    #[arg(long, value_name = "TIME", default_value = "7d", env = "PG_OUTBOX_RETENTION", value_parser = values::retention)]
    pub(crate) retention: Retention,
    /// Only say how many would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Three orders, a broker that times out twice and rejects one event. Takes about half a minute, and checks what it tells:
it exits with 1 if the story did not happen.

Examples:
  DATABASE_URL=postgres://me@localhost/postgres pg-outbox demo")]
pub(crate) struct DemoArgs {
    /// The schema that the demo makes and drops; --schema is not touched
    #[arg(long, value_name = "NAME", default_value = "outbox_demo")]
    pub(crate) demo_schema: String,
}
