//! stub
use super::{Bench, Result};
pub(crate) fn run(_: &mut Bench) -> Result<()> { Ok(()) }
