//! From arguments and environment to settings: what is unknown stops the command, and what is malformed is named.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches};
use pg_outbox::{Policy, RelayConfig};

use super::args::{Cli, SettingsArgs};
use super::failure::{Code, Failure};
use super::output;

const PREFIX: &str = "PG_OUTBOX_";

/// The arguments, or the exit code of a command that ends here (`--help`, or an error that was printed).
pub(crate) fn parse() -> Result<Cli, ExitCode> {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let mut command = command();
    let parsed = command
        .try_get_matches_from_mut(&arguments)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = parsed.map_err(|error| report(&command, &error, &arguments))?;
    let names: Vec<String> =
        std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
    if let Err(failure) = refuse_unknown(&command, &names) {
        eprintln!("pg-outbox: {}", output::line(&failure.message));
        return Err(failure.code.into());
    }
    Ok(cli)
}

/// The command line, which never shows the value of a variable.
fn command() -> Command {
    fn hide_values(command: Command) -> Command {
        command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(hide_values)
    }
    hide_values(Cli::command())
}

/// Prints clap's error with the variable that a bad value came from, and without any value that may hold a password.
fn report(command: &Command, error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return if output::print(&error.render().to_string()).is_ok() {
            Code::Ok
        } else {
            Code::Failed
        }
        .into();
    }
    let mut text = error.render().to_string();
    let ours = |name: &OsString| name.to_string_lossy().to_ascii_uppercase().starts_with(PREFIX);
    let values = std::env::vars_os().filter(|(name, _)| ours(name)).map(|(_, value)| value);
    for shown in arguments.iter().skip(1).cloned().chain(values) {
        for secret in secrets(&shown.to_string_lossy()) {
            text = text.replace(&secret, "[hidden]");
        }
    }
    eprint!("{}", output::lines(&text));
    if let Some(variable) = variable_of(command, error, arguments) {
        eprintln!("The value is that of the variable {variable}.");
    }
    Code::Usage.into()
}

/// What clap may repeat of an argument that has a URL or a password in it: all of it, or what follows its first `=`.
fn secrets(argument: &str) -> Vec<String> {
    if !argument.contains(['@', ':']) && !argument.to_ascii_lowercase().contains("password") {
        return Vec::new();
    }
    let value = argument.split_once('=').map(|(_, value)| value.to_owned());
    [Some(argument.to_owned()), value]
        .into_iter()
        .flatten()
        .filter(|text| !text.is_empty())
        .collect()
}

/// The variable behind an invalid value, where the command line does not have the option.
fn variable_of(command: &Command, error: &clap::Error, arguments: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(invalid)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let invalid = invalid.split_whitespace().next()?.split(['=', '[']).next()?;
    let long = invalid.strip_prefix("--")?;
    let is_given = |argument: &OsString| {
        argument.to_str().is_some_and(|text| text.split('=').next() == Some(invalid))
    };
    if arguments.iter().any(is_given) {
        return None;
    }
    let found = variables(command).into_iter().find(|(option, _)| option == long);
    found.map(|(_, variable)| variable)
}

/// Every option that has a variable, with it.
fn variables(command: &Command) -> Vec<(String, String)> {
    let own = command.get_arguments().filter_map(|arg| {
        Some((arg.get_long()?.to_owned(), arg.get_env()?.to_string_lossy().into_owned()))
    });
    let mut all: Vec<_> = own.chain(command.get_subcommands().flat_map(variables)).collect();
    all.sort();
    all.dedup();
    all
}

/// Refuses variables with our prefix that no option reads: a misspelt setting must not be a silent default.
fn refuse_unknown(command: &Command, names: &[String]) -> Result<(), Failure> {
    let known: Vec<String> = variables(command).into_iter().map(|(_, name)| name).collect();
    let is_strange =
        |name: &&String| name.to_ascii_uppercase().starts_with(PREFIX) && !known.contains(name);
    let Some(name) = names.iter().find(is_strange) else { return Ok(()) };
    let nearest = known.iter().min_by_key(|known| distance(known, &name.to_ascii_uppercase()));
    let nearest = nearest.map(|nearest| format!("; the nearest that is known is {nearest}"));
    Err(Failure::usage(format!(
        "the variable {name} is not a setting of pg-outbox{}",
        nearest.unwrap_or_default()
    )))
}

/// How many letters have to be changed, added or removed.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The relay's settings, with every relation between them checked.
pub(crate) fn relay_config(schema: &str, args: &SettingsArgs) -> Result<RelayConfig, Failure> {
    let relay_id = args.relay_id.clone().or_else(host_name).ok_or_else(|| {
        Failure::usage(
            "this host has no name to call the relay by; set --relay-id or PG_OUTBOX_RELAY_ID",
        )
    })?;
    let policy = Policy {
        transient_window: args.transient_window,
        unexplained_budget: args.unexplained_budget,
        backoff_base: args.backoff_base,
        backoff_cap: args.backoff_cap,
    };
    let config = RelayConfig::builder(relay_id)
        .schema(schema)
        .workers(args.workers)
        .batch_size(args.batch_size)
        .batch_bytes(args.batch_bytes)
        .lease(args.lease)
        .publish_timeout(args.publish_timeout)
        .lease_margin(args.lease_margin)
        .poll_interval(args.poll_interval)
        .heartbeat_interval(args.heartbeat_interval)
        .wake_ups(args.wake_ups)
        .policy(policy)
        .probe_interval_cap(args.probe_interval_cap)
        .delete_on_publish(args.delete_on_publish)
        .retention(args.retention.0)
        .prune_interval(args.prune_interval)
        .shutdown_timeout(args.shutdown_timeout)
        .only(args.only.clone())
        .except(args.except.clone());
    Ok(config.build()?)
}

fn host_name() -> Option<String> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = kernel.or_else(|| std::env::var("HOSTNAME").ok())?;
    let name = name.trim();
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn every_default_is_the_librarys() {
        let arguments = ["pg-outbox", "run", "--relay-id", "x"];
        let matches = command().try_get_matches_from(arguments).expect("arguments");
        let cli = Cli::from_arg_matches(&matches).expect("arguments");
        let super::super::args::Command::Run(args) = &cli.command else { panic!("run") };
        let ours = relay_config(&cli.connection.schema, &args.relay.settings).expect("defaults");
        let theirs = RelayConfig::builder("x").build().expect("defaults");
        assert_eq!(format!("{ours:#?}"), format!("{theirs:#?}"));
    }

    #[test]
    fn every_option_of_run_has_a_variable_of_its_name() {
        let command = command();
        let run = command.find_subcommand("run").expect("run");
        for arg in run.get_arguments().filter(|arg| arg.get_id() != "help") {
            let long = arg.get_long().expect("no positional arguments");
            if long == "database-url" {
                continue; // DATABASE_URL, read where the connection is made
            }
            let expected = format!("PG_OUTBOX_{}", long.replace('-', "_").to_uppercase());
            let variable = arg.get_env().map(|name| name.to_string_lossy().into_owned());
            assert_eq!(variable, Some(expected), "--{long}");
        }
    }

    #[test]
    fn misspelt_variables_are_named_with_the_nearest() {
        let refused =
            |name: &str| refuse_unknown(&command(), &[name.to_owned()]).expect_err(name).message;
        let text = refused("PG_OUTBOX_LEESE");
        assert!(
            text.contains("PG_OUTBOX_LEESE is not") && text.contains("known is PG_OUTBOX_LEASE"),
            "{text}"
        );
        assert!(refused("PG_OUTBOX_BATCHSIZE").contains("known is PG_OUTBOX_BATCH_SIZE"));
        assert!(refused("pg_outbox_lease").contains("known is PG_OUTBOX_LEASE"));
        assert!(refuse_unknown(&command(), &["PG_OUTBOX_LEASE".into(), "PATH".into()]).is_ok());
    }

    #[test]
    fn distances() {
        assert_eq!(distance("LEASE", "LEASE"), 0);
        assert_eq!(distance("LEASE", "LEESE"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
