//! `migrate`: the outbox and its grants.

use pg_outbox::Schema;
use pg_outbox::store::{self, Grantee};
use postgres::Client;

use super::args::MigrateArgs;
use super::database::{Target, describe};
use super::failure::{Code, Failure};
use super::output::print;

pub(crate) fn migrate(target: &Target, args: &MigrateArgs) -> Result<Code, Failure> {
    let schema = target.schema()?;
    if args.print {
        let grants = grants(&schema, args).into_iter().map(|(_, sql)| format!("\n{sql}"));
        print(&(store::migration_sql(&schema) + &grants.collect::<String>()))?;
        return Ok(Code::Ok);
    }
    let mut client = target.connect()?;
    if args.dry_run {
        return dry_run(&mut client, &schema, args);
    }
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
    for (what, sql) in grants(&schema, args) {
        let granted = client.batch_execute(&sql);
        granted
            .map_err(|error| Failure::failed(format!("granting {what}: {}", describe(&error))))?;
        print(&format!("granted {what}\n"))?;
    }
    Ok(Code::Ok)
}

fn dry_run(client: &mut Client, schema: &Schema, args: &MigrateArgs) -> Result<Code, Failure> {
    let (name, to) = (schema.name(), store::SCHEMA_VERSION);
    let mut text = match store::schema_version(client, schema)? {
        None => format!("would create the outbox in schema {name:?}, version {to}\n"),
        Some(from) if from == to => {
            format!("the outbox in schema {name:?} is up to date, version {from}\n")
        }
        Some(from) => {
            format!("would upgrade the outbox in schema {name:?} from version {from} to {to}\n")
        }
    };
    for (what, _) in grants(schema, args) {
        text.push_str(&format!("would grant {what}\n"));
    }
    print(&(text + "nothing was changed\n"))?;
    Ok(Code::Ok)
}

/// The grants that were asked for, with words for them.
fn grants(schema: &Schema, args: &MigrateArgs) -> Vec<(String, String)> {
    let wanted = [
        (&args.grant_writer, Grantee::Writer, "writing"),
        (&args.grant_relay, Grantee::Relay, "relaying"),
        (&args.grant_monitor, Grantee::Monitor, "monitoring"),
    ];
    let mut all = Vec::new();
    for (roles, grantee, what) in wanted {
        let grant =
            |role: &String| (format!("{what} to {role:?}"), store::grants(schema, grantee, role));
        all.extend(roles.iter().map(grant));
    }
    all
}
