//! The arguments that make a relay, each with its variable. The defaults are the library's; a test compares them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::cli::values::{self, Retention};

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
    #[arg(long, value_name = "TYPES", env = "PG_OUTBOX_ONLY", value_delimiter = ',', value_parser = values::name)]
    pub(crate) only: Vec<String>,
    /// Leave these aggregate types to other relays [default: none]
    #[arg(long, value_name = "TYPES", env = "PG_OUTBOX_EXCEPT", value_delimiter = ',', value_parser = values::name)]
    pub(crate) except: Vec<String>,
}
