//! Where RabbitMQ is and how events are addressed there. No I/O; everything is checked by
//! [`RabbitMqConfigBuilder::build`].

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use lapin::uri::{AMQPScheme, AMQPUri};

use crate::error::Error;
use crate::event::Event;

/// Longest name that AMQP can carry (exchange, routing key, message type), in bytes.
pub(super) const MAX_SHORT_STRING_BYTES: usize = 255;

/// Query parameters of the URL that are read; every other is refused rather than ignored.
const QUERY_PARAMETERS: [&str; 2] = ["heartbeat", "frame_max"];

/// A checked set of settings for a [`RabbitMqPublisher`](super::RabbitMqPublisher). Clone it: each worker makes its
/// own publisher of it. Its `Debug` leaves the password out.
///
/// ```
/// use pg_outbox::publisher::rabbitmq::RabbitMqConfig;
/// let config = RabbitMqConfig::builder("amqp://relay:s3cret@rabbit.example/shop")
///     .exchange("events")
///     .routing_key("{aggregate_type}.{event_type}")
///     .build()
///     .unwrap();
/// assert!(!format!("{config:?}").contains("s3cret"));
/// ```
#[derive(Clone)]
pub struct RabbitMqConfig {
    pub(super) uri: AMQPUri,
    pub(super) exchange: String,
    pub(super) routing_key: RoutingKey,
    pub(super) mandatory: bool,
    pub(super) retry_unroutable: bool,
    pub(super) connect_timeout: Duration,
    pub(super) max_body_bytes: Option<usize>,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) connection_name: String,
}

impl RabbitMqConfig {
    /// Every setting at its default.
    ///
    /// The URL is `amqp://user:password@host:port/vhost`, or `amqps://` for TLS. Left out, the user and password are
    /// `guest`, the port 5672 (5671 for TLS) and the vhost `/`. Special characters are percent-encoded. The query
    /// may set `heartbeat` (seconds) and `frame_max` (bytes).
    pub fn builder(url: impl Into<String>) -> RabbitMqConfigBuilder {
        RabbitMqConfigBuilder {
            url: url.into(),
            exchange: "outbox".into(),
            routing_key: "{event_type}".into(),
            mandatory: true,
            retry_unroutable: false,
            connect_timeout: Duration::from_secs(5),
            heartbeat: None,
            max_body_bytes: None,
            ca_file: None,
            connection_name: "pg-outbox".into(),
        }
    }

    /// The broker's address as `host:port`, without credentials, for logs.
    pub fn address(&self) -> String {
        let authority = &self.uri.authority;
        if authority.host.contains(':') {
            format!("[{}]:{}", authority.host, authority.port)
        } else {
            format!("{}:{}", authority.host, authority.port)
        }
    }

    /// The exchange that events go to.
    pub fn exchange(&self) -> &str {
        &self.exchange
    }

    pub(super) fn uses_tls(&self) -> bool {
        self.uri.scheme == AMQPScheme::AMQPS
    }
}

impl fmt::Debug for RabbitMqConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqConfig")
            .field("address", &self.address())
            .field("tls", &self.uses_tls())
            .field("vhost", &self.uri.vhost)
            .field("exchange", &self.exchange)
            .field("routing_key", &self.routing_key.template)
            .field("mandatory", &self.mandatory)
            .field("retry_unroutable", &self.retry_unroutable)
            .field("connect_timeout", &self.connect_timeout)
            .field("max_body_bytes", &self.max_body_bytes)
            .field("ca_file", &self.ca_file)
            .field("connection_name", &self.connection_name)
            .finish_non_exhaustive()
    }
}

/// Collects settings; [`build`](Self::build) checks them.
#[derive(Clone)]
pub struct RabbitMqConfigBuilder {
    url: String,
    exchange: String,
    routing_key: String,
    mandatory: bool,
    retry_unroutable: bool,
    connect_timeout: Duration,
    heartbeat: Option<Duration>,
    max_body_bytes: Option<usize>,
    ca_file: Option<PathBuf>,
    connection_name: String,
}

impl RabbitMqConfigBuilder {
    /// The exchange that every event goes to. It must exist; the publisher declares nothing. Empty for RabbitMQ's
    /// default exchange, where the routing key is the name of a queue. Default: `outbox`.
    pub fn exchange(mut self, exchange: impl Into<String>) -> Self {
        self.exchange = exchange.into();
        self
    }

    /// The routing key, with `{aggregate_type}`, `{aggregate_id}` and `{event_type}` filled in for each event.
    /// Default: `{event_type}`.
    pub fn routing_key(mut self, template: impl Into<String>) -> Self {
        self.routing_key = template.into();
        self
    }

    /// Whether an event that reaches no queue comes back and fails as *unroutable*. Without it, RabbitMQ confirms
    /// such an event and drops it. Default: true.
    pub fn mandatory(mut self, mandatory: bool) -> Self {
        self.mandatory = mandatory;
        self
    }

    /// Whether an unroutable event is retried as a transient failure (for consumers that bind their own queues and
    /// may be late) instead of dead at once. Default: false.
    pub fn retry_unroutable(mut self, retry: bool) -> Self {
        self.retry_unroutable = retry;
        self
    }

    /// How long connecting may take, name resolution, TLS and login together; never longer than the deadline of the
    /// publish. 1 ms to 5 min. Default: 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How often both sides say that they are alive, in whole seconds; the broker may ask for less. A peer that is
    /// silent for about twice that long is given up. 1 s to 1 h. Default: what the URL says, else 30 s.
    pub fn heartbeat(mut self, heartbeat: Duration) -> Self {
        self.heartbeat = Some(heartbeat);
        self
    }

    /// The broker's `max_message_size`, in bytes, where it is known: larger payloads are refused without being sent.
    /// Default: none; the publisher learns the limit from the broker's refusal.
    pub fn max_body_bytes(mut self, bytes: usize) -> Self {
        self.max_body_bytes = Some(bytes);
        self
    }

    /// A PEM file of certificate authorities to trust for `amqps://` besides the system's. Read at each connect, so
    /// that it can be replaced. Default: none.
    pub fn ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.ca_file = Some(path.into());
        self
    }

    /// The name that RabbitMQ's own tools show for the connection. Default: `pg-outbox`.
    pub fn connection_name(mut self, name: impl Into<String>) -> Self {
        self.connection_name = name.into();
        self
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// Names the setting and what is accepted. An error about the URL never repeats any part of it.
    pub fn build(self) -> Result<RabbitMqConfig, Error> {
        let mut uri = parse_url(&self.url)?;
        if let Some(heartbeat) = self.heartbeat {
            uri.query.heartbeat = Some(whole_seconds("heartbeat", heartbeat)?);
        }
        uri.query.heartbeat.get_or_insert(30);
        check_name("exchange", &self.exchange)?;
        check_name("connection_name", &self.connection_name)?;
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(300));
        if self.connect_timeout < least || self.connect_timeout > most {
            return Err(Error::invalid_config(format!(
                "connect_timeout ({:?}) must be {least:?} to {most:?}",
                self.connect_timeout
            )));
        }
        if self.max_body_bytes == Some(0) {
            return Err(Error::invalid_config("max_body_bytes (0) must be at least 1"));
        }
        let config = RabbitMqConfig {
            uri,
            exchange: self.exchange,
            routing_key: RoutingKey::parse(self.routing_key)?,
            mandatory: self.mandatory,
            retry_unroutable: self.retry_unroutable,
            connect_timeout: self.connect_timeout,
            max_body_bytes: self.max_body_bytes,
            ca_file: self.ca_file,
            connection_name: self.connection_name,
        };
        if config.ca_file.is_some() && !config.uses_tls() {
            return Err(Error::invalid_config(
                "ca_file is set, but the RabbitMQ URL starts with amqp://, which is not encrypted; \
                 use amqps:// or leave ca_file out",
            ));
        }
        Ok(config)
    }
}

impl fmt::Debug for RabbitMqConfigBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL is not checked yet, so nothing can be said of where its password stands.
        f.debug_struct("RabbitMqConfigBuilder")
            .field("exchange", &self.exchange)
            .field("routing_key", &self.routing_key)
            .finish_non_exhaustive()
    }
}

fn check_name(what: &str, value: &str) -> Result<(), Error> {
    if value.len() > MAX_SHORT_STRING_BYTES || value.contains(char::is_control) {
        return Err(Error::invalid_config(format!(
            "{what} must have at most {MAX_SHORT_STRING_BYTES} bytes and no control characters"
        )));
    }
    Ok(())
}

fn whole_seconds(what: &str, value: Duration) -> Result<u16, Error> {
    let seconds = u16::try_from(value.as_secs()).unwrap_or(u16::MAX);
    if value.subsec_nanos() != 0 || !(1..=3600).contains(&seconds) {
        return Err(Error::invalid_config(format!(
            "{what} ({value:?}) must be whole seconds, 1s to 3600s"
        )));
    }
    Ok(seconds)
}

/// Reads the URL. What the client's own parser would get wrong is caught first: a password with a raw `/` makes it
/// take the rest of the password for the vhost, an IPv6 address becomes `localhost`, and `host/` becomes a vhost
/// without a name. No part of the URL is repeated in an error: until it is understood, any part may be the password.
fn parse_url(url: &str) -> Result<AMQPUri, Error> {
    let refuse = |why: &str| {
        Error::invalid_config(format!(
            "the RabbitMQ URL {why}; the form is amqp://user:password@host:5672/vhost (amqps:// for TLS), \
             with special characters in the user, password and vhost percent-encoded"
        ))
    };
    let rest = (url.strip_prefix("amqp://").or_else(|| url.strip_prefix("amqps://")))
        .ok_or_else(|| refuse("does not start with amqp:// or amqps://"))?;
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if tail.contains(['@', '#']) {
        return Err(refuse("has an `@` or `#` after the host"));
    }
    let (user_info, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    if host.is_empty() || host.starts_with(':') {
        return Err(refuse("names no host"));
    }
    if user_info.split(':').next().is_some_and(|user| user.contains('@')) {
        return Err(refuse("has an `@` in the user"));
    }
    let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
    let known = |pair: &str| QUERY_PARAMETERS.contains(&pair.split('=').next().unwrap_or(""));
    if !query.split('&').all(|pair| pair.is_empty() || known(pair)) {
        return Err(refuse("has a query parameter other than heartbeat and frame_max"));
    }
    let mut uri: AMQPUri = url.parse().map_err(|_| refuse("cannot be read"))?;
    if let Some((address, _)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        uri.authority.host = address.into();
    }
    if path == "/" {
        uri.vhost = "/".into();
    }
    if uri.vhost.len() > MAX_SHORT_STRING_BYTES {
        return Err(refuse("has a vhost of more than 255 bytes"));
    }
    Ok(uri)
}

/// A routing key with places for the event's own names.
#[derive(Clone)]
pub(super) struct RoutingKey {
    template: String,
    parts: Vec<Part>,
}

#[derive(Clone)]
enum Part {
    Text(String),
    AggregateType,
    AggregateId,
    EventType,
}

impl RoutingKey {
    fn parse(template: String) -> Result<Self, Error> {
        let refuse = |what: String| {
            Err(Error::invalid_config(format!(
                "routing_key {template:?} {what}; the placeholders are {{aggregate_type}}, {{aggregate_id}} \
                 and {{event_type}}"
            )))
        };
        let mut parts = Vec::new();
        let mut rest = template.as_str();
        while let Some(start) = rest.find(['{', '}']) {
            let (text, after) = rest.split_at(start);
            let Some((name, after)) = after.strip_prefix('{').and_then(|a| a.split_once('}'))
            else {
                return refuse("has a brace without its partner".into());
            };
            parts.push(Part::Text(text.into()));
            parts.push(match name {
                "aggregate_type" => Part::AggregateType,
                "aggregate_id" => Part::AggregateId,
                "event_type" => Part::EventType,
                unknown => return refuse(format!("has the unknown placeholder {{{unknown}}}")),
            });
            rest = after;
        }
        parts.push(Part::Text(rest.into()));
        let fixed =
            parts.iter().map(|p| if let Part::Text(t) = p { t.len() } else { 0 }).sum::<usize>();
        if fixed > MAX_SHORT_STRING_BYTES {
            return refuse(format!(
                "has more than {MAX_SHORT_STRING_BYTES} bytes besides its placeholders"
            ));
        }
        Ok(Self { template, parts })
    }

    pub(super) fn of(&self, event: &Event) -> String {
        let text = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::AggregateType => event.aggregate_type.clone(),
            Part::AggregateId => event.aggregate_id.clone(),
            Part::EventType => event.event_type.clone(),
        };
        self.parts.iter().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(builder: RabbitMqConfigBuilder) -> String {
        let error = builder.build().expect_err("the settings make no sense");
        assert!(error.is_invalid_config());
        error.to_string()
    }

    #[test]
    fn urls_are_read() {
        for (url, host, port, user, password, vhost) in [
            ("amqp://h", "h", 5672, "guest", "guest", "/"),
            ("amqp://h/", "h", 5672, "guest", "guest", "/"),
            ("amqp://u:q^G$F%JB@h/shop", "h", 5672, "u", "q^G$F%JB", "shop"),
            ("amqps://u:p%2Fw%40@10.0.0.1:99/%2f", "10.0.0.1", 99, "u", "p/w@", "/"),
            ("amqp://u:p:q@[::1]:5673/a%2Fb", "::1", 5673, "u", "p:q", "a/b"),
        ] {
            let uri = parse_url(url).expect(url);
            let who = &uri.authority.userinfo;
            let got = (&*uri.authority.host, uri.authority.port, &*who.username, &*who.password);
            assert_eq!(got, (host, port, user, password), "{url}");
            assert_eq!(uri.vhost, vhost, "{url}");
        }
        let config = RabbitMqConfig::builder("amqp://h?heartbeat=7").build().expect("heartbeat");
        assert_eq!(config.uri.query.heartbeat, Some(7));
        assert_eq!(
            RabbitMqConfig::builder("amqp://[::1]").build().expect("v6").address(),
            "[::1]:5672"
        );
    }

    #[test]
    fn a_secret_is_never_repeated() {
        for url in [
            "s3cret",
            "http://u:s3cret@h",
            "amqp://u:x/s3cret@h",
            "amqp://u:12/s3cret@h/v",
            "amqp://u:12?s3cret@h",
            "amqp://u:12#s3cret@h",
            "amqp://u:12#s3cret",
            "amqp://u:s3cret@",
            "amqp://u:s3cret@:5672",
            "amqp://u@s3cret:x@h",
            "amqp://u:s3cret@h:99999999",
            "amqp://u:s3cret@h o s t/",
            "amqp://u:s3cret@h/?heartbeat=s3cret",
            "amqp://h/?s3cret=1",
            "amqp://u:s3cret@h/%ff",
            "",
        ] {
            let builder = RabbitMqConfig::builder(url);
            assert!(!format!("{builder:?}").contains("s3cret"));
            let text = refused(builder);
            assert!(
                !text.contains("s3cret") && text.contains("amqp://user:password@host"),
                "{url}: {text}"
            );
        }
        for length in [1, 30] {
            let password = "s".repeat(length) + "3cret";
            let config = RabbitMqConfig::builder(format!("amqp://u:{password}@h/v"))
                .build()
                .expect("a good URL");
            let shown = format!("{config:?}{config:#?}");
            assert!(!shown.contains("3cret") && shown.contains("h:5672"), "{shown}");
            assert!(!shown.contains(&password.len().to_string()) || password.len() < 10, "{shown}");
        }
    }

    #[test]
    fn settings_are_explained() {
        let builder = || RabbitMqConfig::builder("amqp://h");
        for (settings, expected) in [
            (
                builder().routing_key("{agregate_type}"),
                "unknown placeholder {agregate_type}; the placeholders are",
            ),
            (builder().routing_key("a{event_type"), "a brace without its partner"),
            (builder().routing_key("a}"), "a brace without its partner"),
            (builder().routing_key("x".repeat(256)), "more than 255 bytes besides"),
            (builder().exchange("x".repeat(256)), "exchange must have at most 255 bytes"),
            (builder().exchange("a\nb"), "no control characters"),
            (
                builder().connect_timeout(Duration::ZERO),
                "connect_timeout (0ns) must be 1ms to 300s",
            ),
            (
                builder().heartbeat(Duration::from_millis(1500)),
                "heartbeat (1.5s) must be whole seconds",
            ),
            (builder().max_body_bytes(0), "max_body_bytes (0) must be at least 1"),
            (builder().ca_file("ca.pem"), "use amqps://"),
        ] {
            let text = refused(settings);
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn routing_keys_are_filled_in() {
        let event = Event::for_test(1, "42", "placed", b"");
        for (template, expected) in [
            ("{event_type}", "placed"),
            ("{aggregate_type}.{aggregate_id}.{event_type}", "test.42.placed"),
            ("shop.{event_type}.v1", "shop.placed.v1"),
            ("fixed", "fixed"),
            ("", ""),
        ] {
            assert_eq!(RoutingKey::parse(template.into()).expect(template).of(&event), expected);
        }
    }
}
