-- Bare statements on our own table: a token for each claim and a cursor over the lane, and nothing of what our functions
-- know beside that. No pauses, budgets, shares of topics, ordering keys, repeated calls, or answers row by row.
do $$
declare
  v_batch  integer := current_setting('bench.batch')::integer;
  v_delete boolean := current_setting('bench.delete')::boolean;
  v_token  uuid;
  v_ids    uuid[];
  v_due    timestamptz := '-infinity';
  v_seq    bigint := 0;
begin
  perform set_config('enable_seqscan', 'off', false);
  perform set_config('enable_bitmapscan', 'off', false);
  perform set_config('plan_cache_mode', 'force_generic_plan', false);
  loop
    v_token := gen_random_uuid();
    with claimed as (
      update pulse.outbox o
         set status       = 'RUNNING',
             indexed_as   = 'RUNNING',
             known_as     = 'RUNNING',
             attempts     = o.attempts + 1,
             max_attempts = 5,
             lease_until  = clock_timestamp() + interval '30 seconds',
             locked_by    = 'pure sql',
             claim_token  = v_token
       where o.ctid = any (array(
               select d.ctid
                 from pulse.outbox d
                where d.topic = 'bench'
                  and d.generation = 0
                  and d.lapses = 0
                  and d.priority = 0
                  and d.indexed_as in ('PENDING', 'RETRYING')
                  and not d.parked
                  and (d.next_run_at, d.seq) > (v_due, v_seq)
                  and d.next_run_at <= clock_timestamp()
                order by d.topic, d.generation, d.lapses, d.priority, d.next_run_at, d.seq
                limit v_batch
                  for update skip locked))
      returning o.event_id, o.topic, o.payload::text, o.attempts, o.next_run_at, o.seq
    )
    select array_agg(event_id), max(next_run_at), max(seq) into v_ids, v_due, v_seq from claimed;
    commit;
    exit when v_ids is null;
    if v_delete then
      delete from pulse.outbox o where o.event_id = any (v_ids) and o.claim_token = v_token;
    else
      update pulse.outbox o
         set status       = 'COMPLETED',
             known_as     = 'COMPLETED',
             completed_at = clock_timestamp(),
             lease_until  = null,
             locked_by    = null
       where o.event_id = any (v_ids)
         and o.claim_token = v_token;
    end if;
    commit;
  end loop;
end
$$;
