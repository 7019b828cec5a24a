//! `migrate`: the outbox and its grants.

use pg_outbox::store;

use super::args::MigrateArgs;
use super::database::Target;
use super::failure::{Code, Failure};
use super::output::print;

pub(crate) fn migrate(target: &Target, args: &MigrateArgs) -> Result<Code, Failure> {
    let schema = target.schema()?;
    if args.print {
        print(&store::migration_sql(&schema))?;
        return Ok(Code::Ok);
    }
    let mut client = target.connect()?;
    let migrated = store::migrate(&mut client, &schema)?;
    let name = schema.name();
    print(&match migrated.from {
        None => format!("created the outbox in schema {name:?}, version {}\n", migrated.to),
        Some(from) if from == migrated.to => {
            format!("the outbox in schema {name:?} is up to date, version {from}\n")
        }
        Some(from) => format!(
            "upgraded the outbox in schema {name:?} from version {from} to {}\n",
            migrated.to
        ),
    })?;
    Ok(Code::Ok)
}
