//! The database that the settings name, and connections to it. No part of a URL that cannot be read is ever repeated:
//! any part of it may be the password.

use std::path::Path;
use std::time::Duration;

use pg_outbox::Schema;
pub(crate) use pg_outbox::describe;
use postgres::config::{Host, SslMode, TargetSessionAttrs};
use postgres::{Client, Config, NoTls};

use super::args::Connection;
use super::failure::Failure;

const URL_FORM: &str = "the form is postgres://user:password@host:5432/database, with special characters in user and \
                        password percent-encoded, or host=... port=... user=... dbname=...";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Within this, a connection whose other end has gone is given up.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);
/// Variables of libpq that would change where or how to connect, and are not supported.
const UNSUPPORTED: [&str; 9] = [
    "PGSERVICE",
    "PGSERVICEFILE",
    "PGPASSFILE",
    "PGSSLCERT",
    "PGSSLKEY",
    "PGSSLROOTCERT",
    "PGSSLCRL",
    "PGREQUIREPEER",
    "PGGSSENCMODE",
];

/// The database and the schema of the outbox.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) connection: Connection,
}

impl Target {
    /// The outbox's schema.
    pub(crate) fn schema(&self) -> Result<Schema, Failure> {
        Ok(Schema::new(&self.connection.schema)?)
    }

    /// How to connect.
    pub(crate) fn config(&self) -> Result<Config, Failure> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let url = self.url(&variable)?;
        let mut config = match &url {
            Some((name, url)) => parse(name, url)?,
            None => Config::new(),
        };
        complete(&mut config, &variable)?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            if url.is_none() && config.get_dbname().is_none() && config.get_user().is_none() {
                return Err(Failure::usage(
                    "no database is named; set DATABASE_URL=postgres://user:password@host/database, or PGHOST and its like",
                ));
            }
            config.host("localhost");
        }
        Ok(config)
    }

    /// A connection.
    pub(crate) fn connect(&self) -> Result<Client, Failure> {
        connect(&self.config()?)
    }

    /// The URL and where it comes from: the command line, a file, the environment.
    fn url(
        &self,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<Option<(String, String)>, Failure> {
        match (&self.connection.database_url, &self.connection.database_url_file) {
            (Some(url), _) => {
                if parse("--database-url", url)?.get_password().is_some() {
                    eprintln!(
                        "pg-outbox: warning: --database-url has a password, which every user of this machine can read in \
                         the list of processes; set DATABASE_URL or use --database-url-file"
                    );
                }
                Ok(Some(("--database-url".into(), url.clone())))
            }
            (None, Some(file)) => {
                Ok(Some((format!("the URL in {}", file.display()), first_line(file)?)))
            }
            (None, None) => Ok(variable("DATABASE_URL").map(|url| ("DATABASE_URL".into(), url))),
        }
    }
}

/// The first line of a file that holds a secret.
pub(crate) fn first_line(file: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        Failure::usage(format!("the file {} cannot be read: {error}", file.display()))
    })?;
    let line = text.lines().next().unwrap_or_default().trim();
    if line.is_empty() {
        return Err(Failure::usage(format!(
            "the first line of the file {} is empty",
            file.display()
        )));
    }
    Ok(line.to_owned())
}

/// Connects, and says where to when it fails.
pub(crate) fn connect(config: &Config) -> Result<Client, Failure> {
    config.connect(NoTls).map_err(|error| {
        Failure::failed(format!("connecting to {}: {}", address(config), describe(&error)))
    })
}

/// `host:port/database`, for people.
pub(crate) fn address(config: &Config) -> String {
    let host = match (config.get_hosts().first(), config.get_hostaddrs().first()) {
        (Some(Host::Tcp(host)), _) => host.clone(),
        (Some(Host::Unix(path)), _) => path.display().to_string(),
        (None, Some(addr)) => addr.to_string(),
        (None, None) => "localhost".into(),
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let database = config.get_dbname().or(config.get_user()).unwrap_or("the default database");
    format!("{host}:{port}/{database}")
}

fn parse(name: &str, url: &str) -> Result<Config, Failure> {
    let refuse = |why: &str| Err(Failure::usage(format!("{name} {why}; {URL_FORM}")));
    if let Some(mode) = ssl_mode(url) {
        refuse_tls(&format!("{name} has sslmode"), &mode)?;
    }
    let Ok(config) = url.trim().parse::<Config>() else {
        return refuse("cannot be read");
    };
    // A raw `@` or `/` in a password moves the rest of it into the host, which errors do name.
    let odd =
        |text: &str| text.contains(|c: char| !(c.is_ascii_alphanumeric() || "-_.:%".contains(c)));
    let odd_host =
        config.get_hosts().iter().any(|host| matches!(host, Host::Tcp(host) if odd(host)));
    if odd_host || config.get_dbname().is_some_and(|name| name.contains(['@', ':', '/'])) {
        return refuse("names a host or database with characters that none has");
    }
    Ok(config)
}

/// The value of `sslmode` in a URL's query or a list of keywords, which the parser knows only in part.
fn ssl_mode(url: &str) -> Option<String> {
    let tail = match url.rsplit_once('@') {
        Some((_, tail)) if url.contains("://") => tail,
        _ => url,
    };
    let (_, value) = tail.split_once("sslmode")?;
    let value = value.trim_start().strip_prefix('=')?.trim_start().trim_start_matches('\'');
    let end = value.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).unwrap_or(value.len());
    Some(value[..end].to_owned())
}

fn refuse_tls(what: &str, mode: &str) -> Result<(), Failure> {
    match mode {
        "disable" | "prefer" => Ok(()),
        "allow" => Err(Failure::usage(format!(
            "{what} allow, which is not supported: this build has no TLS to PostgreSQL; use disable or prefer"
        ))),
        "require" | "verify-ca" | "verify-full" => Err(Failure::usage(format!(
            "{what} {mode}, but this build has no TLS to PostgreSQL; connect over a private network, a tunnel or a local \
             proxy, with sslmode=disable"
        ))),
        _ => Err(Failure::usage(format!(
            "{what} with a value that is not known; use disable or prefer"
        ))),
    }
}

/// Fills in what the URL leaves out: the variables of libpq, then timeouts.
fn complete(
    config: &mut Config,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<(), Failure> {
    let malformed = |name: &str, form: &str| Failure::usage(format!("{name} must be {form}"));
    for name in UNSUPPORTED.iter().filter(|name| variable(name).is_some()) {
        eprintln!("pg-outbox: warning: {name} is set, but not supported here, and ignored");
    }
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        for host in variable("PGHOST").iter().flat_map(|hosts| hosts.split(',')) {
            config.host(host);
        }
        for addr in variable("PGHOSTADDR").iter().flat_map(|addrs| addrs.split(',')) {
            config.hostaddr(addr.parse().map_err(|_| malformed("PGHOSTADDR", "an IP address"))?);
        }
    }
    if config.get_ports().is_empty() {
        for port in variable("PGPORT").iter().flat_map(|ports| ports.split(',')) {
            config.port(port.parse().map_err(|_| malformed("PGPORT", "a number from 1 to 65535"))?);
        }
    }
    if let (None, Some(user)) = (config.get_user(), variable("PGUSER")) {
        config.user(&user);
    }
    if let (None, Some(password)) = (config.get_password(), variable("PGPASSWORD")) {
        config.password(password);
    }
    if let (None, Some(name)) = (config.get_dbname(), variable("PGDATABASE")) {
        config.dbname(&name);
    }
    if let (None, Some(options)) = (config.get_options(), variable("PGOPTIONS")) {
        config.options(&options);
    }
    if config.get_application_name().is_none() {
        config.application_name(&variable("PGAPPNAME").unwrap_or_else(|| "pg-outbox".into()));
    }
    if let Some(mode) = variable("PGSSLMODE") {
        refuse_tls("PGSSLMODE is", &mode)?;
        if mode == "disable" {
            config.ssl_mode(SslMode::Disable);
        }
    }
    if let Some(attributes) = variable("PGTARGETSESSIONATTRS") {
        config.target_session_attrs(match attributes.as_str() {
            "any" => TargetSessionAttrs::Any,
            "read-write" => TargetSessionAttrs::ReadWrite,
            "read-only" => TargetSessionAttrs::ReadOnly,
            _ => return Err(malformed("PGTARGETSESSIONATTRS", "any, read-write or read-only")),
        });
    }
    if config.get_connect_timeout().is_none() {
        let seconds =
            variable("PGCONNECT_TIMEOUT").map(|seconds| seconds.parse::<u64>()).transpose();
        let seconds = seconds.map_err(|_| malformed("PGCONNECT_TIMEOUT", "a number of seconds"))?;
        let timeout = seconds.filter(|seconds| *seconds > 0).map(Duration::from_secs);
        config.connect_timeout(timeout.unwrap_or(CONNECT_TIMEOUT));
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(TCP_USER_TIMEOUT);
    }
    let (idle, interval) = (Duration::from_secs(15), Duration::from_secs(5));
    config
        .keepalives(true)
        .keepalives_idle(idle)
        .keepalives_interval(interval)
        .keepalives_retries(3);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(url: &str) -> String {
        parse("DATABASE_URL", url).expect_err(url).message
    }

    #[test]
    fn a_secret_is_never_repeated() {
        for url in [
            "s3cret",
            "postgres://u:s3cret",
            "postgres://u:s3cret@h:port/db",
            "postgres://u:x@s3cret@h/db",
            "postgres://u:x@s3/cret:@h/db",
            "postgre://u:s3cret@h/db",
            "u:s3cret@h/db",
            "host=h password='s3cret",
            "host=h pasword=s3cret",
            "postgres://u:s3cret@h/db?nonsense=s3cret",
            "postgres://u:s3cret@h/db?sslmode=s3cret",
        ] {
            let text = refused(url);
            assert!(!text.contains("s3cret") && !text.contains("cret:"), "{url}: {text}");
            assert!(text.contains("DATABASE_URL"), "{text}");
        }
    }

    #[test]
    fn urls_are_read() {
        let config =
            parse("DATABASE_URL", "postgres://u:q^G$F%25JB@h:99/db?sslmode=prefer").expect("a URL");
        assert_eq!(config.get_password(), Some(b"q^G$F%JB".as_slice()));
        assert_eq!(address(&config), "h:99/db");
        assert!(parse("DATABASE_URL", "host=/run/postgresql user=u").is_ok());
        assert!(parse("DATABASE_URL", "postgres://u@[::1]:5433/db").is_ok());
    }

    #[test]
    fn tls_is_refused_in_words() {
        for mode in ["require", "verify-ca", "verify-full"] {
            for url in [
                format!("postgres://u@h/db?x=1&sslmode={mode}"),
                format!("host=h sslmode = '{mode}'"),
            ] {
                assert!(refused(&url).contains("this build has no TLS to PostgreSQL"), "{url}");
            }
        }
        assert!(refuse_tls("PGSSLMODE is", "disable").is_ok());
    }

    #[test]
    fn variables_fill_in_what_the_url_leaves_out() {
        let variables = |name: &str| {
            let value = match name {
                "PGHOST" => "elsewhere",
                "PGUSER" => "someone",
                "PGPASSWORD" => "s3cret",
                "PGCONNECT_TIMEOUT" => "3",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let mut config = parse("DATABASE_URL", "postgres://h/db").expect("a URL");
        complete(&mut config, &variables).expect("variables");
        assert_eq!((config.get_hosts().len(), config.get_user()), (1, Some("someone")));
        assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        let wrong = |name: &str| (name == "PGPORT").then(|| "5432x".to_owned());
        let error = complete(&mut Config::new(), &wrong).expect_err("a port");
        assert!(error.message.contains("PGPORT must be a number"), "{}", error.message);
    }
}
