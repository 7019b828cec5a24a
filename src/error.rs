//! The library's one error: opaque, with predicates; the cause is only ever its `source()`.

use std::error::Error as StdError;
use std::fmt;

/// Any error as a cause.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// What went wrong, in words that name the thing and what to do. Ask the predicates, not the text.
pub struct Error(Box<Inner>);

struct Inner {
    kind: Kind,
    message: String,
    source: Option<BoxError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    InvalidEvent,
    DuplicateEventId,
    NotInTransaction,
    InvalidConfig,
    SchemaMissing,
    SchemaVersion,
    Connect,
    Database,
    ThreadDied,
}

impl Error {
    fn new(kind: Kind, message: impl Into<String>, source: Option<BoxError>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), source }))
    }

    pub(crate) fn invalid_event(message: impl Into<String>) -> Self {
        Self::new(Kind::InvalidEvent, message, None)
    }

    #[cfg(feature = "diesel")]
    pub(crate) fn not_in_transaction() -> Self {
        let message = "append needs an open transaction, or the event would not belong to your change; \
                       call it inside conn.transaction(|conn| ...)";
        Self::new(Kind::NotInTransaction, message, None)
    }

    pub(crate) fn invalid_config(message: impl Into<String>) -> Self {
        Self::new(Kind::InvalidConfig, message, None)
    }

    pub(crate) fn schema_missing(schema: &str) -> Self {
        let message = format!(
            "there is no outbox in schema {schema:?} of this database; create it with `pg-outbox migrate`"
        );
        Self::new(Kind::SchemaMissing, message, None)
    }

    pub(crate) fn schema_version(message: impl Into<String>) -> Self {
        Self::new(Kind::SchemaVersion, message, None)
    }

    /// A database error while doing `what` (such as "claiming events").
    pub(crate) fn database(what: &str, source: impl Into<BoxError>) -> Self {
        let source = source.into();
        let detail = describe(source.as_ref());
        Self::new(Kind::Database, format!("{what}: {detail}"), Some(source))
    }

    /// No connection could be had. Whatever the reason, a later try may succeed.
    pub(crate) fn connect(source: impl Into<BoxError>) -> Self {
        let source = source.into();
        let detail = describe(source.as_ref());
        Self::new(Kind::Connect, format!("connecting to the database: {detail}"), Some(source))
    }

    /// The same, for `append`: limits and duplicate ids are the caller's to mend and get their own kinds. `code` is the
    /// SQLSTATE, `constraint` the name of the constraint that was broken.
    pub(crate) fn append(
        source: impl Into<BoxError>,
        code: Option<&str>,
        constraint: Option<&str>,
    ) -> Self {
        let source = source.into();
        let detail = describe(source.as_ref());
        match (code, constraint) {
            (Some("23505"), Some("outbox_event_id_key")) => Self::new(
                Kind::DuplicateEventId,
                "an event with this event id is in the outbox already; the transaction must be rolled back",
                Some(source),
            ),
            (Some("22023" | "23514" | "22021" | "22P05" | "23502"), _) => {
                Self::new(Kind::InvalidEvent, detail, Some(source))
            }
            // No such schema, table or function: there is no outbox, or not of this version.
            (Some("3F000" | "42P01" | "42883"), _) => Self::new(
                Kind::SchemaMissing,
                format!(
                    "appending to the outbox: {detail}; is the schema's name right, and was `pg-outbox migrate` run?"
                ),
                Some(source),
            ),
            (Some("42501"), _) => Self::new(
                Kind::Database,
                format!(
                    "appending to the outbox: {detail}; grant it with `pg-outbox migrate --grant-writer ROLE`"
                ),
                Some(source),
            ),
            _ => Self::new(
                Kind::Database,
                format!("appending to the outbox: {detail}"),
                Some(source),
            ),
        }
    }

    /// The driver's own error, where that is what is behind this one.
    #[cfg(feature = "diesel")]
    pub(crate) fn into_cause<E: StdError + 'static>(mut self) -> Result<E, Self> {
        match self.0.source.take().map(|source| source.downcast::<E>()) {
            Some(Ok(cause)) => Ok(*cause),
            Some(Err(source)) => {
                self.0.source = Some(source);
                Err(self)
            }
            None => Err(self),
        }
    }

    pub(crate) fn thread_died(thread: &str, panic: &str) -> Self {
        let message =
            format!("the {thread} thread of the relay panicked ({panic}); the relay stopped");
        Self::new(Kind::ThreadDied, message, None)
    }

    /// An event broke a limit, or a value could not be stored. Nothing was appended.
    pub fn is_invalid_event(&self) -> bool {
        self.0.kind == Kind::InvalidEvent
    }

    /// The caller's own event id is in the outbox already.
    pub fn is_duplicate_event_id(&self) -> bool {
        self.0.kind == Kind::DuplicateEventId
    }

    /// `append` was called outside a transaction (Diesel only; with `postgres` it does not compile).
    pub fn is_not_in_transaction(&self) -> bool {
        self.0.kind == Kind::NotInTransaction
    }

    /// A setting, or the relation between two, makes no sense.
    pub fn is_invalid_config(&self) -> bool {
        self.0.kind == Kind::InvalidConfig
    }

    /// The database has no outbox in this schema, or one of another version. `migrate` mends the first.
    pub fn is_schema_mismatch(&self) -> bool {
        matches!(self.0.kind, Kind::SchemaMissing | Kind::SchemaVersion)
    }

    /// The database refused or was lost. [`source`](StdError::source) has the driver's error.
    pub fn is_database(&self) -> bool {
        matches!(self.0.kind, Kind::Connect | Kind::Database)
    }

    /// A thread of the relay panicked. What it held comes back when its leases lapse.
    pub fn is_thread_died(&self) -> bool {
        self.0.kind == Kind::ThreadDied
    }

    /// The SQLSTATE of the database's answer, where there was one. Diesel does not keep it; ask its error, the `source()`.
    pub fn sqlstate(&self) -> Option<&str> {
        let source = self.0.source.as_deref()?.downcast_ref::<postgres::Error>()?;
        source.code().map(|code| code.code())
    }

    /// Whether the same statement may succeed later in the same session: a deadlock, a conflict, a lock or a statement
    /// that took too long.
    pub(crate) fn passes_by_itself(&self) -> bool {
        self.sqlstate()
            .is_some_and(|code| code.starts_with("40") || matches!(code, "55P03" | "57014"))
    }

    /// Whether the session behind this error is of no more use: the connection is gone, the server is shutting
    /// down or out of sessions, or it has become read-only after a failover (25006).
    pub(crate) fn needs_new_session(&self) -> bool {
        if self.0.kind != Kind::Database {
            return self.0.kind == Kind::Connect;
        }
        let Some(source) = self.0.source.as_deref() else { return false };
        let Some(error) = source.downcast_ref::<postgres::Error>() else { return true };
        match error.code().map(|code| code.code()) {
            // Not from the server: the connection broke, or a value could not be converted, which stays as it is.
            None => {
                error.is_closed()
                    || error.source().is_some_and(|cause| cause.is::<std::io::Error>())
            }
            Some(code) => {
                ["08", "57P", "53", "58"].iter().any(|class| code.starts_with(class))
                    || matches!(code, "25006" | "25P03" | "26000" | "XX000")
            }
        }
    }
}

/// The driver's message with the server's own words, which its `Display` leaves to `source()`.
#[doc(hidden)]
pub fn describe(error: &(dyn StdError + 'static)) -> String {
    if let Some(db) = error.downcast_ref::<postgres::Error>().and_then(|e| e.as_db_error()) {
        let code = db.code().code();
        let hint = if code == "25006" { "; connect to the primary" } else { "" };
        return format!("{} (SQLSTATE {code}){hint}", db.message());
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("message", &self.0.message)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
