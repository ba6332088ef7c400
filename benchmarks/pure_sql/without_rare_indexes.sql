-- No given idempotency keys, no ordering keys, and dead letters and their alerts found by reading the whole table. The rows of
-- a drain have no entry in these: what is saved is to find that out, for each version of each row.
drop index pulse.outbox_idempotency, pulse.outbox_keys, pulse.outbox_one_running_per_key, pulse.outbox_dead, pulse.outbox_alerts_owed;
