-- The watchdog would have to read the whole table to find a lease that has run out.
drop index pulse.outbox_leases;
