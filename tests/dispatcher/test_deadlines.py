"""Deadlines for connections: whoever does not answer in time is cut off, and nobody else."""

from __future__ import annotations

import os
import threading

import psycopg
import pytest

from pulse_outbox.dispatcher.deadlines import Deadlines
from tests.support.waiting import wait_until


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pulse-outbox-deadlines"]


def is_cut_off(conn: psycopg.Connection) -> bool:
    try:
        conn.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False


def test_who_does_not_answer_in_time_is_cut_off(connect):
    slow, quick = connect(autocommit=True), connect(autocommit=True)
    deadlines = Deadlines()
    deadlines.start(slow, 0.2)
    number = deadlines.start(quick, 0.2)
    deadlines.stop(number)

    with pytest.raises(psycopg.OperationalError):
        slow.execute("select pg_sleep(60)")
    assert not is_cut_off(quick)


def test_one_thread_watches_all_and_ends_when_there_is_nothing_to_watch(connect):
    """A thread for each would cost a job more than its transaction."""
    wait_until(lambda: watchers() == [])  # of another test
    conn, deadlines = connect(autocommit=True), Deadlines()
    numbers = [deadlines.start(conn, 60) for _ in range(100)]
    assert len(watchers()) == 1

    for number in numbers:
        deadlines.stop(number)
    wait_until(lambda: watchers() == [])
    deadlines.start(conn, 0)
    wait_until(lambda: is_cut_off(conn))


def test_who_can_not_be_watched_is_not_cut_off_later(connect, monkeypatch):
    """The system had no thread left. The connection goes back to its pool, and somebody else gets it."""
    conn, other = connect(autocommit=True), connect(autocommit=True)
    deadlines = Deadlines()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            deadlines.start(conn, 0)
    deadlines.start(other, 0)
    wait_until(lambda: is_cut_off(other))

    assert not is_cut_off(conn)


def test_a_forked_child_has_a_watcher_of_its_own(connect, dsn):
    """A server that forks its workers may have used it before."""
    parents = connect(autocommit=True)
    deadlines = Deadlines()
    number = deadlines.start(parents, 60)

    child = os.fork()
    if not child:
        with psycopg.connect(dsn, autocommit=True) as conn:
            deadlines.start(conn, 0.1)
            try:
                conn.execute("select pg_sleep(20)")
            finally:
                os._exit(0 if conn.closed else 1)
    deadlines.stop(number)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_cut_off(parents)
