use super::args::DemoArgs;
use super::database::Target;
use super::failure::{Code, Failure};

pub(crate) fn demo(_target: &Target, _args: &DemoArgs) -> Result<Code, Failure> {
    Ok(Code::Ok)
}
