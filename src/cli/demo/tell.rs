//! How the demo tells: lines with the time since the start, in colour where somebody watches.

use std::io::IsTerminal;
use std::time::Instant;

use super::super::failure::Failure;
use super::super::output::{self, print};

pub(super) struct Teller {
    started: Instant,
    has_colour: bool,
}

impl Teller {
    pub(super) fn new() -> Self {
        let has_colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { started: Instant::now(), has_colour }
    }

    /// A sentence of the story.
    pub(super) fn say(&self, text: &str) -> Result<(), Failure> {
        print(&format!("\n{}  {}\n", self.clock(), self.paint("1", text)))
    }

    /// The head of a pass.
    pub(super) fn pass(&self, text: &str) -> Result<(), Failure> {
        print(&format!("\n{}  {}\n", self.clock(), self.paint("1;36", text)))
    }

    pub(super) fn line(&self, text: &str) -> Result<(), Failure> {
        print(&format!("          {}\n", output::line(text)))
    }

    pub(super) fn good(&self, name: &str, text: &str) -> Result<(), Failure> {
        self.event("32", "+", name, text)
    }

    pub(super) fn warn(&self, name: &str, text: &str) -> Result<(), Failure> {
        self.event("33", "~", name, text)
    }

    pub(super) fn bad(&self, name: &str, text: &str) -> Result<(), Failure> {
        self.event("31", "x", name, text)
    }

    pub(super) fn held(&self, name: &str, text: &str) -> Result<(), Failure> {
        self.event("2", "|", name, text)
    }

    /// Text that was made by another command.
    pub(super) fn block(&self, text: &str) -> Result<(), Failure> {
        print(&text.lines().map(|line| format!("          {line}\n")).collect::<String>())
    }

    /// The metrics, without the lines that explain them.
    pub(super) fn metrics(&self, text: &str) -> Result<(), Failure> {
        self.say("What /metrics says (its HELP and TYPE lines are left out here):")?;
        let values = text.lines().filter(|line| !line.starts_with('#'));
        self.block(&values.map(|line| format!("{line}\n")).collect::<String>())
    }

    fn event(&self, colour: &str, sign: &str, name: &str, text: &str) -> Result<(), Failure> {
        let text = format!("{sign} {name:9} {}", output::line(text));
        print(&format!("          {}\n", self.paint(colour, &text)))
    }

    fn clock(&self) -> String {
        format!("{:6.1} s", self.started.elapsed().as_secs_f64())
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.has_colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.into() }
    }
}
