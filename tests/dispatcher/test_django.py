"""Handlers that use Django: a dispatcher has no requests, at whose ends Django would look after its connections."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict

from tests.support.command import running

APPLICATION = """
import django
import psycopg
from django.conf import settings
from django.db import connection
from pulse_outbox import Event, Outbox, RetryPolicy

settings.configure(DATABASES={{"default": {{
    "ENGINE": "django.db.backends.postgresql", "NAME": {dbname!r}, "USER": {user!r}, "HOST": {host!r}, "PORT": {port!r},
    "CONN_MAX_AGE": 600,
}}}})
django.setup()
outbox = Outbox()


@outbox.handler("job", retry=RetryPolicy(max_attempts=2, base_delay=0))
def job(event: Event[dict]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        [pid] = cursor.fetchone()
        if event.attempt == 1:
            with psycopg.connect({dsn!r}) as other:
                other.execute("select pg_terminate_backend(%s)", [pid])
        cursor.execute("insert into effect values (%s, %s)", [event.attempt, pid])
"""


def test_a_connection_that_died_is_not_used_again(tmp_path, dsn, conn):
    """A thread that lives for months keeps its connection: after a restart of the database every job would fail."""
    conn.execute("create table effect (attempt integer, pid integer)")
    for _ in range(2):
        conn.execute("select pulse.outbox_enqueue('job', '{}')")
    conn.commit()
    (tmp_path / "shop.py").write_text(APPLICATION.format(dsn=dsn, **conninfo_to_dict(dsn)))

    with running(tmp_path, "shop:outbox", "--burst", "--concurrency", "1", dsn=dsn) as command:
        assert command.ended(within=50) == 0, command.text

    assert [attempt for [attempt] in conn.execute("select attempt from effect")] == [2, 2]
    assert conn.execute("select count(*) from pulse.outbox where status = 'COMPLETED'").fetchone() == (2,)
