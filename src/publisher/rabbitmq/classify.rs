//! What RabbitMQ's refusals are evidence of. The table is in the [module's documentation](super); here are its rows.

use lapin::protocol::AMQPErrorKind;
use lapin::{Error, ErrorKind};

use super::config::RabbitMqConfig;
use crate::event::Event;
use crate::policy::PublishError;

/// Why a channel or connection closed under a wave.
#[derive(Debug, PartialEq)]
pub(super) enum Fault {
    /// A payload was over the broker's `max_message_size`, which it names.
    TooLarge { limit: usize },
    /// The user may not publish with this routing key.
    RoutingKey(String, PublishError),
    /// Every event meets it, until the broker or its set-up is mended.
    Everyone(PublishError),
    /// Something in one of the events, or nothing in any of them: it takes one event alone to know.
    Unknown(String),
}

/// Judges the error that closed a channel or connection.
pub(super) fn fault(config: &RabbitMqConfig, error: &Error) -> Fault {
    let ErrorKind::ProtocolError(refusal) = error.kind() else {
        return Fault::Everyone(PublishError::transient(lost(config, error)).broker());
    };
    let text = refusal.get_message().to_string();
    let everyone = |hint: &str| {
        Fault::Everyone(PublishError::transient(format!("RabbitMQ: {text} ({hint})")).broker())
    };
    match refusal.get_id() {
        404 => everyone("declare the exchange; events go out as soon as it is there"),
        403 => match between(&text, "access to topic '", "' in exchange") {
            Some(key) => {
                let reason = format!("RabbitMQ: {text} (grant the topic permission)");
                Fault::RoutingKey(key.into(), PublishError::transient(reason).destination())
            }
            None => everyone("grant the user write permission on the exchange"),
        },
        406 if text.contains("message size") => match last_number(&text) {
            Some(limit) => Fault::TooLarge { limit },
            None => Fault::Unknown(format!("RabbitMQ closed the channel: {text} (406)")),
        },
        406 if text.to_lowercase().contains("disk") => {
            everyone("the broker is short of disk space")
        }
        320 => everyone("the broker or its operator closed the connection"),
        530 | 402 => everyone("mend the vhost, or the user's access to it"),
        code if matches!(refusal.kind(), AMQPErrorKind::Hard(_)) => {
            Fault::Unknown(format!("RabbitMQ closed the connection: {text} ({code})"))
        }
        code => Fault::Unknown(format!("RabbitMQ closed the channel: {text} ({code})")),
    }
}

/// A connection that could not be made. Never the event's fault, whatever the code: a revoked password must not kill
/// the backlog.
pub(super) fn connecting(config: &RabbitMqConfig, error: &Error) -> PublishError {
    let address = config.address();
    let reason = match error.kind() {
        ErrorKind::ProtocolError(refusal) => {
            let hint = match refusal.get_id() {
                403 => "check the user and the password",
                530 => "check the vhost and the user's access to it",
                _ => "the broker refused the connection",
            };
            format!("RabbitMQ at {address}: {} ({hint})", refusal.get_message())
        }
        ErrorKind::IOError(error) => format!("cannot connect to RabbitMQ at {address}: {error}"),
        _ => format!("cannot connect to RabbitMQ at {address}: {error}"),
    };
    PublishError::transient(reason).broker()
}

/// No connection in time.
pub(super) fn connecting_timed_out(config: &RabbitMqConfig) -> PublishError {
    let address = config.address();
    PublishError::transient(format!(
        "no connection to RabbitMQ at {address} in time (up to {:?})",
        config.connect_timeout
    ))
    .broker()
}

/// The broker takes nothing because it is short of memory or disk.
pub(super) fn blocked(reason: &str) -> PublishError {
    PublishError::transient(format!("RabbitMQ blocks publishers: {reason}")).broker()
}

/// No confirm by the deadline, though the connection stands.
pub(super) fn unconfirmed() -> PublishError {
    PublishError::transient("no confirm from RabbitMQ before the deadline").broker().in_doubt()
}

/// The deadline came before the event was handed over.
pub(super) fn unsent() -> PublishError {
    PublishError::transient("the deadline came before RabbitMQ could take the event").broker()
}

/// Confirmed, but it cannot be told whether it had come back as unroutable.
pub(super) fn return_unknown() -> PublishError {
    PublishError::transient(
        "confirmed, but RabbitMQ was lost before it was clear that a queue took the event",
    )
    .in_doubt()
}

/// The broker's queue refused the event.
pub(super) fn nack() -> PublishError {
    PublishError::transient(
        "RabbitMQ refused the event (basic.nack): its queue is full or could not store it",
    )
    .destination()
}

/// No queue is bound for the event.
pub(super) fn unroutable(
    config: &RabbitMqConfig,
    key: &str,
    code: u16,
    text: &str,
) -> PublishError {
    let reason = format!(
        "unroutable: exchange {:?} has no queue bound for routing key {key:?} ({code} {text}); bind one{}",
        config.exchange,
        if config.retry_unroutable { "" } else { " and requeue" }
    );
    if config.retry_unroutable {
        PublishError::transient(reason)
    } else {
        PublishError::permanent(reason)
    }
}

/// The payload is over the broker's limit.
pub(super) fn too_large(event: &Event, limit: usize) -> PublishError {
    let size = event.payload.len();
    PublishError::permanent(format!(
        "the payload has {size} bytes, over the broker's limit of {limit} bytes (max_message_size); send a reference instead, or raise the limit and requeue"
    ))
}

/// Another event of the same wave closed the channel.
pub(super) fn bystander(cause: &str) -> PublishError {
    PublishError::transient(format!(
        "sent beside an event that closed the channel, and not yet confirmed ({cause})"
    ))
}

/// What became of a connection, in words.
pub(super) fn lost(config: &RabbitMqConfig, error: &Error) -> String {
    let address = config.address();
    match error.kind() {
        ErrorKind::MissingHeartbeatError => {
            format!("RabbitMQ at {address} is silent: no heartbeat")
        }
        ErrorKind::IOError(error) => {
            format!("the connection to RabbitMQ at {address} was lost: {error}")
        }
        _ => format!("the connection to RabbitMQ at {address} was lost: {error}"),
    }
}

/// The one of several errors that says most: those that follow from another only name a state.
pub(super) fn cause<'a>(errors: impl Iterator<Item = &'a Error>) -> Option<&'a Error> {
    errors.min_by_key(|error| match error.kind() {
        ErrorKind::ProtocolError(_) => 0,
        ErrorKind::InvalidChannelState(..) | ErrorKind::InvalidConnectionState(_) => 2,
        _ => 1,
    })
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.rfind(after).map(|end| &rest[..end])
}

fn last_number(text: &str) -> Option<usize> {
    text.split(|c: char| !c.is_ascii_digit()).rfind(|digits| !digits.is_empty())?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{FailureKind, FailureScope};
    use lapin::protocol::AMQPError;

    fn config() -> RabbitMqConfig {
        RabbitMqConfig::builder("amqp://u:s3cret@h/v").build().expect("a good URL")
    }

    fn refusal(code: u16, text: &str) -> Error {
        ErrorKind::ProtocolError(AMQPError::from_id(code, text.into()).expect("a known code"))
            .into()
    }

    fn broker_trouble(fault: Fault) -> String {
        let Fault::Everyone(error) = fault else { panic!("{fault:?} is not for everyone") };
        assert_eq!((error.kind(), error.scope()), (FailureKind::Transient, FailureScope::Broker));
        error.reason().to_owned()
    }

    #[test]
    fn what_meets_everyone_pauses_the_relay() {
        for (code, text, expected) in [
            (404, "NOT_FOUND - no exchange 'x' in vhost '/'", "declare the exchange"),
            (
                403,
                "ACCESS_REFUSED - access to exchange 'x' in vhost '/' refused for user 'u'",
                "write permission",
            ),
            (406, "PRECONDITION_FAILED - Server low on disk space", "disk space"),
            (
                320,
                "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
                "operator",
            ),
            (530, "NOT_ALLOWED - vhost '/' is down", "vhost"),
        ] {
            let reason = broker_trouble(fault(&config(), &refusal(code, text)));
            assert!(reason.contains(text) && reason.contains(expected), "{reason}");
        }
        let io = Error::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert!(broker_trouble(fault(&config(), &io)).contains("connection reset"));
        assert!(
            broker_trouble(fault(&config(), &ErrorKind::MissingHeartbeatError.into()))
                .contains("heartbeat")
        );
    }

    #[test]
    fn what_one_event_did_is_told_apart() {
        let size =
            "PRECONDITION_FAILED - message size 200001 is larger than configured max size 200000";
        assert_eq!(fault(&config(), &refusal(406, size)), Fault::TooLarge { limit: 200_000 });
        let topic = "ACCESS_REFUSED - access to topic 'a.b' in exchange 'x' in vhost '/' refused for user 'u'";
        let Fault::RoutingKey(key, error) = fault(&config(), &refusal(403, topic)) else {
            panic!("no key")
        };
        assert_eq!((&*key, error.scope()), ("a.b", FailureScope::Destination));
        for code in [406, 501, 541] {
            let text = "SOMETHING - nobody has seen yet";
            assert!(
                matches!(fault(&config(), &refusal(code, text)), Fault::Unknown(t) if t.contains(text))
            );
        }
    }

    #[test]
    fn a_failed_login_is_broker_trouble_without_the_password() {
        let login = refusal(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN.",
        );
        let error = connecting(&config(), &login);
        assert_eq!((error.kind(), error.scope()), (FailureKind::Transient, FailureScope::Broker));
        assert!(
            error.reason().contains("check the user and the password")
                && !error.reason().contains("s3cret")
        );
    }

    #[test]
    fn the_error_that_explains_the_others_wins() {
        use lapin::ChannelState;
        let follow_up: Error =
            ErrorKind::InvalidChannelState(ChannelState::Closing, "basic.publish").into();
        let io = Error::from(std::io::Error::other("x"));
        let refusal = refusal(404, "NOT_FOUND");
        assert_eq!(cause([&follow_up, &io, &refusal].into_iter()), Some(&refusal));
        assert!(cause([&follow_up, &io].into_iter()).expect("one").is_io_error());
    }
}
