//! The run's own tables: which events committed, and what really happened to the rows of the outbox.
//!
//! `chaos.written` gets a row in the transaction that appends an event, so it commits or rolls back with it, whatever the
//! writer's connection went through. `chaos.change` is filled by a trigger, in the transactions of whoever changes the
//! outbox, so it is exact where an answer was lost. Both are read at the end.

use postgres::{Client, Row};

use super::history::{Committed, Counts, History, Outcome};

const READ: &str = "the run's tables can be read";

/// A sequence is not locked by this table: whoever has the aggregate's lock of the outbox reads the highest and takes
/// the next. Two writers at once break the primary key.
pub const TABLES: &str = r"
CREATE SCHEMA chaos;
CREATE TABLE chaos.written (
    aggregate integer NOT NULL, sequence integer NOT NULL, event_id uuid NOT NULL, content bigint NOT NULL,
    is_poison boolean NOT NULL, PRIMARY KEY (aggregate, sequence)
);
CREATE TABLE chaos.change (
    published bigint, retried bigint, dead bigint, unlawful bigint, stolen bigint, at timestamptz DEFAULT clock_timestamp()
);
CREATE TABLE chaos.death (event_id uuid, reason text, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION chaos.note() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    INSERT INTO chaos.change
    SELECT * FROM (
        SELECT count(*) FILTER (WHERE o.status = 'pending' AND n.status = 'published') AS published,
               -- A failure moves the time of the next attempt; a release leaves it alone.
               count(*) FILTER (WHERE o.status = 'pending' AND n.status = 'pending' AND o.lease_id IS NOT NULL
                                  AND n.lease_id IS NULL AND n.next_attempt_at <> o.next_attempt_at) AS retried,
               count(*) FILTER (WHERE o.status = 'pending' AND n.status = 'dead') AS dead,
               count(*) FILTER (WHERE o.status IN ('published', 'discarded')
                                   OR o.status = 'dead' AND n.status NOT IN ('pending', 'discarded')
                                   OR o.status = 'pending' AND n.status = 'discarded'
                                   OR (n.id, n.event_id, n.aggregate_id, n.payload) <> (o.id, o.event_id, o.aggregate_id, o.payload))
                   AS unlawful,
               count(*) FILTER (WHERE o.locked_until > now() AND n.lease_id <> o.lease_id) AS stolen
          FROM old_rows o JOIN new_rows n USING (id)) AS c
     WHERE published + retried + dead + unlawful + stolen > 0;
    INSERT INTO chaos.death (event_id, reason)
    SELECT n.event_id, n.last_error FROM old_rows o JOIN new_rows n USING (id)
     WHERE o.status = 'pending' AND n.status = 'dead' AND n.event_type <> 'chaos.poison';
    RETURN NULL;
END $body$;
CREATE TRIGGER note AFTER UPDATE ON outbox.outbox REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION chaos.note();
";

/// Pending events that no dead one holds: what there is still to do.
pub fn left(client: &mut Client) -> i64 {
    const LEFT: &str = "SELECT count(*) FROM outbox.outbox o WHERE o.status = 'pending' AND NOT EXISTS (
        SELECT FROM outbox.outbox d WHERE d.status = 'dead' AND d.aggregate_key = o.aggregate_key AND d.id < o.id)";
    one(client, LEFT).get(0)
}

/// Which heads of aggregates are left and what is known of them, for people.
pub fn why(client: &mut Client) -> Vec<String> {
    const WHY: &str = "SELECT format('%s: attempts %s, unexplained %s, due in %s, leased by %s for %s, %s', o.id, o.attempts,
               o.unexplained_failures, o.next_attempt_at - now(), o.locked_by, o.locked_until - now(), o.last_error)
          FROM outbox.outbox o WHERE o.status = 'pending' AND NOT EXISTS (SELECT FROM outbox.outbox d
               WHERE d.status IN ('pending', 'dead') AND d.aggregate_key = o.aggregate_key AND d.id < o.id)
         ORDER BY o.id LIMIT 10";
    client.query(WHY, &[]).expect(READ).iter().map(|row| row.get(0)).collect()
}

/// Why events died that have nothing wrong with them, and how many of each. Each of them cost an operator's time.
pub fn reasons(client: &mut Client) -> Vec<(String, i64)> {
    const REASONS: &str =
        "SELECT concat(left(reason, 90), ', first at ', min(at)::timetz(0)), count(*) FROM chaos.death
         GROUP BY reason ORDER BY 2 DESC LIMIT 5";
    let rows = client.query(REASONS, &[]).expect(READ);
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

pub fn lease_lost(client: &mut Client) -> i64 {
    one(client, "SELECT lease_lost_total FROM outbox.outbox_metrics").get(0)
}

/// Reads what committed, aggregate by aggregate so that no answer is large, and the sums.
pub fn read(client: &mut Client, aggregates: u32, history: &mut History) {
    // Statistics may be older than the table; each event is looked up by its id.
    let by_index =
        "SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_seqscan = off";
    client.batch_execute(by_index).expect(READ);
    for aggregate in 0..aggregates {
        history.committed.extend(of_aggregate(client, aggregate));
    }
    history.outbox_rows = one(client, "SELECT count(*) FROM outbox.outbox").get(0);
    history.counted = counts(&one(
        client,
        "SELECT published_total, retried_total, dead_lettered_total FROM outbox.outbox_metrics",
    ));
    let happened = one(
        client,
        "SELECT coalesce(sum(published), 0)::bigint, coalesce(sum(retried), 0)::bigint, coalesce(sum(dead), 0)::bigint,
                coalesce(sum(unlawful), 0)::bigint, coalesce(sum(stolen), 0)::bigint FROM chaos.change",
    );
    history.happened = counts(&happened);
    let (unlawful, stolen): (i64, i64) = (happened.get(3), happened.get(4));
    if unlawful > 0 {
        history.incidents.push(format!("{unlawful} rows changed against the rules"));
    }
    if stolen > 0 {
        history.incidents.push(format!("{stolen} leases were overwritten before they lapsed"));
    }
}

fn one(client: &mut Client, sql: &str) -> Row {
    client.query_one(sql, &[]).expect(READ)
}

fn counts(row: &Row) -> Counts {
    Counts { published: row.get(0), retried: row.get(1), dead_lettered: row.get(2) }
}

fn of_aggregate(client: &mut Client, aggregate: u32) -> Vec<Committed> {
    let rows = client.query(
        "SELECT w.sequence, w.event_id, w.content, w.is_poison, o.status, coalesce(o.last_error, '') <> ''
           FROM chaos.written w LEFT JOIN outbox.outbox o USING (event_id)
          WHERE w.aggregate = $1 ORDER BY w.sequence",
        &[&(aggregate as i32)],
    );
    let event = |row: &Row| {
        let (sequence, event_id): (i32, uuid::Uuid) = (row.get(0), row.get(1));
        let outcome = match row.get::<_, Option<&str>>(4) {
            Some("pending") => Outcome::Pending,
            Some("published") => Outcome::Published,
            Some("dead") => Outcome::Dead { has_reason: row.get(5) },
            Some("discarded") => Outcome::Discarded,
            _ => Outcome::Missing,
        };
        Committed {
            event_id: event_id.as_u128(),
            aggregate,
            sequence: sequence as u32,
            content: row.get::<_, i64>(2) as u64,
            is_poison: row.get(3),
            outcome,
        }
    };
    rows.expect(READ).iter().map(event).collect()
}
