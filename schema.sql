-- pg-outbox, schema version 1: the outbox, what the relays say of themselves, and the writer's door.
--
-- Runs as it is with psql for a schema named outbox; `pg-outbox migrate` runs it for any other name, in one
-- transaction and under a lock. The name of the schema stands only between quotes ("outbox" as an identifier,
-- 'outbox' as a string), which is what is replaced.

-- A schema that is there already may belong to somebody else, and its comment with it.
DO $body$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'outbox') THEN
        CREATE SCHEMA "outbox";
        COMMENT ON SCHEMA "outbox" IS 'pg-outbox: events that a relay publishes to a broker';
    END IF;
END $body$;

CREATE TABLE "outbox".outbox_schema (
    version     integer     NOT NULL PRIMARY KEY,
    migrated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE "outbox".outbox_schema IS 'One row for each schema version that was installed; the highest is in force';
COMMENT ON INDEX "outbox".outbox_schema_pkey IS 'A version is installed once';
COMMENT ON COLUMN "outbox".outbox_schema.version IS 'Schema version';
COMMENT ON COLUMN "outbox".outbox_schema.migrated_at IS 'When it was installed';

-- ---------------------------------------------------------------------------------------------------- events

-- Header names: 1 to 255 bytes, no control characters, not the relay's own prefix. Values: strings without NUL, CR or
-- LF. Together at most 16 KiB.
CREATE FUNCTION "outbox".outbox_headers_ok(headers jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
RETURN CASE WHEN jsonb_typeof(headers) = 'object' THEN (
    SELECT coalesce(bool_and(jsonb_typeof(h.value) = 'string'
                             AND octet_length(h.key) BETWEEN 1 AND 255
                             AND h.key !~ E'[\\x01-\\x1f\\x7f]'
                             AND left(lower(h.key), 7) <> 'outbox-'
                             AND (h.value #>> '{}') !~ E'[\\r\\n]')
                    AND sum(octet_length(h.key) + octet_length(h.value #>> '{}')) <= 16384, true)
      FROM jsonb_each(headers) AS h) ELSE false END;
COMMENT ON FUNCTION "outbox".outbox_headers_ok(jsonb) IS 'Whether a header map keeps the limits';

CREATE TABLE "outbox".outbox (
    -- CACHE 1: a session that keeps numbers in reserve would hand out a lower one after a higher one was
    -- committed, and order inside an aggregate is the order of these numbers.
    id                   bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    aggregate_key        bigint      NOT NULL GENERATED ALWAYS AS
                                     (hashtextextended(aggregate_id, hashtextextended(aggregate_type, 0))) STORED,
    event_id             uuid        NOT NULL UNIQUE,
    lease_id             bigint,
    locked_until         timestamptz,
    next_attempt_at      timestamptz NOT NULL DEFAULT now(),
    created_at           timestamptz NOT NULL DEFAULT now(),
    not_before           timestamptz,
    retry_since          timestamptz,
    published_at         timestamptz,
    died_at              timestamptz,
    discarded_at         timestamptz,
    attempts             integer     NOT NULL DEFAULT 0,
    unexplained_failures integer     NOT NULL DEFAULT 0,
    in_doubt             boolean     NOT NULL DEFAULT false,
    status               text        NOT NULL DEFAULT 'pending',
    locked_by            text,
    aggregate_type       text        NOT NULL,
    aggregate_id         text        NOT NULL,
    event_type           text        NOT NULL,
    content_type         text        NOT NULL DEFAULT 'application/json',
    headers              jsonb       NOT NULL DEFAULT '{}',
    last_error           text,
    discard_note         text,
    payload              bytea       NOT NULL,
    -- PostgreSQL checks these again at every claim and verdict, so only what costs next to nothing stands here; the rest is
    -- checked by outbox_append_all().
    CONSTRAINT status_is_known CHECK (status IN ('pending', 'published', 'dead', 'discarded')),
    CONSTRAINT aggregate_type_has_1_to_255_bytes CHECK (octet_length(aggregate_type) BETWEEN 1 AND 255),
    CONSTRAINT aggregate_id_has_1_to_255_bytes CHECK (octet_length(aggregate_id) BETWEEN 1 AND 255),
    CONSTRAINT event_type_has_1_to_255_bytes CHECK (octet_length(event_type) BETWEEN 1 AND 255),
    CONSTRAINT content_type_has_1_to_255_bytes CHECK (octet_length(content_type) BETWEEN 1 AND 255),
    CONSTRAINT headers_are_an_object CHECK (jsonb_typeof(headers) = 'object'),
    CONSTRAINT payload_has_at_most_67108864_bytes CHECK (octet_length(payload) <= 67108864),
    CONSTRAINT times_are_finite CHECK (isfinite(next_attempt_at) AND isfinite(created_at))
) WITH (
    -- Room for the version that a claim writes on the same page, so that a claim touches no index (HOT).
    fillfactor = 60,
    -- Dead versions slow the claim down long before a fifth of the table has changed.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 5000,
    autovacuum_vacuum_cost_delay = 1
);

COMMENT ON TABLE "outbox".outbox IS 'Events. Write through outbox_append(), which keeps the order of an aggregate';
COMMENT ON COLUMN "outbox".outbox.id IS 'Order inside an aggregate; grows, with gaps';
COMMENT ON COLUMN "outbox".outbox.aggregate_key IS '64-bit hash of aggregate type and id; two aggregates that share one wait for each other, no more';
COMMENT ON COLUMN "outbox".outbox.event_id IS 'The id that every delivery of this event carries';
COMMENT ON COLUMN "outbox".outbox.lease_id IS 'The claim that holds the row; every later write must name it';
COMMENT ON COLUMN "outbox".outbox.locked_until IS 'When the lease lapses';
COMMENT ON COLUMN "outbox".outbox.next_attempt_at IS 'Not due before this; later than created_at once the event was put off, retried or requeued';
COMMENT ON COLUMN "outbox".outbox.created_at IS 'When the event was appended';
COMMENT ON COLUMN "outbox".outbox.not_before IS 'The delivery time that the writer asked for; the lag is measured from it';
COMMENT ON COLUMN "outbox".outbox.retry_since IS 'First failure of the present series; NULL while none';
COMMENT ON COLUMN "outbox".outbox.published_at IS 'When the verdict "published" was written';
COMMENT ON COLUMN "outbox".outbox.died_at IS 'When it last became dead';
COMMENT ON COLUMN "outbox".outbox.discarded_at IS 'When an operator discarded it';
COMMENT ON COLUMN "outbox".outbox.attempts IS 'Claims, less those that were given back; counted at the claim';
COMMENT ON COLUMN "outbox".outbox.unexplained_failures IS 'Unclassified failures, and claims that never came back';
COMMENT ON COLUMN "outbox".outbox.in_doubt IS 'An earlier attempt may have reached the broker';
COMMENT ON COLUMN "outbox".outbox.status IS 'pending, published, dead or discarded; dead holds the aggregate like pending';
COMMENT ON COLUMN "outbox".outbox.locked_by IS 'The relay that holds it, for people; still set at the next claim means that the holder never came back';
COMMENT ON COLUMN "outbox".outbox.aggregate_type IS 'Kind of aggregate, and the destination';
COMMENT ON COLUMN "outbox".outbox.aggregate_id IS 'Which aggregate';
COMMENT ON COLUMN "outbox".outbox.event_type IS 'What happened';
COMMENT ON COLUMN "outbox".outbox.content_type IS 'MIME type of the payload';
COMMENT ON COLUMN "outbox".outbox.headers IS 'The writer''s headers, names and string values';
COMMENT ON COLUMN "outbox".outbox.last_error IS 'Text of the last failure; survives a requeue';
COMMENT ON COLUMN "outbox".outbox.discard_note IS 'Who discarded it and why';
COMMENT ON COLUMN "outbox".outbox.payload IS 'Bytes, carried unchanged';

-- The jump: from the head of one aggregate to the head of the next, past everything that is held behind it.
CREATE INDEX outbox_unfinished ON "outbox".outbox (aggregate_key, id) WHERE status IN ('pending', 'dead');
COMMENT ON INDEX "outbox".outbox_unfinished IS 'Heads of aggregates, and what is held behind them';

-- Events whose time was moved (put off, retried, requeued), by that time. Fresh ones are not in it.
CREATE INDEX outbox_waiting ON "outbox".outbox (next_attempt_at, id) WHERE status = 'pending' AND next_attempt_at > created_at;
COMMENT ON INDEX "outbox".outbox_waiting IS 'Retries, requeues and delayed events in the order in which they become due';

CREATE INDEX outbox_dead ON "outbox".outbox (aggregate_key, id) WHERE status = 'dead';
COMMENT ON INDEX "outbox".outbox_pkey IS 'The order of events';
COMMENT ON INDEX "outbox".outbox_event_id_key IS 'An event id is there once';
COMMENT ON INDEX "outbox".outbox_dead IS 'Dead letters, and the aggregates that they hold';

-- The payload as text where it is text, for people.
CREATE FUNCTION "outbox".outbox_text(payload bytea) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    RETURN convert_from(payload, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character OR invalid_text_representation THEN
    RETURN NULL;
END $body$;
COMMENT ON FUNCTION "outbox".outbox_text(bytea) IS 'Bytes as text; NULL where they are no UTF-8';

CREATE VIEW "outbox".outbox_events AS
SELECT id, event_id, aggregate_type, aggregate_id, event_type, status,
       "outbox".outbox_text(payload) AS payload_text, octet_length(payload) AS payload_bytes, content_type, headers,
       attempts, unexplained_failures, next_attempt_at, locked_by, locked_until, retry_since, last_error,
       created_at, not_before, published_at, died_at, discarded_at, discard_note
  FROM "outbox".outbox;
COMMENT ON VIEW "outbox".outbox_events IS 'Events for people: the payload as text where it is text';
COMMENT ON COLUMN "outbox".outbox_events.payload_text IS 'The payload as text; NULL where it is none';
COMMENT ON COLUMN "outbox".outbox_events.payload_bytes IS 'The length of the payload';
-- The other columns say what they say in the table.
DO $body$
DECLARE
    shared record;
BEGIN
    FOR shared IN
        SELECT v.attname AS name, col_description(t.attrelid, t.attnum) AS comment
          FROM pg_attribute AS v JOIN pg_attribute AS t ON t.attname = v.attname
         WHERE v.attrelid = format('%I.outbox_events', 'outbox')::regclass
           AND t.attrelid = format('%I.outbox', 'outbox')::regclass AND t.attnum > 0
    LOOP
        EXECUTE format('COMMENT ON COLUMN %I.outbox_events.%I IS %L', 'outbox', shared.name, shared.comment);
    END LOOP;
END $body$;

-- ---------------------------------------------------------------------------------------------------- relays

CREATE TABLE "outbox".outbox_relay (
    relay_id      text        NOT NULL,
    worker        integer     NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at  timestamptz DEFAULT clock_timestamp(),
    only_types    text[]      NOT NULL DEFAULT '{}',
    except_types  text[]      NOT NULL DEFAULT '{}',
    paused_types  text[]      NOT NULL DEFAULT '{}',
    paused_reason text,
    paused_since  timestamptz,
    published     bigint      NOT NULL DEFAULT 0,
    retried       bigint      NOT NULL DEFAULT 0,
    dead_lettered bigint      NOT NULL DEFAULT 0,
    lease_lost    bigint      NOT NULL DEFAULT 0,
    latency       bigint[]    NOT NULL DEFAULT array_fill(0::bigint, ARRAY[14]),
    latency_sum   float8      NOT NULL DEFAULT 0,
    transient_window interval,
    PRIMARY KEY (relay_id, worker)
) WITH (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE "outbox".outbox_relay IS 'What each thread of each relay says of itself, and its counters, which are written with what they count';
COMMENT ON INDEX "outbox".outbox_relay_pkey IS 'A row for each thread';
COMMENT ON COLUMN "outbox".outbox_relay.relay_id IS 'The relay, stable across restarts';
COMMENT ON COLUMN "outbox".outbox_relay.worker IS 'Its thread: 0 claims, 1 and up publish. A row each, so that they never wait for each other';
COMMENT ON COLUMN "outbox".outbox_relay.started_at IS 'When the thread last started';
COMMENT ON COLUMN "outbox".outbox_relay.heartbeat_at IS 'Its last progress; NULL after a clean stop. A relay is alive while the oldest of its beats is younger than 30 s';
COMMENT ON COLUMN "outbox".outbox_relay.only_types IS 'The aggregate types it serves; {} for all. Said by thread 0 only';
COMMENT ON COLUMN "outbox".outbox_relay.except_types IS 'The aggregate types it leaves to others. Said by thread 0 only';
COMMENT ON COLUMN "outbox".outbox_relay.paused_types IS 'Destinations that are paused; {*} for the whole broker';
COMMENT ON COLUMN "outbox".outbox_relay.paused_reason IS 'Why';
COMMENT ON COLUMN "outbox".outbox_relay.paused_since IS 'Since when';
COMMENT ON COLUMN "outbox".outbox_relay.published IS 'Events marked as published';
COMMENT ON COLUMN "outbox".outbox_relay.retried IS 'Failures that will be retried';
COMMENT ON COLUMN "outbox".outbox_relay.dead_lettered IS 'Events marked as dead';
COMMENT ON COLUMN "outbox".outbox_relay.lease_lost IS 'Events whose verdict or renewal came too late, so that another claim had them';
COMMENT ON COLUMN "outbox".outbox_relay.latency IS 'The published ones by the time they took from append (or not_before) to verdict: under 10 ms, 50 ms, 100 ms, 500 ms, 1 s, 5 s, 10 s, 30 s, 1 min, 5 min, 10 min, 1 h, 1 day, and longer';
COMMENT ON COLUMN "outbox".outbox_relay.latency_sum IS 'The sum of those times, in seconds';
COMMENT ON COLUMN "outbox".outbox_relay.transient_window IS 'How long this relay lets an event fail, as it was last started; on thread 0 only';

CREATE TABLE "outbox".outbox_wakeup (
    relay_id text        NOT NULL PRIMARY KEY,
    until    timestamptz NOT NULL
) WITH (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 100);
COMMENT ON TABLE "outbox".outbox_wakeup IS 'Idle relays that want a NOTIFY; writers send none while it is empty, because a NOTIFY serialises commits';
COMMENT ON INDEX "outbox".outbox_wakeup_pkey IS 'A row for each relay';
COMMENT ON COLUMN "outbox".outbox_wakeup.relay_id IS 'The relay that sleeps';
COMMENT ON COLUMN "outbox".outbox_wakeup.until IS 'Until when it wants one, so that a killed relay costs the writers nothing for long';

-- Every metric of the relay in one row, by one reading of the clock. Its owner reads the tables, so whoever may read
-- the view sees no event. Rows that are finished are never looked at: each part reads a partial index only. The lag
-- of an event starts when it was appended, or later where its writer asked for that.
CREATE VIEW "outbox".outbox_metrics AS
-- What began to fail before this has used its window up. The shortest window among living relays counts; without one,
-- that of the relay that was started last.
WITH doom AS (
    SELECT statement_timestamp() - coalesce(
        (SELECT min(transient_window) FROM "outbox".outbox_relay WHERE heartbeat_at > statement_timestamp() - interval '30 s'),
        (SELECT transient_window FROM "outbox".outbox_relay WHERE transient_window IS NOT NULL
          ORDER BY started_at DESC LIMIT 1)) AS cut)
SELECT unfinished.pending_rows, unfinished.retrying_rows, unfinished.leased_rows, held.held_rows,
       unfinished.dead_rows, unfinished.oldest_pending_age_seconds, unfinished.oldest_dead_age_seconds,
       unfinished.dying_within_1h_rows, unfinished.dying_within_6h_rows, relays.relays_alive, relays.relays_paused,
       counters.published_total, counters.retried_total, counters.dead_lettered_total, counters.lease_lost_total,
       counters.latency, counters.latency_sum
  FROM (SELECT count(*) FILTER (WHERE status = 'pending') AS pending_rows,
               count(*) FILTER (WHERE status = 'pending' AND retry_since IS NOT NULL) AS retrying_rows,
               count(*) FILTER (WHERE status = 'pending' AND locked_until > statement_timestamp()) AS leased_rows,
               count(*) FILTER (WHERE status = 'dead') AS dead_rows,
               greatest(0, extract(epoch FROM statement_timestamp() - min(greatest(not_before, created_at))
                   FILTER (WHERE status = 'pending')))::float8 AS oldest_pending_age_seconds,
               greatest(0, extract(epoch FROM statement_timestamp() - min(died_at)
                   FILTER (WHERE status = 'dead')))::float8 AS oldest_dead_age_seconds,
               count(*) FILTER (WHERE status = 'pending' AND retry_since < (SELECT cut FROM doom) + interval '1 h') AS dying_within_1h_rows,
               count(*) FILTER (WHERE status = 'pending' AND retry_since < (SELECT cut FROM doom) + interval '6 h') AS dying_within_6h_rows
          FROM "outbox".outbox WHERE status IN ('pending', 'dead')) AS unfinished,
       -- Counted for each dead head by itself: a join could be planned as all dead times all pending when the
       -- statistics are old. All that is unfinished behind it, less the dead: both are counted in an index alone.
       (SELECT coalesce(sum((SELECT count(*) FROM "outbox".outbox AS later
                              WHERE later.aggregate_key = dead.aggregate_key AND later.id > dead.id
                                AND later.status IN ('pending', 'dead')) - dead.others), 0)::bigint AS held_rows
          FROM (SELECT aggregate_key, min(id) AS id, count(*) - 1 AS others
                  FROM "outbox".outbox WHERE status = 'dead' GROUP BY aggregate_key) AS dead) AS held,
       -- A relay is as alive as the slowest of its threads; one that stopped cleanly has no beat.
       (SELECT count(*) FILTER (WHERE alive) AS relays_alive, count(*) FILTER (WHERE alive AND paused) AS relays_paused
          FROM (SELECT min(heartbeat_at) > statement_timestamp() - interval '30 s' AS alive,
                       bool_or(paused_types <> '{}') AS paused
                  FROM "outbox".outbox_relay WHERE heartbeat_at IS NOT NULL GROUP BY relay_id) AS relay) AS relays,
       (SELECT coalesce(sum(published), 0)::bigint AS published_total, coalesce(sum(retried), 0)::bigint AS retried_total,
               coalesce(sum(dead_lettered), 0)::bigint AS dead_lettered_total,
               coalesce(sum(lease_lost), 0)::bigint AS lease_lost_total, coalesce(sum(latency_sum), 0) AS latency_sum,
               ARRAY(SELECT coalesce(sum(r.latency[place]), 0)::bigint
                       FROM generate_series(1, 14) AS place LEFT JOIN "outbox".outbox_relay AS r ON true
                      GROUP BY place ORDER BY place) AS latency
          FROM "outbox".outbox_relay) AS counters;
COMMENT ON VIEW "outbox".outbox_metrics IS 'The metrics, read from the tables';
COMMENT ON COLUMN "outbox".outbox_metrics.pending_rows IS 'Events not yet published';
COMMENT ON COLUMN "outbox".outbox_metrics.retrying_rows IS 'Pending events that have failed';
COMMENT ON COLUMN "outbox".outbox_metrics.leased_rows IS 'Pending events that a relay holds';
COMMENT ON COLUMN "outbox".outbox_metrics.held_rows IS 'Pending events behind a dead one of their aggregate';
COMMENT ON COLUMN "outbox".outbox_metrics.dead_rows IS 'Events that wait for a person';
COMMENT ON COLUMN "outbox".outbox_metrics.oldest_pending_age_seconds IS 'The lag; 0 while nothing is pending';
COMMENT ON COLUMN "outbox".outbox_metrics.oldest_dead_age_seconds IS 'How long the first dead event has waited; 0 while none is dead';
COMMENT ON COLUMN "outbox".outbox_metrics.dying_within_1h_rows IS 'Failing events whose window ends within an hour, or has ended';
COMMENT ON COLUMN "outbox".outbox_metrics.dying_within_6h_rows IS 'The same within six hours';
COMMENT ON COLUMN "outbox".outbox_metrics.relays_alive IS 'Relays all of whose threads made progress within 30 s';
COMMENT ON COLUMN "outbox".outbox_metrics.relays_paused IS 'Living relays that paused a destination or the broker';
COMMENT ON COLUMN "outbox".outbox_metrics.published_total IS 'Events marked as published, by all relays ever';
COMMENT ON COLUMN "outbox".outbox_metrics.retried_total IS 'Failures that were to be retried';
COMMENT ON COLUMN "outbox".outbox_metrics.dead_lettered_total IS 'Events marked as dead';
COMMENT ON COLUMN "outbox".outbox_metrics.lease_lost_total IS 'Verdicts and renewals that came too late';
COMMENT ON COLUMN "outbox".outbox_metrics.latency IS 'Published events by the time they took, as in outbox_relay';
COMMENT ON COLUMN "outbox".outbox_metrics.latency_sum IS 'The sum of those times, in seconds';

-- ---------------------------------------------------------------------------------------------------- writers

-- A version 7 UUID: 48 bits of milliseconds, then randomness. PostgreSQL 18 has its own.
DO $body$
BEGIN
    IF current_setting('server_version_num')::int >= 180000 THEN
        CREATE FUNCTION "outbox".outbox_new_event_id() RETURNS uuid LANGUAGE sql VOLATILE
        RETURN uuidv7();
    ELSE
        -- A version 4 UUID has its variant bits where version 7 wants them; only time and version are put in front.
        CREATE FUNCTION "outbox".outbox_new_event_id() RETURNS uuid LANGUAGE sql VOLATILE
        RETURN (lpad(to_hex(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '7'
                || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid;
    END IF;
END $body$;
COMMENT ON FUNCTION "outbox".outbox_new_event_id() IS 'A new version 7 UUID';

-- Serialises the writers of each aggregate until their transactions end, so that within an aggregate the order of ids
-- is the order of commits. Locks are taken in one order, so that two calls for the same aggregates cannot deadlock.
--
-- The server's lock table has room for some thousands. A transaction that writes for more than 1,000 aggregates
-- therefore takes one lock for all instead: every writer holds the gate in shared mode, such a transaction alone. While
-- it waits for those who were first, new writers wait behind it. A transaction that has appended before it comes to that
-- point may meet one that waits for its aggregate in a deadlock, which the server resolves by failing one of them
-- (40P01). One call for all of its events, as the first one of its transaction, spares it that.
CREATE FUNCTION "outbox".outbox_lock_aggregates(aggregate_types text[], aggregate_ids text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    aggregates CONSTANT integer := 1869968482;  -- namespaces of advisory locks, private to this project
    gates      CONSTANT integer := 1869968483;
    most       CONSTANT integer := 1000;
    salt       CONSTANT integer := hashtext('outbox');
    spent      integer := coalesce(nullif(current_setting('pg_outbox.locks', true), ''), '0')::integer;
    keys       integer[];
BEGIN
    -- unnest and not a subscript: an array need not begin at 1.
    SELECT array_agg(DISTINCT hashint8extended(hashtextextended(a.id, hashtextextended(a.type, 0)), salt)::bit(32)::integer)
      INTO keys FROM unnest(aggregate_types, aggregate_ids) AS a (type, id);
    IF keys IS NULL THEN RETURN; END IF;
    IF spent <= most THEN
        spent := spent + cardinality(keys);
        IF spent > most THEN
            -- Calls for an aggregate that is locked already were counted as well: look at what is really held. Unless
            -- that leaves some room, every further call would have to look, which is not cheap.
            SELECT count(*) + cardinality(keys) INTO spent
              FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND classid = aggregates::oid AND objsubid = 2;
            IF spent > most - 100 THEN spent := most + 1; END IF;
        END IF;
        PERFORM set_config('pg_outbox.locks', spent::text, true);
    END IF;
    IF spent > most THEN
        PERFORM pg_advisory_xact_lock(gates, salt);
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(gates, salt);
    PERFORM pg_advisory_xact_lock(aggregates, k.key) FROM (SELECT unnest(keys) AS key ORDER BY 1) AS k;
END $body$;
COMMENT ON FUNCTION "outbox".outbox_lock_aggregates(text[], text[]) IS 'Serialises the writers of these aggregates until the transaction ends';

-- The one door. Runs with its owner's rights, so that a writer needs no right on the table. Returns the event ids in
-- input order. What is NULL in content_types, headers, event_ids and not_befores gets its default.
CREATE FUNCTION "outbox".outbox_append_all(
    aggregate_types text[], aggregate_ids text[], event_types text[], payloads bytea[],
    content_types text[] DEFAULT NULL, headers jsonb[] DEFAULT NULL, event_ids uuid[] DEFAULT NULL,
    not_befores timestamptz[] DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    events      CONSTANT integer := cardinality(aggregate_ids);
    appended_at timestamptz;
    ids         uuid[];
BEGIN
    IF (events = ALL (ARRAY[cardinality(aggregate_types), cardinality(event_types), cardinality(payloads),
                            coalesce(cardinality(content_types), events), coalesce(cardinality(headers), events),
                            coalesce(cardinality(event_ids), events), coalesce(cardinality(not_befores), events)])) IS NOT TRUE THEN
        RAISE EXCEPTION 'every array must have as many entries as aggregate_ids; only content_types, headers, event_ids and '
            'not_befores may be NULL'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF array_position(aggregate_types, NULL) IS NOT NULL OR array_position(aggregate_ids, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'aggregate type or aggregate id is NULL' USING ERRCODE = 'not_null_violation';
    END IF;
    IF EXISTS (SELECT FROM unnest(aggregate_types || aggregate_ids || event_types || content_types) AS name
                WHERE name ~ E'[\\x01-\\x1f\\x7f]') THEN
        RAISE EXCEPTION 'names have a control character: aggregate type, aggregate id, event type and content type must have none'
            USING ERRCODE = 'check_violation';
    END IF;
    IF EXISTS (SELECT FROM unnest(headers) AS map WHERE map <> '{}' AND NOT "outbox".outbox_headers_ok(map)) THEN
        RAISE EXCEPTION 'headers break a limit: a map of strings, together at most 16384 bytes; names of 1 to 255 bytes that do '
            'not start with outbox- and have no control characters; values without line breaks'
            USING ERRCODE = 'check_violation';
    END IF;
    -- Before any id is drawn.
    PERFORM "outbox".outbox_lock_aggregates(aggregate_types, aggregate_ids);
    appended_at := clock_timestamp();
    SELECT coalesce(array_agg(coalesce(e.given, "outbox".outbox_new_event_id()) ORDER BY e.n), '{}')
      INTO ids FROM unnest(aggregate_ids, event_ids) WITH ORDINALITY AS e (aggregate_id, given, n);
    INSERT INTO "outbox".outbox (event_id, aggregate_type, aggregate_id, event_type, payload, content_type, headers,
                                 not_before, next_attempt_at, created_at)
    SELECT e.event_id, e.aggregate_type, e.aggregate_id, e.event_type, e.payload,
           coalesce(e.content_type, 'application/json'), coalesce(e.headers, '{}'),
           e.not_before, greatest(e.not_before, appended_at), appended_at
      FROM unnest(ids, aggregate_types, aggregate_ids, event_types, payloads, content_types, headers, not_befores)
           WITH ORDINALITY AS e (event_id, aggregate_type, aggregate_id, event_type, payload, content_type, headers,
                                 not_before, n)
     ORDER BY e.n;
    IF EXISTS (SELECT FROM "outbox".outbox_wakeup WHERE until > appended_at) THEN
        PERFORM pg_notify('outbox_' || md5('outbox'), '');
    END IF;
    RETURN ids;
END $body$;
COMMENT ON FUNCTION "outbox".outbox_append_all(text[], text[], text[], bytea[], text[], jsonb[], uuid[], timestamptz[])
    IS 'Appends events, in order, and returns their event ids';

CREATE FUNCTION "outbox".outbox_append(
    aggregate_type text, aggregate_id text, event_type text, payload bytea,
    content_type text DEFAULT 'application/octet-stream', headers jsonb DEFAULT '{}', event_id uuid DEFAULT NULL,
    not_before timestamptz DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    RETURN ("outbox".outbox_append_all(ARRAY[aggregate_type], ARRAY[aggregate_id], ARRAY[event_type], ARRAY[payload],
        ARRAY[coalesce(content_type, 'application/octet-stream')], ARRAY[headers], ARRAY[event_id], ARRAY[not_before]))[1];
END $body$;
COMMENT ON FUNCTION "outbox".outbox_append(text, text, text, bytea, text, jsonb, uuid, timestamptz)
    IS 'Appends an event whose payload is bytes';

-- json keeps the text as it was written; jsonb would not.
CREATE FUNCTION "outbox".outbox_append(
    aggregate_type text, aggregate_id text, event_type text, payload json,
    content_type text DEFAULT 'application/json', headers jsonb DEFAULT '{}', event_id uuid DEFAULT NULL,
    not_before timestamptz DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    RETURN ("outbox".outbox_append_all(ARRAY[aggregate_type], ARRAY[aggregate_id], ARRAY[event_type],
        ARRAY[convert_to(payload::text, 'UTF8')], ARRAY[content_type], ARRAY[headers], ARRAY[event_id], ARRAY[not_before]))[1];
END $body$;
COMMENT ON FUNCTION "outbox".outbox_append(text, text, text, json, text, jsonb, uuid, timestamptz)
    IS 'Appends an event whose payload is JSON';

-- A quoted literal has no type of its own; this form checks it where the content type says that it is JSON.
CREATE FUNCTION "outbox".outbox_append(
    aggregate_type text, aggregate_id text, event_type text, payload text,
    content_type text DEFAULT 'application/json', headers jsonb DEFAULT '{}', event_id uuid DEFAULT NULL,
    not_before timestamptz DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    content_type := coalesce(content_type, 'application/json');
    IF content_type ~* '^[^;]*[/+]json *(;|$)' THEN
        PERFORM payload::json;
    END IF;
    RETURN "outbox".outbox_append(aggregate_type, aggregate_id, event_type, convert_to(payload, 'UTF8'),
        content_type, headers, event_id, not_before);
END $body$;
COMMENT ON FUNCTION "outbox".outbox_append(text, text, text, text, text, jsonb, uuid, timestamptz)
    IS 'Appends an event whose payload is a string: JSON, unless the content type says otherwise';

-- Nobody writes unless granted: see `pg-outbox migrate --help`. By name, because the schema may have functions of
-- others as well.
REVOKE ALL ON FUNCTION
    "outbox".outbox_headers_ok(jsonb),
    "outbox".outbox_text(bytea),
    "outbox".outbox_new_event_id(),
    "outbox".outbox_lock_aggregates(text[], text[]),
    "outbox".outbox_append_all(text[], text[], text[], bytea[], text[], jsonb[], uuid[], timestamptz[]),
    "outbox".outbox_append(text, text, text, bytea, text, jsonb, uuid, timestamptz),
    "outbox".outbox_append(text, text, text, json, text, jsonb, uuid, timestamptz),
    "outbox".outbox_append(text, text, text, text, text, jsonb, uuid, timestamptz)
    FROM PUBLIC;

INSERT INTO "outbox".outbox_schema (version) VALUES (1);
