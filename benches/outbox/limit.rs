//! The limit: the relay's cycle as plain SQL inside the server.
//!
//! Claim up to 500 events under a lease, commit, mark them as published where the lease still holds, commit; again until
//! nothing is left. The same table with the same rows, order per aggregate kept: the head of an aggregate is locked and
//! looked at again, and nobody else claims behind a locked head. Rows are found again by their place (`ctid`), which is
//! the fastest way known, and safe here, where nothing else moves a row between claim and verdict. No client, no round
//! trip, no payload leaves, nothing for suspects, retries, counters or pauses, and a row of a run that somebody else has
//! locked would be waited for: with two writes an event to this table, a relay can hardly do less, so its figure is given
//! as a share of this one.

use std::time::Instant;

use super::database::{Database, Fill};
use super::report::{Row, median};
use super::{Bench, Result, machine::Others};

/// Jumps from the head of one aggregate to the next, takes up to `run` events of each that is free, and wraps around
/// once. `first` is where this connection begins.
const PROCEDURE: &str = r#"
CREATE PROCEDURE bench_limit(INOUT first bigint, heads integer, run integer) LANGUAGE plpgsql AS $body$
DECLARE
    lease   bigint;
    taken   tid[];
    reached bigint;
    idle    integer := 0;
BEGIN
    WHILE idle < 2 LOOP
        lease := floor(random() * 9e18);
        WITH RECURSIVE walk AS (
            (SELECT aggregate_key, ctid AS place, 1 AS n FROM outbox.outbox
              WHERE status IN ('pending', 'dead') AND aggregate_key >= first ORDER BY aggregate_key, id LIMIT 1)
            UNION ALL
            SELECT next.aggregate_key, next.place, walk.n + 1
              FROM walk CROSS JOIN LATERAL (
                   SELECT aggregate_key, ctid AS place FROM outbox.outbox
                    WHERE status IN ('pending', 'dead') AND aggregate_key > walk.aggregate_key
                    ORDER BY aggregate_key, id LIMIT 1) AS next
             WHERE walk.n < heads
        ), head AS MATERIALIZED (
            SELECT aggregate_key, id FROM outbox.outbox
             WHERE ctid = ANY (ARRAY(SELECT place FROM walk)) AND status = 'pending' AND next_attempt_at <= now()
               AND (locked_until IS NULL OR locked_until <= now())
               FOR UPDATE SKIP LOCKED
        ), wanted AS MATERIALIZED (
            SELECT each.place, bool_and(each.free) OVER (PARTITION BY head.aggregate_key ORDER BY each.id) AS unbroken
              FROM head CROSS JOIN LATERAL (
                   SELECT id, ctid AS place, status = 'pending' AND next_attempt_at <= now()
                          AND (locked_until IS NULL OR locked_until <= now()) AS free
                     FROM outbox.outbox
                    WHERE status IN ('pending', 'dead') AND aggregate_key = head.aggregate_key AND id >= head.id
                    ORDER BY aggregate_key, id LIMIT run) AS each
        ), claimed AS (
            UPDATE outbox.outbox
               SET locked_by = 'limit', lease_id = lease, locked_until = now() + interval '30 s', attempts = attempts + 1
             WHERE ctid = ANY (ARRAY(SELECT place FROM wanted WHERE unbroken)) AND status = 'pending'
               AND next_attempt_at <= now() AND (locked_until IS NULL OR locked_until <= now())
            RETURNING ctid AS place
        )
        SELECT (SELECT array_agg(place) FROM claimed), (SELECT max(aggregate_key) FROM walk) INTO taken, reached;
        COMMIT;
        -- The next walk begins behind this one, or once more at the beginning.
        first := coalesce(reached + 1, -9223372036854775808);
        IF taken IS NULL THEN
            IF reached IS NULL THEN idle := idle + 1; END IF;
        ELSE
            idle := 0;
            UPDATE outbox.outbox SET status = 'published', published_at = now(), locked_by = NULL, lease_id = NULL, locked_until = NULL
             WHERE ctid = ANY (taken) AND lease_id = lease;
            COMMIT;
        END IF;
    END LOOP;
END $body$"#;

/// As the relay's sessions are set up.
const SETTINGS: &str = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan";

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    for connections in [1, 2] {
        let others = Others::watch(&bench.server.pid().into_iter().collect::<Vec<_>>());
        let (mut rates, mut processor) = (Vec::new(), f64::NAN);
        for _ in 0..bench.args.repeat {
            let (rate, seconds) = once(bench, connections)?;
            rates.push(rate);
            processor = seconds * 1e6 / f64::from(bench.args.events);
        }
        let (rate, spread) = median(rates);
        let name =
            format!("limit, {connections} connection{}", if connections > 1 { "s" } else { "" });
        let cost = format!("{processor:.1} us of processor time an event in the server");
        bench.row(Row::new(name, rate, "events/s").notes(spread).note(cost).notes(others.note()));
        bench.limit = Some(rate);
    }
    Ok(())
}

/// Events a second, and the processor time.
fn once(bench: &Bench, connections: u32) -> Result<(f64, f64)> {
    let database = bench.server.database()?;
    let (events, aggregates) = (bench.args.events, bench.args.aggregates);
    database.fill(&Fill { events, aggregates, ..Fill::default() })?;
    database.execute(PROCEDURE)?;
    database.settle()?;
    let before = database.server_seconds();
    let seconds = drain(&database, connections)?;
    let processor = database.server_seconds() - before;
    let left = database.count("SELECT count(*) FROM outbox.outbox WHERE status <> 'published'")?;
    if left > 0 {
        return Err(format!("the limit left {left} events").into());
    }
    Ok((f64::from(events) / seconds, processor))
}

fn drain(database: &Database, connections: u32) -> Result<f64> {
    let mut clients = Vec::new();
    for index in 0..connections {
        let mut client = database.connect()?;
        client.batch_execute(SETTINGS)?;
        // Each at its own part of the keys.
        let first = i128::from(i64::MIN) + (i128::from(index) << 64) / i128::from(connections);
        clients.push((client, first));
    }
    let started = Instant::now();
    let threads: Vec<_> = clients
        .into_iter()
        .map(|(mut client, first)| {
            std::thread::spawn(move || {
                client.batch_execute(&format!("CALL bench_limit({first}, 100, 5)"))
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked")??;
    }
    Ok(started.elapsed().as_secs_f64())
}
