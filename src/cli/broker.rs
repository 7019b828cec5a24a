//! The broker that the settings name, and publishers for it.

use pg_outbox::{Publisher, StdoutPublisher};

use super::args::RelayArgs;
use super::database::first_line;
use super::failure::Failure;

/// A broker whose settings were checked.
#[derive(Debug, Clone)]
pub(crate) enum Broker {
    Stdout,
    #[cfg(feature = "rabbitmq")]
    RabbitMq(Box<pg_outbox::publisher::rabbitmq::RabbitMqConfig>),
}

impl Broker {
    /// The broker of `--broker`, `--broker-file` or their variables.
    pub(crate) fn from_args(args: &RelayArgs) -> Result<Self, Failure> {
        let (name, url) = match (&args.broker, &args.broker_file) {
            (Some(_), Some(_)) => {
                return Err(Failure::usage(
                    "both --broker and --broker-file are set (or their variables); set one of them",
                ));
            }
            (Some(url), None) => ("--broker (PG_OUTBOX_BROKER)", url.clone()),
            (None, Some(file)) => ("the URL in --broker-file", first_line(file)?),
            (None, None) => {
                return Err(Failure::usage(
                    "no broker is named; set --broker or PG_OUTBOX_BROKER to stdout, or to amqp://user:password@host/vhost",
                ));
            }
        };
        let url = url.trim();
        if url == "stdout" {
            return Ok(Self::Stdout);
        }
        if url.starts_with("amqp://") || url.starts_with("amqps://") {
            warn_of_password(args, url);
            return Self::rabbitmq(args, url);
        }
        // The value may be a URL with a password and a spelling mistake: it is not repeated.
        Err(Failure::usage(format!("{name} must be stdout, amqp://... or amqps://...")))
    }

    #[cfg(feature = "rabbitmq")]
    fn rabbitmq(args: &RelayArgs, url: &str) -> Result<Self, Failure> {
        use pg_outbox::publisher::rabbitmq::RabbitMqConfig;
        let options = &args.rabbitmq;
        let mut config = RabbitMqConfig::builder(url)
            .exchange(&options.exchange)
            .routing_key(&options.routing_key)
            .mandatory(options.mandatory)
            .retry_unroutable(options.retry_unroutable)
            .connect_timeout(options.broker_connect_timeout);
        if let Some(heartbeat) = options.broker_heartbeat {
            config = config.heartbeat(heartbeat);
        }
        if let Some(bytes) = options.max_body_bytes {
            config = config.max_body_bytes(bytes);
        }
        if let Some(file) = &options.broker_ca_file {
            config = config.ca_file(file);
        }
        Ok(Self::RabbitMq(Box::new(config.build()?)))
    }

    #[cfg(not(feature = "rabbitmq"))]
    fn rabbitmq(_: &RelayArgs, _: &str) -> Result<Self, Failure> {
        Err(Failure::usage(
            "this build has no RabbitMQ publisher; build it with the feature rabbitmq",
        ))
    }

    /// A publisher of its own for each thread. Does no I/O.
    pub(crate) fn publisher(&self) -> Box<dyn Publisher> {
        match self {
            Self::Stdout => Box::new(StdoutPublisher::new()),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(config) => {
                Box::new(pg_outbox::publisher::rabbitmq::RabbitMqPublisher::new((**config).clone()))
            }
        }
    }

    /// What it is, for people.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Stdout => "standard output",
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(_) => "RabbitMQ",
        }
    }
}

/// Warns where the URL with its password stands on the command line, which every user can read.
fn warn_of_password(args: &RelayArgs, url: &str) {
    let has_password = url
        .split_once("://")
        .and_then(|(_, rest)| rest.rsplit_once('@'))
        .is_some_and(|(user, _)| user.contains(':'));
    let on_command_line =
        args.broker.is_some() && std::env::args().any(|argument| argument.ends_with(url));
    if has_password && on_command_line {
        eprintln!(
            "pg-outbox: warning: --broker has a password, which every user of this machine can read in the list of \
             processes; set PG_OUTBOX_BROKER or use --broker-file"
        );
    }
}
