-- The outbox: one table, and one function for each thing that may happen to a row of it.
--
-- Locks:    nothing that exists; everything here is new. Takes well under a second.
-- Deploy:   before any code that uses it.
--
-- The map, in reading order:
--
--   types       status, and domains for what a single column may hold
--   tables      migration        which of these files have been applied, and the oldest code they support
--               outbox           a row is a job: its state, budget, lease and evidence (SPEC: the row)
--               event_handled    what a handler has done once and for all
--               pause            topics that nobody may claim now
--               dispatcher       who is alive, what it serves, whether it sleeps
--               sweep            when the watchdog last looked, and until when it holds off
--               claim_try        claims that had to be sent again
--               batch            large claims: one entry by which all of their leases are found
--
--   producers   uuid7, outbox_enqueue (with has_long_queue, event_with and event_named), outbox_wake
--   dispatchers outbox_lanes     which lanes have work, and from when on
--               outbox_claim     due rows -> RUNNING, under a lease and a token (outbox_claim_lane: of one lane)
--               outbox_flush     what was committed before is on disk
--               outbox_heartbeat the lease goes on
--               outbox_complete  RUNNING -> COMPLETED, or the row is deleted
--               outbox_fail      RUNNING -> RETRYING or DEAD_LETTERED, as record_failure decides
--               outbox_snooze    RUNNING -> RETRYING, and the attempt was none
--               outbox_release   RUNNING -> where it came from, and the attempt was none
--               outbox_lapse     RUNNING -> as record_failure decides, when a worker's child has died
--               outbox_reap      the same for every lease that has run out: the watchdog
--               outbox_heal      ordering keys that a race left without a claimable head
--               outbox_next_alert  what died and was not alerted: the next alert to send, outbox_pay_alert when it has arrived
--               dispatcher_*     who is alive
--   operators   outbox_replay, outbox_discard, outbox_pause, outbox_resume, outbox_prune, outbox_prune_handled
--               outbox_free      RUNNING -> where it came from, after a restore: what dead workers held
--               outbox_replay_many, outbox_discard_many  dead letters by topic, error class and time, no more than asked for
--               views topic_status, dispatcher_status, dead_kind, dead_letter, blocked_key; running
--   at the end  outbox_grant: who may call what
--   inside      follow_status, lock_claimed, answers, unpark, record_failure, release_locked, paused_topics, whose_turn, take,
--               note_batch, count_off, enter_leases, dissolve, mend_leases, lapse_delay, lapse_failure, hold_event, failure_cycle,
--               check_replay, check_discard, replay_held, discard_held, hold_dead, oldest_unfinished, count_topics, blocked_keys
--
-- Five rules hold everywhere:
--
--   A lane is (topic, generation, lapses, priority): rows that one claim may take in the order of the index outbox_due.
--   Rows that nobody could run now (finished, running, waiting for their key) are in no lane, so no claim walks over them.
--
--   Indexes know the status by a copy of it, indexed_as, in which COMPLETED is RUNNING, and its time by indexed_at. So the completion
--   of a row without an entry in outbox_leases changes nothing that is indexed: the new version of the row stays on its page and
--   needs no entry in any index, which saves a fifth of what a job costs the server. Whoever looks for rows by their status asks for
--   indexed_as; what a row is, its status says. A third copy, known_as, is what our own statements wrote last: by it a status shows that
--   somebody has written by hand.
--
--   The fence is (event_id, claim_token, RUNNING). Whoever writes after a claim goes through lock_claimed, which also
--   skips rows that somebody else has locked: no write after a claim waits for a row. outbox_complete, which nearly every job
--   ends in, says the same in its own statements first, and can wait for who locks a row in that very moment. Only two claims that
--   go for the same ordering key at the same moment can wait for each other, in outbox_one_running_per_key: 23505 or 40P01, claim again.
--
--   p_now is null in production: the database's clock rules. Tests pass a time of their own.
--
--   Functions run with their owner's rights and a search_path of their own; the grants at the end say who may call what.
--   The planner's choices are pinned inside them: statistics of a queue are wrong most of the time. That makes costs look
--   immense, so just-in-time compilation is off: it would take 40 ms before the first row. Whatever looks for given ids
--   says `event_id = any (ids)`, joined or not: else the planner walks along the whole primary key while the table is small,
--   and keeps that plan while it grows.

-- Not `if not exists`: that needs the right to create schemas even where an administrator has made this one.
do $$
begin
  if to_regnamespace('pulse') is null then
    create schema pulse;
  end if;
end
$$;

create table pulse.migration (
  version     integer     not null,
  name        text        not null,
  oldest_code text        not null,
  checksum    text,
  applied_at  timestamptz not null default clock_timestamp(),
  applied_by  text        not null default session_user,
  constraint migration_pkey primary key (version)
);
comment on table pulse.migration is 'Applied migration files. oldest_code: the oldest release that may use the schema from then on.';

------------------------------------------------------------------------------------------------------------------------
-- Tables
------------------------------------------------------------------------------------------------------------------------

-- COMPLETED last and RUNNING before it: see indexed_as.
create type pulse.status as enum ('PENDING', 'RETRYING', 'DEAD_LETTERED', 'DISCARDED', 'RUNNING', 'COMPLETED');

-- What one column may hold by itself. A domain is looked at only by who writes its column, and its text is read once by a session.
-- As constraints of the table these would be read anew by every statement: a job that comes alone would cost a quarter more.
-- topic has no domain: drivers don't know what array_agg would make of it.
create domain pulse.natural2 as smallint check (value >= 0);
create domain pulse.natural4 as integer check (value >= 0);
create domain pulse.natural8 as bigint check (value >= 0);
create domain pulse.budget as integer check (value >= 1);
create domain pulse.priority as smallint check (value between -9 and 9);
-- What a client can't hold it can't claim: the whole batch would lapse again and again.
create domain pulse.moment as timestamptz check (value between '2000-01-01 00:00Z' and '9000-01-01 00:00Z');
-- Keys are index entries: 400 characters of four bytes still fit. Bytes are known and characters have to be counted.
create domain pulse.key as text collate "C"
  check (octet_length(value) between 1 and 400 or char_length(value) between 1 and 400);
create domain pulse.error as text check (octet_length(value) <= 8192);

-- The order of the columns is for speed: an update compares every indexed column of the old and the new row, and finds
-- those fastest that stand before the first null and the first text. What comes next is what claims and completions look at.
--
-- PostgreSQL reads the text of a check anew in every statement. A list of statuses is one constant there, `status in (…)` would
-- be as many as it names.
--
-- The primary key is filled to a half: each job adds two entries beside its first one, and a full page would be cleaned up or
-- split on the way.
create table pulse.outbox (
  event_id              uuid           not null,
  seq                   bigint         not null generated always as identity,
  next_run_at           pulse.moment   not null default clock_timestamp(),
  generation            pulse.natural8 not null default 0,
  status                pulse.status   not null default 'PENDING',
  indexed_as            pulse.status   not null default 'PENDING', -- the status, with RUNNING for COMPLETED
  known_as              pulse.status   not null default 'PENDING', -- the status, unless it was written by hand
  parked                boolean        not null default false, -- waits for an earlier event of its ordering key
  holds_key             boolean        not null default true,  -- as a dead letter it keeps later events of its key waiting
  alone                 boolean        not null default false, -- the present claim runs with nothing beside it
  priority              pulse.priority not null default 0,
  lapses                pulse.natural2 not null default 0,
  topic                 text           not null collate "C",
  idempotency_key       pulse.key      not null,
  indexed_at            timestamptz,                           -- lease_until, where no batch stands for it; of the dead, completed_at
  lease_until           timestamptz,
  completed_at          timestamptz,
  ordering_key          pulse.key,
  claim_token           uuid,
  producer_max_attempts pulse.budget,                          -- the producer's own budget, if it gave one
  created_at            pulse.moment   not null default clock_timestamp(),
  lease_seq             pulse.natural8 not null default 0,
  attempts              pulse.natural4 not null default 0,
  snoozes               pulse.natural4 not null default 0,     -- how often the handler asked for later, in this cycle
  alerted_at            timestamptz,
  alert_id              uuid,
  claimed_at            timestamptz,                           -- the newest claim; kept when it ends
  max_attempts          pulse.budget,
  locked_by             text,
  payload               jsonb          not null,
  headers               jsonb          not null default '{}',
  source                text,
  target                text,
  first_failed_at       timestamptz,
  last_error            pulse.error,
  last_failure          jsonb,
  failure_history       jsonb          not null default '[]',
  alert_offered_at      timestamptz,                           -- when its alert was last given to a dispatcher to send

  constraint outbox_pkey primary key (event_id) with (fillfactor = 50),
  constraint outbox_lease_means_running check (
    case when status = 'RUNNING'
      then lease_until is not null and locked_by is not null and claim_token is not null and max_attempts is not null
      else lease_until is null and locked_by is null
    end),
  constraint outbox_ended_has_a_time check (
    (completed_at is not null) = (status = any ('{COMPLETED,DEAD_LETTERED,DISCARDED}'))),
  constraint outbox_parked_waits check (
    not parked or (ordering_key is not null and lease_until is null and completed_at is null)),
  constraint outbox_topic check (char_length(topic) <@ int4range '[1, 200]')
);
-- Where lz4 was built in, a large payload is written up to three times as fast as with the server's default.
do $$
begin
  if 'lz4' = any ((select enumvals from pg_catalog.pg_settings where name = 'default_toast_compression')::text[]) then
    alter table pulse.outbox alter column payload set compression lz4;
  end if;
end
$$;
comment on table pulse.outbox is 'One row is one job: state, retry budget, lease and evidence.';

-- What a claim reads: only rows that could run, lane by lane, in the order in which they are to run.
create index outbox_due on pulse.outbox (topic, generation, lapses, priority, next_run_at, seq)
  where indexed_as in ('PENDING', 'RETRYING') and not parked;

-- What the watchdog reads, beside pulse.batch.
create index outbox_leases on pulse.outbox (indexed_at)
  where indexed_as = 'RUNNING' and indexed_at is not null;

-- A given idempotency key exists once per topic. A key that is the event's own id needs no index beside the primary key.
create unique index outbox_idempotency on pulse.outbox (topic, idempotency_key)
  where idempotency_key <> event_id::text;

-- Whose turn it is: the first entry of an ordering key is its head.
create index outbox_keys on pulse.outbox (ordering_key, seq)
  where ordering_key is not null
    and (indexed_as in ('PENDING', 'RETRYING') or (indexed_at is not null and (indexed_as = 'RUNNING' or holds_key)));

-- Of one key two can never run at once, whatever a claim believes.
create unique index outbox_one_running_per_key on pulse.outbox (ordering_key)
  where ordering_key is not null and indexed_as = 'RUNNING' and indexed_at is not null;

-- Dead letters by topic and time, and those whose alert is still owed: by alert, and last those that have none yet.
create index outbox_dead on pulse.outbox (topic, indexed_at)
  where indexed_as = 'DEAD_LETTERED';
create index outbox_alerts_owed on pulse.outbox (alert_id, indexed_at)
  where indexed_as = 'DEAD_LETTERED' and alerted_at is null;

-- Pages are filled to less than a half, since a claim makes a row longer by a quarter. The claimed version comes into the rest, and
-- the completed one where the first has been: a table that is full would take three places for a row until vacuum comes, and a new page
-- for each.
--
-- A job writes its row three times in a few milliseconds. Without these settings autovacuum would come after a fifth of the
-- table has died; with them it comes after 20,000 dead rows and does not rest between pages.
alter table pulse.outbox set (
  fillfactor = 40,
  autovacuum_vacuum_scale_factor = 0.01,
  autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0,
  autovacuum_vacuum_insert_scale_factor = 0.1,
  autovacuum_analyze_scale_factor = 0.1,
  autovacuum_analyze_threshold = 20000
);

-- The copies for who writes a row by hand; what stands here sets them itself. The condition is as short as it is since every claim
-- and every completion pays for it, and reads its text anew. What it does not see: a lease that somebody moves while a batch stands
-- for it.
create function pulse.follow_status() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
begin
  update pulse.outbox o
     set known_as   = o.status,
         indexed_as = least(o.status, 'RUNNING'),
         indexed_at = case o.status when 'RUNNING' then o.lease_until when 'DEAD_LETTERED' then o.completed_at end
   where o.event_id = any (array[new.event_id]);
  return null;
end
$$;
create trigger outbox_written_by_hand after update of status, lease_until, completed_at on pulse.outbox
  for each row
  when (new.known_as <> new.status
        or new.indexed_at <> coalesce(new.lease_until, new.completed_at))
  execute function pulse.follow_status();
create trigger outbox_inserted_by_hand after insert on pulse.outbox
  for each row
  when (new.known_as <> new.status)
  execute function pulse.follow_status();

create table pulse.event_handled (
  handler_name    text        not null collate "C",
  idempotency_key text        not null collate "C",
  handled_at      timestamptz not null default clock_timestamp(),
  constraint event_handled_pkey primary key (handler_name, idempotency_key)
);
comment on table pulse.event_handled is
  'A handler records here, in its own transaction, that it has done its work for this key. Kept for ever unless pruned on request.';

create table pulse.pause (
  topic     text        collate "C",
  reason    text        not null,
  paused_by text        not null,
  paused_at timestamptz not null default clock_timestamp(),
  constraint pause_topic_length check (char_length(topic) between 1 and 200)
);
comment on table pulse.pause is 'Topics that nobody may claim now. A null topic pauses all.';
create unique index pause_once on pulse.pause (coalesce(topic, ''));

create table pulse.dispatcher (
  worker       text        not null collate "C",
  host         text        not null,
  pid          integer     not null,
  version      text        not null,
  topics       text[]      not null,
  generations  bigint[],
  started_at   timestamptz not null default clock_timestamp(),
  last_seen_at timestamptz not null default clock_timestamp(),
  in_flight    integer     not null default 0,
  sleeping     boolean     not null default false,
  lease        interval    not null default '30 seconds',
  completed    bigint      not null default 0,             -- events since it started
  rates        real[],                                     -- completed per second of each of its topics, lately; null: too early to say
  constraint dispatcher_pkey primary key (worker)
) with (fillfactor = 50);
comment on table pulse.dispatcher is
  'Dispatchers that are alive. generations null: all. sleeping: a producer must notify it.';

create table pulse.sweep (
  swept_at   timestamptz not null,
  hold_until timestamptz not null
);
comment on table pulse.sweep is
  'Sweeps of the watchdog, newest last; a handful of rows. Appended to, never locked, so that one stuck sweeper cannot stop the others.';

-- Unlogged: a crash or a failover ends the sessions in which an earlier try could still be waiting.
create unlogged table pulse.claim_try (
  token    uuid        not null,
  tries    integer     not null,
  tried_at timestamptz not null,
  constraint claim_try_pkey primary key (token)
);
comment on table pulse.claim_try is
  'Claims that were sent again because their answer was lost, so that an earlier try which comes late takes nothing. Kept for a day.';

-- An entry for each lease in outbox_leases would be the dearest part of a claim and, since it has to go again, of a completion.
-- The rows of a large claim have none; what is left of them when the lease is over gets one then, and is like all others.
create table pulse.batch (
  token       uuid        not null,
  lease_until timestamptz not null,                        -- the first lease of its rows: a heartbeat gives a row an entry of its own
  open        integer     not null,                        -- how many are not settled, as far as was counted off
  event_ids   uuid[]      not null,
  constraint batch_pkey primary key (token)
);
alter table pulse.batch alter column event_ids set storage external;
alter table pulse.batch set (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
create index batch_leases on pulse.batch (lease_until);
comment on table pulse.batch is
  'Large claims that are not settled, each with the events that it took: the leases for which outbox_leases has no entry.';

------------------------------------------------------------------------------------------------------------------------
-- Producers
------------------------------------------------------------------------------------------------------------------------

-- A time-ordered UUID (version 7): new rows land on one side of the primary key.
create function pulse.uuid7() returns uuid
language plpgsql volatile parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
  return encode(
           set_bit(set_bit(
             overlay(uuid_send(gen_random_uuid())
                     placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                     from 1 for 6),
             52, 1), 53, 1),
           'hex')::uuid;
end
$$;

-- Wakes the dispatchers that sleep and serve one of these topics. While all of them are busy this is one look at a table of
-- a few rows: a producer under load never reaches the lock that notifications share. A single topic is named, so that who
-- wakes up asks for it and for nothing else.
create function pulse.outbox_wake(p_topics text[]) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (
       select 1
         from pulse.dispatcher d
        where d.sleeping
          and d.topics && p_topics
          and d.last_seen_at > clock_timestamp() - d.lease)      -- or it was killed in its sleep
     and pg_notification_queue_usage() < 0.5      -- a full queue would fail the producer's commit; polling is enough
  then
    perform pg_notify('pulse_outbox_wake', case when cardinality(p_topics) = 1 then p_topics[1] else '' end);
  end if;
end
$$;

-- Whether an ordering key has a long queue. An event that joins one is born parked, which saves the claim a look at it. Not
-- behind a short one: the whole queue may end before the producer commits, and then nobody would see the row in time to
-- unpark it.
create function pulse.has_long_queue(p_ordering_key text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return exists (
    select 1
      from pulse.outbox o
     where o.ordering_key = p_ordering_key
       and (o.indexed_as in ('PENDING', 'RETRYING') or (o.indexed_at is not null and (o.indexed_as = 'RUNNING' or o.holds_key)))
     order by o.ordering_key desc, o.seq desc
    offset 15
     limit 1);
end
$$;

-- The event that has this id or, in its topic, this key.
create function pulse.event_with(p_topic text, p_idempotency_key text, p_event_id uuid) returns uuid
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_found uuid;
begin
  select o.event_id into v_found from pulse.outbox o where o.event_id = p_event_id;
  if v_found is null then
    select o.event_id
      into v_found
      from pulse.outbox o
     where o.topic = p_topic
       and o.idempotency_key = p_idempotency_key
       and o.idempotency_key <> o.event_id::text;
  end if;
  return v_found;
end
$$;

-- The event of this topic that has no given key, and whose own id this key is.
create function pulse.event_named(p_topic text, p_idempotency_key text) returns uuid
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
  return (
    select o.event_id
      from pulse.outbox o
     where o.event_id = p_idempotency_key::uuid
       and o.idempotency_key = p_idempotency_key
       and o.topic = p_topic);
end
$$;

-- Writes one event in the caller's transaction and returns its id, or the id of the event that is already there.
-- What only few events need stands in functions of its own: in the insert, every event would pay for its set-up.
create function pulse.outbox_enqueue(
  p_topic           text,
  p_payload         jsonb,
  p_idempotency_key text        default null,
  p_ordering_key    text        default null,
  p_headers         jsonb       default null,
  p_priority        smallint    default null,
  p_run_at          timestamptz default null,
  p_max_attempts    integer     default null,
  p_generation      bigint      default null,
  p_source          text        default null,
  p_target          text        default null,
  p_event_id        uuid        default null,
  p_dead_key        text        default null,
  p_now             timestamptz default null
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now      timestamptz := coalesce(p_now, clock_timestamp());
  v_event_id uuid := coalesce(p_event_id, pulse.uuid7());
  v_found    uuid;
  v_sleeps   boolean;                                  -- a dispatcher that serves the topic
begin
  -- A transaction's first look at a condition sets it up, so the many are looked at only if there is something to see.
  if p_topic is null
     or char_length(p_topic) not between 1 and 200
     or p_payload is null
     or num_nonnulls(p_idempotency_key, p_ordering_key, p_headers, p_priority, p_run_at, p_max_attempts, p_generation,
                     p_dead_key) > 0
  then
    case
      when p_topic is null or char_length(p_topic) not between 1 and 200 then
        raise exception 'topic must have 1 to 200 characters' using errcode = 'PO003';
      when p_payload is null then
        raise exception 'payload must not be null (for a JSON null pass ''null'')' using errcode = 'PO003';
      when char_length(p_idempotency_key) not between 1 and 400 then
        raise exception 'idempotency_key must have 1 to 400 characters' using errcode = 'PO003';
      when char_length(p_ordering_key) not between 1 and 400 then
        raise exception 'ordering_key must have 1 to 400 characters' using errcode = 'PO003';
      when jsonb_typeof(p_headers) <> 'object' then
        raise exception 'headers must be a JSON object' using errcode = 'PO003';
      when p_priority not between -9 and 9 then
        raise exception 'priority must be between -9 and 9' using errcode = 'PO003';
      when p_max_attempts < 1 then
        raise exception 'max_attempts must be at least 1' using errcode = 'PO003';
      when p_generation < 0 then
        raise exception 'generation must not be negative' using errcode = 'PO003';
      when p_run_at = '-infinity' or p_run_at >= '9000-01-01 00:00Z' then
        raise exception 'run_at must be before the year 9000' using errcode = 'PO003';
      when p_dead_key not in ('hold', 'skip') then
        raise exception 'dead_key must be ''hold'' or ''skip''' using errcode = 'PO003';
      else
        null;
    end case;
  end if;

  -- An event without a given key has its own id for one: a given key that is such an id means that event.
  if p_idempotency_key ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' then
    v_found := pulse.event_named(p_topic, p_idempotency_key);
  end if;
  while v_found is null loop
    insert into pulse.outbox (
      event_id, topic, payload, headers, source, target, idempotency_key, ordering_key, priority, generation,
      producer_max_attempts, next_run_at, created_at, holds_key, parked)
    values (
      v_event_id, p_topic, p_payload, coalesce(p_headers, '{}'), p_source, p_target,
      coalesce(p_idempotency_key, v_event_id::text), p_ordering_key, coalesce(p_priority, 0::smallint), coalesce(p_generation, 0),
      p_max_attempts, greatest(p_run_at, v_now), v_now, coalesce(p_dead_key, 'hold') = 'hold',
      p_ordering_key is not null and pulse.has_long_queue(p_ordering_key))
    on conflict do nothing
    returning exists (
                select 1
                  from pulse.dispatcher d
                 where d.sleeping
                   and p_topic = any (d.topics))
         into v_sleeps;
    if found then
      if v_sleeps then
        perform pulse.outbox_wake(array[p_topic]);
      end if;
      return v_event_id;
    end if;
    -- Null when what was in the way has been pruned between the two statements: then it is tried again.
    v_found := pulse.event_with(p_topic, p_idempotency_key, p_event_id);
  end loop;
  return v_found;
end
$$;

------------------------------------------------------------------------------------------------------------------------
-- Inside: what every write after a claim shares
------------------------------------------------------------------------------------------------------------------------

-- The fence. Locks those of the given claims that still hold and that nobody else has locked, and says where they are.
-- Inside coalesce, the pairs are looked up in a hash for each row; else the planner would make a join of it, either way round.
create function pulse.lock_claimed(p_event_ids uuid[], p_tokens uuid[]) returns tid[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  if cardinality(p_event_ids) is distinct from cardinality(p_tokens) then
    raise exception 'event_ids and tokens must have the same length' using errcode = 'PO003';
  end if;
  return array(
    select o.ctid
      from pulse.outbox o
     where o.event_id = any (p_event_ids)
       and coalesce((o.event_id, o.claim_token) in (
             select c.event_id, c.token from unnest(p_event_ids, p_tokens) as c (event_id, token)), false)
       and o.lease_until is not null      -- RUNNING, said so that the planner can't turn to the index of leases
       for update skip locked);
end
$$;

-- The answer for each of the given claims after a call that was to settle them: 'locked' (try again), 'lost' (never yours
-- again), or how it is settled, by this call or by an earlier one whose answer was lost. Of the settled it speaks only when
-- asked to (p_loud): silence is success. Where rows are deleted, one that is gone is settled.
create function pulse.answers(
  p_event_ids uuid[], p_tokens uuid[], p_wanted pulse.status[], p_loud boolean default false, p_gone_is_done boolean default false)
returns table (event_id uuid, answer text)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_nestloop = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return query
  select c.event_id, a.answer
    from unnest(p_event_ids, p_tokens) as c (event_id, token)
    left join pulse.outbox o on o.event_id = c.event_id and o.event_id = any (p_event_ids)
   cross join lateral (
           select case
                    when o.event_id is null and p_gone_is_done then null
                    when (o.claim_token = c.token) is not true then 'lost'
                    when o.status = 'RUNNING' then 'locked'
                    when o.status <> all (p_wanted) then 'lost'
                    when p_loud then o.status::text
                  end as answer) as a
   where a.answer is not null;
end
$$;

-- One entry for the leases of these rows, which are about to be claimed under this token. True, so that it can be a condition.
create function pulse.note_batch(p_token uuid, p_rows tid[], p_until timestamptz) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  insert into pulse.batch as b (token, lease_until, open, event_ids)
  select p_token, p_until, count(*), array_agg(o.event_id)
    from pulse.outbox o
   where o.ctid = any (p_rows)
  having count(*) > 0
  on conflict (token) do update
     set lease_until = least(b.lease_until, excluded.lease_until),
         open        = b.open + excluded.open,
         event_ids   = b.event_ids || excluded.event_ids;
  return true;
end
$$;

-- Says of which batches rows have just been settled, one token for each row, and forgets those that are settled whole. Only for
-- rows that this transaction has settled: none is counted off twice. It waits for nobody: what is not counted off, dissolve finds.
-- So callers do not count a few: looking at their batch once when its lease is over is cheaper.
create function pulse.count_off(p_tokens uuid[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_token uuid;
  v_count integer;
begin
  for v_token, v_count in
    select t.token, count(*)
      from unnest(p_tokens) as t (token)
     where t.token = any (array(select b.token from pulse.batch b where b.token = any (p_tokens)))
     group by t.token
     order by t.token
  loop
    delete from pulse.batch b
     where b.ctid = any (array(
             select d.ctid from pulse.batch d where d.token = v_token and d.open <= v_count for update skip locked));
    continue when found;
    update pulse.batch b
       set open = b.open - v_count
     where b.ctid = any (array(
             select d.ctid from pulse.batch d where d.token = v_token for update skip locked));
  end loop;
end
$$;

-- Gives rows that the caller has locked, all of them RUNNING, an entry each in outbox_leases. One with an ordering key is not in a
-- batch unless somebody wrote it by hand, and another of its key may be running: then it gets its entry when that has ended. Says how
-- many entries it made.
create function pulse.enter_leases(p_rows tid[]) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_row   tid;
  v_count integer;
begin
  update pulse.outbox o
     set indexed_at = o.lease_until
   where o.ctid = any (p_rows)
     and o.ordering_key is null;
  get diagnostics v_count = row_count;
  for v_row in
    select o.ctid from pulse.outbox o where o.ctid = any (p_rows) and o.ordering_key is not null
  loop
    begin
      update pulse.outbox o
         set indexed_at = o.lease_until
       where o.ctid = v_row;
      v_count := v_count + 1;
    exception
      when unique_violation then
        null;
    end;
  end loop;
  return v_count;
end
$$;

-- Gives what is left of batches whose lease ends before p_before an entry of its own in outbox_leases, and says how much that was.
-- Stops after p_limit. A batch of which somebody has a row locked, or that is locked itself, is looked at again the next time.
create function pulse.dissolve(p_before timestamptz, p_limit integer) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_batch record;
  v_rows  tid[];
  v_count integer := 0;
begin
  for v_batch in
    select b.token, b.event_ids
      from pulse.batch b
     where b.lease_until < p_before
     order by b.lease_until
  loop
    v_rows := array(
      select o.ctid
        from pulse.outbox o
       where o.event_id = any (v_batch.event_ids)
         and o.status = 'RUNNING'
         and o.indexed_at is null
         for update skip locked);
    v_count := v_count + pulse.enter_leases(v_rows);
    -- Not one that has grown meanwhile: of what came to it, nothing was looked at.
    delete from pulse.batch b
     where b.ctid = any (array(
             select d.ctid
               from pulse.batch d
              where d.token = v_batch.token
                and cardinality(d.event_ids) = cardinality(v_batch.event_ids)
                for update skip locked))
       and not exists (
             select 1
               from pulse.outbox o
              where o.event_id = any (v_batch.event_ids)
                and o.status = 'RUNNING'
                and o.indexed_at is null);
    exit when v_count >= p_limit;
  end loop;
  return v_count;
end
$$;

-- The same for what is RUNNING without a batch, on some pages of the table: after a restore of this table alone, or a write by hand.
create function pulse.mend_leases(p_page bigint, p_pages bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
  perform pulse.enter_leases(array(
    select r.ctid
      from pulse.outbox r
     where r.ctid >= format('(%s,0)', p_page)::tid
       and r.ctid < format('(%s,0)', p_page + p_pages)::tid
       and r.status = 'RUNNING'
       and r.indexed_at is null
       and not exists (select 1 from pulse.batch b where b.token = r.claim_token)
       for update of r skip locked));
end
$$;

-- What is RUNNING.
create function pulse.running() returns setof pulse.outbox
language sql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
  select o.*
    from pulse.outbox o
   where o.indexed_as = 'RUNNING'
     and o.indexed_at is not null
   union all
  select o.*
    from pulse.outbox o
   where o.event_id = any (array(select unnest(b.event_ids) from pulse.batch b))
     and o.status = 'RUNNING'
     and o.indexed_at is null
$$;

-- Gives the turn to the next event of each key: the lowest that is unfinished, if it is parked.
-- A second statement after the write that ended the turn, so that it sees that write and whatever was committed meanwhile.
-- The row gets the present time: claims that go on from where they were must not have passed it.
create function pulse.unpark(p_keys text[], p_now timestamptz) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_rows   tid[];
  v_topics text[];
begin
  v_rows := array(
    select o.ctid
      from pulse.outbox o
     where o.ctid = any (array(
             select head.ctid
               from unnest(p_keys) as k (ordering_key)
              cross join lateral (
                      select h.ctid, h.parked
                        from pulse.outbox h
                       where h.ordering_key = k.ordering_key
                         and (h.indexed_as in ('PENDING', 'RETRYING')
                              or (h.indexed_at is not null and (h.indexed_as = 'RUNNING' or h.holds_key)))
                       order by h.ordering_key, h.seq
                       limit 1) as head
              where head.parked))
       and o.parked
       for no key update skip locked);
  if cardinality(v_rows) = 0 then
    return 0;
  end if;

  with unparked as (
    update pulse.outbox o
       set parked = false,
           next_run_at = greatest(o.next_run_at, p_now)
     where o.ctid = any (v_rows)
    returning o.topic
  )
  select array_agg(distinct topic) into v_topics from unparked;
  perform pulse.outbox_wake(v_topics);
  return cardinality(v_rows);
end
$$;

-- The one place where retry or dead letter is decided, for failures that a worker reports and for leases that lapsed.
-- The caller has locked the rows in the same transaction. The attempt was counted when the job was claimed; it is given
-- back when the job lapsed in company, since it may be an innocent neighbour of the one that killed the worker, except
-- under a budget of one, which is a promise not to start twice.
create function pulse.record_failure(
  p_rows      tid[],
  p_event_ids uuid[],
  p_tokens    uuid[],
  p_errors    text[],
  p_failures  jsonb[],
  p_delays    interval[],
  p_terminal  boolean[],
  p_lapsed    boolean,
  p_reaped    boolean,
  p_now       timestamptz
) returns table (event_id uuid, answer text, topic text, attempts pulse.natural4, max_attempts pulse.budget,
               lapses pulse.natural2, last_error pulse.error)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_keys text[];
begin
  return query
  with decided as materialized (
    select o.ctid as row,
           f.error,
           f.failure,
           f.delay,
           greatest(0, o.attempts - c.refund) as attempts,
           (case
              when f.terminal then 'DEAD_LETTERED'
              when c.refund = 1 or o.attempts < o.max_attempts then 'RETRYING'
              else 'DEAD_LETTERED'
            end)::pulse.status as status
      from pulse.outbox o
      join unnest(p_event_ids, p_tokens, p_errors, p_failures, p_delays, p_terminal)
             as f (event_id, token, error, failure, delay, terminal)
        on f.event_id = o.event_id
       and f.token = o.claim_token
     cross join lateral (
             select (p_lapsed and not o.alone and o.max_attempts > 1)::integer as refund) as c
     where o.ctid = any (p_rows)
       and o.event_id = any (p_event_ids)
  )
  update pulse.outbox o
     set status          = d.status,
         indexed_as      = d.status,
         known_as        = d.status,
         indexed_at      = case d.status when 'DEAD_LETTERED' then p_now end,
         attempts        = d.attempts,
         lapses          = least(o.lapses + p_lapsed::integer, 32767)::smallint,
         next_run_at     = case d.status when 'RETRYING' then least(p_now + d.delay, '9000-01-01 00:00Z') else o.next_run_at end,
         completed_at    = case d.status when 'DEAD_LETTERED' then p_now end,
         first_failed_at = coalesce(o.first_failed_at, p_now),
         last_error      = case when octet_length(d.error) <= 8192 then d.error else left(d.error, 2048) end,
         -- Whoever reports a lapse may not know the handler; an earlier failure of the cycle may.
         last_failure    = jsonb_strip_nulls(jsonb_build_object('handler', o.last_failure -> 'handler')) || d.failure,
         lease_until     = null,
         locked_by       = null,
         claim_token     = case when not p_reaped then o.claim_token end
    from decided d
   where o.ctid = d.row
  returning o.event_id, o.status::text, o.topic, o.attempts, o.max_attempts, o.lapses, o.last_error;

  -- The turn may be over: by a dead letter that lets its key go on, or because an earlier event came late.
  v_keys := array(
    select distinct o.ordering_key
      from pulse.outbox o
     where o.event_id = any (p_event_ids)
       and o.ordering_key is not null);
  if cardinality(v_keys) > 0 then
    perform pulse.unpark(v_keys, p_now);
  end if;
end
$$;

------------------------------------------------------------------------------------------------------------------------
-- Dispatchers
------------------------------------------------------------------------------------------------------------------------

-- Topics that nobody may claim now; an empty string stands for all of them. Not in SQL's own language: before PostgreSQL 18
-- that is planned anew at each call, a tenth of what a claim takes that finds one event.
create function pulse.paused_topics() returns text[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select coalesce(p.topic, '') from pulse.pause p);
end
$$;

-- The lanes that have work, now or later, each with its first row: where a claim may start, and until when one may sleep.
-- It jumps from lane to lane in the index and never walks along one. Paused topics and other generations are left out.
-- due_in: seconds until the first row is due, on the database's clock; negative when it is.
create function pulse.outbox_lanes(p_topics text[], p_generations bigint[] default null, p_now timestamptz default null)
returns table (topic text, generation bigint, lapses smallint, priority smallint, next_run_at timestamptz, seq bigint,
               due_in double precision)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_paused     text[] := pulse.paused_topics();
  v_topic      text;
  v_generation bigint;
  v_lapses     smallint;
  v_priority   smallint;
begin
  foreach v_topic in array p_topics loop
    continue when v_topic = any (v_paused) or '' = any (v_paused);
    v_generation := -1;
    v_lapses := 0;
    v_priority := 0;
    loop
      select o.topic, o.generation, o.lapses, o.priority, o.next_run_at, o.seq,
             extract(epoch from o.next_run_at - coalesce(p_now, clock_timestamp()))
        into topic, generation, lapses, priority, next_run_at, seq, due_in
        from pulse.outbox o
       where o.topic = v_topic
         and (o.generation, o.lapses, o.priority) > (v_generation, v_lapses, v_priority)
         and o.indexed_as in ('PENDING', 'RETRYING')
         and not o.parked
       order by o.topic, o.generation, o.lapses, o.priority, o.next_run_at, o.seq
       limit 1;
      exit when not found;
      v_generation := generation;
      v_lapses := lapses;
      v_priority := priority;
      if p_generations is null or v_generation = 0 or v_generation = any (p_generations) then
        return next;
      else
        v_lapses := 32767;      -- on to the next generation
        v_priority := 9;
      end if;
    end loop;
  end loop;
end
$$;

-- Of rows that the caller has locked: those whose turn it is. The others are parked until the end of the turn unparks them.
-- Parking happens under a lock on the row that is waited for. If that can't be had, its turn may be ending right now, and
-- the end would not see what is parked here: the row is left as it is, for the next claim to look at.
create function pulse.whose_turn(p_rows tid[], p_now timestamptz) returns tid[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_waiting  tid[];
  v_seqs     bigint[];
  v_blockers uuid[];
  v_locked   uuid[];
  v_stuck    text[];
begin
  select array_agg(w.row), array_agg(w.seq), array_agg(w.blocker)
    into v_waiting, v_seqs, v_blockers
    from (
      select c.ctid as row, c.seq, coalesce(nullif(head.event_id, c.event_id), running.event_id) as blocker
        from pulse.outbox c
       cross join lateral (
               select h.event_id
                 from pulse.outbox h
                where h.ordering_key = c.ordering_key
                  and (h.indexed_as in ('PENDING', 'RETRYING')
                       or (h.indexed_at is not null and (h.indexed_as = 'RUNNING' or h.holds_key)))
                order by h.ordering_key, h.seq
                limit 1) as head
        left join lateral (
               select r.event_id
                 from pulse.outbox r
                where r.ordering_key = c.ordering_key
                  and r.indexed_as = 'RUNNING'
                  and r.indexed_at is not null
                order by r.ordering_key
                limit 1) as running on true      -- the limit keeps the planner from making a join of it
       where c.ctid = any (p_rows)
         and c.ordering_key is not null) as w
   where w.blocker is not null;
  if v_waiting is null then
    return p_rows;
  end if;

  select array_agg(b.event_id), array_agg(b.ordering_key) filter (where b.parked)
    into v_locked, v_stuck
    from (
      select o.event_id, o.ordering_key, o.parked
        from pulse.outbox o
       where o.event_id = any (v_blockers)
         and (o.indexed_as in ('PENDING', 'RETRYING') or (o.indexed_at is not null and (o.indexed_as = 'RUNNING' or o.holds_key)))
         for no key update skip locked) as b;

  -- Once more under the lock: a blocker that comes later blocks only while it runs.
  update pulse.outbox o
     set parked = true
   where o.ctid = any (array(
           select w.row
             from unnest(v_waiting, v_seqs, v_blockers) as w (row, seq, blocker)
             join pulse.outbox b on b.event_id = w.blocker
            where b.event_id = any (v_locked)
              and (b.seq < w.seq or b.status = 'RUNNING')));
  if v_stuck is not null then
    perform pulse.unpark(v_stuck, p_now);      -- a head that a race left parked: now is the time
  end if;
  return array(select r from unnest(p_rows) as r where r <> all (v_waiting));
end
$$;

-- What take has taken; how many rows with a budget of one may still be; and the first that it left behind for want of a slot.
create type pulse.taken as (rows tid[], slots integer, left_behind tid);

-- Locks up to p_limit due rows of one lane, from a position on, and says where they are. Of rows with a budget of one it takes
-- no more than p_slots. Rows that can't be taken now are passed over, in ever larger strides but not for ever: what waits
-- for its key gets parked on the way.
create function pulse.take(
  p_topic       text,
  p_generation  bigint,
  p_lapses      smallint,
  p_priority    smallint,
  p_next_run_at timestamptz,
  p_seq         bigint,
  p_limit       integer,
  p_slots       integer,
  p_budget      integer,
  p_now         timestamptz
) returns pulse.taken
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_taken  tid[] := '{}';
  v_found  tid[];
  v_rows   tid[];
  v_once   boolean[];                                  -- of what was found: its budget is one
  v_onces  integer;
  v_keyed  boolean;
  v_left   tid;
  v_wanted integer := p_limit;
  v_stride integer := p_limit;
begin
  if p_budget = 1 then
    v_stride := least(p_limit, p_slots + 1);           -- what this lane has is mostly such: one more shows whether there are more
  end if;
  for v_round in 1 .. 5 loop
    exit when v_wanted < 1;
    select array_agg(c.row), array_agg(c.once), count(*) filter (where c.once), bool_or(c.keyed)
      into v_found, v_once, v_onces, v_keyed
      from (
        select o.ctid as row,
               o.ordering_key is not null as keyed,
               coalesce(o.producer_max_attempts, p_budget) = 1 as once
          from pulse.outbox o
         where o.topic = p_topic
           and o.generation = p_generation
           and o.lapses = p_lapses
           and o.priority = p_priority
           and o.indexed_as in ('PENDING', 'RETRYING')
           and not o.parked
           and o.status in ('PENDING', 'RETRYING')      -- whatever its copy says
           and (o.next_run_at, o.seq) >= (p_next_run_at, p_seq)
           and o.next_run_at <= p_now
         order by o.topic, o.generation, o.lapses, o.priority, o.next_run_at, o.seq
         limit v_stride
           for update skip locked) as c;
    exit when v_found is null;

    v_rows := v_found;
    if v_keyed or v_onces > p_slots or v_stride <> v_wanted then
      select o.next_run_at, o.seq + 1
        into p_next_run_at, p_seq
        from pulse.outbox o
       where o.ctid = v_found[cardinality(v_found)];
      if v_keyed then
        v_rows := pulse.whose_turn(v_rows, p_now);
      end if;
      -- Budgets of one, as many as can start at once; and of all that, no more than is wanted.
      select coalesce(array_agg(w.row order by w.place) filter (where w.fits), '{}'),
             p_slots - count(*) filter (where w.fits and w.once),
             coalesce(v_left, (array_agg(w.row order by w.place) filter (where not w.fits))[1])
        into v_rows, p_slots, v_left
        from (
          select n.row, n.once, n.place, n.fits, count(*) filter (where n.fits) over (order by n.place) as number
            from (
              select f.row, f.once, f.place,
                     not f.once or count(*) filter (where f.once) over (order by f.place) <= p_slots as fits
                from unnest(v_found, v_once) with ordinality as f (row, once, place)
               where f.row in (select unnest(v_rows))) as n) as w
       where w.number <= v_wanted
         and (w.fits or w.number < v_wanted);          -- what comes behind the last one is not left for want of a slot
    else
      p_slots := p_slots - v_onces;
    end if;
    v_taken := v_taken || v_rows[:v_wanted];
    v_wanted := v_wanted - least(v_wanted, cardinality(v_rows));
    exit when cardinality(v_found) < v_stride
           -- More of the same would only be locked for nothing.
           or ((v_round > 1 or p_budget = 1) and p_slots < 1 and v_left is not null and v_onces = cardinality(v_found));
    v_stride := least(2000, greatest(100, v_wanted * 4 ^ v_round));
  end loop;
  return (v_taken, p_slots, v_left)::pulse.taken;
end
$$;

-- Takes due rows, gives them a lease under the caller's token, counts the attempt, and returns them, in no order. looked_at
-- tells the caller what time it is here. A row without event_id is none that was taken: in its lane, at its place,
-- a row with a budget of one was left behind for want of a slot.
--
-- p_token     minted by the caller for this one call. Called again with the same token, because the answer was lost, it
--             returns the rows of the first call and takes no others, even while that call is still running.
-- p_topics    what the caller serves; p_budgets: for each of them the max_attempts of its policy (5 where none is given).
-- p_limit     never more than this. p_slots: how many of them can start at once; only as many rows with a budget of
--             one are taken, since those must not wait in the memory of a process that may die.
-- p_lanes     lanes to take from, in this order, as outbox_lanes gave them, each with the position to start at and the
--             quota of its topic, which all lanes of the topic share and which must stand together:
--             [{"topic", "generation", "lapses", "priority", "quota", "next_run_at", "seq"}]. A caller that remembers
--             where it was skips what vacuum could not remove yet. Null: all lanes there are, fair between topics;
--             with p_lapses only those of events whose lease has lapsed so often.
-- p_fresh     the caller is certain that this token was never sent before; saves the look for its rows.
-- p_try       which try of this call it is, from 1 on. One that a stalled server or network lets through after a later one
--             takes nothing: nobody waits for its answer, so nobody would run what it took.
-- p_alone     the caller will run these with nothing beside them (what lapsed twice is always run so).
-- p_together  many are expected, and soon settled: a batch stands for their leases. The same at every try. For speed only.
create function pulse.outbox_claim(
  p_token       uuid,
  p_worker      text,
  p_topics      text[],
  p_limit       integer,
  p_lease       interval    default '30 seconds',
  p_budgets     integer[]   default null,
  p_generations bigint[]    default null,
  p_slots       integer     default null,
  p_lanes       jsonb       default null,
  p_lapses      smallint    default null,
  p_fresh       boolean     default false,
  p_alone       boolean     default false,
  p_try         integer     default null,
  p_together    boolean     default false,
  p_now         timestamptz default null
) returns table (
  event_id uuid, seq bigint, topic text, payload jsonb, headers jsonb, source text, target text, idempotency_key pulse.key,
  ordering_key pulse.key, priority pulse.priority, generation pulse.natural8, attempts pulse.natural4,
  max_attempts pulse.budget, lease_seq pulse.natural8, lapses pulse.natural2, snoozes pulse.natural4, alone boolean,
  created_at pulse.moment, next_run_at pulse.moment, looked_at timestamptz
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_now    timestamptz;
  v_lanes  jsonb := p_lanes;
  v_topics integer := 1;
  v_paused text[];
  v_lane   record;
  v_topic  text;
  v_share  integer;                                    -- what the present topic may still take in this round
  v_room   integer := p_limit;
  v_before integer;
  v_slots  integer := greatest(0, coalesce(p_slots, p_limit));
  v_budget integer;                                    -- of the present topic's policy
  v_until  timestamptz;
  v_taken  pulse.taken;
  v_tries  integer;
  v_ids    uuid[];
begin
  if p_token is null or coalesce(p_worker, '') = '' or p_topics is null or p_limit is null or p_lease is null then
    raise exception 'token, worker, topics, limit and lease are needed to claim' using errcode = 'PO003';
  end if;

  -- A repeated call waits here until the first has committed, and then sees what it took.
  perform pg_advisory_xact_lock(hashtextextended(p_token::text, 0));
  lock table pulse.outbox in row exclusive mode;       -- whoever has to wait for that takes the time afterwards: a lease begins now
  v_now := coalesce(p_now, clock_timestamp());
  v_until := v_now + p_lease;

  if p_try > 1 then
    insert into pulse.claim_try as t (token, tries, tried_at)
    values (p_token, p_try, v_now)
    on conflict (token) do update
       set tries = greatest(t.tries, excluded.tries)
    returning t.tries into v_tries;
    delete from pulse.claim_try t
     where t.ctid = any (array(
             select old.ctid from pulse.claim_try old where old.tried_at < v_now - interval '1 day' limit 100 for update skip locked));
  elsif p_try is not null then
    select t.tries into v_tries from pulse.claim_try t where t.token = p_token;
  end if;
  if v_tries > p_try then
    return;
  end if;

  if not p_fresh then
    v_ids := coalesce((select b.event_ids from pulse.batch b where b.token = p_token), '{}') || array(
      select o.event_id
        from pulse.outbox o
       where o.indexed_as = 'RUNNING'
         and o.indexed_at is not null
         and o.claim_token = p_token);
    return query
    select o.event_id, o.seq, o.topic, o.payload, o.headers, o.source, o.target, o.idempotency_key,
           o.ordering_key, o.priority, o.generation, o.attempts, o.max_attempts, o.lease_seq,
           o.lapses, o.snoozes, o.alone, o.created_at, o.next_run_at,
           v_now
      from pulse.outbox o
     where o.event_id = any (v_ids)
       and o.status = 'RUNNING'
       and o.claim_token = p_token;
    if found then
      return;
    end if;
  end if;

  v_paused := pulse.paused_topics();
  if v_lanes is null then
    select jsonb_agg(to_jsonb(l) - array['next_run_at', 'seq', 'due_in']
                     order by hashtextextended(l.topic, hashtextextended(p_token::text, 0)), l.topic, l.priority desc, l.next_run_at),
           count(distinct l.topic)
      into v_lanes, v_topics
      from pulse.outbox_lanes(p_topics, p_generations) as l
     where l.next_run_at <= v_now
       and (p_lapses is null or l.lapses = p_lapses);
  end if;

  -- One round over the lanes that the caller named. Without any: rounds in which every topic gets an equal share.
  loop
    v_before := v_room;
    v_topic := null;
    for v_lane in
      select l.*
        from jsonb_to_recordset(v_lanes)
               as l (topic text, generation bigint, lapses smallint, priority smallint,
                     quota integer, next_run_at timestamptz, seq bigint)
    loop
      exit when v_room < 1;
      continue when v_lane.topic = any (v_paused) or '' = any (v_paused);
      if v_topic is distinct from v_lane.topic then
        v_topic := v_lane.topic;
        v_share := coalesce(v_lane.quota, greatest(1, v_before / v_topics));
        v_budget := coalesce(p_budgets[array_position(p_topics, v_topic)], 5);
      end if;
      continue when v_share < 1;
      -- Transactions commit in another order than they began: the last tenth of a second is always looked at again.
      if v_lane.next_run_at > v_now - interval '100 milliseconds' then
        v_lane.next_run_at := v_now - interval '100 milliseconds';
        v_lane.seq := 0;
      end if;
      v_taken := pulse.take(
        v_lane.topic, v_lane.generation, v_lane.lapses, v_lane.priority,
        coalesce(v_lane.next_run_at, '-infinity'), coalesce(v_lane.seq, 0),
        least(v_room, v_share), v_slots, v_budget, v_now);
      v_slots := v_taken.slots;
      if v_taken.left_behind is not null then
        return query
        select null::uuid, o.seq, o.topic, null::jsonb, null::jsonb, null::text, null::text, null::pulse.key,
               null::pulse.key, o.priority, o.generation, null::pulse.natural4, null::pulse.budget, null::pulse.natural8,
               o.lapses, null::pulse.natural4, null::boolean, null::pulse.moment, o.next_run_at, v_now
          from pulse.outbox o
         where o.ctid = v_taken.left_behind;
      end if;
      continue when cardinality(v_taken.rows) = 0;
      if p_together then
        perform pulse.note_batch(p_token, v_taken.rows, v_until);
      end if;

      return query
      update pulse.outbox o
         set status       = 'RUNNING',
             indexed_as   = 'RUNNING',
             known_as     = 'RUNNING',
             indexed_at   = case when p_together and o.ordering_key is null then null else v_until end,
             attempts     = o.attempts + 1,
             max_attempts = coalesce(o.producer_max_attempts, v_budget),
             lease_until  = v_until,
             claimed_at   = v_now,
             locked_by    = p_worker,
             claim_token  = p_token,
             lease_seq    = o.lease_seq + 1,
             alone        = p_alone or o.lapses >= 2
       where o.ctid = any (v_taken.rows)
      returning o.event_id, o.seq, o.topic, o.payload, o.headers, o.source, o.target, o.idempotency_key,
                o.ordering_key, o.priority, o.generation, o.attempts, o.max_attempts, o.lease_seq,
                o.lapses, o.snoozes, o.alone, o.created_at, o.next_run_at,
                v_now;

      v_room := v_room - cardinality(v_taken.rows);
      v_share := v_share - cardinality(v_taken.rows);
    end loop;
    exit when p_lanes is not null or v_room = v_before or v_room < 1;
  end loop;
end
$$;

-- The same for one lane, which is what most claims ask for, while its events wait for nothing but a slot: one statement then. A
-- transaction's first look at an expression or a statement sets it up, which is most of what the long way costs an event that comes
-- alone. Where an ordering key is seen, or more budgets of one than slots, the long way does what is to be done.
-- What all rows of a lane have in common is not returned.
-- The time is taken where the rows are written: whoever has to wait for the table has a lease that begins afterwards.
create function pulse.outbox_claim_lane(
  p_token       uuid,
  p_worker      text,
  p_topic       text,
  p_generation  bigint,
  p_lapses      smallint,
  p_priority    smallint,
  p_next_run_at timestamptz,
  p_seq         bigint,
  p_limit       integer,
  p_lease       interval,
  p_budget      integer,
  p_slots       integer,
  p_try         integer,
  p_together    boolean     default false,
  p_now         timestamptz default null
) returns table (
  event_id uuid, seq bigint, payload jsonb, headers jsonb, source text, target text, idempotency_key pulse.key,
  ordering_key pulse.key, attempts pulse.natural4, max_attempts pulse.budget, lease_seq pulse.natural8, snoozes pulse.natural4,
  created_at pulse.moment, next_run_at pulse.moment, looked_at timestamptz
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_now timestamptz;
begin
  -- As in outbox_claim: behind the lock, a repeated call is seen. One expression, since each has to be set up.
  v_now := case when pg_advisory_xact_lock(hashtextextended(p_token::text, 0)) is not null then coalesce(p_now, clock_timestamp()) end;

  return query
  update pulse.outbox o
     set status       = 'RUNNING',
         indexed_as   = 'RUNNING',
         known_as     = 'RUNNING',
         indexed_at   = case when p_together then null else t.now + p_lease end,
         attempts     = o.attempts + 1,
         max_attempts = coalesce(o.producer_max_attempts, p_budget),
         lease_until  = t.now + p_lease,
         claimed_at   = t.now,
         locked_by    = p_worker,
         claim_token  = p_token,
         lease_seq    = o.lease_seq + 1,
         alone        = o.lapses >= 2
    from (select coalesce(p_now, clock_timestamp()) as now offset 0) as t
   where o.ctid = any ((
           select case
                    when bool_or(c.keyed) or count(*) filter (where c.once) > p_slots then null
                    when not p_together or pulse.note_batch(p_token, array_agg(c.row), v_now + p_lease) then array_agg(c.row)
                  end
             from (
               select i.ctid as row,
                      i.ordering_key is not null as keyed,
                      coalesce(i.producer_max_attempts, p_budget) = 1 as once
                 from pulse.outbox i
                where i.topic = p_topic
                  and i.generation = p_generation
                  and i.lapses = p_lapses
                  and i.priority = p_priority
                  and i.indexed_as in ('PENDING', 'RETRYING')
                  and not i.parked
                  and i.status in ('PENDING', 'RETRYING')      -- whatever its copy says
                  and (i.next_run_at, i.seq) >= (least(p_next_run_at, v_now - interval '100 milliseconds'), p_seq)
                  and i.next_run_at <= v_now
                  and not exists (select 1 from pulse.claim_try y where y.token = p_token and y.tries > p_try)
                  and not exists (select 1 from pulse.pause p where p.topic = p_topic or p.topic is null)
                order by i.topic, i.generation, i.lapses, i.priority, i.next_run_at, i.seq
                limit greatest(0, p_limit)             -- null: none
                  for update skip locked) as c)::tid[])
  returning o.event_id, o.seq, o.payload, o.headers, o.source, o.target, o.idempotency_key,
            o.ordering_key, o.attempts, o.max_attempts, o.lease_seq, o.snoozes, o.created_at, o.next_run_at, t.now;

  -- Not where somebody else was faster, or what there is is for later or paused: the long way would find nothing either.
  if found then
    return;
  end if;
  if exists (
       select 1
         from pulse.outbox i
        where i.topic = p_topic
          and i.generation = p_generation
          and i.lapses = p_lapses
          and i.priority = p_priority
          and i.indexed_as in ('PENDING', 'RETRYING')
          and not i.parked
          and (i.next_run_at, i.seq) >= (least(p_next_run_at, v_now - interval '100 milliseconds'), p_seq)
          and i.next_run_at <= v_now
          and (i.ordering_key is not null or coalesce(i.producer_max_attempts, p_budget) = 1))
  then
    return query
    select c.event_id, c.seq, c.payload, c.headers, c.source, c.target, c.idempotency_key,
           c.ordering_key, c.attempts, c.max_attempts, c.lease_seq, c.snoozes, c.created_at, c.next_run_at, c.looked_at
      from pulse.outbox_claim(
             p_token  => p_token,
             p_worker => p_worker,
             p_topics => array[p_topic],
             p_limit  => p_limit,
             p_lease  => p_lease,
             p_budgets => array[p_budget],
             p_slots  => p_slots,
             p_lanes  => jsonb_build_array(jsonb_build_object(
               'topic', p_topic, 'generation', p_generation, 'lapses', p_lapses, 'priority', p_priority,
               'next_run_at', p_next_run_at, 'seq', p_seq, 'quota', p_limit)),
             p_fresh  => true,
             p_try    => p_try,
             p_together => p_together,
             p_now    => p_now) as c;
  end if;
end
$$;

-- Returns when all that was committed on this server before the call is on disk, and on the standbys that a commit waits for. A claim
-- that was sent with synchronous_commit off does not wait for that itself, and nothing that it took may start earlier. Setting a
-- sequence is the least that a commit has to wait for.
create sequence pulse.flushed as integer;
create function pulse.outbox_flush() returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform setval('pulse.flushed', 1);
end
$$;

-- Extends the leases of jobs that are being run, also of one that has lapsed and that nobody has reaped.
-- Says nothing of those: only of what is 'locked' (try again) or 'lost'.
create function pulse.outbox_heartbeat(
  p_event_ids uuid[], p_tokens uuid[], p_lease interval default '30 seconds', p_now timestamptz default null)
returns table (event_id uuid, answer text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_rows  tid[] := pulse.lock_claimed(p_event_ids, p_tokens);
  v_until timestamptz := coalesce(p_now, clock_timestamp()) + p_lease;
begin
  update pulse.outbox o
     set lease_until = v_until,
         indexed_at = v_until
   where o.ctid = any (v_rows);

  if cardinality(v_rows) < cardinality(p_event_ids) then
    return query
    select u.event_id, u.answer
      from pulse.answers(p_event_ids, p_tokens, '{}') as u
      left join pulse.outbox o on o.event_id = u.event_id and o.event_id = any (p_event_ids)
     where u.answer = 'lost'
        or o.lease_until is distinct from v_until;
  end if;
end
$$;

-- RUNNING -> COMPLETED, or the row is deleted (p_delete; never one with a given idempotency key, which has to be remembered).
-- Says nothing of what is settled: only of what is 'locked' (try again) or 'lost'.
--
-- Rows that nobody has locked are written without being locked first, which would be a tenth of the work. Their xmax is none,
-- or the claim's own. It may also be left from a lock that is over: what remains after the first round goes through
-- lock_claimed and into a second. Each row is written as soon as it was looked at, in the order of the ids, so that two of these
-- calls never wait for each other; who locks a row in that very moment is waited for.
create function pulse.outbox_complete(
  p_event_ids uuid[], p_tokens uuid[], p_delete boolean default false, p_now timestamptz default null)
returns table (event_id uuid, answer text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_now  timestamptz := coalesce(p_now, clock_timestamp());
  v_open integer := cardinality(p_event_ids);
  v_rows tid[];                                        -- what this call has locked
  v_done integer;
  v_keys text[];
  v_more text[];
begin
  if v_open is distinct from cardinality(p_tokens) then
    raise exception 'event_ids and tokens must have the same length' using errcode = 'PO003';
  end if;
  for v_round in 1 .. 2 loop
    if p_delete then
      with gone as (
        delete from pulse.outbox o
         where o.event_id = any (p_event_ids)
           and coalesce((o.event_id, o.claim_token) in (
                 select c.event_id, c.token from unnest(p_event_ids, p_tokens) as c (event_id, token)), false)
           and o.lease_until is not null
           and (o.xmax = o.xmin or o.xmax = '0' or o.ctid = any (v_rows))
           and o.idempotency_key = o.event_id::text
        returning o.ordering_key
      )
      select count(*), array_agg(ordering_key) filter (where ordering_key is not null)
        into v_done, v_more
        from gone;
      v_open := v_open - v_done;
      v_keys := v_keys || v_more;
      exit when v_open = 0;
    end if;

    with done as (
      update pulse.outbox o
         set status       = 'COMPLETED',
             known_as     = 'COMPLETED',
             indexed_at   = null,
             completed_at = v_now,
             lease_until  = null,
             locked_by    = null
       where o.event_id = any (p_event_ids)
         and coalesce((o.event_id, o.claim_token) in (
               select c.event_id, c.token from unnest(p_event_ids, p_tokens) as c (event_id, token)), false)
         and o.lease_until is not null
         and (o.xmax = o.xmin or o.xmax = '0' or o.ctid = any (v_rows))
         and (not p_delete or o.idempotency_key <> o.event_id::text)
      returning o.ordering_key
    )
    select count(*), array_agg(ordering_key) filter (where ordering_key is not null)
      into v_done, v_more
      from done;
    v_open := v_open - v_done;
    v_keys := v_keys || v_more;
    exit when v_open = 0 or v_round = 2;
    v_rows := pulse.lock_claimed(p_event_ids, p_tokens);
    exit when v_rows = '{}';
  end loop;

  if v_keys is not null then
    perform pulse.unpark(v_keys, v_now);
  end if;
  if v_open > 0 then
    return query select * from pulse.answers(p_event_ids, p_tokens, '{COMPLETED}', p_gone_is_done => p_delete);
  elsif cardinality(p_tokens) >= 10 then
    perform pulse.count_off(p_tokens);
  end if;
end
$$;

-- RUNNING -> RETRYING after p_delays, or DEAD_LETTERED when it is terminal or the budget is spent.
-- Answers for every event: RETRYING, DEAD_LETTERED, 'locked' (try again) or 'lost'.
create function pulse.outbox_fail(
  p_event_ids uuid[],
  p_tokens    uuid[],
  p_errors    text[],
  p_failures  jsonb[],
  p_delays    interval[],
  p_terminal  boolean[],
  p_now       timestamptz default null
) returns table (event_id uuid, answer text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_rows tid[] := pulse.lock_claimed(p_event_ids, p_tokens);
begin
  perform pulse.record_failure(
    v_rows, p_event_ids, p_tokens, p_errors, p_failures, p_delays, p_terminal, false, false, coalesce(p_now, clock_timestamp()));
  if cardinality(v_rows) = cardinality(p_tokens) and cardinality(p_tokens) >= 10 then
    perform pulse.count_off(p_tokens);
  end if;
  return query select * from pulse.answers(p_event_ids, p_tokens, '{RETRYING, DEAD_LETTERED}', p_loud => true);
end
$$;

-- RUNNING -> RETRYING after p_delays: the handler asked to be called later, so the attempt was none.
create function pulse.outbox_snooze(
  p_event_ids uuid[], p_tokens uuid[], p_delays interval[], p_now timestamptz default null)
returns table (event_id uuid, answer text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_rows tid[] := pulse.lock_claimed(p_event_ids, p_tokens);
  v_now  timestamptz := coalesce(p_now, clock_timestamp());
  v_keys text[];
begin
  with snoozed as (
    update pulse.outbox o
       set status      = 'RETRYING',
           indexed_as  = 'RETRYING',
           known_as    = 'RETRYING',
           indexed_at  = null,
           attempts    = greatest(0, o.attempts - 1),
           snoozes     = o.snoozes + 1,
           next_run_at = least(v_now + c.delay, '9000-01-01 00:00Z'),
           lease_until = null,
           locked_by   = null
      from unnest(p_event_ids, p_tokens, p_delays) as c (event_id, token, delay)
     where o.ctid = any (v_rows)
       and o.event_id = any (p_event_ids)
       and o.event_id = c.event_id
       and o.claim_token = c.token
    returning o.ordering_key
  )
  select array_agg(ordering_key) filter (where ordering_key is not null) into v_keys from snoozed;
  if v_keys is not null then
    perform pulse.unpark(v_keys, v_now);
  end if;
  if cardinality(v_rows) = cardinality(p_tokens) and cardinality(p_tokens) >= 10 then
    perform pulse.count_off(p_tokens);
  end if;
  return query select * from pulse.answers(p_event_ids, p_tokens, '{RETRYING}');
end
$$;

-- The one place where a claim is undone. The caller has locked the rows. p_void: whoever held them never gets them back.
create function pulse.release_locked(p_rows tid[], p_void boolean, p_now timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_topics text[];
  v_keys   text[];
begin
  with released as (
    update pulse.outbox o
       set status      = (case when o.attempts > 1 or o.snoozes > 0 or o.lapses > 0 then 'RETRYING' else 'PENDING' end)::pulse.status,
           indexed_as  = (case when o.attempts > 1 or o.snoozes > 0 or o.lapses > 0 then 'RETRYING' else 'PENDING' end)::pulse.status,
           known_as    = (case when o.attempts > 1 or o.snoozes > 0 or o.lapses > 0 then 'RETRYING' else 'PENDING' end)::pulse.status,
           indexed_at  = null,
           attempts    = greatest(0, o.attempts - 1),
           next_run_at = p_now,
           lease_until = null,
           locked_by   = null,
           claim_token = case when not p_void then o.claim_token end
     where o.ctid = any (p_rows)
    returning o.topic, o.ordering_key
  )
  select array_agg(distinct topic), array_agg(ordering_key) filter (where ordering_key is not null)
    into v_topics, v_keys
    from released;
  if v_keys is not null then
    perform pulse.unpark(v_keys, p_now);
  end if;
  perform pulse.outbox_wake(v_topics);
end
$$;

-- RUNNING -> where it came from, due at once: the job was claimed and never started (shutdown, pause), so the attempt was none.
create function pulse.outbox_release(p_event_ids uuid[], p_tokens uuid[], p_now timestamptz default null)
returns table (event_id uuid, answer text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_rows tid[] := pulse.lock_claimed(p_event_ids, p_tokens);
begin
  perform pulse.release_locked(v_rows, false, coalesce(p_now, clock_timestamp()));
  if cardinality(v_rows) = cardinality(p_tokens) and cardinality(p_tokens) >= 10 then
    perform pulse.count_off(p_tokens);
  end if;
  return query select * from pulse.answers(p_event_ids, p_tokens, '{PENDING, RETRYING}');
end
$$;

-- How long a job waits after it has killed its worker while alone: 1, 2, 4 … seconds, at most five minutes.
-- What lapsed in company may go on at once.
create function pulse.lapse_delay(p_alone boolean, p_attempts integer) returns interval
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select case when p_alone then make_interval(secs => least(300, 2 ^ least(greatest(p_attempts, 1) - 1, 9))) else interval '0' end
$$;

-- What is known of a failure that nobody lived to report. p_handlers: the names of handlers by topic, as far as the caller knows them.
create function pulse.lapse_failure(p_class text, p_rule text, p_handlers jsonb, p_topic text) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select jsonb_strip_nulls(jsonb_build_object(
    'error_class', p_class, 'verdict', 'transient', 'rule', p_rule, 'handler', p_handlers -> p_topic))
$$;

-- A worker's child has died while these jobs were running: as when their leases had run out, but at once and with its reason.
create function pulse.outbox_lapse(
  p_event_ids uuid[], p_tokens uuid[], p_error text, p_handlers jsonb default '{}', p_now timestamptz default null)
returns table (event_id uuid, answer text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_rows     tid[] := pulse.lock_claimed(p_event_ids, p_tokens);
  v_ids      uuid[];
  v_tokens   uuid[];
  v_delays   interval[];
  v_failures jsonb[];
begin
  select array_agg(o.event_id), array_agg(o.claim_token), array_agg(pulse.lapse_delay(o.alone, o.attempts)),
         array_agg(pulse.lapse_failure('WorkerDied', 'worker.died', p_handlers, o.topic))
    into v_ids, v_tokens, v_delays, v_failures
    from pulse.outbox o
   where o.ctid = any (v_rows);
  perform pulse.record_failure(
    v_rows, v_ids, v_tokens, array_fill(p_error, array[cardinality(v_rows)]), v_failures,
    v_delays, array_fill(false, array[cardinality(v_rows)]), true, false, coalesce(p_now, clock_timestamp()));
  return query select * from pulse.answers(p_event_ids, p_tokens, '{RETRYING, DEAD_LETTERED}', p_loud => true);
end
$$;

-- The watchdog: leases that have run out go through record_failure, and their tokens are worthless from then on.
--
-- When nobody has swept for two thirds of a lease (an outage, or nobody was there) leases have lapsed whose holders live:
-- that sweep only sets a hold of one lease, which every sweeper respects, so that the living can report first.
-- p_full false: starts where the last sweep ended, unless that one was held, and does not walk over what vacuum could not
-- remove below.
create function pulse.outbox_reap(
  p_limit    integer     default 1000,
  p_lease    interval    default '30 seconds',
  p_full     boolean     default true,
  p_handlers jsonb       default '{}',
  p_now      timestamptz default null
) returns table (event_id uuid, answer text, topic text, attempts pulse.natural4, max_attempts pulse.budget,
               lapses pulse.natural2, last_error pulse.error, worker text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_now      timestamptz;
  v_swept    timestamptz;
  v_hold     timestamptz;
  v_rows     tid[];
  v_ids      uuid[];
  v_tokens   uuid[];
  v_workers  text[];
  v_delays   interval[];
  v_failures jsonb[];
  v_count    integer;
  v_left     integer;                                  -- of batches
begin
  -- Where that has to be waited for, heartbeats have to wait too: a sweep that could not be made is one that was missed.
  lock table pulse.outbox in row exclusive mode;
  v_now := coalesce(p_now, clock_timestamp());
  -- Times of the future were written under another clock, before a failover: they must not hold for longer than a lease.
  select max(least(s.swept_at, v_now)), max(least(s.hold_until, v_now + p_lease)) into v_swept, v_hold from pulse.sweep s;
  if v_swept is null or v_swept < v_now - p_lease * 2 / 3 then
    v_hold := v_now + p_lease;
  end if;
  delete from pulse.sweep s
   where s.ctid = any (array(select old.ctid from pulse.sweep old limit 100 for update skip locked));
  insert into pulse.sweep (swept_at, hold_until) values (v_now, coalesce(v_hold, v_now));
  if v_hold > v_now then
    return;
  end if;

  v_left := pulse.dissolve(v_now, p_limit);
  select array_agg(c.row), array_agg(c.event_id), array_agg(c.claim_token), array_agg(c.locked_by),
         array_agg(pulse.lapse_delay(c.alone, c.attempts)),
         array_agg(pulse.lapse_failure('LeaseExpired', 'lease.expired', p_handlers, c.topic)), count(*)
    into v_rows, v_ids, v_tokens, v_workers, v_delays, v_failures, v_count
    from (
      select o.ctid as row, o.event_id, o.claim_token, o.locked_by, o.alone, o.attempts, o.topic
        from pulse.outbox o
       where o.indexed_as = 'RUNNING'
         and o.indexed_at is not null
         and o.indexed_at < v_now
         and o.status = 'RUNNING'
         and o.indexed_at >= case when p_full or v_hold > v_swept or v_left > 0 then '-infinity' else v_swept end
       order by o.indexed_at
       limit p_limit
         for update skip locked) as c;
  if v_count = 0 then
    return;
  end if;

  return query
  select r.*, v_workers[array_position(v_ids, r.event_id)]
    from pulse.record_failure(
           v_rows, v_ids, v_tokens, array_fill('worker lease expired'::text, array[v_count]), v_failures,
           v_delays, array_fill(false, array[v_count]), true, true, v_now) as r;
  perform pulse.outbox_wake(array(select distinct o.topic from pulse.outbox o where o.event_id = any (v_ids)));
end
$$;

-- Ordering keys whose head is parked: an enqueue and the end of the turn before it did not see each other. Looks at p_limit keys after
-- p_after and says where to go on (null: it has been round) and how many heads it freed.
create function pulse.outbox_heal(p_after text default null, p_limit integer default 500, p_now timestamptz default null,
                                  out last_key text, out healed integer)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_key    text := coalesce(p_after, '');
  v_parked boolean;
  v_stuck  text[] := '{}';
begin
  for v_step in 1 .. p_limit loop
    select o.ordering_key, o.parked
      into v_key, v_parked
      from pulse.outbox o
     where o.ordering_key > v_key
       and (o.indexed_as in ('PENDING', 'RETRYING') or (o.indexed_at is not null and (o.indexed_as = 'RUNNING' or o.holds_key)))
     order by o.ordering_key, o.seq
     limit 1;
    exit when not found;
    if v_parked then
      v_stuck := v_stuck || v_key;
    end if;
  end loop;
  last_key := v_key;
  healed := 0;
  if cardinality(v_stuck) > 0 then
    healed := pulse.unpark(v_stuck, coalesce(p_now, clock_timestamp()));
  end if;
end
$$;

-- The next alert to send, if one is owed: the dead letters of one kind (topic and class of error) that nobody has alerted yet,
-- as one, with the first of them as the example. Its id is on the rows before anybody sends it, so that whoever has to send it
-- again, because the sender died or was not heard, sends the same one. It is lent for p_lease: until then nobody else gets it.
-- What has waited longest comes first, so that an alert which can't be delivered holds up no other.
--
-- p_quiet_*   kinds that the caller has alerted a moment ago: their later deaths gather until it asks without these.
-- p_limit     how many rows that have no alert yet are looked at, which is also the most that one alert can stand for.
create function pulse.outbox_next_alert(
  p_lease         interval    default '20 seconds',
  p_quiet_topics  text[]      default '{}',
  p_quiet_classes text[]      default '{}',
  p_limit         integer     default 10000,
  p_now           timestamptz default null
) returns table (alert_id uuid, topic text, error_class text, count bigint, event_id uuid, source text, target text,
                 handler_name text, last_error text, attempts integer, verdict text, rule text, first_failed_at timestamptz,
                 dead_lettered_at timestamptz, last_dead_lettered_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set lock_timeout = '2s'
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_now     timestamptz;
  v_id      uuid := '00000000-0000-0000-0000-000000000000';
  v_row     tid;
  v_offered timestamptz;
  v_alert   uuid;
  v_head    tid;
  v_waited  timestamptz;
  v_topic   text;
  v_class   text;
  v_died    timestamptz;
  v_rows    tid[];
begin
  -- One at a time: two at once would share the dead of one sweep between two alerts.
  perform pg_advisory_xact_lock(hashtextextended('pulse.outbox_next_alert', 0));
  v_now := coalesce(p_now, clock_timestamp());

  -- Alerts that were lent and not paid: from one id to the next in the index. The first row of each keeps the time.
  -- A time of the future was written under another clock, before a failover.
  loop
    select o.alert_id, o.ctid, o.alert_offered_at
      into v_id, v_row, v_offered
      from pulse.outbox o
     where o.indexed_as = 'DEAD_LETTERED'
       and o.alerted_at is null
       and o.alert_id > v_id
     order by o.alert_id, o.indexed_at
     limit 1;
    exit when not found;
    if (v_offered < v_now - p_lease or v_offered > v_now) and (v_waited is null or v_offered < v_waited) then
      perform
         from pulse.outbox o
        where o.ctid = v_row
          and o.indexed_as = 'DEAD_LETTERED'
          and o.alerted_at is null
          for update skip locked;
      if found then
        v_alert := v_id;
        v_head := v_row;
        v_waited := v_offered;
      end if;
    end if;
  end loop;

  loop
    select d.topic, d.error_class, d.completed_at
      into v_topic, v_class, v_died
      from (
        select o.alert_id, o.completed_at, o.topic, coalesce(o.last_failure ->> 'error_class', '') as error_class
          from pulse.outbox o
         where o.indexed_as = 'DEAD_LETTERED'
           and o.alerted_at is null
           and o.alert_id is null
         order by o.alert_id, o.indexed_at
         limit p_limit) as d
     where not exists (
             select 1
               from unnest(p_quiet_topics, p_quiet_classes) as q (topic, error_class)
              where q.topic = d.topic
                and q.error_class = d.error_class)
     order by d.alert_id, d.completed_at
     limit 1;

    if v_alert is not null and (v_topic is null or v_waited < v_died) then
      update pulse.outbox o
         set alert_offered_at = v_now
       where o.ctid = v_head;
      exit;
    elsif v_topic is null then
      return;
    end if;

    v_rows := array(
      select o.ctid
        from pulse.outbox o
       where o.ctid = any (array(
               select d.ctid
                 from (
                   select o.ctid, o.topic, coalesce(o.last_failure ->> 'error_class', '') as error_class
                     from pulse.outbox o
                    where o.indexed_as = 'DEAD_LETTERED'
                      and o.alerted_at is null
                      and o.alert_id is null
                    order by o.alert_id, o.indexed_at
                    limit p_limit) as d
                where d.topic = v_topic
                  and d.error_class = v_class))
         and o.indexed_as = 'DEAD_LETTERED'
         and o.alert_id is null
         for update skip locked);
    if cardinality(v_rows) > 0 then
      v_alert := pulse.uuid7();
      update pulse.outbox o
         set alert_id = v_alert,
             alert_offered_at = v_now
       where o.ctid = any (v_rows);
      exit;
    end if;
    -- Somebody holds all of them: on to the next kind.
    p_quiet_topics := p_quiet_topics || v_topic;
    p_quiet_classes := p_quiet_classes || v_class;
  end loop;

  return query
  select o.alert_id, o.topic, coalesce(o.last_failure ->> 'error_class', ''), kind.count, o.event_id, o.source, o.target,
         o.last_failure ->> 'handler', o.last_error::text, o.attempts::integer, o.last_failure ->> 'verdict', o.last_failure ->> 'rule',
         o.first_failed_at, o.completed_at, kind.last_died
    from pulse.outbox o
   cross join (
           select count(*) as count, max(k.completed_at) as last_died
             from pulse.outbox k
            where k.indexed_as = 'DEAD_LETTERED'
              and k.alerted_at is null
              and k.alert_id = v_alert) as kind
   where o.indexed_as = 'DEAD_LETTERED'
     and o.alerted_at is null
     and o.alert_id = v_alert
   order by o.alert_id, o.indexed_at
   limit 1;
end
$$;

-- An alert was accepted: its dead letters owe none any more. How many they were; 0 when it is paid already, or when all of them
-- have been replayed or discarded meanwhile. A row that somebody holds stays owed, and the alert comes again under its id.
create function pulse.outbox_pay_alert(p_alert_id uuid, p_now timestamptz default null) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_paid integer;
begin
  update pulse.outbox o
     set alerted_at = coalesce(p_now, clock_timestamp())
   where o.ctid = any (array(
           select owed.ctid
             from pulse.outbox owed
            where owed.indexed_as = 'DEAD_LETTERED'
              and owed.alerted_at is null
              and owed.alert_id = p_alert_id
              for update skip locked));
  get diagnostics v_paid = row_count;
  return v_paid;
end
$$;

-- Says that a dispatcher is alive, and forgets those that have not said so for ten leases.
-- p_completed: events since it started. p_rates: of each of its topics, completed per second.
create function pulse.dispatcher_seen(
  p_worker text, p_host text, p_pid integer, p_version text, p_topics text[], p_generations bigint[], p_in_flight integer,
  p_sleeping boolean, p_lease interval default '30 seconds', p_completed bigint default 0, p_rates real[] default null,
  p_now timestamptz default null)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := coalesce(p_now, clock_timestamp());
begin
  update pulse.dispatcher d
     set host = p_host,
         started_at = case when d.pid = p_pid and d.host = p_host then d.started_at else v_now end,
         pid = p_pid,
         version = p_version,
         topics = p_topics,
         generations = p_generations,
         last_seen_at = v_now,
         in_flight = p_in_flight,
         sleeping = p_sleeping,
         lease = p_lease,
         completed = p_completed,
         rates = p_rates
   where d.ctid = any (array(
           select own.ctid from pulse.dispatcher own where own.worker = p_worker for update skip locked));
  if not found then
    insert into pulse.dispatcher (worker, host, pid, version, topics, generations, started_at, last_seen_at, in_flight, sleeping,
                                  lease, completed, rates)
    select p_worker, p_host, p_pid, p_version, p_topics, p_generations, v_now, v_now, p_in_flight, p_sleeping,
           p_lease, p_completed, p_rates
     where not exists (select 1 from pulse.dispatcher d where d.worker = p_worker)      -- there, and locked: next time
    on conflict (worker) do nothing;
  end if;
  delete from pulse.dispatcher d
   where d.ctid = any (array(
           select old.ctid
             from pulse.dispatcher old
            where old.last_seen_at < v_now - old.lease * 10
              for update skip locked));
end
$$;

create function pulse.dispatcher_gone(p_worker text) returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
  delete from pulse.dispatcher d where d.worker = p_worker
$$;

------------------------------------------------------------------------------------------------------------------------
-- Operators
------------------------------------------------------------------------------------------------------------------------

-- Locks an event that an operator wants to change, and refuses when it isn't there or in no state for it.
-- False: it has been changed by this very request, whose answer was lost.
create function pulse.hold_event(p_event_id uuid, p_statuses pulse.status[], p_verb text, p_request uuid) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_status pulse.status;
  v_done   boolean;
begin
  -- In any entry, not only the last: a call that was held back may arrive after another request.
  select o.status, o.failure_history @> jsonb_build_array(jsonb_build_object('request', p_request))
    into v_status, v_done
    from pulse.outbox o
   where o.event_id = p_event_id
     for update;
  if not found then
    raise exception 'no event %', coalesce(p_event_id::text, 'null')
      using errcode = 'PO001', hint = 'Events that completed may have been pruned.';
  end if;
  if v_done and p_request is not null then
    return false;
  end if;
  if v_status <> all (p_statuses) then
    raise exception 'event % is %; only % can be %', p_event_id, v_status, array_to_string(p_statuses, ', '), p_verb
      using errcode = 'PO002';
  end if;
  return true;
end
$$;

-- The current cycle as an entry of failure_history.
create function pulse.failure_cycle(o pulse.outbox, p_request uuid) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case when p_request is null then '{}' else jsonb_build_object('request', p_request) end || jsonb_build_object(
    'attempts', o.attempts,
    'last_error', o.last_error,
    'last_failure', o.last_failure,
    'first_failed_at', o.first_failed_at,
    'dead_lettered_at', case when o.status = 'DEAD_LETTERED' then o.completed_at end,
    'generation', o.generation)
$$;

-- What replaying and discarding ask of their callers, whether of one event or of many.
create function pulse.check_replay(p_new_generation bigint, p_replayed_by text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  if p_new_generation < 0 then
    raise exception 'the new generation must be a number from 0 (any) on' using errcode = 'PO003';
  elsif coalesce(p_replayed_by, '') = '' then
    raise exception 'replayed_by must say who replays' using errcode = 'PO003';
  end if;
end
$$;

create function pulse.check_discard(p_reason text, p_discarded_by text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  if coalesce(p_reason, '') = '' then
    raise exception 'reason must say why the event must not run' using errcode = 'PO003';
  elsif coalesce(p_discarded_by, '') = '' then
    raise exception 'discarded_by must say who discards' using errcode = 'PO003';
  end if;
end
$$;

-- The one place where a dead letter gets its new start. The caller has locked the events.
create function pulse.replay_held(
  p_event_ids uuid[], p_new_generation bigint, p_replayed_by text, p_request uuid, p_now timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_topics text[];
begin
  with replayed as (
    update pulse.outbox o
       set failure_history = o.failure_history || jsonb_build_array(
                               pulse.failure_cycle(o, p_request) || jsonb_build_object(
                                 'replayed_by', p_replayed_by, 'replayed_at', p_now)),
           status          = 'PENDING',
           indexed_as      = 'PENDING',
           known_as        = 'PENDING',
           indexed_at      = null,
           generation      = coalesce(p_new_generation, o.generation),
           attempts        = 0,
           max_attempts    = null,
           snoozes         = 0,
           lapses          = 0,
           alone           = false,
           next_run_at     = p_now,
           last_error      = null,
           last_failure    = null,
           first_failed_at = null,
           completed_at    = null,
           claimed_at      = null,
           claim_token     = null,
           alert_id        = null,
           alert_offered_at = null,
           alerted_at      = null
     where o.event_id = any (p_event_ids)
    returning o.topic
  )
  select array_agg(distinct topic) into v_topics from replayed;
  perform pulse.outbox_wake(v_topics);
end
$$;

-- The one place where an event is put away for good. The caller has locked the events.
create function pulse.discard_held(
  p_event_ids uuid[], p_reason text, p_discarded_by text, p_request uuid, p_now timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_keys text[];
begin
  with discarded as (
    update pulse.outbox o
       set failure_history = o.failure_history || jsonb_build_array(
                               pulse.failure_cycle(o, p_request) || jsonb_build_object(
                                 'discarded_by', p_discarded_by, 'discarded_at', p_now, 'reason', p_reason)),
           status          = 'DISCARDED',
           indexed_as      = 'DISCARDED',
           known_as        = 'DISCARDED',
           indexed_at      = null,
           completed_at    = p_now,
           parked          = false
     where o.event_id = any (p_event_ids)
    returning o.ordering_key
  )
  select array_agg(distinct ordering_key) filter (where ordering_key is not null) into v_keys from discarded;
  if v_keys is not null then
    perform pulse.unpark(v_keys, p_now);
  end if;
end
$$;

-- DEAD_LETTERED -> PENDING, in place: the ended cycle becomes an entry of failure_history and a new one begins.
-- Two at once make one entry: the second waits for the row, and finds that it isn't dead any more.
-- p_request: any id of the caller's; a call that is repeated with it, because the answer was lost, changes nothing.
create function pulse.outbox_replay(
  event_id uuid, p_new_generation bigint, p_replayed_by text, p_request uuid default null, p_now timestamptz default null)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pulse.check_replay(coalesce(p_new_generation, -1), p_replayed_by);
  if pulse.hold_event(event_id, '{DEAD_LETTERED}', 'replayed', p_request) then
    perform pulse.replay_held(array[event_id], p_new_generation, p_replayed_by, p_request, coalesce(p_now, clock_timestamp()));
  end if;
end
$$;

-- PENDING, RETRYING, DEAD_LETTERED -> DISCARDED: it must never run. Who and why stays in failure_history; its key goes on.
create function pulse.outbox_discard(
  event_id uuid, p_reason text, p_discarded_by text, p_request uuid default null, p_now timestamptz default null)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pulse.check_discard(p_reason, p_discarded_by);
  if pulse.hold_event(event_id, '{PENDING, RETRYING, DEAD_LETTERED}', 'discarded', p_request) then
    perform pulse.discard_held(array[event_id], p_reason, p_discarded_by, p_request, coalesce(p_now, clock_timestamp()));
  end if;
end
$$;

-- Locks dead letters, the oldest first and no more than p_limit; those that somebody else has locked are passed over.
-- By topic, and if given by error class ('' where there is none) and time of death; or by their ids.
-- Those that this very request has changed already are left out: none is replayed twice by one request.
create function pulse.hold_dead(
  p_topic text, p_error_class text, p_since timestamptz, p_until timestamptz, p_limit integer, p_event_ids uuid[], p_request uuid)
returns uuid[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
  if p_limit is null or p_limit not between 1 and 10000 then
    raise exception 'limit must be from 1 to 10000: call again for more' using errcode = 'PO003';
  elsif p_event_ids is not null then
    return array(
      select o.event_id
        from pulse.outbox o
       where o.event_id = any (p_event_ids)
         and o.status = 'DEAD_LETTERED'
         and (p_topic is null or o.topic = p_topic)
         and (p_error_class is null or coalesce(o.last_failure ->> 'error_class', '') = p_error_class)
         and (p_since is null or o.completed_at >= p_since)
         and (p_until is null or o.completed_at < p_until)
         and (p_request is null or not o.failure_history @> jsonb_build_array(jsonb_build_object('request', p_request)))
       limit p_limit
         for update skip locked);
  elsif p_topic is null then
    raise exception 'topic must be named' using errcode = 'PO003';
  end if;
  return array(
    select o.event_id
      from pulse.outbox o
     where o.indexed_as = 'DEAD_LETTERED'
       and o.topic = p_topic
       and o.indexed_at >= coalesce(p_since, '-infinity')
       and o.indexed_at < coalesce(p_until, 'infinity')
       and (p_error_class is null or coalesce(o.last_failure ->> 'error_class', '') = p_error_class)
       and (p_request is null or not o.failure_history @> jsonb_build_array(jsonb_build_object('request', p_request)))
     order by o.topic, o.indexed_at
     limit p_limit
       for update skip locked);
end
$$;

-- outbox_replay for many: how many it replayed. A null generation: each keeps its own.
-- All in one go and, with the bug still there, that many deaths: try one first.
-- Called again and again it comes to those that died again; p_until, the time at which you began, keeps it from that.
create function pulse.outbox_replay_many(
  p_topic text, p_error_class text, p_since timestamptz, p_until timestamptz, p_limit integer, p_new_generation bigint, p_replayed_by text,
  p_event_ids uuid[] default null, p_request uuid default null, p_now timestamptz default null)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_held uuid[];
begin
  perform pulse.check_replay(p_new_generation, p_replayed_by);
  v_held := pulse.hold_dead(p_topic, p_error_class, p_since, p_until, p_limit, p_event_ids, p_request);
  perform pulse.replay_held(v_held, p_new_generation, p_replayed_by, p_request, coalesce(p_now, clock_timestamp()));
  return cardinality(v_held);
end
$$;

-- outbox_discard for many dead letters: how many it discarded.
create function pulse.outbox_discard_many(
  p_topic text, p_error_class text, p_since timestamptz, p_until timestamptz, p_limit integer, p_reason text, p_discarded_by text,
  p_event_ids uuid[] default null, p_request uuid default null, p_now timestamptz default null)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_held uuid[];
begin
  perform pulse.check_discard(p_reason, p_discarded_by);
  v_held := pulse.hold_dead(p_topic, p_error_class, p_since, p_until, p_limit, p_event_ids, p_request);
  perform pulse.discard_held(v_held, p_reason, p_discarded_by, p_request, coalesce(p_now, clock_timestamp()));
  return cardinality(v_held);
end
$$;

-- No claim of this topic (null: of any) from the commit on; running jobs finish. Pausing again changes who and why.
create function pulse.outbox_pause(p_topic text, p_reason text, p_by text, p_now timestamptz default null) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if char_length(p_topic) not between 1 and 200 then
    raise exception 'topic must have 1 to 200 characters, or be null for all topics' using errcode = 'PO003';
  elsif coalesce(p_reason, '') = '' then
    raise exception 'reason must say why' using errcode = 'PO003';
  elsif coalesce(p_by, '') = '' then
    raise exception 'by must say who pauses' using errcode = 'PO003';
  end if;
  insert into pulse.pause (topic, reason, paused_by, paused_at)
  values (p_topic, p_reason, p_by, coalesce(p_now, clock_timestamp()))
  on conflict (coalesce(topic, '')) do update
     set reason = excluded.reason,
         paused_by = excluded.paused_by,
         paused_at = excluded.paused_at;
end
$$;

-- Ends a pause. True when there was one. Resuming a topic does not end the pause of all, nor the other way round.
create function pulse.outbox_resume(p_topic text, p_by text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if coalesce(p_by, '') = '' then
    raise exception 'by must say who resumes' using errcode = 'PO003';
  end if;
  delete from pulse.pause p where p.topic is not distinct from p_topic;
  if not found then
    return false;
  end if;
  raise log 'pulse outbox: % resumed by %', coalesce('topic ' || p_topic, 'all topics'), p_by;
  perform pulse.outbox_wake(array(
    select distinct t from pulse.dispatcher d, unnest(d.topics) as t where p_topic is null or t = p_topic));
  return true;
end
$$;

-- Frees up to p_limit events that are RUNNING under workers of whom none is alive, and says how many: for a restored backup, whose
-- claims are of workers that will never settle them. Their attempt was none and nobody suspects them, unlike after a lapse; only
-- those with a budget of one, which may not start twice, are DEAD_LETTERED. Call it until it says 0.
create function pulse.outbox_free(p_freed_by text, p_limit integer default 10000, p_now timestamptz default null) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
  v_now    timestamptz := coalesce(p_now, clock_timestamp());
  v_rows   tid[];
  v_once   tid[];
  v_ids    uuid[];
  v_tokens uuid[];
  v_topics text[];
begin
  if coalesce(p_freed_by, '') = '' then
    raise exception 'freed_by must say who frees them' using errcode = 'PO003';
  end if;
  for v_round in 1 .. 2 loop
    select array_agg(c.row) filter (where c.max_attempts > 1),
           array_agg(c.row) filter (where c.max_attempts = 1),
           array_agg(c.event_id) filter (where c.max_attempts = 1),
           array_agg(c.claim_token) filter (where c.max_attempts = 1),
           array_agg(c.topic) filter (where c.max_attempts = 1)
      into v_rows, v_once, v_ids, v_tokens, v_topics
      from (
        select o.ctid as row, o.event_id, o.claim_token, o.max_attempts, o.topic
          from pulse.outbox o
         where o.event_id = any (array(select r.event_id from pulse.running() as r))
           and o.status = 'RUNNING'
           and not exists (
                 select 1
                   from pulse.dispatcher d
                  where d.worker = o.locked_by
                    and d.last_seen_at > v_now - d.lease)
         limit p_limit
           for update of o skip locked) as c;
    exit when v_rows is not null or v_once is not null or v_round = 2;
    -- Then what no index knows: a look at the whole table.
    perform pulse.mend_leases(0, pg_relation_size('pulse.outbox') / current_setting('block_size')::bigint + 1);
  end loop;
  if v_rows is not null then
    perform pulse.release_locked(v_rows, true, v_now);
  end if;
  if v_once is not null then
    perform pulse.record_failure(
      v_once, v_ids, v_tokens, array_fill('worker lease expired'::text, array[cardinality(v_once)]),
      array(select pulse.lapse_failure('LeaseExpired', 'lease.expired', '{}', t) from unnest(v_topics) as t),
      array_fill(interval '0', array[cardinality(v_once)]), array_fill(false, array[cardinality(v_once)]), true, true, v_now);
  end if;
  raise log 'pulse outbox: % events freed by %', coalesce(cardinality(v_rows), 0) + coalesce(cardinality(v_once), 0), p_freed_by;
  return coalesce(cardinality(v_rows), 0) + coalesce(cardinality(v_once), 0);
end
$$;

-- Deletes what completed or was discarded longer than p_retention ago, from p_pages pages of the table, starting at p_page.
-- Says where to go on (null: the end has been reached). It walks along the table, not along an index: an index for this
-- would be paid for by every completion. p_dead: dead letters too. As it comes by all rows, it mends leases that no index knows.
create function pulse.outbox_prune(
  p_retention interval    default '7 days',
  p_page      bigint      default 0,
  p_pages     integer     default 1000,
  p_dead      boolean     default false,
  p_now       timestamptz default null,
  out pruned    integer,
  out next_page bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_now   timestamptz := coalesce(p_now, clock_timestamp());
  v_pages bigint := pg_relation_size('pulse.outbox') / current_setting('block_size')::bigint;
  v_keys  text[];
begin
  if p_retention is null or p_retention < interval '0' then
    raise exception 'retention must not be negative' using errcode = 'PO003';
  end if;
  perform pulse.mend_leases(p_page, p_pages);
  with gone as (
    delete from pulse.outbox o
     where o.ctid = any (array(
             select old.ctid
               from pulse.outbox old
              where old.ctid >= format('(%s,0)', p_page)::tid
                and old.ctid < format('(%s,0)', p_page + p_pages)::tid
                and (old.status in ('COMPLETED', 'DISCARDED') or (p_dead and old.status = 'DEAD_LETTERED'))
                and old.completed_at < v_now - p_retention
                for update skip locked))
    returning o.ordering_key, o.status
  )
  select count(*), array_agg(ordering_key) filter (where ordering_key is not null and status = 'DEAD_LETTERED')
    into pruned, v_keys
    from gone;
  if v_keys is not null then
    perform pulse.unpark(v_keys, v_now);
  end if;
  next_page := case when p_page + p_pages < v_pages then p_page + p_pages end;
end
$$;

-- When the oldest event was made that is running or may still run, dead letters among them; null when there is none.
create function pulse.oldest_unfinished() returns timestamptz
language sql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
  select least(
    (select min(o.created_at) from pulse.outbox o where o.indexed_as in ('PENDING', 'RETRYING') and not o.parked),
    (select min(o.created_at) from pulse.running() as o),
    (select min(o.created_at) from pulse.outbox o where o.indexed_as = 'DEAD_LETTERED'),
    (select min(o.created_at)
       from pulse.outbox o
      where o.ordering_key is not null
        and (o.indexed_as in ('PENDING', 'RETRYING') or (o.indexed_at is not null and (o.indexed_as = 'RUNNING' or o.holds_key)))
        and o.parked))
$$;

-- Forgets what handlers did longer than p_older_than ago, from p_pages pages of event_handled, starting at p_page; says where to go
-- on, as outbox_prune does. Never what an event needs that may still run: a record as young as the oldest of those is kept.
create function pulse.outbox_prune_handled(
  p_older_than interval,
  p_page       bigint      default 0,
  p_pages      integer     default 1000,
  p_now        timestamptz default null,
  out pruned    integer,
  out next_page bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_before timestamptz := least(coalesce(p_now, clock_timestamp()) - p_older_than, pulse.oldest_unfinished());
  v_pages  bigint := pg_relation_size('pulse.event_handled') / current_setting('block_size')::bigint;
begin
  if p_older_than is null or p_older_than < interval '0' then
    raise exception 'older_than must be given, and not be negative' using errcode = 'PO003';
  end if;
  delete from pulse.event_handled h
   where h.ctid = any (array(
           select old.ctid
             from pulse.event_handled old
            where old.ctid >= format('(%s,0)', p_page)::tid
              and old.ctid < format('(%s,0)', p_page + p_pages)::tid
              and old.handled_at < v_before
              for update skip locked));
  get diagnostics pruned = row_count;
  next_page := case when p_page + p_pages < v_pages then p_page + p_pages end;
end
$$;

-- Views show no domains: what people gather into arrays here, drivers know.
create view pulse.dead_letter as
select o.event_id,
       o.topic,
       o.completed_at as dead_lettered_at,
       o.attempts::integer,
       coalesce(o.last_failure ->> 'error_class', '') as error_class,
       o.last_error::text,
       o.last_failure ->> 'rule' as rule,
       o.last_failure ->> 'handler' as handler,
       o.first_failed_at,
       o.generation::bigint,
       o.ordering_key::text,
       o.holds_key,
       jsonb_array_length(o.failure_history) as earlier_cycles,
       o.alert_id,
       o.alerted_at,
       o.source,
       o.target,
       o.created_at::timestamptz
  from pulse.outbox o
 where o.indexed_as = 'DEAD_LETTERED';
comment on view pulse.dead_letter is 'What died and why, without payloads.';

create view pulse.dead_kind as
select o.topic,
       coalesce(o.last_failure ->> 'error_class', '') as error_class,
       count(*) as dead,
       min(o.completed_at) as first_died_at,
       max(o.completed_at) as last_died_at,
       array_agg(distinct o.generation::bigint) as generations,
       count(*) filter (where o.failure_history <> '[]') as died_before,
       count(*) filter (where o.alerted_at is null) as alerts_owed,
       (array_agg(o.last_error order by o.completed_at desc))[1]::text as last_error
  from pulse.outbox o
 where o.indexed_as = 'DEAD_LETTERED'
 group by o.topic, coalesce(o.last_failure ->> 'error_class', '');
comment on view pulse.dead_kind is
  'Dead letters by kind: one kind is one topic and error class, and most often one bug. died_before: replayed earlier, and dead again.';

create view pulse.dispatcher_status as
select d.worker,
       d.last_seen_at > clock_timestamp() - d.lease as alive,
       d.host,
       d.pid,
       d.version,
       d.topics,
       d.generations,
       d.in_flight,
       d.completed,
       (select sum(r) from unnest(d.rates) as r) as rate,
       clock_timestamp() - d.last_seen_at as last_seen,
       d.started_at,
       d.last_seen_at,
       d.rates
  from pulse.dispatcher d;
comment on view pulse.dispatcher_status is
  'Who runs events. alive: seen within its lease. rate: completed per second; rates: the same for each of its topics. generations null: all. Those not seen for ten leases are forgotten.';

-- Unfinished work by topic and generation. By the partial indexes, each with its own condition: completed rows are not looked at.
create function pulse.count_topics()
returns table (topic text, generation bigint, due bigint, later bigint, parked bigint, running bigint, retrying bigint, dead bigint,
               oldest_due timestamptz, oldest_claim timestamptz)
language sql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
  select o.topic, o.generation,
         count(*) filter (where o.next_run_at <= statement_timestamp()),
         count(*) filter (where o.next_run_at > statement_timestamp()),
         0, 0, count(*) filter (where o.status = 'RETRYING'), 0,
         min(o.next_run_at) filter (where o.next_run_at <= statement_timestamp()), null::timestamptz
    from pulse.outbox o
   where o.indexed_as in ('PENDING', 'RETRYING')
     and not o.parked
   group by o.topic, o.generation
   union all
  select o.topic, o.generation, 0, 0, count(*), 0, count(*) filter (where o.status = 'RETRYING'), 0, null, null
    from pulse.outbox o
   where o.ordering_key is not null
     and (o.indexed_as in ('PENDING', 'RETRYING') or (o.indexed_at is not null and (o.indexed_as = 'RUNNING' or o.holds_key)))
     and o.parked
   group by o.topic, o.generation
   union all
  select o.topic, o.generation, 0, 0, 0, count(*), 0, 0, null, min(o.claimed_at)
    from pulse.running() as o
   group by o.topic, o.generation
   union all
  select o.topic, o.generation, 0, 0, 0, 0, 0, count(*), null, null
    from pulse.outbox o
   where o.indexed_as = 'DEAD_LETTERED'
   group by o.topic, o.generation
$$;

create view pulse.topic_status as
with counted as materialized (
  select * from pulse.count_topics()
), living as materialized (
  select * from pulse.dispatcher_status where alive
), rated as (
  select t.topic collate "C" as topic, sum(t.rate) as rate
    from living d, unnest(d.topics, d.rates) as t (topic, rate)
   group by 1
), named as (
  select topic collate "C" as topic from counted
   union
  select unnest(topics) collate "C" from living
   union
  select p.topic from pulse.pause p where p.topic is not null
)
select n.topic,
       coalesce(sum(c.due), 0)::bigint as due,
       coalesce(sum(c.later), 0)::bigint as later,
       coalesce(sum(c.parked), 0)::bigint as parked,
       coalesce(sum(c.running), 0)::bigint as running,
       coalesce(sum(c.retrying), 0)::bigint as retrying,
       coalesce(sum(c.dead), 0)::bigint as dead,
       clock_timestamp() - min(c.oldest_due) as oldest_wait,
       clock_timestamp() - min(c.oldest_claim) as longest_running,
       min(r.rate) as rate,
       (select p.reason from pulse.pause p where p.topic is null or p.topic = n.topic order by p.topic limit 1) as paused,
       array(select d.worker from living d where n.topic = any (d.topics) order by d.worker) as served_by,
       coalesce(sum(c.due + c.later + c.parked) filter (
         where not exists (
           select 1
             from living d
            where c.topic = any (d.topics)
              and (d.generations is null or c.generation = 0 or c.generation = any (d.generations)))), 0)::bigint as unserved
  from named n
  left join counted c on c.topic = n.topic
  left join rated r on r.topic = n.topic
 group by n.topic;
comment on view pulse.topic_status is
  'Unfinished work by topic, and who serves it. due, later and parked hold what waits; retrying: those of them that have failed. unserved: those of them whose topic and generation no living dispatcher serves. rate: completed per second, lately.';

-- Ordering keys that do not move by themselves: behind a dead letter that holds its key, or behind a parked head, which a
-- dispatcher heals within seconds. waiting counts no further than 1,000. Parked heads are looked for among p_keys keys.
create function pulse.blocked_keys(p_keys integer default 20000)
returns table (ordering_key text, event_id uuid, topic text, status pulse.status, why text, since timestamptz, waiting bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_key  text := '';
  v_head record;
begin
  return query
  select d.ordering_key::text, d.event_id, d.topic, d.status, 'dead letter'::text, d.completed_at, w.waiting
    from pulse.outbox d
   cross join lateral (
           select count(*) as waiting
             from (select 1
                     from pulse.outbox f
                    where f.ordering_key = d.ordering_key
                      and (f.indexed_as in ('PENDING', 'RETRYING') or (f.indexed_at is not null and (f.indexed_as = 'RUNNING' or f.holds_key)))
                      and f.seq > d.seq
                    limit 1000) as followers) as w
   where d.indexed_as = 'DEAD_LETTERED'
     and d.ordering_key is not null
     and d.holds_key
     and w.waiting > 0
     and not exists (
           select 1
             from pulse.outbox h
            where h.ordering_key = d.ordering_key
              and (h.indexed_as in ('PENDING', 'RETRYING') or (h.indexed_at is not null and (h.indexed_as = 'RUNNING' or h.holds_key)))
              and h.seq < d.seq);

  for v_step in 1 .. p_keys loop
    select o.ordering_key, o.event_id, o.topic, o.status, o.parked, o.next_run_at
      into v_head
      from pulse.outbox o
     where o.ordering_key > v_key
       and (o.indexed_as in ('PENDING', 'RETRYING') or (o.indexed_at is not null and (o.indexed_as = 'RUNNING' or o.holds_key)))
     order by o.ordering_key, o.seq
     limit 1;
    exit when not found;
    v_key := v_head.ordering_key;
    if v_head.parked then
      ordering_key := v_head.ordering_key;
      event_id := v_head.event_id;
      topic := v_head.topic;
      status := v_head.status;
      why := 'parked head';
      since := v_head.next_run_at;
      waiting := (
        select count(*)
          from (select 1
                  from pulse.outbox f
                 where f.ordering_key = v_head.ordering_key
                   and (f.indexed_as in ('PENDING', 'RETRYING') or (f.indexed_at is not null and (f.indexed_as = 'RUNNING' or f.holds_key)))
                 limit 1001) as followers) - 1;
      return next;
    end if;
  end loop;
end
$$;

create view pulse.blocked_key as
select * from pulse.blocked_keys();
comment on view pulse.blocked_key is
  'Ordering keys that wait for a person: replay or discard the event that is named. waiting: how many wait behind it, at most 1000.';

------------------------------------------------------------------------------------------------------------------------
-- Who may call what
------------------------------------------------------------------------------------------------------------------------

-- Gives each of the three roles that exists its rights. Nobody else gets any; inside functions are for their owner alone.
-- A role that an administrator creates later gets its rights by calling this again.
create function pulse.outbox_grant() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  revoke all on all functions in schema pulse from public;

  if exists (select 1 from pg_roles where rolname = 'pulse_producer') then
    grant usage on schema pulse to pulse_producer;
    grant select on pulse.migration to pulse_producer;
    grant insert (event_id, topic, payload, headers, source, target, idempotency_key, ordering_key, priority, generation,
                  producer_max_attempts, next_run_at, holds_key, parked) on pulse.outbox to pulse_producer;
    grant select (sleeping, topics) on pulse.dispatcher to pulse_producer;
    grant execute on function
      pulse.uuid7(),
      pulse.outbox_wake(text[]),
      pulse.outbox_enqueue(text, jsonb, text, text, jsonb, smallint, timestamptz, integer, bigint, text, text, uuid, text, timestamptz)
      to pulse_producer;
  end if;

  if exists (select 1 from pg_roles where rolname = 'pulse_dispatcher') then
    grant usage on schema pulse to pulse_dispatcher;
    grant select on pulse.migration, pulse.pause, pulse.dispatcher to pulse_dispatcher;
    grant select, insert on pulse.event_handled to pulse_dispatcher;
    -- As a producer has it: handlers enqueue too.
    grant insert (event_id, topic, payload, headers, source, target, idempotency_key, ordering_key, priority, generation,
                  producer_max_attempts, next_run_at, holds_key, parked) on pulse.outbox to pulse_dispatcher;
    grant execute on function
      pulse.uuid7(),
      pulse.outbox_wake(text[]),
      pulse.outbox_enqueue(text, jsonb, text, text, jsonb, smallint, timestamptz, integer, bigint, text, text, uuid, text, timestamptz),
      pulse.outbox_lanes(text[], bigint[], timestamptz),
      pulse.outbox_claim(uuid, text, text[], integer, interval, integer[], bigint[], integer, jsonb, smallint, boolean, boolean, integer, boolean, timestamptz),
      pulse.outbox_claim_lane(uuid, text, text, bigint, smallint, smallint, timestamptz, bigint, integer, interval, integer, integer, integer, boolean, timestamptz),
      pulse.outbox_flush(),
      pulse.outbox_heartbeat(uuid[], uuid[], interval, timestamptz),
      pulse.outbox_complete(uuid[], uuid[], boolean, timestamptz),
      pulse.outbox_fail(uuid[], uuid[], text[], jsonb[], interval[], boolean[], timestamptz),
      pulse.outbox_snooze(uuid[], uuid[], interval[], timestamptz),
      pulse.outbox_release(uuid[], uuid[], timestamptz),
      pulse.outbox_lapse(uuid[], uuid[], text, jsonb, timestamptz),
      pulse.outbox_reap(integer, interval, boolean, jsonb, timestamptz),
      pulse.outbox_heal(text, integer, timestamptz),
      pulse.outbox_next_alert(interval, text[], text[], integer, timestamptz),
      pulse.outbox_pay_alert(uuid, timestamptz),
      pulse.outbox_prune(interval, bigint, integer, boolean, timestamptz),
      pulse.dispatcher_seen(text, text, integer, text, text[], bigint[], integer, boolean, interval, bigint, real[], timestamptz),
      pulse.dispatcher_gone(text)
      to pulse_dispatcher;
  end if;

  if exists (select 1 from pg_roles where rolname = 'pulse_operator') then
    grant usage on schema pulse to pulse_operator;
    grant select on all tables in schema pulse to pulse_operator;
    grant execute on function
      pulse.outbox_lanes(text[], bigint[], timestamptz),
      pulse.outbox_replay(uuid, bigint, text, uuid, timestamptz),
      pulse.outbox_discard(uuid, text, text, uuid, timestamptz),
      pulse.outbox_replay_many(text, text, timestamptz, timestamptz, integer, bigint, text, uuid[], uuid, timestamptz),
      pulse.outbox_discard_many(text, text, timestamptz, timestamptz, integer, text, text, uuid[], uuid, timestamptz),
      pulse.count_topics(),
      pulse.running(),
      pulse.blocked_keys(integer),
      pulse.outbox_pause(text, text, text, timestamptz),
      pulse.outbox_resume(text, text),
      pulse.outbox_free(text, integer, timestamptz),
      pulse.outbox_prune(interval, bigint, integer, boolean, timestamptz),
      pulse.outbox_prune_handled(interval, bigint, integer, timestamptz)
      to pulse_operator;
  end if;
end
$$;

------------------------------------------------------------------------------------------------------------------------
-- What \d+ and \df+ show, and docs/reference/sql.md repeats (a test holds it to that)
------------------------------------------------------------------------------------------------------------------------

comment on column pulse.migration.version is 'The file''s number.';
comment on column pulse.migration.name is 'The file''s name.';
comment on column pulse.migration.oldest_code is 'The oldest release that may use the schema from then on.';
comment on column pulse.migration.checksum is 'Of the file as it was applied; null where psql did it, until the next migrate.';
comment on column pulse.migration.applied_at is 'When.';
comment on column pulse.migration.applied_by is 'By which login.';

comment on column pulse.outbox.event_id is 'Public identity, known to the producer before it commits.';
comment on column pulse.outbox.seq is 'Order of insertion, given by the database.';
comment on column pulse.outbox.next_run_at is 'Not before this time: schedule of a new event, backoff of a failed one.';
comment on column pulse.outbox.created_at is 'When it was enqueued.';
comment on column pulse.outbox.generation is 'Which generation of code should run it; 0: any.';
comment on column pulse.outbox.lease_seq is '+1 at every claim, never reset: a fencing number for the handler''s own downstreams.';
comment on column pulse.outbox.attempts is 'Started runs in this cycle, counted at claim.';
comment on column pulse.outbox.snoozes is 'How often the handler asked for later, in this cycle.';
comment on column pulse.outbox.status is 'PENDING, RUNNING, COMPLETED, RETRYING, DEAD_LETTERED or DISCARDED.';
comment on column pulse.outbox.indexed_as is 'The status as the indexes have it: RUNNING goes on when the event completes.';
comment on column pulse.outbox.known_as is 'The status as our own statements wrote it last. Another one was written by hand, and is noticed by this.';
comment on column pulse.outbox.indexed_at is 'lease_until where outbox_leases has it, completed_at of a dead letter, else null.';
comment on column pulse.outbox.priority is 'From -9 to 9, higher first within its topic.';
comment on column pulse.outbox.lapses is 'Leases of this cycle that lapsed: 1 makes a suspect, 2 run alone.';
comment on column pulse.outbox.parked is 'Waits for an earlier event of its ordering key.';
comment on column pulse.outbox.holds_key is 'As a dead letter it keeps later events of its key waiting.';
comment on column pulse.outbox.alone is 'The present claim runs with nothing beside it.';
comment on column pulse.outbox.lease_until is 'Until when the claim is good without a heartbeat; null unless RUNNING.';
comment on column pulse.outbox.completed_at is 'When it completed, died or was discarded.';
comment on column pulse.outbox.alerted_at is 'When its alert was accepted. Dead and null: still owed.';
comment on column pulse.outbox.alert_id is 'The alert that covers this dead letter, stamped before it is sent.';
comment on column pulse.outbox.claimed_at is 'The newest claim; kept when it ends.';
comment on column pulse.outbox.topic is 'Which handler. 1 to 200 characters.';
comment on column pulse.outbox.ordering_key is 'Events with the same key run one at a time, in the order of seq. Null: no order.';
comment on column pulse.outbox.idempotency_key is 'What a consumer deduplicates on; the event''s id unless the producer gave one, which is unique per topic.';
comment on column pulse.outbox.claim_token is 'The fence: minted for one claim call, kept when its holder settles, cleared when it is reaped or replayed.';
comment on column pulse.outbox.max_attempts is 'The budget in force, stamped at each claim.';
comment on column pulse.outbox.producer_max_attempts is 'The producer''s own budget, if it gave one.';
comment on column pulse.outbox.locked_by is 'The worker that holds the lease; null unless RUNNING.';
comment on column pulse.outbox.payload is 'The producer''s data.';
comment on column pulse.outbox.headers is 'Trace context and anything that is not payload.';
comment on column pulse.outbox.source is 'Producing context, optional.';
comment on column pulse.outbox.target is 'Receiving context, optional.';
comment on column pulse.outbox.first_failed_at is 'First failure of this cycle.';
comment on column pulse.outbox.last_error is 'Sanitised, at most 8 KiB.';
comment on column pulse.outbox.last_failure is 'What any dispatcher needs to alert: handler, error_class, verdict, rule.';
comment on column pulse.outbox.failure_history is 'One entry for each cycle that ended in a dead letter and was replayed or discarded.';
comment on column pulse.outbox.alert_offered_at is 'When its alert was last given to a dispatcher to send.';

comment on column pulse.event_handled.handler_name is 'The handler, or the name that it gave to its effect.';
comment on column pulse.event_handled.idempotency_key is 'Of the event.';
comment on column pulse.event_handled.handled_at is 'When it was recorded.';

comment on column pulse.pause.topic is 'Null: all topics.';
comment on column pulse.pause.reason is 'Why.';
comment on column pulse.pause.paused_by is 'Who.';
comment on column pulse.pause.paused_at is 'When.';

comment on column pulse.dispatcher.worker is 'Its name, as in locked_by.';
comment on column pulse.dispatcher.host is 'Where it runs.';
comment on column pulse.dispatcher.pid is 'Its process there.';
comment on column pulse.dispatcher.version is 'The release that it runs.';
comment on column pulse.dispatcher.topics is 'What it serves.';
comment on column pulse.dispatcher.generations is 'These and 0; null: all.';
comment on column pulse.dispatcher.started_at is 'When it started.';
comment on column pulse.dispatcher.last_seen_at is 'When it last said that it lives.';
comment on column pulse.dispatcher.in_flight is 'Events that it holds.';
comment on column pulse.dispatcher.sleeping is 'A producer must notify it.';
comment on column pulse.dispatcher.lease is 'Its lease: alive means seen within this time.';
comment on column pulse.dispatcher.completed is 'Events since it started.';
comment on column pulse.dispatcher.rates is 'Completed per second lately, by topic.';

comment on column pulse.sweep.swept_at is 'When the watchdog looked.';
comment on column pulse.sweep.hold_until is 'Until when nothing is reaped, so that the living can report first.';

comment on column pulse.claim_try.token is 'The token of the claim.';
comment on column pulse.claim_try.tries is 'The latest try that has arrived.';
comment on column pulse.claim_try.tried_at is 'When the second try arrived.';

comment on column pulse.batch.token is 'The token of the claim.';
comment on column pulse.batch.lease_until is 'When the first lease of its events ends.';
comment on column pulse.batch.open is 'How many of them are not settled, at most.';
comment on column pulse.batch.event_ids is 'What it took.';

comment on column pulse.topic_status.topic is 'With unfinished work, a pause, or a living dispatcher that serves it.';
comment on column pulse.topic_status.due is 'Could run now.';
comment on column pulse.topic_status.later is 'Scheduled, or backing off.';
comment on column pulse.topic_status.parked is 'Waits for an earlier event of its ordering key.';
comment on column pulse.topic_status.running is 'Claimed.';
comment on column pulse.topic_status.retrying is 'Those of due, later and parked that have failed before.';
comment on column pulse.topic_status.dead is 'Dead letters.';
comment on column pulse.topic_status.oldest_wait is 'How long the oldest due event has been due.';
comment on column pulse.topic_status.longest_running is 'How long ago the oldest running event was claimed.';
comment on column pulse.topic_status.rate is 'Completed per second, lately, by all who live.';
comment on column pulse.topic_status.paused is 'The reason of its pause, or of the pause of all.';
comment on column pulse.topic_status.served_by is 'Living dispatchers.';
comment on column pulse.topic_status.unserved is 'Those of due, later and parked whose topic and generation nobody alive serves.';

comment on column pulse.dispatcher_status.worker is 'Its name, as in locked_by.';
comment on column pulse.dispatcher_status.alive is 'Seen within its lease.';
comment on column pulse.dispatcher_status.host is 'Where it runs.';
comment on column pulse.dispatcher_status.pid is 'Its process there.';
comment on column pulse.dispatcher_status.version is 'The release that it runs.';
comment on column pulse.dispatcher_status.topics is 'What it serves.';
comment on column pulse.dispatcher_status.generations is 'These and 0; null: all.';
comment on column pulse.dispatcher_status.in_flight is 'Events that it holds.';
comment on column pulse.dispatcher_status.completed is 'Events since it started.';
comment on column pulse.dispatcher_status.rate is 'Completed per second, lately.';
comment on column pulse.dispatcher_status.last_seen is 'How long ago it said that it lives.';
comment on column pulse.dispatcher_status.started_at is 'When it started.';
comment on column pulse.dispatcher_status.last_seen_at is 'When it said that it lives.';
comment on column pulse.dispatcher_status.rates is 'Completed per second, by topic.';

comment on column pulse.dead_kind.topic is 'One half of the kind.';
comment on column pulse.dead_kind.error_class is 'The other half; empty where there is none.';
comment on column pulse.dead_kind.dead is 'How many.';
comment on column pulse.dead_kind.first_died_at is 'The first death.';
comment on column pulse.dead_kind.last_died_at is 'The last death.';
comment on column pulse.dead_kind.generations is 'Of which generations they are.';
comment on column pulse.dead_kind.died_before is 'Replayed earlier, and dead again.';
comment on column pulse.dead_kind.alerts_owed is 'How many nobody has been told of.';
comment on column pulse.dead_kind.last_error is 'Of the last that died.';

comment on column pulse.dead_letter.event_id is 'Its id.';
comment on column pulse.dead_letter.topic is 'Its topic.';
comment on column pulse.dead_letter.dead_lettered_at is 'When it died.';
comment on column pulse.dead_letter.attempts is 'Started runs in this cycle.';
comment on column pulse.dead_letter.error_class is 'Of the last failure; empty where there is none.';
comment on column pulse.dead_letter.last_error is 'Sanitised, at most 8 KiB.';
comment on column pulse.dead_letter.rule is 'What decided that it is dead.';
comment on column pulse.dead_letter.handler is 'Who failed.';
comment on column pulse.dead_letter.first_failed_at is 'First failure of this cycle.';
comment on column pulse.dead_letter.generation is 'Its generation.';
comment on column pulse.dead_letter.ordering_key is 'Its ordering key.';
comment on column pulse.dead_letter.holds_key is 'Later events of its key wait for it.';
comment on column pulse.dead_letter.earlier_cycles is 'How often it died before.';
comment on column pulse.dead_letter.alert_id is 'The alert that covers it.';
comment on column pulse.dead_letter.alerted_at is 'When that was accepted; null: still owed.';
comment on column pulse.dead_letter.source is 'Producing context.';
comment on column pulse.dead_letter.target is 'Receiving context.';
comment on column pulse.dead_letter.created_at is 'When it was enqueued.';

comment on column pulse.blocked_key.ordering_key is 'The key.';
comment on column pulse.blocked_key.event_id is 'The event that it waits for.';
comment on column pulse.blocked_key.topic is 'Of that event.';
comment on column pulse.blocked_key.status is 'Of that event.';
comment on column pulse.blocked_key.why is 'dead letter, or parked head: the latter is freed by any dispatcher.';
comment on column pulse.blocked_key.since is 'When it died, or has been due.';
comment on column pulse.blocked_key.waiting is 'How many wait behind it, counted up to 1000.';

comment on function pulse.uuid7 is 'A time-ordered UUID (version 7).';
comment on function pulse.outbox_wake is 'Wakes the dispatchers that sleep and serve one of these topics: for those who insert by COPY.';
comment on function pulse.outbox_enqueue is 'Writes one event in the caller''s transaction and returns its id, or the id of the event that is already there.';
comment on function pulse.outbox_lanes is 'The lanes that have work, now or later, each with its first row.';
comment on function pulse.outbox_claim is 'Takes due events, gives them a lease under the caller''s token, counts the attempt, and returns them.';
comment on function pulse.outbox_claim_lane is 'outbox_claim for one lane and a new token: in one statement where no ordering key is in the way.';
comment on function pulse.outbox_flush is 'Returns when all that was committed before it is on disk.';
comment on function pulse.outbox_heartbeat is 'Extends leases; speaks only of what is locked or lost.';
comment on function pulse.outbox_complete is 'RUNNING to COMPLETED, or the row is deleted; speaks only of what is locked or lost.';
comment on function pulse.outbox_fail is 'RUNNING to RETRYING after a delay, or DEAD_LETTERED when it is terminal or the budget is spent.';
comment on function pulse.outbox_snooze is 'RUNNING to RETRYING: the handler asked for later, so the attempt was none.';
comment on function pulse.outbox_release is 'RUNNING to where it came from, due at once: it never started, so the attempt was none.';
comment on function pulse.outbox_lapse is 'A worker''s child has died while these were running: as when their leases had run out, but at once.';
comment on function pulse.outbox_reap is 'The watchdog: leases that have run out become failures, and their tokens worthless.';
comment on function pulse.outbox_heal is 'Frees ordering keys whose head a race left parked; goes round the keys in steps.';
comment on function pulse.outbox_next_alert is 'The next alert to send, if one is owed: the dead letters of one kind, lent for p_lease.';
comment on function pulse.outbox_pay_alert is 'An alert was accepted: its dead letters owe none any more. Returns how many they were.';
comment on function pulse.dispatcher_seen is 'Says that a dispatcher is alive, and forgets those that have not said so for ten leases.';
comment on function pulse.dispatcher_gone is 'Removes a dispatcher that ends.';
comment on function pulse.outbox_replay is 'DEAD_LETTERED to PENDING, in place: the ended cycle goes into failure_history and a new one begins.';
comment on function pulse.outbox_discard is 'PENDING, RETRYING or DEAD_LETTERED to DISCARDED: it must never run.';
comment on function pulse.outbox_replay_many is 'Replays dead letters, the oldest first and no more than p_limit. Returns how many.';
comment on function pulse.outbox_discard_many is 'Discards dead letters, the oldest first and no more than p_limit. Returns how many.';
comment on function pulse.outbox_pause is 'Nobody claims this topic (null: any) from the commit on; running events finish.';
comment on function pulse.outbox_resume is 'Ends a pause; true when there was one.';
comment on function pulse.outbox_prune is 'Deletes what ended longer than p_retention ago from p_pages pages, and says where to go on (null: the end).';
comment on function pulse.outbox_free is 'After a restore: what is RUNNING under workers of whom none is alive is due again, and the attempt was none. Call it until it says 0.';
comment on function pulse.outbox_prune_handled is 'Forgets what handlers did longer than p_older_than ago, a few pages at a time, and says where to go on (null: the end).';
comment on function pulse.running is 'The events that are RUNNING, by indexes: asking for the status would read the whole table.';
comment on function pulse.count_topics is 'Unfinished work by topic and generation: what topic_status counts.';
comment on function pulse.blocked_keys is 'What the view blocked_key shows, looking for parked heads among p_keys keys.';
comment on function pulse.outbox_grant is 'Gives each of the three roles that exists its rights; to be called again when one was created later.';

-- Roles belong to the cluster: they may exist, another database may be creating them now, or this user may not create any.
do $$
begin
  begin
    create role pulse_producer nologin;
  exception when duplicate_object or unique_violation then null;
  end;
  begin
    create role pulse_dispatcher nologin;
  exception when duplicate_object or unique_violation then null;
  end;
  begin
    create role pulse_operator nologin;
  exception when duplicate_object or unique_violation then null;
  end;
exception when insufficient_privilege then
  raise notice 'not allowed to create roles: an administrator may create pulse_producer, pulse_dispatcher and pulse_operator and call pulse.outbox_grant()';
end
$$;

select pulse.outbox_grant();

insert into pulse.migration (version, name, oldest_code) values (1, 'outbox', '0.1.0');
