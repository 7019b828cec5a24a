//! Rows, and the three ways to show them: a table, JSON, and against an earlier run.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use super::Result;

/// What a figure should be; of the ratio where there is one, of the value otherwise.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// The figure over that of something else of the same run, and of what.
    pub(crate) ratio: Option<(f64, &'static str)>,
    pub(crate) goal: Option<Goal>,
    pub(crate) notes: Vec<String>,
}

pub(crate) struct Report {
    pub(crate) conditions: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

impl Row {
    pub(crate) fn new(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { name: name.into(), value, unit, ratio: None, goal: None, notes: Vec::new() }
    }

    pub(crate) fn failed(case: &str, error: &str) -> Self {
        Self::new(case, f64::NAN, "").note(format!("failed: {error}"))
    }

    pub(crate) fn ratio(mut self, ratio: f64, to: &'static str) -> Self {
        self.ratio = Some((ratio, to));
        self
    }

    pub(crate) fn goal(mut self, goal: Goal) -> Self {
        self.goal = Some(goal);
        self
    }

    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    pub(crate) fn notes(mut self, notes: impl IntoIterator<Item = String>) -> Self {
        self.notes.extend(notes);
        self
    }

    fn ratio_text(&self) -> String {
        self.ratio.map_or(String::new(), |(ratio, to)| format!("{ratio:.2} x {to}"))
    }

    fn goal_text(&self) -> String {
        let figure = self.ratio.map_or(self.value, |(ratio, _)| ratio);
        let (sign, bound, met) = match self.goal {
            None => return String::new(),
            Some(Goal::AtLeast(bound)) => (">=", bound, figure >= bound),
            Some(Goal::AtMost(bound)) => ("<=", bound, figure <= bound),
        };
        format!("{sign} {}: {}", amount(bound), if met { "met" } else { "missed" })
    }

    /// For progress.
    pub(crate) fn line(&self) -> String {
        let parts = [
            format!("{}: {} {}", self.name, amount(self.value), self.unit),
            self.ratio_text(),
            self.goal_text(),
            self.notes.join("; "),
        ];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" | ")
    }
}

impl Report {
    pub(crate) fn new(conditions: Vec<String>) -> Self {
        Self { conditions, rows: Vec::new() }
    }

    /// Markdown. Against an earlier run, the figure of each row over its figure there.
    pub(crate) fn table(&self, earlier: Option<&Value>) -> String {
        let mut text = self.conditions.join("; ") + "\n\n| case | figure | ratio | goal | notes |";
        text += if earlier.is_some() { " against before |\n" } else { "\n" };
        text += if earlier.is_some() {
            "|---|---|---|---|---|---|\n"
        } else {
            "|---|---|---|---|---|\n"
        };
        for row in &self.rows {
            let _ = write!(
                text,
                "| {} | {} {} | {} | {} | {} |",
                row.name,
                amount(row.value),
                row.unit,
                row.ratio_text(),
                row.goal_text(),
                row.notes.join("; ")
            );
            if let Some(earlier) = earlier {
                let _ = write!(text, " {} |", row.against(earlier));
            }
            text.push('\n');
        }
        text
    }

    pub(crate) fn json(&self) -> String {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.name, "value": row.value, "unit": row.unit,
                    "ratio": row.ratio.map(|(ratio, _)| ratio), "ratio_to": row.ratio.map(|(_, to)| to),
                    "goal": row.goal_text(), "notes": row.notes,
                })
            })
            .collect();
        format!("{:#}\n", json!({"conditions": self.conditions, "rows": rows}))
    }

    /// An earlier run's JSON.
    pub(crate) fn read(path: &Path) -> Result<Value> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(serde_json::from_str(&text)?)
    }
}

impl Row {
    /// By ratio where both have one, since that leaves the machine's mood out.
    fn against(&self, earlier: &Value) -> String {
        let rows = earlier["rows"].as_array().map_or(&[][..], Vec::as_slice);
        let Some(then) = rows.iter().find(|row| row["name"] == self.name.as_str()) else {
            return "new".into();
        };
        match (self.ratio, then["ratio"].as_f64(), then["value"].as_f64()) {
            (Some((now, _)), Some(then), _) => format!("{:.2} (ratios)", now / then),
            (_, _, Some(then)) => format!("{:.2}", self.value / then),
            _ => "-".into(),
        }
    }
}

/// A number with the digits that say something, and thousands apart.
pub(crate) fn amount(value: f64) -> String {
    if value.is_nan() {
        return "-".into();
    }
    if value.abs() < 100.0 {
        let digits = if value.abs() < 1.0 { 3 } else { 2 };
        let text = format!("{value:.digits$}");
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 && digits.as_bytes()[index - 1] != b'-' {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The middle one, and the notes of a spread that says how far to trust it.
pub(crate) fn median(mut values: Vec<f64>) -> (f64, Option<String>) {
    values.sort_by(f64::total_cmp);
    let middle = values.get(values.len() / 2).copied().unwrap_or(f64::NAN);
    let spread = match (values.first(), values.last()) {
        (Some(least), Some(most)) if values.len() > 1 => {
            Some(format!("{} to {} in {} runs", amount(*least), amount(*most), values.len()))
        }
        _ => None,
    };
    (middle, spread)
}
