-- Nothing keeps a row, or a column, from saying what can't be.
do $$
declare
  v_name text;
  v_type regtype;
begin
  for v_name in select conname from pg_constraint where conrelid = 'pulse.outbox'::regclass and contype = 'c' loop
    execute format('alter table pulse.outbox drop constraint %I', v_name);
  end loop;
  for v_name, v_type in
    select conname, contypid from pg_constraint where connamespace = 'pulse'::regnamespace and contypid <> 0
  loop
    execute format('alter domain %s drop constraint %I', v_type, v_name);
  end loop;
end
$$;
