//! `check`: everything that `run` needs, one line each.

use std::time::{Duration, Instant};

use pg_outbox::store::status::{LAG_LIMIT, TOLERATED_OUTAGE};
use pg_outbox::{RelayConfig, Schema, store};
use postgres::Client;
use postgres::fallible_iterator::FallibleIterator;

use super::args::RelayArgs;
use super::broker::Broker;
use super::database::{self, Target, describe};
use super::failure::{Code, Failure};
use super::{output, settings};

const BROKER_TIMEOUT: Duration = Duration::from_secs(10);
const WAKE_UP_TIMEOUT: Duration = Duration::from_secs(3);
/// What the longer of the two metrics of deaths ahead looks ahead.
const DEATHS_AHEAD: Duration = Duration::from_secs(6 * 3600);

/// What is known of one thing.
enum Finding {
    Ok(String),
    /// Works, but less well.
    Warning(String),
    Failed(String),
    /// Could not be looked at, because of something before.
    Unknown(String),
}

pub(crate) fn check(target: &Target, args: &RelayArgs) -> Result<Code, Failure> {
    let mut report = Report { failed: false };
    let config = settings::relay_config(&target.connection.schema, &args.settings);
    report.line(
        "settings",
        &match &config {
            Ok(config) => Finding::Ok(format!(
                "relay {:?}, {} publishers, schema {:?}",
                config.relay_id(),
                config.workers(),
                config.schema()
            )),
            Err(failure) => Finding::Failed(failure.message.clone()),
        },
    )?;
    if let Ok(config) = &config {
        report.line("alerts", &check_alerts(config))?;
    }
    check_database(target, config.as_ref().ok(), &mut report)?;
    report.line("broker", &check_broker(args))?;
    Ok(if report.failed { Code::Unhealthy } else { Code::Ok })
}

struct Report {
    failed: bool,
}

impl Report {
    fn line(&mut self, name: &str, finding: &Finding) -> Result<(), Failure> {
        let (state, text) = match finding {
            Finding::Ok(text) => ("ok", text),
            Finding::Warning(text) => ("warn", text),
            Finding::Failed(text) => ("FAIL", text),
            Finding::Unknown(text) => ("?", text),
        };
        self.failed |= matches!(finding, Finding::Failed(_));
        output::print(&format!("{state:<5} {name:<10} {}\n", output::line(text)))
    }
}

fn check_database(
    target: &Target,
    config: Option<&RelayConfig>,
    report: &mut Report,
) -> Result<(), Failure> {
    let schema = target.schema()?;
    let connected =
        target.config().and_then(|to| Ok((database::connect(&to)?, database::connect(&to)?, to)));
    let (mut client, mut second, to) = match connected {
        Ok(connected) => connected,
        Err(failure) => {
            report.line("database", &Finding::Failed(failure.message))?;
            for name in ["schema", "writable", "pooler", "wake-ups"] {
                report.line(name, &Finding::Unknown("there is no connection to ask".into()))?;
            }
            return Ok(());
        }
    };
    let version = client.query_typed("SELECT current_setting('server_version')", &[]);
    report.line(
        "database",
        &match version.as_deref() {
            Ok([row, ..]) => Finding::Ok(format!(
                "PostgreSQL {} at {}",
                row.get::<_, &str>(0),
                database::address(&to)
            )),
            Ok([]) => Finding::Failed("the server does not say its version".into()),
            Err(error) => Finding::Failed(describe(error)),
        },
    )?;
    let found = store::check_schema(&mut client, &schema);
    report.line(
        "schema",
        &match &found {
            Ok(()) => {
                Finding::Ok(format!("{:?} has version {}", schema.name(), store::SCHEMA_VERSION))
            }
            Err(error) => Finding::Failed(error.to_string()),
        },
    )?;
    report.line("writable", &check_writable(&mut client, found.is_ok().then_some(&schema)))?;
    let pooled = store::is_pooled(&mut client, &mut second);
    report.line("pooler", &match &pooled {
        Ok(false) => Finding::Ok("none that pools transactions".into()),
        Ok(true) => Finding::Warning("a transaction pooler: works, at the cost of some speed; connect directly where you can".into()),
        Err(error) => Finding::Failed(error.to_string()),
    })?;
    let polling = config.map_or(String::new(), |config| {
        format!("; see --poll-interval of relay {:?}", config.relay_id())
    });
    report.line(
        "wake-ups",
        &match pooled {
            Ok(true) => Finding::Warning(format!(
                "LISTEN cannot work behind a transaction pooler: the relay polls{polling}"
            )),
            _ => check_wake_ups(&mut client, &mut second),
        },
    )
}

/// Whether these settings are those that the shipped rules (`monitoring/alerts.yml`) were made for.
fn check_alerts(config: &RelayConfig) -> Finding {
    let (policy, mut misfits) = (config.policy(), Vec::new());
    let needed = TOLERATED_OUTAGE + policy.backoff_cap;
    if needed > LAG_LIMIT {
        misfits.push(format!(
            "OutboxLagHigh pages above {LAG_LIMIT:?}, which one event in backoff can reach: with --backoff-cap {:?} let it be \
             {TOLERATED_OUTAGE:?} + {:?} = {needed:?}",
            policy.backoff_cap, policy.backoff_cap
        ));
    }
    if config.lease() > TOLERATED_OUTAGE {
        misfits.push(format!(
            "the events of a killed relay wait for its --lease of {:?}, longer than the {TOLERATED_OUTAGE:?} that OutboxLagHigh tolerates",
            config.lease()
        ));
    }
    if policy.transient_window <= DEATHS_AHEAD {
        misfits.push(format!(
            "OutboxDeathsAhead counts what dies within {DEATHS_AHEAD:?}, which with --transient-window {:?} is every event that fails: \
             leave that rule out",
            policy.transient_window
        ));
    }
    if misfits.is_empty() {
        Finding::Ok("the settings fit the rules in monitoring/alerts.yml".into())
    } else {
        Finding::Warning(misfits.join("; "))
    }
}

/// Writes a row, as the relay will, and takes it back.
fn check_writable(client: &mut Client, schema: Option<&Schema>) -> Finding {
    let read_only = "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool";
    match client.query_typed(read_only, &[]).as_deref() {
        Ok([row]) if row.get(0) => {
            return Finding::Failed("it is read-only (a standby, or a primary that was demoted); connect to the primary".into());
        }
        Err(error) => return Finding::Failed(describe(error)),
        Ok(_) => {}
    }
    let Some(schema) = schema else {
        return Finding::Unknown("there is no outbox to write to".into());
    };
    let name = schema.name().replace('"', "\"\"");
    let mut write = || -> Result<(), postgres::Error> {
        let mut transaction = client.transaction()?;
        transaction.batch_execute(&format!(
            "INSERT INTO \"{name}\".outbox_relay (relay_id, worker) VALUES ('pg-outbox check', -pg_backend_pid());
             UPDATE \"{name}\".outbox SET locked_by = NULL WHERE id = -1"
        ))?;
        transaction.rollback()
    };
    match write() {
        Ok(()) => Finding::Ok("a row was written and taken back".into()),
        Err(error) => Finding::Failed(format!(
            "{}; grant it with `pg-outbox migrate --grant-relay ROLE`",
            describe(&error)
        )),
    }
}

fn check_wake_ups(client: &mut Client, second: &mut Client) -> Finding {
    let channel = format!("outbox_check_{}", std::process::id());
    let mut arrived = || -> Result<bool, postgres::Error> {
        client.batch_execute(&format!("LISTEN {channel}"))?;
        second.batch_execute(&format!("NOTIFY {channel}"))?;
        let came = client.notifications().timeout_iter(WAKE_UP_TIMEOUT).next()?.is_some();
        client.batch_execute(&format!("UNLISTEN {channel}"))?;
        Ok(came)
    };
    match arrived() {
        Ok(true) => Finding::Ok("a NOTIFY arrived".into()),
        Ok(false) => Finding::Warning("no NOTIFY arrived: the relay polls".into()),
        Err(error) => Finding::Warning(format!("the relay polls: {}", describe(&error))),
    }
}

fn check_broker(args: &RelayArgs) -> Finding {
    let broker = match Broker::from_args(args) {
        Ok(broker) => broker,
        Err(failure) => return Finding::Failed(failure.message),
    };
    match broker.publisher().check(Instant::now() + BROKER_TIMEOUT) {
        Some(Ok(())) => Finding::Ok(format!("{} takes events", broker.name())),
        Some(Err(error)) => Finding::Failed(error.reason().to_owned()),
        None => Finding::Ok(format!("{}: only the first event will tell", broker.name())),
    }
}
