"""What `pulse-outbox demo` shows, in reading order.

shop        an application: its tables, its Outbox, its handlers, and a transaction that writes an order and its events
database    where it happens: a PostgreSQL that is made for it, or schemas of its own in one that is given
dispatchers the real `pulse-outbox run`, started again when it dies; `tethered` lets it never outlive the demo
story       what happens, and what must be true at the end
views       how it is shown: live on a terminal, else as plain lines
"""
