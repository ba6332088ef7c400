-- The bare prototype: ten columns, one index, no topics, keys or generations.
create table bench_job (
  id           bigint      generated always as identity primary key,
  topic        text        not null,
  payload      jsonb       not null,
  status       text        not null default 'PENDING',
  attempts     integer     not null default 0,
  next_run_at  timestamptz not null default clock_timestamp(),
  lease_until  timestamptz,
  locked_by    text,
  claim_token  uuid,
  completed_at timestamptz
);
create index bench_due on bench_job (next_run_at, id) where status = 'PENDING';
