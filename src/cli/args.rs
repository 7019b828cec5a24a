//! Every argument of every command, as clap reads them. The defaults of `run` are the library's; a test compares them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{ArgGroup, Args, Parser, Subcommand};
use pg_outbox::EventRef;
use uuid::Uuid;

use super::values::{self, Retention};

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    the database, the broker or the relay failed
  2    an argument or a setting makes no sense
  3    nothing matched: no such event, no such dead letter
  4    status or check found trouble
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

/// Everything that makes a relay.
#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// Where events go: `stdout`, or amqp://host (amqps:// for TLS). With a password, set the variable or use the file
    #[arg(long, value_name = "URL", env = "PG_OUTBOX_BROKER")]
    pub(crate) broker: Option<String>,
    /// A file whose first line is the broker's URL
    #[arg(long, value_name = "FILE", env = "PG_OUTBOX_BROKER_FILE")]
    pub(crate) broker_file: Option<PathBuf>,
    #[cfg(feature = "rabbitmq")]
    #[command(flatten)]
    pub(crate) rabbitmq: RabbitMqArgs,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Stopping: the first SIGTERM, SIGINT or SIGHUP stops claiming, finishes the publish in progress, writes its verdicts,
gives the rest back and exits with 0, within --shutdown-timeout. The second leaves at once, with 130.

The log goes to standard error; RUST_LOG overrides --log-level (RUST_LOG=warn,pg_outbox=debug).
Durations need a unit: 500ms, 30s, 5m, 24h, 7d. An unknown PG_OUTBOX_ variable stops the command.

Examples:
  pg-outbox run --broker stdout
  PG_OUTBOX_BROKER=amqp://user:password@rabbit/shop pg-outbox run --exchange shop --routing-key '{event_type}'
  pg-outbox run --broker-file /etc/pg-outbox/broker --listen 127.0.0.1:9718 --workers 4
  curl http://127.0.0.1:9718/metrics")]
pub(crate) struct RunArgs {
    /// Where /metrics, /healthz and /readyz are served, or `off`
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9718", env = "PG_OUTBOX_LISTEN",
          value_parser = listen)]
    pub(crate) listen: Listen,
    /// How much is logged: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info", env = "PG_OUTBOX_LOG_LEVEL",
          value_parser = ["off", "error", "warn", "info", "debug", "trace"], hide_possible_values = true)]
    pub(crate) log_level: String,
    #[command(flatten)]
    pub(crate) relay: RelayArgs,
}

/// Where to serve; `None` is nowhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listen(pub(crate) Option<SocketAddr>);

fn listen(text: &str) -> Result<Listen, String> {
    if text.eq_ignore_ascii_case("off") {
        return Ok(Listen(None));
    }
    let addr = text
        .parse()
        .map_err(|_| "an address is written as 127.0.0.1:9718 or [::1]:9718; or off")?;
    Ok(Listen(Some(addr)))
}

#[cfg(feature = "rabbitmq")]
#[derive(Debug, Args)]
#[command(next_help_heading = "RabbitMQ")]
pub(crate) struct RabbitMqArgs {
    /// The exchange, which must exist; empty for the default exchange
    #[arg(long, value_name = "NAME", default_value = "outbox", env = "PG_OUTBOX_EXCHANGE")]
    pub(crate) exchange: String,
    /// The routing key, with {aggregate_type}, {aggregate_id} and {event_type} filled in
    #[arg(
        long,
        value_name = "TEMPLATE",
        default_value = "{event_type}",
        env = "PG_OUTBOX_ROUTING_KEY"
    )]
    pub(crate) routing_key: String,
    /// Fail an event that reaches no queue; false lets RabbitMQ drop it
    #[arg(long, value_name = "BOOL", default_value = "true", env = "PG_OUTBOX_MANDATORY", value_parser = values::switch,
          action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub(crate) mandatory: bool,
    /// Retry an event that reaches no queue, instead of marking it as dead
    #[arg(long, value_name = "BOOL", default_value = "false", env = "PG_OUTBOX_RETRY_UNROUTABLE", value_parser = values::switch,
          action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub(crate) retry_unroutable: bool,
    /// How long connecting to the broker may take
    #[arg(long, value_name = "TIME", default_value = "5s", env = "PG_OUTBOX_BROKER_CONNECT_TIMEOUT", value_parser = values::duration)]
    pub(crate) broker_connect_timeout: Duration,
    /// How often both sides say that they are alive; by default what the URL says, else 30s
    #[arg(long, value_name = "TIME", env = "PG_OUTBOX_BROKER_HEARTBEAT", value_parser = values::duration)]
    pub(crate) broker_heartbeat: Option<Duration>,
    /// The broker's max_message_size where it is known, so that larger events are not sent
    #[arg(long, value_name = "BYTES", env = "PG_OUTBOX_MAX_BODY_BYTES", value_parser = values::bytes)]
    pub(crate) max_body_bytes: Option<usize>,
    /// A PEM file of certificate authorities to trust besides the system's
    #[arg(long, value_name = "FILE", env = "PG_OUTBOX_BROKER_CA_FILE")]
    pub(crate) broker_ca_file: Option<PathBuf>,
}

/// The settings of `RelayConfig`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Relay")]
pub(crate) struct SettingsArgs {
    /// The name of this relay: stable across restarts, and its own [default: the host's name]
    #[arg(long, value_name = "NAME", env = "PG_OUTBOX_RELAY_ID")]
    pub(crate) relay_id: Option<String>,
    /// Threads that publish, each with its own connection
    #[arg(long, value_name = "N", default_value = "2", env = "PG_OUTBOX_WORKERS")]
    pub(crate) workers: usize,
    /// Most events in one claim
    #[arg(long, value_name = "N", default_value = "500", env = "PG_OUTBOX_BATCH_SIZE")]
    pub(crate) batch_size: usize,
    /// Most payload bytes in one claim; a larger event travels alone
    #[arg(long, value_name = "BYTES", default_value = "8MiB", env = "PG_OUTBOX_BATCH_BYTES", value_parser = values::bytes)]
    pub(crate) batch_bytes: usize,
    /// How long a claim is good for; longer than --publish-timeout and --lease-margin together
    #[arg(long, value_name = "TIME", default_value = "30s", env = "PG_OUTBOX_LEASE", value_parser = values::duration)]
    pub(crate) lease: Duration,
    /// Deadline of one call of the broker
    #[arg(long, value_name = "TIME", default_value = "10s", env = "PG_OUTBOX_PUBLISH_TIMEOUT", value_parser = values::duration)]
    pub(crate) publish_timeout: Duration,
    /// What must be left of the lease to write a verdict
    #[arg(long, value_name = "TIME", default_value = "5s", env = "PG_OUTBOX_LEASE_MARGIN", value_parser = values::duration)]
    pub(crate) lease_margin: Duration,
    /// Longest time between two looks for events
    #[arg(long, value_name = "TIME", default_value = "1s", env = "PG_OUTBOX_POLL_INTERVAL", value_parser = values::duration)]
    pub(crate) poll_interval: Duration,
    /// How often an idle thread says that it is alive; at most 20s
    #[arg(long, value_name = "TIME", default_value = "10s", env = "PG_OUTBOX_HEARTBEAT_INTERVAL", value_parser = values::duration)]
    pub(crate) heartbeat_interval: Duration,
    /// Whether writers wake an idle relay by NOTIFY; costs one connection
    #[arg(long, value_name = "BOOL", default_value = "true", env = "PG_OUTBOX_WAKE_UPS", value_parser = values::switch,
          action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub(crate) wake_ups: bool,
    /// How long an event may fail for transient reasons, from its first failure, before it is dead
    #[arg(long, value_name = "TIME", default_value = "24h", env = "PG_OUTBOX_TRANSIENT_WINDOW", value_parser = values::duration)]
    pub(crate) transient_window: Duration,
    /// How many unexplained failures kill an event; at least 2
    #[arg(long, value_name = "N", default_value = "3", env = "PG_OUTBOX_UNEXPLAINED_BUDGET")]
    pub(crate) unexplained_budget: u32,
    /// Ceiling of the first wait between two attempts; it doubles with each
    #[arg(long, value_name = "TIME", default_value = "1s", env = "PG_OUTBOX_BACKOFF_BASE", value_parser = values::duration)]
    pub(crate) backoff_base: Duration,
    /// Ceiling of every wait between two attempts
    #[arg(long, value_name = "TIME", default_value = "5m", env = "PG_OUTBOX_BACKOFF_CAP", value_parser = values::duration)]
    pub(crate) backoff_cap: Duration,
    /// Longest time between two probes of a broker that is down
    #[arg(long, value_name = "TIME", default_value = "15s", env = "PG_OUTBOX_PROBE_INTERVAL_CAP", value_parser = values::duration)]
    pub(crate) probe_interval_cap: Duration,
    /// Delete an event with its verdict instead of keeping it as published
    #[arg(long, value_name = "BOOL", default_value = "false", env = "PG_OUTBOX_DELETE_ON_PUBLISH", value_parser = values::switch,
          action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub(crate) delete_on_publish: bool,
    /// How long published and discarded events are kept, or `forever`
    #[arg(long, value_name = "TIME", default_value = "7d", env = "PG_OUTBOX_RETENTION", value_parser = values::retention)]
    pub(crate) retention: Retention,
    /// How often old events are looked for
    #[arg(long, value_name = "TIME", default_value = "1m", env = "PG_OUTBOX_PRUNE_INTERVAL", value_parser = values::duration)]
    pub(crate) prune_interval: Duration,
    /// How long a stop may take; longer than --publish-timeout
    #[arg(long, value_name = "TIME", default_value = "25s", env = "PG_OUTBOX_SHUTDOWN_TIMEOUT", value_parser = values::duration)]
    pub(crate) shutdown_timeout: Duration,
    /// Serve only these aggregate types, separated by commas [default: all]
    #[arg(long, value_name = "TYPES", env = "PG_OUTBOX_ONLY", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Leave these aggregate types to other relays [default: none]
    #[arg(long, value_name = "TYPES", env = "PG_OUTBOX_EXCEPT", value_delimiter = ',')]
    pub(crate) except: Vec<String>,
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
  pg-outbox dead-letters requeue --all --limit 1000")]
pub(crate) struct RequeueArgs {
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Most events, in the order of their ids [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
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
  pg-outbox prune --retention 24h")]
pub(crate) struct PruneArgs {
    /// Remove what was published or discarded longer ago than this
    #[arg(long, value_name = "TIME", default_value = "7d", env = "PG_OUTBOX_RETENTION", value_parser = values::retention)]
    pub(crate) retention: Retention,
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
