//! The relay's settings, each with its unit, default and effect, and every relation between them.

use std::time::Duration;

use crate::error::Error;
use crate::event::MAX_AGGREGATE_TYPE_BYTES;
use crate::policy::Policy;

/// The schema that is used where none is named.
pub const DEFAULT_SCHEMA: &str = "outbox";

/// A publish must not hide a heartbeat for longer than the metrics wait for one.
pub(crate) const LONGEST_PUBLISH: Duration = Duration::from_secs(25);

/// A checked set of settings. Made by [`RelayConfig::builder`].
#[derive(Debug, Clone)]
pub struct RelayConfig {
    pub(crate) relay_id: String,
    pub(crate) schema: String,
    pub(crate) workers: usize,
    pub(crate) batch_size: usize,
    pub(crate) batch_bytes: usize,
    pub(crate) lease: Duration,
    pub(crate) publish_timeout: Duration,
    pub(crate) lease_margin: Duration,
    pub(crate) poll_interval: Duration,
    pub(crate) heartbeat_interval: Duration,
    pub(crate) wake_ups: bool,
    pub(crate) policy: Policy,
    pub(crate) probe_interval_cap: Duration,
    pub(crate) delete_on_publish: bool,
    pub(crate) retention: Option<Duration>,
    pub(crate) prune_interval: Duration,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) only: Vec<String>,
    pub(crate) except: Vec<String>,
}

impl RelayConfig {
    /// Every setting at its default. `relay_id` names this relay in the tables and must be stable across
    /// restarts (a host name, a slot), and no two running relays may share it.
    pub fn builder(relay_id: impl Into<String>) -> RelayConfigBuilder {
        RelayConfigBuilder(RelayConfig {
            relay_id: relay_id.into(),
            schema: DEFAULT_SCHEMA.into(),
            workers: 2,
            batch_size: 500,
            batch_bytes: 8 * 1024 * 1024,
            lease: Duration::from_secs(30),
            publish_timeout: Duration::from_secs(10),
            lease_margin: Duration::from_secs(5),
            poll_interval: Duration::from_secs(1),
            heartbeat_interval: Duration::from_secs(10),
            wake_ups: true,
            policy: Policy::default(),
            probe_interval_cap: Duration::from_secs(15),
            delete_on_publish: false,
            retention: Some(Duration::from_secs(7 * 24 * 3600)),
            prune_interval: Duration::from_secs(60),
            shutdown_timeout: Duration::from_secs(25),
            only: Vec::new(),
            except: Vec::new(),
        })
    }

    /// The relay's id.
    pub fn relay_id(&self) -> &str {
        &self.relay_id
    }

    /// The schema of the outbox, unquoted.
    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// How many threads publish.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// How long a claim is good for.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Budgets and backoff.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// How long a stopping relay may take.
    pub fn shutdown_timeout(&self) -> Duration {
        self.shutdown_timeout
    }
}

/// Collects settings; [`build`](Self::build) checks them.
#[derive(Debug, Clone)]
pub struct RelayConfigBuilder(RelayConfig);

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {
        $($(#[$doc])* pub fn $name(mut self, value: $type) -> Self { self.0.$name = value.into(); self })*
    };
}

impl RelayConfigBuilder {
    setters! {
        /// The schema of the outbox, unquoted. Default: `outbox`.
        schema: &str;
        /// Threads that publish, each with its own connection and publisher. 1 to 64. Default: 2.
        workers: usize;
        /// Most events in one claim. 1 to 10,000. Default: 500.
        batch_size: usize;
        /// Most payload bytes in one claim, so that memory is bounded; a larger event travels alone.
        /// At least 1,024. Default: 8 MiB.
        batch_bytes: usize;
        /// How long a claim is good for unless it is renewed. Also how long the events of a killed relay
        /// wait. Must be longer than `publish_timeout` + `lease_margin`. Default: 30 s.
        lease: Duration;
        /// Deadline of one call of the publisher; at most 25 s. Default: 10 s.
        publish_timeout: Duration;
        /// What must be left of the lease after a publish, to write its verdict. Default: 5 s.
        lease_margin: Duration;
        /// Longest time between two looks for events, and the latency where wake-ups cannot work.
        /// 1 ms to 1 min. Default: 1 s.
        poll_interval: Duration;
        /// How often an idle thread says in the table that it is alive. The metrics count a relay as alive
        /// for 30 s after its last beat, so at most 20 s. Default: 10 s.
        heartbeat_interval: Duration;
        /// Whether to ask writers for a NOTIFY while idle. Costs one connection. Off by itself behind a
        /// transaction pooler. Default: true.
        wake_ups: bool;
        /// Budgets and backoff. See [`Policy`].
        policy: Policy;
        /// Longest time between two probes of a broker that is down. Default: 15 s.
        probe_interval_cap: Duration;
        /// Deletes an event with its verdict instead of keeping it as published. Default: false.
        delete_on_publish: bool;
        /// How long published and discarded events are kept; `None` keeps them for ever. Dead and pending ones are
        /// never removed. Default: 7 days.
        retention: Option<Duration>;
        /// How often the relay looks for events to remove. Default: 1 min.
        prune_interval: Duration;
        /// How long a stopping relay may take to finish its publish, write verdicts and release the rest.
        /// Must be longer than `publish_timeout`. Default: 25 s.
        shutdown_timeout: Duration;
        /// Aggregate types that this relay serves; empty serves all. Default: empty.
        only: Vec<String>;
        /// Aggregate types that this relay leaves to others. Default: empty.
        except: Vec<String>;
    }

    /// Checks every setting and every relation.
    ///
    /// # Errors
    /// Names the settings, the relation and the values.
    pub fn build(self) -> Result<RelayConfig, Error> {
        let config = self.0;
        let refuse = |message: String| Err(Error::invalid_config(message));
        check_name("relay_id", &config.relay_id, 255)?;
        check_name("schema", &config.schema, 63)?;
        check_range("workers", config.workers, 1, 64)?;
        check_range("batch_size", config.batch_size, 1, 10_000)?;
        check_range("batch_bytes", config.batch_bytes, 1024, 1 << 30)?;
        let (milli, minute, day) =
            (Duration::from_millis(1), Duration::from_secs(60), Duration::from_secs(86_400));
        check_span("lease", config.lease, milli * 100, day)?;
        check_span("publish_timeout", config.publish_timeout, milli, day)?;
        check_span("lease_margin", config.lease_margin, milli, day)?;
        check_span("poll_interval", config.poll_interval, milli, minute)?;
        check_span("heartbeat_interval", config.heartbeat_interval, milli * 100, minute / 3)?;
        check_span("probe_interval_cap", config.probe_interval_cap, milli, minute * 10)?;
        check_span("prune_interval", config.prune_interval, milli, day)?;
        check_span("shutdown_timeout", config.shutdown_timeout, milli, day)?;
        check_span("transient_window", config.policy.transient_window, milli, day * 3650)?;
        check_span("backoff_base", config.policy.backoff_base, milli, day)?;
        check_span("backoff_cap", config.policy.backoff_cap, milli, day)?;
        let needed = config.publish_timeout + config.lease_margin;
        if config.lease <= needed {
            return refuse(format!(
                "lease ({:?}) must be longer than publish_timeout ({:?}) + lease_margin ({:?}) = {needed:?}, \
                 or a publish could outlive its lease and another relay would send the event again",
                config.lease, config.publish_timeout, config.lease_margin
            ));
        }
        if config.publish_timeout > LONGEST_PUBLISH {
            return refuse(format!(
                "publish_timeout ({:?}) must be at most {LONGEST_PUBLISH:?}: a thread that publishes cannot beat, and the \
                 metrics take a relay for dead that has not beaten for 30s",
                config.publish_timeout
            ));
        }
        if config.shutdown_timeout <= config.publish_timeout {
            return refuse(format!(
                "shutdown_timeout ({:?}) must be longer than publish_timeout ({:?}), \
                 or a stop could not wait for the publish in progress",
                config.shutdown_timeout, config.publish_timeout
            ));
        }
        if config.policy.unexplained_budget < 2 {
            return refuse(format!(
                "unexplained_budget ({}) must be at least 2: with 1, a crash would kill every event that was \
                 claimed together with the one that caused it",
                config.policy.unexplained_budget
            ));
        }
        if config.policy.backoff_base > config.policy.backoff_cap {
            return refuse(format!(
                "backoff_base ({:?}) must not be longer than backoff_cap ({:?})",
                config.policy.backoff_base, config.policy.backoff_cap
            ));
        }
        if config.policy.transient_window <= config.policy.backoff_cap {
            return refuse(format!(
                "transient_window ({:?}) must be longer than backoff_cap ({:?}), \
                 or one wait could use it up",
                config.policy.transient_window, config.policy.backoff_cap
            ));
        }
        if !config.only.is_empty() && !config.except.is_empty() {
            return refuse("only and except exclude each other; set one of them".into());
        }
        for (name, types) in [("only", &config.only), ("except", &config.except)] {
            for aggregate_type in types {
                check_name(name, aggregate_type, MAX_AGGREGATE_TYPE_BYTES)?;
            }
        }
        Ok(config)
    }
}

fn check_name(name: &str, value: &str, limit: usize) -> Result<(), Error> {
    if value.is_empty() || value.len() > limit || value.contains(|c: char| c.is_control()) {
        return Err(Error::invalid_config(format!(
            "{name} ({value:?}) must have 1 to {limit} bytes and no control characters"
        )));
    }
    Ok(())
}

fn check_range(name: &str, value: usize, least: usize, most: usize) -> Result<(), Error> {
    if value < least || value > most {
        return Err(Error::invalid_config(format!("{name} ({value}) must be {least} to {most}")));
    }
    Ok(())
}

fn check_span(name: &str, value: Duration, least: Duration, most: Duration) -> Result<(), Error> {
    if value < least || value > most {
        return Err(Error::invalid_config(format!(
            "{name} ({value:?}) must be {least:?} to {most:?}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn refused(builder: RelayConfigBuilder) -> String {
        let error = builder.build().expect_err("the settings make no sense");
        assert!(error.is_invalid_config());
        error.to_string()
    }

    fn builder() -> RelayConfigBuilder {
        RelayConfig::builder("relay-a")
    }

    #[test]
    fn defaults_are_sane() {
        builder().build().expect("defaults");
    }

    #[test]
    fn the_lease_outlasts_a_publish() {
        let text = refused(builder().lease(15 * SECOND));
        assert!(text.contains(
            "lease (15s) must be longer than publish_timeout (10s) + lease_margin (5s) = 15s"
        ));
        builder().lease(15 * SECOND + Duration::from_millis(1)).build().expect("just enough");
    }

    #[test]
    fn each_relation_is_explained() {
        let policy = |change: fn(&mut Policy)| {
            let mut policy = Policy::default();
            change(&mut policy);
            builder().policy(policy)
        };
        for (settings, expected) in [
            (
                builder().shutdown_timeout(10 * SECOND),
                "shutdown_timeout (10s) must be longer than publish_timeout",
            ),
            (policy(|p| p.unexplained_budget = 1), "unexplained_budget (1) must be at least 2"),
            (
                policy(|p| p.backoff_base = 301 * SECOND),
                "backoff_base (301s) must not be longer than backoff_cap",
            ),
            (
                policy(|p| p.transient_window = 300 * SECOND),
                "transient_window (300s) must be longer",
            ),
            (
                builder().only(vec!["a".into()]).except(vec!["b".into()]),
                "only and except exclude each other",
            ),
            (
                builder().only(vec!["a".into(), String::new()]),
                "only (\"\") must have 1 to 255 bytes",
            ),
            (builder().except(vec!["a\n".into()]), "except (\"a\\n\") must have 1 to 255 bytes"),
            (
                builder().publish_timeout(26 * SECOND).lease(60 * SECOND),
                "publish_timeout (26s) must be at most 25s",
            ),
            (RelayConfig::builder(""), "relay_id (\"\") must have 1 to 255 bytes"),
            (builder().schema(&"x".repeat(64)), "must have 1 to 63 bytes"),
            (builder().workers(0), "workers (0) must be 1 to 64"),
            (builder().batch_size(10_001), "batch_size (10001) must be 1 to 10000"),
            (builder().batch_bytes(1), "batch_bytes (1) must be 1024"),
            (builder().poll_interval(Duration::ZERO), "poll_interval (0ns) must be 1ms to 60s"),
            (
                builder().heartbeat_interval(21 * SECOND),
                "heartbeat_interval (21s) must be 100ms to 20s",
            ),
        ] {
            let text = refused(settings);
            assert!(text.contains(expected), "{text}");
        }
    }
}
