//! Waiting for something to become true, never for time to pass.

use std::time::{Duration, Instant};

/// Looks every 10 ms until `condition` is true; panics with `what` at the deadline.
#[track_caller]
pub fn eventually(what: &str, timeout: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + timeout;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {timeout:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
