-- Run by an administrator, after `pulse-outbox migrate`. billing.invoice and its owner billing_owner are there already,
-- and so is billing_app, the login of the program that writes to it.

begin;

-- The function's owner: it may enqueue and do nothing else. As a SECURITY DEFINER function runs with its owner's rights, one
-- that is owned by an administrator would hand an administrator's rights to whoever finds a hole in it.
create role invoice_events nologin;
grant pulse_producer to invoice_events;

create schema invoice_events authorization invoice_events;

-- Without `security definer` the trigger would run with the rights of billing_app, which must not get any on the outbox.
-- Without its own search_path, billing_app could put a function or an operator of its own where this one looks for them;
-- pg_temp stands last because otherwise it comes first. With it every name outside pg_catalog needs its schema.
create function invoice_events.invoice_was_paid() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- No dynamic SQL, and no values but those that the handler needs. The key makes the event of one payment one event,
  -- whatever the other program does in between; the ordering key lets events of one invoice run one at a time.
  perform pulse.outbox_enqueue(
    p_topic           => 'invoice.paid',
    p_payload         => jsonb_build_object('invoice_id', new.id, 'cents', new.cents),
    p_idempotency_key => 'invoice:' || new.id || ':paid',
    p_ordering_key    => 'invoice:' || new.id,
    p_source          => 'billing');
  return null;      -- what an AFTER trigger returns is ignored
end
$$;

alter function invoice_events.invoice_was_paid() owner to invoice_events;

-- Functions are executable by everybody when they are made. Anybody could put this one on a table of his own, with columns of the
-- same names, and send events of his own making.
revoke execute on function invoice_events.invoice_was_paid() from public;

-- The trigger runs for everybody who writes to the table; the right to execute is looked at now, for whoever creates it.
-- AFTER, so that it sees the row as it is stored; WHEN, so that the other program's updates of anything else cost nothing.
create trigger invoice_was_paid
  after update of paid_at on billing.invoice
  for each row
  when (old.paid_at is null and new.paid_at is not null)
  execute function invoice_events.invoice_was_paid();

commit;
