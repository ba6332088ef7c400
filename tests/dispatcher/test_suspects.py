"""Suspects in child processes: real processes, real signals, a real database."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.rows import namedtuple_row

from pulse_outbox import Dispatcher, Outbox
from pulse_outbox.dispatcher import child
from pulse_outbox.events import NewEvent
from pulse_outbox.store import Store
from tests.support import suspects
from tests.support.command import Command, running
from tests.support.suspects import TABLES
from tests.support.waiting import wait_until, wait_until_async

ROOT = Path(__file__).parents[2]
TARGET = "tests.support.suspects:outbox"
QUICK: dict[str, Any] = {"lease": 1.5, "heartbeat": 0.5, "watchdog": 0.5, "poll": 0.5, "grace": 10}
SLOW = "(payload ->> 'seconds')::real > 100"
NOTHING: dict[str, Any] = {}
Start = Callable[..., Command]


class Rows:
    """The outbox of the test's database, as an operator sees it."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn
        conn.execute(TABLES)
        conn.commit()
        conn.autocommit = True

    def enqueue(
        self, topic: str, payload: object = None, *, lapses: int = 0, number: int = 1, **options: Any
    ) -> None:
        """Events that have lapsed so often."""
        with self.conn.transaction():
            ids = Outbox().enqueue_many(
                self.conn, [NewEvent(topic, payload or {}, **options) for _ in range(number)]
            )
            self.conn.execute("update pulse.outbox set lapses = %s where event_id = any(%s)", (lapses, ids))

    def of(self, topic: str) -> list[Any]:
        cursor = self.conn.cursor(row_factory=namedtuple_row)
        return cursor.execute("select * from pulse.outbox where topic = %s order by seq", (topic,)).fetchall()

    def one(self, topic: str) -> Any:
        [row] = self.of(topic)
        return row

    def count(self, condition: str) -> int:
        [number] = self.conn.execute(f"select count(*) from pulse.outbox where {condition}").fetchone() or [0]
        return int(number)

    def slow_ones_started(self) -> int:
        return self.conn.execute(
            f"select from noted join pulse.outbox using (event_id) where {SLOW}"
        ).rowcount

    def until(self, condition: str, number: int, *, within: float = 20) -> None:
        try:
            wait_until(lambda: self.count(condition) == number, within=within)
        except AssertionError:
            states = self.conn.execute(
                "select topic, status, attempts, lapses, last_error, count(*) from pulse.outbox group by 1, 2, 3, 4, 5"
            ).fetchall()
            raise AssertionError(f"not {number} with {condition} within {within} s: {states}") from None


@pytest.fixture
def rows(conn: psycopg.Connection[Any]) -> Rows:
    return Rows(conn)


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    """Starts a dispatcher of the suspects' application with short times."""
    with ExitStack() as stack:

        def start_one(*flags: str, environment: dict[str, Any] = NOTHING, **options: Any) -> Command:
            arguments = [*flags, *(f"--{name}={value}" for name, value in {**QUICK, **options}.items())]
            return stack.enter_context(running(ROOT, TARGET, *arguments, dsn=dsn, **environment))

        yield start_one


def children_of(command: Command) -> list[psutil.Process]:
    return psutil.Process(command.process.pid).children()


def start_with_more_than_fits(start: Start, rows: Rows, **options: Any) -> Command:
    """Two run and eight wait in the child: it has been working so quickly that more was claimed ahead for it."""
    rows.enqueue("noted", {"seconds": 0}, lapses=1, number=400, priority=9)
    rows.enqueue("noted", {"seconds": 600}, lapses=1, number=10)
    command = start(concurrency=2, **options)
    rows.until(f"{SLOW} and status = 'RUNNING'", 10)
    wait_until(lambda: rows.slow_ones_started() == 2)
    return command


# What one lapse and two mean


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("how", "evidence"),
    [
        ("SIGKILL", "worker process died: signal 9 (SIGKILL)"),
        ("exit", "worker process ended with exit code 0 in the middle of a job"),
        ("segfault", "worker process died: signal 11 (SIGSEGV)"),
    ],
)
def test_poison_dies_alone(start, rows, how, evidence):
    """A job that kills its worker beside 100 innocents: they complete, it is dead, the dispatcher died once."""
    rows.enqueue("innocent", {"seconds": 0.1}, number=50)
    rows.enqueue("poison", {"how": how})
    rows.enqueue("innocent", {"seconds": 0.1}, number=50)
    start().process.wait(20)

    second = start(concurrency=200)
    rows.until("status in ('COMPLETED', 'DEAD_LETTERED')", 101, within=60)

    assert rows.count("topic = 'innocent' and status = 'COMPLETED'") == 100
    assert rows.count("topic = 'innocent' and attempts <> 1") == 0
    poison = rows.one("poison")
    assert poison.status == "DEAD_LETTERED"
    assert poison.last_error == evidence
    assert poison.attempts == poison.max_attempts == 2
    assert second.process.poll() is None


@pytest.mark.timeout(90)
def test_power_cut_is_no_reason_for_slow_motion(start, rows):
    """2,000 jobs in flight when the worker is killed are run together, as soon as their leases have lapsed."""
    rows.enqueue("patient", number=2000)
    first = start(concurrency=2000)
    rows.until("status = 'RUNNING'", 2000)
    first.send(signal.SIGKILL)
    killed_at = time.monotonic()

    second = start(concurrency=2000)
    rows.until("status = 'COMPLETED'", 2000, within=30)

    # Up to two leases until they are reaped, a second or two for the child, one for the handlers.
    assert time.monotonic() - killed_at < 12
    assert rows.count("lapses = 1 and attempts = 1") == 2000
    assert len(second.logged("outbox.child_started")) == 1


def test_one_lapse_runs_in_company_two_alone(start, rows):
    """Those with one lapse share a child, those with more have one to themselves; nobody runs in the dispatcher."""
    rows.enqueue("noted", {"seconds": 0.3}, lapses=1, number=20)
    rows.enqueue("noted", {"seconds": 0.3}, lapses=2, number=3)
    rows.enqueue("noted", {"seconds": 0.3}, lapses=5, number=3)
    command = start()
    rows.until("status = 'COMPLETED'", 26)

    together = rows.conn.execute(
        """select count(*), count(*) filter (where one.pid = other.pid),
                  count(*) filter (where one.pid = other.pid and (a.lapses > 1 or b.lapses > 1))
             from noted one join pulse.outbox a using (event_id),
                  noted other join pulse.outbox b using (event_id)
            where one.event_id < other.event_id
              and tstzrange(one.began, one.ended) && tstzrange(other.began, other.ended)"""
    ).fetchone()
    assert together is not None
    overlaps, in_one_process, beside_loners = together
    assert overlaps >= in_one_process > 20
    assert beside_loners == 0
    pids = rows.conn.execute("select pid from noted").fetchall()
    assert (command.process.pid,) not in pids
    assert rows.count("alone") == 6


def test_lonely_ones_do_not_queue_up_behind_a_long_one(start, rows):
    """A suspect that runs for hours alone is no reason for the others to wait for hours."""
    rows.enqueue("endless", lapses=2)
    rows.enqueue("innocent", lapses=2, number=5)
    start()

    rows.until("status = 'COMPLETED'", 5)
    assert rows.one("endless").status == "RUNNING"


def test_suspects_are_noticed_while_no_slot_is_free(start, rows):
    """They have a process of their own, and handlers may run for hours."""
    rows.enqueue("innocent", {"seconds": 600}, number=2)
    start("--no-notify", concurrency=2, grace=0.5)
    rows.until("status = 'RUNNING'", 2)
    rows.enqueue("innocent", {"seconds": 0.2}, lapses=1, number=300)
    rows.until("status = 'RUNNING'", 4)
    rows.enqueue("noted", lapses=1)

    rows.until("topic = 'noted' and status = 'COMPLETED'", 1)
    assert rows.count("status = 'PENDING'"), (
        "control: they came all the time, and each was a place that had become free"
    )


def test_limit_of_a_handler_holds_across_processes(start, rows):
    """A handler's concurrency is a promise to somebody else's server, whichever process keeps it."""
    for lapses in (0, 1, 2):
        rows.enqueue("limited", {"seconds": 0.05}, lapses=lapses, number=10)
    start()
    rows.until("status = 'COMPLETED'", 30)

    [[most]] = rows.conn.execute(
        """select max(number) from (
             select count(*) as number
               from noted one, noted other
              where one.began >= other.began and one.began < other.ended
              group by one.event_id) as running"""
    ).fetchall()
    assert most == 2


def test_transactional_handler_runs_as_a_suspect(start, rows):
    """Its transaction completes the event from within the child, once."""
    for topic in ("written", "written.sync"):
        for lapses in (1, 2):
            rows.enqueue(topic, lapses=lapses, number=5)
    start()
    rows.until("status = 'COMPLETED'", 20)

    [[effects, events]] = rows.conn.execute(
        "select count(*), count(distinct event_id) from effect"
    ).fetchall()
    assert (effects, events) == (20, 20)


# How a child may end


def test_death_is_reported_at_once(start, rows):
    """Not when the lease has lapsed: here that would take half a minute."""
    rows.enqueue("poison", {"how": "SIGKILL"}, lapses=1)
    rows.enqueue("innocent", lapses=1)
    start(lease=60, heartbeat=20, watchdog=20)

    rows.until("topic = 'poison' and status = 'DEAD_LETTERED'", 1, within=15)
    rows.until("topic = 'innocent' and status = 'COMPLETED'", 1)


def test_only_what_had_started_has_lapsed(start, rows):
    """Whoever waited in the child for his turn is as innocent as before."""
    command = start_with_more_than_fits(start, rows)
    [child] = children_of(command)
    rows.conn.execute("select pulse.outbox_pause('noted', 'so that they stay where they are', 'me')")
    child.kill()
    rows.until("status = 'RUNNING'", 0)

    assert rows.count(f"{SLOW} and lapses = 1 and attempts = 0 and last_error is null") == 8
    assert rows.count(f"{SLOW} and lapses = 2 and attempts = 0 and last_error like '%SIGKILL%'") == 2


@pytest.mark.parametrize("target", [TARGET, None], ids=["in a child", "in this process"])
async def test_claim_whose_answer_was_lost_is_asked_again(dsn, rows, monkeypatch, target):
    """Else its rows would be claimed by nobody, and alone that costs an attempt that never started."""
    monkeypatch.setenv("PULSE_OUTBOX_DSN", dsn)
    monkeypatch.chdir(ROOT)

    class Forgetful(Dispatcher):
        def _new_store(self, name: str, *timeout: timedelta) -> Store:
            store = super()._new_store(name, *timeout)
            if name == "suspects":
                monkeypatch.setattr(store, "claim", loses_first_answer(store.claim))
            return store

    rows.enqueue("innocent", lapses=2)
    dispatcher = Forgetful(suspects.outbox, dsn=dsn, target=target, **QUICK)
    running = asyncio.create_task(dispatcher.run_async())
    await wait_until_async(lambda: asyncio.to_thread(rows.count, "status = 'COMPLETED'"))
    dispatcher.stop()
    await running

    innocent = rows.one("innocent")
    assert (innocent.attempts, innocent.lapses, innocent.lease_seq) == (1, 2, 1)


def loses_first_answer(claim: Callable[..., Any]) -> Callable[..., Any]:
    lost: list[object] = []

    async def claim_and_forget(**options: Any) -> Any:
        claims = await claim(**options)
        if claims and not lost:
            lost.append(claims)
            raise psycopg.OperationalError("the connection is lost")
        return claims

    return claim_and_forget


def test_lost_connection_costs_nobody_an_attempt(start, rows):
    """Not even when it is lost again and again; the children stay the same."""
    rows.enqueue("innocent", {"seconds": 0.01}, lapses=2, number=100)
    command = start()
    command.wait_for("outbox.child_started")
    for number in (10, 30, 50, 70, 90):
        rows.until(f"status = 'COMPLETED' and seq <= {number}", number)
        rows.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pulse-outbox suspects'"
        )
    rows.until("status = 'COMPLETED'", 100)

    assert rows.count("attempts = 1 and lapses = 2") == 100
    assert not command.logged("outbox.child_died")


def test_death_is_noticed_although_the_socket_stays_open(start, rows):
    """A process that the handler forked holds the child's end of the connection."""
    rows.enqueue("poison", {"how": "heir"}, lapses=2)
    start(lease=60, heartbeat=20, watchdog=20)

    rows.until("attempts = 1 and status = 'RETRYING'", 1, within=4)
    assert "SIGKILL" in rows.one("poison").last_error


def test_result_that_was_told_survives_the_process(start, rows):
    """The last words of a child count: its job is not run again."""
    rows.enqueue("last.words", lapses=2)
    command = start()
    rows.until("status = 'COMPLETED'", 1)

    assert rows.one("last.words").attempts == 1
    wait_until(lambda: not children_of(command), what="the child's end")


def test_child_that_closed_its_connection_is_ended(start, rows):
    """Nobody would ever hear of its job again."""
    rows.enqueue("poison", {"how": "descriptors"}, lapses=3)
    start()

    rows.until("status = 'DEAD_LETTERED'", 1)
    assert (
        "closed the connection" in rows.one("poison").last_error
        or "exit code" in rows.one("poison").last_error
    )


def test_child_that_holds_the_interpreter_is_ended(start, rows):
    """It can't show life, nor be asked: after a lease it is taken for dead."""
    rows.enqueue("greedy", lapses=2)
    rows.enqueue("innocent", lapses=1)
    start()

    rows.until("status = 'DEAD_LETTERED'", 1)
    assert rows.one("greedy").last_error == "worker process killed: no sign of life for 1.5 s"
    rows.until("status = 'COMPLETED'", 1)


def test_blocking_the_childs_loop_is_not_death(start, rows):
    """For three leases, and it is one run; whoever waited behind it has been given back and run elsewhere."""
    rows.enqueue("blocking", {"seconds": 4.5}, lapses=1)
    command = start()
    command.wait_for("outbox.child_started")
    rows.until("status = 'RUNNING'", 1)
    rows.enqueue("innocent", lapses=1, number=5)
    rows.until("topic = 'innocent' and status = 'COMPLETED'", 5, within=4)

    assert rows.one("blocking").status == "RUNNING"
    rows.until("status = 'COMPLETED'", 6)
    blocking = rows.one("blocking")
    assert (blocking.attempts, blocking.lapses, blocking.lease_seq) == (1, 1, 1)
    assert command.logged("outbox.child_stalled")


def test_loop_that_is_blocked_past_the_timeout_is_ended(start, rows):
    """Nothing inside the child can stop that handler; the parent can."""
    rows.enqueue("blocking.long", lapses=2)
    start()

    rows.until("attempts = 1 and status = 'RETRYING'", 1, within=15)
    assert "ran longer than 0.3 s" in rows.one("blocking.long").last_error


def test_thread_past_its_timeout_costs_the_child(start, rows):
    """The attempt has failed as usual; what follows runs beside no stray thread."""
    rows.enqueue("stuck", lapses=2)
    command = start()
    rows.until("topic = 'stuck' and status = 'DEAD_LETTERED'", 1)
    rows.enqueue("noted", lapses=2)
    rows.until("status = 'COMPLETED'", 1)

    assert "the handler ran longer than 0.3 s" in rows.one("stuck").last_error
    assert (rows.one("noted").attempts, rows.one("noted").lease_seq) == (1, 1)
    assert len(command.logged("outbox.child_started")) == 2


# What must not matter


@pytest.mark.parametrize("topic", ["exits", "exits.sync"])
def test_sys_exit_is_a_failed_attempt(start, rows, topic):
    """As in the dispatcher's own process: the child lives on."""
    rows.enqueue(topic, lapses=1)
    command = start()
    rows.until("status = 'DEAD_LETTERED'", 1)

    row = rows.one(topic)
    assert "SystemExit" in row.last_error
    assert (row.attempts, row.lapses) == (2, 1)
    assert not command.logged("outbox.child_died")


def test_noise_does_not_disturb(start, rows):
    """What a handler prints is not what a child says, and an error may be of any size and of any characters."""
    rows.enqueue("noisy", lapses=1, number=20)
    rows.enqueue("wordy", lapses=1)
    command = start()
    rows.until("topic = 'noisy' and status = 'COMPLETED'", 20)
    rows.until("topic = 'wordy' and status = 'DEAD_LETTERED'", 1)

    assert "ValueError" in rows.one("wordy").last_error
    assert not command.logged("outbox.child_died")


def test_child_is_kept_for_the_next_suspect(start, rows):
    """A new one would cost a second each time."""
    command = start()
    for number in range(1, 6):
        rows.enqueue("innocent", lapses=2)
        rows.until("status = 'COMPLETED'", number)

    assert len(command.logged("outbox.child_started")) == 1


def test_resources_may_take_longer_than_a_lease_to_open(start, rows):
    """A lifespan that loads a model, or a slow machine: that is no event loop that stands still."""
    command = start(environment={"TEST_SLOW_LIFESPAN": "2"})
    command.wait_for("outbox.started")
    rows.enqueue("innocent", lapses=1)
    rows.until("status = 'COMPLETED'", 1, within=40)

    assert len(command.logged("outbox.child_started")) == 1
    assert not command.logged("outbox.child_stalled")


def test_application_that_does_not_load_is_tried_ever_more_rarely(start, rows, tmp_path):
    """The suspects keep their attempts and wait for somebody who can run them; everything else goes on."""
    broken = tmp_path / "broken"
    broken.touch()
    command = start(environment={"TEST_BREAK_IF_THERE": str(broken)})
    command.wait_for("outbox.started")
    rows.enqueue("innocent", lapses=1)
    rows.enqueue("innocent", lapses=2)
    rows.enqueue("serial", lapses=1)
    complaint = command.wait_for("outbox.child_failed")
    rows.enqueue("innocent", lapses=0)
    rows.enqueue("serial", lapses=0)
    rows.until("status = 'COMPLETED'", 2)
    wait_until(lambda: len(broken.read_text().split()) >= 4, within=20)

    assert "can't be loaded today" in complaint["error"]
    assert rows.count("attempts = 0 and lease_seq = 0") == 3
    first, *_, last = map(float, broken.read_text().split())
    assert last - first > 2
    broken.unlink()
    rows.until("status = 'COMPLETED'", 5)


def test_a_traceback_of_a_child_is_one_write(monkeypatch):
    """Both write to one standard error: in pieces it would tear the parent's line, which says that suspects wait."""
    pieces: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", pieces.append)
    try:
        raise ImportError("not today")
    except ImportError:
        child.write_whole(*sys.exc_info())

    [text] = pieces
    assert text.startswith("Traceback ")
    assert text.endswith("ImportError: not today\n")


# The end of the dispatcher


@pytest.mark.parametrize(
    "topic",
    [
        "endless",
        pytest.param(
            "greedy", marks=pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
        ),
    ],
)
def test_children_die_with_their_parent(start, rows, topic):
    """Or they would go on working under leases that nobody keeps."""
    rows.enqueue(topic, lapses=1)
    rows.enqueue(topic, lapses=2)
    command = start(lease=60, heartbeat=20, watchdog=20)
    for concurrency in (1, 100):
        command.wait_for("outbox.child_started", concurrency=concurrency)
    rows.until("status = 'RUNNING'", 2)
    children = children_of(command)
    assert len(children) == 2
    command.send(signal.SIGKILL)

    assert not psutil.wait_procs(children, timeout=3)[1]


def test_sigterm_lets_suspects_finish(start, rows):
    """They get the grace like everybody else, and a signal to the whole group is not for them."""
    rows.enqueue("noted", {"seconds": 1.5}, lapses=1)
    rows.enqueue("noted", {"seconds": 1.5}, lapses=2)
    command = start()
    wait_until(lambda: rows.conn.execute("select 1 from noted").rowcount == 2)
    children = children_of(command)
    for process in [*children, psutil.Process(command.process.pid)]:
        process.send_signal(signal.SIGTERM)

    assert command.ended() == 0
    assert rows.count("status = 'COMPLETED' and attempts = 1") == 2
    assert not psutil.wait_procs(children, timeout=1)[1]


def test_sigterm_takes_no_longer_than_the_grace(start, rows):
    """What has not started is given back untouched; what has is ended, and comes back."""
    command = start_with_more_than_fits(start, rows, grace=1)
    rows.enqueue("noted", {"seconds": 700}, lapses=2)
    wait_until(lambda: rows.slow_ones_started() == 3)
    command.send(signal.SIGTERM)
    asked_at = time.monotonic()
    command.ended()

    assert time.monotonic() - asked_at < 5
    assert rows.count(f"{SLOW} and status = 'RETRYING' and lapses = 1 and attempts = 0") == 8
    assert rows.count(f"{SLOW} and status = 'RETRYING' and lapses = 2 and attempts = 0") == 2
    [alone] = [row for row in rows.of("noted") if row.alone]
    assert (alone.status, alone.attempts, alone.lapses) == ("RETRYING", 1, 3)
    assert "grace" in alone.last_error


def test_pause_takes_back_what_a_child_has_not_started(start, rows):
    """What was claimed ahead is released, also from a child."""
    start_with_more_than_fits(start, rows)
    rows.conn.execute("select pulse.outbox_pause('noted', 'a test', 'me')")

    rows.until(f"{SLOW} and status = 'RUNNING'", 2)
    rows.until(f"{SLOW} and status = 'RETRYING' and attempts = 0", 8)
