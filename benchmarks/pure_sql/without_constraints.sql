-- Nothing keeps a row from saying what can't be.
do $$
declare
  v_name name;
begin
  for v_name in select conname from pg_constraint where conrelid = 'pulse.outbox'::regclass and contype = 'c' loop
    execute format('alter table pulse.outbox drop constraint %I', v_name);
  end loop;
end
$$;
