-- The limit: our own claim and complete, called on the server by one session. No client, no handler, no network.
-- What a dispatcher does, it does: a fresh token for each claim, a cursor over the lane, a commit after every call.
do $$
declare
  v_batch  integer := current_setting('bench.batch')::integer;
  v_delete boolean := current_setting('bench.delete')::boolean;
  v_token  uuid;
  v_ids    uuid[];
  v_due    timestamptz;
  v_seq    bigint;
begin
  loop
    v_token := gen_random_uuid();
    select array_agg(c.event_id), max(c.next_run_at), max(c.seq)
      into v_ids, v_due, v_seq
      from pulse.outbox_claim_lane(
             p_token       => v_token,
             p_worker      => 'pure sql',
             p_topic       => 'bench',
             p_generation  => 0,
             p_lapses      => 0::smallint,
             p_priority    => 0::smallint,
             p_next_run_at => coalesce(v_due, '-infinity'),
             p_seq         => coalesce(v_seq, 0),
             p_limit       => v_batch,
             p_lease       => '30 seconds',
             p_budget      => 5,
             p_slots       => v_batch,
             p_try         => 1,
             p_together    => v_batch >= 20) as c;
    commit;
    exit when v_ids is null;
    perform pulse.outbox_complete(
      p_event_ids => v_ids,
      p_tokens    => array_fill(v_token, array[cardinality(v_ids)]),
      p_delete    => v_delete);
    commit;
  end loop;
end
$$;
