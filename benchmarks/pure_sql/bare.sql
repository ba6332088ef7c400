-- The bare prototype's statements, called on the server by one session.
do $$
declare
  v_batch  integer := current_setting('bench.batch')::integer;
  v_delete boolean := current_setting('bench.delete')::boolean;
  v_token  uuid;
  v_ids    bigint[];
  v_due    timestamptz := '-infinity';
  v_id     bigint := 0;
begin
  perform set_config('enable_seqscan', 'off', false);
  perform set_config('plan_cache_mode', 'force_generic_plan', false);
  loop
    v_token := gen_random_uuid();
    with claimed as (
      update bench_job j
         set status      = 'RUNNING',
             attempts    = j.attempts + 1,
             lease_until = clock_timestamp() + interval '30 seconds',
             locked_by   = 'pure sql',
             claim_token = v_token
       where j.ctid = any (array(
               select d.ctid
                 from bench_job d
                where d.status = 'PENDING'
                  and (d.next_run_at, d.id) > (v_due, v_id)
                  and d.next_run_at <= clock_timestamp()
                order by d.next_run_at, d.id
                limit v_batch
                  for update skip locked))
      returning j.id, j.topic, j.payload::text, j.attempts, j.next_run_at
    )
    select array_agg(id), max(next_run_at), max(id) into v_ids, v_due, v_id from claimed;
    commit;
    exit when v_ids is null;
    if v_delete then
      delete from bench_job where id = any (v_ids) and claim_token = v_token;
    else
      update bench_job
         set status       = 'COMPLETED',
             completed_at = clock_timestamp(),
             lease_until  = null,
             locked_by    = null
       where id = any (v_ids)
         and claim_token = v_token;
    end if;
    commit;
  end loop;
end
$$;
