//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use super::{CASES, Result};

pub(crate) struct Args {
    cases: Vec<String>,
    pub(crate) events: u32,
    pub(crate) aggregates: u32,
    pub(crate) repeat: usize,
    pub(crate) seconds: Duration,
    pub(crate) scale: f64,
    pub(crate) full: bool,
    pub(crate) json: Option<PathBuf>,
    pub(crate) svg: Option<PathBuf>,
    pub(crate) compare: Option<PathBuf>,
}

impl Args {
    pub(crate) fn wants(&self, case: &str) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|wanted| wanted == case)
    }

    /// A size of the growth cases: in full, or scaled down.
    pub(crate) fn scaled(&self, full: u32) -> u32 {
        if self.full { full } else { ((f64::from(full) * self.scale) as u32).max(100) }
    }
}

pub(crate) fn usage() -> String {
    let mut text =
        String::from("Usage: ./run bench [CASE...] [OPTION...]\n\nCases (default: all):\n");
    for (name, _, what) in CASES {
        text.push_str(&format!("  {name:<10} {what}\n"));
    }
    text.push_str(
        "\nOptions:
  --events N        events of a drain (default: 50000; the hot aggregate has twice as many)
  --aggregates N    aggregates that they are spread over (default: 10000)
  --repeat N        drains of each kind, of which the median counts (default: 3)
  --seconds N       length of each measurement of latency and writers (default: 8)
  --scale X         size of the growth cases, 1 being that of the goals (default: 0.1)
  --full            the growth and memory cases in full, 10,000,000 published rows included
  --json FILE       writes the results
  --svg FILE        writes a chart
  --compare FILE    shows each figure against that of an earlier --json FILE
",
    );
    text
}

/// `None` when help was asked for.
pub(crate) fn parse(words: &[String]) -> Result<Option<Args>> {
    let mut args = Args {
        cases: Vec::new(),
        events: 50_000,
        aggregates: 10_000,
        repeat: 3,
        seconds: Duration::from_secs(8),
        scale: 0.1,
        full: false,
        json: None,
        svg: None,
        compare: None,
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "-h" | "--help" => return Ok(None),
            "--events" => args.events = number(word, value()?)?,
            "--aggregates" => args.aggregates = number(word, value()?)?,
            "--repeat" => args.repeat = number::<usize>(word, value()?)?.max(1),
            "--seconds" => {
                args.seconds = Duration::from_secs(number::<u64>(word, value()?)?.max(1))
            }
            "--scale" => args.scale = number(word, value()?)?,
            "--full" => args.full = true,
            "--json" => args.json = Some(value()?.into()),
            "--svg" => args.svg = Some(value()?.into()),
            "--compare" => args.compare = Some(value()?.into()),
            case if CASES.iter().any(|(name, ..)| *name == case) => args.cases.push(case.into()),
            other => return Err(format!("there is no case or option {other:?}").into()),
        }
    }
    if args.aggregates == 0 || args.events < args.aggregates {
        return Err("--events must be at least --aggregates, and that at least 1".into());
    }
    Ok(Some(args))
}

fn number<T: std::str::FromStr>(option: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| format!("{option}: {text:?} is no number that fits").into())
}
