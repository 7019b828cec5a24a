//! stub
use super::{Bench, Result};
pub(crate) fn run(_: &mut Bench) -> Result<()> { Ok(()) }
pub(crate) fn publisher(_: &str) -> pg_outbox::StdoutPublisher { pg_outbox::StdoutPublisher::new() }
