//! How settings are written: durations with units, sizes, switches. Each parser names the accepted form.

use std::time::{Duration, SystemTime};

/// A duration with a unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    const FORM: &str = "a duration has a number and a unit, such as 500ms, 30s, 5m, 24h or 7d";
    if text.trim().chars().all(|c| c.is_ascii_digit()) {
        return Err(format!("the unit is missing: {FORM}"));
    }
    humantime::parse_duration(text.trim()).map_err(|_| FORM.into())
}

/// A duration, or `forever`.
pub(crate) fn retention(text: &str) -> Result<Retention, String> {
    if text.trim().eq_ignore_ascii_case("forever") {
        return Ok(Retention(None));
    }
    duration(text).map(|time| Retention(Some(time))).map_err(|form| format!("{form}; or forever"))
}

/// How long events are kept; `None` is for ever. A type of its own, because clap takes an `Option` for an optional argument.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Retention(pub(crate) Option<Duration>);

/// A number of bytes, such as `1048576`, `64KiB` or `8MiB`.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: usize = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        _ => 0,
    };
    let number = number.parse::<usize>().ok().filter(|_| factor > 0);
    number
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| "a size is a number of bytes, such as 1048576, 64KiB or 8MiB".into())
}

/// `true` or `false`.
pub(crate) fn switch(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "on" | "yes" | "1" => Ok(true),
        "false" | "off" | "no" | "0" => Ok(false),
        _ => Err("a switch is true or false".into()),
    }
}

/// A time: RFC 3339, or a duration from now.
pub(crate) fn time(text: &str) -> Result<SystemTime, String> {
    if let Ok(time) = humantime::parse_rfc3339_weak(text.trim()) {
        return Ok(time);
    }
    let from_now = duration(text).ok().and_then(|wait| SystemTime::now().checked_add(wait));
    from_now.ok_or_else(|| {
        "a time is written as 2026-12-01T08:30:00Z (UTC), or as a duration from now, such as 5m"
            .into()
    })
}

/// One name of a list; blanks around it are not part of it.
pub(crate) fn name(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("a name is empty; names are written as order,invoice".into()),
        name => Ok(name.into()),
    }
}

/// A header as `name=value`.
pub(crate) fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("a header is written as name=value")?;
    Ok((name.into(), value.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["15", "0", "", " ", "-1s", "1e309", "15 parsecs", "s", "NaN"] {
            let text = duration(wrong).expect_err(wrong);
            assert!(text.contains("such as 500ms, 30s, 5m"), "{wrong}: {text}");
        }
        assert!(retention("forever").is_ok_and(|keep| keep.0.is_none()));
        assert!(retention("15").is_err());
    }

    #[test]
    fn sizes_and_switches() {
        assert_eq!(bytes("8MiB"), Ok(8 << 20));
        assert_eq!(bytes("1024"), Ok(1024));
        for wrong in ["", "MiB", "8MB", "-1", "1.5KiB", "99999999999999999999", "99999999999999GiB"]
        {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(switch("TRUE"), Ok(true));
        assert!(switch("maybe").is_err() && switch("").is_err());
    }

    #[test]
    fn times_and_headers() {
        assert!(time("2026-12-01T08:30:00Z").is_ok());
        assert!(time("5m").is_ok_and(|at| at > SystemTime::now()));
        assert!(time("tomorrow").is_err());
        assert_eq!(header("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(header("a").is_err());
        assert_eq!(name(" order "), Ok("order".into()));
        assert!(name(" ").is_err());
    }
}
