//! The `pg-outbox` command. Everything it can do is in [`cli`]; the relay itself is the library's.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
