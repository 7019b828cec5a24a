//! The README's table of settings says what the command says.
#![cfg(all(feature = "cli", feature = "rabbitmq"))]

use std::collections::BTreeMap;
use std::process::Command;

/// Option, then variable and default.
type Settings = BTreeMap<String, (String, String)>;

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let rest = &text[text.find(start)? + start.len()..];
    rest.find(end).map(|end| &rest[..end])
}

/// From `run --help`: an option starts a line, and what follows it up to the next one is its description.
fn of_the_command() -> Settings {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pg-outbox"));
    let help = command.args(["run", "--help"]).output().expect("the command runs").stdout;
    let help = String::from_utf8(help).expect("UTF-8");
    let options =
        &help[help.find("\nOptions:").expect("options")..help.find("\nStopping:").expect("an end")];
    let mut described: Vec<(String, String)> = Vec::new();
    for line in options.lines() {
        let text = line.trim_start();
        if text.starts_with("--") && line.len() - text.len() <= 6 {
            let name: String =
                text.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
            described.push((name, text.to_owned()));
        } else if let Some((_, description)) = described.last_mut() {
            *description = format!("{description} {text}");
        }
    }
    let described = described.into_iter().filter_map(|(name, text)| {
        let variable = between(&text, "[env: ", "]")?.to_owned();
        let default = between(&text, "[default: ", "]").unwrap_or_default().to_owned();
        Some((name, (variable, default)))
    });
    described.collect()
}

fn of_the_readme() -> Settings {
    let readme = include_str!("../README.md");
    let rows = readme.lines().filter(|line| line.starts_with("| `--"));
    rows.map(|row| {
        let cells: Vec<_> =
            row.split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect();
        (cells[1].clone(), (cells[2].clone(), cells[3].clone()))
    })
    .collect()
}

#[test]
fn the_settings_table_is_true() {
    let command = of_the_command();
    assert!(command.len() > 30, "the help could not be read: {command:?}");
    assert_eq!(of_the_readme(), command);
}
