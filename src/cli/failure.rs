//! How a command ends: exit codes, and failures in one line.

use std::process::ExitCode;

use pg_outbox::Error;

/// The exit codes, which `--help` explains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    /// Done.
    Ok = 0,
    /// The database, the broker or the relay failed.
    Failed = 1,
    /// An argument or a setting makes no sense.
    Usage = 2,
    /// Nothing matched.
    NotFound = 3,
    /// `status` or `check` found trouble.
    Unhealthy = 4,
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        Self::from(code as u8)
    }
}

/// Why a command could not do its work.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { code: Code::Usage, message: message.into() }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self { code: Code::Failed, message: message.into() }
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self { code: Code::NotFound, message: message.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = if error.is_invalid_config() || error.is_invalid_event() {
            Code::Usage
        } else {
            Code::Failed
        };
        Self { code, message: error.to_string() }
    }
}
