-- Test-only: every change of a row of the outbox leaves a line here, in the transaction that made it.
-- `who` is the process behind the session, which the rig's connection strings name (chaos.who).

create schema chaos;

create table chaos.transition (
  id              bigint       not null generated always as identity primary key,
  at              timestamptz  not null default clock_timestamp(),
  who             text         not null default coalesce(current_setting('chaos.who', true), ''),
  transaction     xid8         not null default pg_current_xact_id(),
  began           timestamptz  not null default transaction_timestamp(),
  event_id        uuid         not null,
  old_status      pulse.status,      -- null: inserted
  status          pulse.status,      -- null: deleted
  token           uuid,
  attempts        integer,
  max_attempts    integer,
  lapses          smallint,
  snoozes         integer,
  lease_seq       bigint,
  lease_until     timestamptz,
  next_run_at     timestamptz,
  locked_by       text,
  alone           boolean,
  generation      bigint,
  history         integer,
  request         text,
  rule            text,
  verdict         text,
  alert_id        uuid,
  alerted         boolean,
  error           text,
  failure         jsonb,
  first_failed_at timestamptz,
  completed_at    timestamptz,
  cycle           jsonb,             -- what a replay or a discard has added to the history
  topic           text,              -- from here on: of inserts only
  seq             bigint,
  ordering_key    text,
  holds_key       boolean,
  idempotency_key text,
  mark            text,              -- the producer's own name of what it wanted to enqueue: the column source
  budget          integer,
  priority        smallint,
  parked          boolean
);

-- An event is parked, or given its turn: no change of its state. Numbered together with those.
create table chaos.turn (
  id          bigint      not null default nextval(pg_get_serial_sequence('chaos.transition', 'id')),
  at          timestamptz not null default clock_timestamp(),
  transaction xid8        not null default pg_current_xact_id(),
  event_id    uuid        not null,
  parked      boolean     not null
);

-- What handlers have done, and the application's own data, written in the transaction that enqueues.
create table chaos.effect (
  event_id  uuid   not null,
  kind      text   not null,
  lease_seq bigint not null
);
create table chaos.business (
  event_id uuid not null
);

create function chaos.log_insert() returns trigger
language plpgsql security definer
as $$
begin
  insert into chaos.transition (
    event_id, status, token, attempts, max_attempts, lapses, snoozes, lease_seq, lease_until, next_run_at, locked_by, alone,
    generation, history, alert_id, alerted, topic, seq, ordering_key, holds_key, idempotency_key, mark, budget,
    priority, parked)
  values (
    new.event_id, new.status, new.claim_token, new.attempts, new.max_attempts, new.lapses, new.snoozes, new.lease_seq,
    new.lease_until, new.next_run_at, new.locked_by, new.alone, new.generation, jsonb_array_length(new.failure_history), new.alert_id,
    new.alerted_at is not null, new.topic, new.seq, new.ordering_key, new.holds_key, new.idempotency_key,
    new.source, new.producer_max_attempts, new.priority, new.parked);
  return null;
end
$$;

create function chaos.log_update() returns trigger
language plpgsql security definer
as $$
begin
  insert into chaos.transition (
    event_id, old_status, status, token, attempts, max_attempts, lapses, snoozes, lease_seq, lease_until, next_run_at,
    locked_by, alone, generation, history, request, rule, verdict, alert_id, alerted, error, failure, first_failed_at,
    completed_at, cycle)
  values (
    new.event_id, old.status, new.status, new.claim_token, new.attempts, new.max_attempts, new.lapses, new.snoozes,
    new.lease_seq, new.lease_until, new.next_run_at, new.locked_by, new.alone, new.generation, jsonb_array_length(new.failure_history),
    new.failure_history -> -1 ->> 'request', new.last_failure ->> 'rule', new.last_failure ->> 'verdict', new.alert_id,
    new.alerted_at is not null, new.last_error, new.last_failure, new.first_failed_at, new.completed_at,
    case when jsonb_array_length(new.failure_history) > jsonb_array_length(old.failure_history) then new.failure_history -> -1 end);
  return null;
end
$$;

create function chaos.log_turn() returns trigger
language plpgsql security definer
as $$
begin
  insert into chaos.turn (event_id, parked) values (new.event_id, new.parked);
  return null;
end
$$;

create function chaos.log_delete() returns trigger
language plpgsql security definer
as $$
begin
  insert into chaos.transition (event_id, old_status, token, lease_seq) values (old.event_id, old.status, old.claim_token, old.lease_seq);
  return null;
end
$$;

create trigger chaos_insert after insert on pulse.outbox
  for each row execute function chaos.log_insert();
-- A lease that gets an entry of its own in outbox_leases is no change of its state either.
create trigger chaos_update after update on pulse.outbox
  for each row
  when ((old.parked = new.parked or old.status <> new.status)
        and not (old.status = new.status
                 and old.lease_until = new.lease_until
                 and old.indexed_at is distinct from new.indexed_at))
  execute function chaos.log_update();
create trigger chaos_turn after update on pulse.outbox
  for each row when (old.parked <> new.parked and old.status = new.status) execute function chaos.log_turn();
create trigger chaos_delete after delete on pulse.outbox
  for each row execute function chaos.log_delete();

-- Sweeps of the watchdog, whose own table forgets them.
create table chaos.sweep (
  transaction xid8        not null default pg_current_xact_id(),
  swept_at    timestamptz not null
);

create function chaos.log_sweep() returns trigger
language plpgsql security definer
as $$
begin
  insert into chaos.sweep (swept_at) values (new.swept_at);
  return null;
end
$$;

create trigger chaos_sweep after insert on pulse.sweep
  for each row execute function chaos.log_sweep();

grant usage on schema chaos to public;
grant select, insert on chaos.effect, chaos.business to public;
