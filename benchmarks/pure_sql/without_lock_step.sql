-- A completion would wait for whoever has one of its rows locked, and two of them could wait for each other.
do $$
begin
  execute replace(pg_get_functiondef('pulse.lock_claimed'::regproc), 'for update of o skip locked', '');
end
$$;
