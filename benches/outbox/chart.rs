//! The chart: a bar for each figure in events a second.

use std::fmt::Write as _;

use super::report::{Report, amount};

const LEFT: f64 = 330.0;
const WIDTH: f64 = 420.0;
const STEP: f64 = 24.0;

pub(crate) fn svg(report: &Report) -> String {
    let rows: Vec<_> =
        report.rows.iter().filter(|row| row.unit == "events/s" && row.value > 0.0).collect();
    let most = rows.iter().map(|row| row.value).fold(1.0, f64::max);
    let (width, height) = (LEFT + WIDTH + 110.0, STEP * (rows.len() as f64 + 2.0));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" fill=\"#222\">events a second</text>\n"
    );
    for (index, row) in rows.iter().enumerate() {
        let y = STEP * (index as f64 + 1.3);
        let length = WIDTH * row.value / most;
        let colour = if row.name.starts_with("limit") { "#999" } else { "#336791" };
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"#222\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"16\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{}\" fill=\"#222\">{}</text>",
            LEFT - 8.0,
            y + 13.0,
            escaped(&row.name),
            LEFT + length + 6.0,
            y + 13.0,
            amount(row.value),
        );
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
