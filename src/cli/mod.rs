//! The command: arguments in, one library call, text out.
//!
//! Each command is a file. A command returns an exit [`Code`], or a [`Failure`] that is printed as one line on standard
//! error. Results go to standard output, everything else to standard error.

mod append;
mod args;
mod broker;
mod canary;
mod check;
mod database;
mod dead_letters;
mod demo;
mod failure;
mod logger;
mod migrate;
mod output;
mod run;
mod settings;
mod status;
mod values;

use std::process::ExitCode;

use args::{Cli, Command};
use failure::{Code, Failure};

/// Runs the command that the arguments ask for.
pub(crate) fn main() -> ExitCode {
    let cli = match settings::parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match dispatch(cli) {
        Ok(code) => code.into(),
        Err(failure) => {
            eprintln!("pg-outbox: {}", output::line(&failure.message));
            failure.code.into()
        }
    }
}

fn dispatch(cli: Cli) -> Result<Code, Failure> {
    let target = database::Target { connection: cli.connection };
    match cli.command {
        Command::Migrate(args) => migrate::migrate(&target, &args),
        Command::Check(args) => check::check(&target, &args),
        Command::Run(args) => run::run(&target, &args),
        Command::Append(args) => append::append(&target, &args),
        Command::Status(args) => status::status(&target, &args),
        Command::Why(args) => status::why(&target, &args),
        Command::DeadLetters(args) => dead_letters::dead_letters(&target, args.command),
        Command::Metrics => status::metrics(&target),
        Command::Prune(args) => status::prune(&target, &args),
        Command::Demo(args) => demo::demo(&target, &args),
    }
}
