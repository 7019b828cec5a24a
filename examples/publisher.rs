//! A publisher of one's own: one file a destination, appended and synced. Run it against a migrated outbox:
//! `DATABASE_URL=postgres://... cargo run --example publisher -- /tmp/events`. Ctrl-c ends the process at once here; see the
//! `pg-outbox` command for a clean stop.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use pg_outbox::{Event, Outcomes, PublishError, Publisher, Relay, RelayConfig};
use postgres::{Client, NoTls};

/// Appends each event to the file of its aggregate type.
struct Files {
    folder: PathBuf,
}

impl Files {
    fn write(&self, event: &Event) -> io::Result<()> {
        let path = self.folder.join(&event.aggregate_type);
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        writeln!(
            file,
            "{} {} {}",
            event.event_id,
            event.event_type,
            String::from_utf8_lossy(&event.payload)
        )?;
        // Published means stored: without this the disk may not have it yet.
        file.sync_data()
    }
}

impl Publisher for Files {
    fn publish(&mut self, wave: &[Event], _deadline: Instant, outcomes: &mut Outcomes) {
        for (index, event) in wave.iter().enumerate() {
            if event.aggregate_type.contains('/') {
                outcomes.failed(
                    index,
                    PublishError::permanent(
                        "the aggregate type has a slash and cannot be a file name",
                    ),
                );
                continue;
            }
            match self.write(event) {
                Ok(()) => outcomes.published(index),
                // A full disk is met by every event, a missing right by those of this file.
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    outcomes.failed(
                        index,
                        PublishError::transient(error.to_string()).broker().in_doubt(),
                    );
                }
                Err(error) => {
                    outcomes.failed(
                        index,
                        PublishError::transient(error.to_string()).destination().in_doubt(),
                    );
                }
            }
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let folder: PathBuf = std::env::args_os().nth(1).ok_or("usage: publisher FOLDER")?.into();
    std::fs::create_dir_all(&folder)?;
    let connect = move || Client::connect(&url, NoTls);
    let relay = Relay::new(RelayConfig::builder("files-1").build()?, connect, move |_| Files {
        folder: folder.clone(),
    });
    println!("{}", relay.run()?);
    Ok(())
}
