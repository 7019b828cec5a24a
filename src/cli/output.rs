//! Text for terminals: tables, and words of others with nothing in them that a terminal would obey.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write as _};

use super::failure::Failure;

/// Prints to standard output. A reader that has gone (`| head`) ends the output, and is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_on(text).map(drop)
}

/// [`print`], and whether anybody still reads.
pub(crate) fn print_on(text: &str) -> Result<bool, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::failed(format!("standard output: {error}"))),
    }
}

/// One line, with control characters and those that change the direction of text made visible.
pub(crate) fn line(text: &str) -> String {
    clean(text, false)
}

/// Several lines, made safe as [`line`] does.
pub(crate) fn lines(text: &str) -> String {
    clean(text, true)
}

fn clean(text: &str, keep_breaks: bool) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' if keep_breaks => clean.push(c),
            c if c.is_control() || is_invisible(c) => clean.extend(c.escape_default()),
            c => clean.push(c),
        }
    }
    clean
}

/// Format characters: directions, joiners, the byte order mark, line and paragraph separators.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// [`line`], with at most `width` characters.
pub(crate) fn short(text: &str, width: usize) -> String {
    let text = line(text);
    if text.chars().count() <= width {
        return text;
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// A table with a heading, columns aligned by spaces. Cells are made safe and cut at `width` characters.
pub(crate) fn table<const N: usize>(
    heading: [&str; N],
    rows: &[[String; N]],
    width: usize,
) -> String {
    let rows: Vec<[String; N]> =
        rows.iter().map(|row| row.each_ref().map(|cell| short(cell, width))).collect();
    let mut widths = heading.map(|cell| cell.chars().count());
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let heading = heading.map(String::from);
    for row in std::iter::once(&heading).chain(&rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            // Writing to a String cannot fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// How many events, in words.
pub(crate) fn count(events: u64) -> String {
    if events == 1 { "1 event".into() } else { format!("{events} events") }
}

/// The payload for machines: as text where it is text, otherwise in hexadecimal.
pub(crate) fn payload(bytes: &[u8]) -> (&'static str, String) {
    match std::str::from_utf8(bytes) {
        Ok(text) => ("payload", text.into()),
        Err(_) => ("payload_hex", hex(bytes)),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes from hexadecimal.
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_that_it_would_obey() {
        assert_eq!(
            line("a\x1b[31m\r\nb\u{202e}\u{9b}é💥"),
            "a\\u{1b}[31m\\r\\nb\\u{202e}\\u{9b}é💥"
        );
        assert_eq!(lines("a\nb\x07"), "a\nb\\u{7}");
        assert_eq!(short("abcdef", 4), "abc…");
    }

    #[test]
    fn tables_are_aligned() {
        let rows = [["1".into(), "a\nb".into()], ["100".into(), "é".repeat(9)]];
        assert_eq!(table(["ID", "REASON"], &rows, 6), "ID   REASON\n1    a\\nb\n100  ééééé…\n");
    }

    #[test]
    fn hexadecimal_both_ways() {
        assert_eq!(payload(b"\xff\0"), ("payload_hex", "ff00".into()));
        assert_eq!(unhex("ff00"), Some(vec![0xff, 0]));
        assert_eq!(unhex("fF0"), None);
        assert_eq!(unhex("zz"), None);
    }
}
