"""The injector: does the planned faults to a rig, and undoes them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from chaos import points
from chaos.faults import KINDS
from pulse_outbox.embedded import EmbeddedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chaos.faults import Planned
    from chaos.processes import Process
    from chaos.rig import Rig


STANDBY_PATIENCE = 120.0


class Injector:
    """One method for each kind of fault: `begin` calls it, and later what it returned."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.counts: Counter[str] = Counter()
        self._undo: dict[int, Callable[[], None]] = {}
        self._database: list[int] = []
        self._failing_over = False

    def in_words(self) -> str:
        """What has been done until now."""
        return f"{sum(self.counts.values())} faults"

    def begin(self, fault: Planned) -> None:
        """Does it now, and plans its end."""
        if KINDS[fault.kind].lane == "database" and self._failing_over:
            return  # one thing at a time
        if KINDS[fault.kind].lane == "database":  # a slow machine may be late with the end of the last one
            for number in self._database:
                self._end(number)
            self._database.clear()
        method = getattr(self, f"_{fault.kind.replace('-', '_')}")
        try:
            undo: Callable[[], None] | str | None = method(fault)
        except (EmbeddedError, psycopg.Error) as error:
            # A server that could not be started in time, on a machine that has other things to do.
            self._note("failed", fault=fault.kind, error=str(error))
            self._rig.cluster.primary.start()
            return
        if isinstance(undo, str):
            self._rig.skipped[fault.kind] = undo
            return
        self.counts[fault.kind] += 1
        self._note("fault", fault=fault.kind, seconds=fault.seconds)
        if undo is not None:
            number = id(fault)
            self._undo[number] = undo
            if KINDS[fault.kind].lane == "database":
                self._database.append(number)
            self._rig.later(time.monotonic() + fault.seconds, lambda: self._end(number))

    def _end(self, number: int) -> None:
        if (undo := self._undo.pop(number, None)) is not None:
            undo()

    def heal(self) -> None:
        """Everything that has been begun ends."""
        for number in list(self._undo):
            self._end(number)
        if self._failing_over:
            self._give_up_failover("the run was over")

    def _note(self, kind: str, **values: object) -> None:
        self._rig.journal.write(kind, **values)

    # Processes

    def _victim(self, group: Sequence[Process | None], choice: float) -> Process | None:
        living = [process for process in group if process is not None and not process.stopped]
        return living[int(choice * len(living))] if living else None

    def _kill(self, group: Sequence[Process | None], fault: Planned) -> None:
        if (process := self._victim(group, fault.choice)) is not None:
            process.signal(signal.SIGKILL)
            self._note("kill", who=process.name, pid=process.pid)

    def _stop(self, group: Sequence[Process | None], fault: Planned) -> Callable[[], None] | None:
        if (process := self._victim(group, fault.choice)) is None:
            return None
        process.stopped = True
        process.signal(signal.SIGSTOP)
        self._note("stop", who=process.name, pid=process.pid, seconds=fault.seconds)

        def go_on() -> None:
            process.stopped = False
            process.signal(signal.SIGCONT)

        return go_on

    def _order(self, group: Sequence[Process | None], names: Sequence[str], fault: Planned) -> None:
        """At a named point, one of the next times that the process comes there."""
        process = self._victim(group, fault.choice)
        if process is None or not any(self._rig.directory.glob(f"*-{process.name}-{process.pid}.jsonl")):
            return  # it has only just started, and does not listen yet
        number = int(fault.choice * 1e6)
        point = names[number % len(names)]
        action = "STOP" if number // 100 % 3 == 0 else "KILL"
        (self._rig.directory / f"orders-{process.name}").write_text(
            f"{point}:{1 + number // 1000 % 3}:{action}"
        )
        process.signal(signal.SIGUSR1)

    def _kill_dispatcher(self, fault: Planned) -> None:
        self._kill(self._rig.dispatchers, fault)

    def _stop_dispatcher(self, fault: Planned) -> Callable[[], None] | None:
        return self._stop(self._rig.dispatchers, fault)

    def _order_dispatcher(self, fault: Planned) -> None:
        self._order(self._rig.dispatchers, points.DISPATCHER_POINTS, fault)

    def _kill_child(self, fault: Planned) -> None:
        for _, child in self._one_child(fault):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                self._note("kill-child", pid=child)

    def _stop_child(self, fault: Planned) -> Callable[[], None]:
        stopped = self._one_child(fault)

        def send(number: signal.Signals) -> None:
            for _, child in stopped:
                with suppress(ProcessLookupError):
                    os.kill(child, number)

        send(signal.SIGSTOP)
        return lambda: send(signal.SIGCONT)

    def _order_child(self, fault: Planned) -> None:
        """Killed at a named point of a handler's run; it takes orders from the file of its dispatcher."""
        for process, child in self._one_child(fault):
            if any(self._rig.directory.glob(f"*-{process.name}-{child}.jsonl")):
                point = points.CHILD_POINTS[int(fault.choice * 1e6) % len(points.CHILD_POINTS)]
                (self._rig.directory / f"orders-{process.name}").write_text(f"{point}:1:KILL")
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGUSR1)

    def _one_child(self, fault: Planned) -> list[tuple[Process, int]]:
        children = [
            (process, child) for process in self._rig.dispatchers if process for child in process.children()
        ]
        return [children[int(fault.choice * len(children))]] if children else []

    def _deploy(self, fault: Planned) -> None:
        """A dispatcher is told to end and comes back, the first of them with the other generation of the code."""
        if (process := self._victim(self._rig.dispatchers, fault.choice)) is not None:
            if process is self._rig.dispatchers[0]:
                [old] = self._rig.generations[0]
                self._rig.generations[0] = (3 - old,)
            process.signal(signal.SIGTERM)
            self._note("deploy", who=process.name)

    def _kill_producer(self, fault: Planned) -> None:
        self._kill(self._rig.producers, fault)

    def _stop_producer(self, fault: Planned) -> Callable[[], None] | None:
        return self._stop(self._rig.producers, fault)

    def _order_producer(self, fault: Planned) -> None:
        self._order(self._rig.producers, points.PRODUCER_POINTS, fault)

    def _kill_operator(self, fault: Planned) -> None:
        self._kill(self._rig.operators, fault)

    def _order_operator(self, fault: Planned) -> None:
        self._order(self._rig.operators, points.OPERATOR_POINTS, fault)

    # The database

    def _terminate(self, fault: Planned) -> None:
        with suppress(psycopg.Error), self._rig.cluster.connect() as conn:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where usename like 'chaos%%' and random() < %s",
                (0.1 + 0.9 * fault.choice,),
            )

    def _restart(self, fault: Planned) -> None:
        self._rig.cluster.restart()
        self._note("database", how="immediate stop")

    def _crash(self, fault: Planned) -> None:
        self._rig.cluster.crash()
        self._note("database", how="all processes killed")

    def _kill_postmaster(self, fault: Planned) -> None:
        self._rig.cluster.kill_postmaster()
        self._note("database", how="postmaster killed")

    def _freeze(self, fault: Planned) -> Callable[[], None]:
        self._rig.cluster.freeze()
        return self._rig.cluster.thaw

    def _exhaust(self, fault: Planned) -> None:
        self._rig.start_intruder("exhaust", fault.seconds)

    def _full_disk(self, fault: Planned) -> Callable[[], None] | str:
        if self._rig.cluster.small_disk is None:
            return "mounting a small file system is not permitted here"
        self._rig.cluster.fill_disk()
        return self._rig.cluster.free_disk

    def _failover(self, fault: Planned) -> None:
        """A standby is made, which takes a while; then the primary goes and the standby takes over."""
        self._rig.cluster.begin_standby()
        self._failing_over = True
        give_up_at = time.monotonic() + STANDBY_PATIENCE

        def go_on() -> None:
            try:
                ready = self._rig.cluster.continue_standby()
            except (EmbeddedError, psycopg.Error) as error:
                self._give_up_failover(str(error))
                return
            if ready:
                self._rig.later(time.monotonic() + fault.seconds, lambda: self._fail_over(fault.choice))
            elif time.monotonic() > give_up_at:
                self._give_up_failover("the standby was not ready in time")
            else:
                self._rig.later(time.monotonic() + 0.2, go_on)

        go_on()

    def _give_up_failover(self, why: str) -> None:
        self._note("failed", fault="failover", error=why)
        self._rig.cluster.drop_standby()
        self._failing_over = False

    def _fail_over(self, choice: float) -> None:
        cluster = self._rig.cluster
        assert cluster.standby is not None
        # Clients come to the standby before it is promoted: they are told that it is read-only.
        self._rig.proxy.say(upstream=f"{cluster.standby.socket_directory}/.s.PGSQL.5432")
        time.sleep(0.3 * choice)
        cluster.promote()
        self._failing_over = False
        self._note("failover")

    # The network

    def _lose(self, fault: Planned) -> Callable[[], None]:
        self._rig.proxy.say(lose=0.02 + 0.1 * fault.choice)
        return lambda: self._rig.proxy.say(lose=0)

    def _reset(self, fault: Planned) -> None:
        self._rig.proxy.say(reset=0.2 + 0.8 * fault.choice)

    def _delay(self, fault: Planned) -> Callable[[], None]:
        self._rig.proxy.say(delay=0.3 * fault.choice)
        return lambda: self._rig.proxy.say(delay=0)

    def _forget(self, fault: Planned) -> Callable[[], None]:
        self._rig.proxy.say(forget=0.3 + 0.7 * fault.choice)
        return lambda: self._rig.proxy.say(forget=0)

    def _refuse(self, fault: Planned) -> Callable[[], None]:
        self._rig.proxy.say(refuse=True, reset=1)
        return lambda: self._rig.proxy.say(refuse=False)

    # Sentry

    def _sentry_busy(self, fault: Planned) -> Callable[[], None]:
        self._rig.sentry.say(status=429)
        return lambda: self._rig.sentry.say(status=200)

    def _sentry_broken(self, fault: Planned) -> Callable[[], None]:
        self._rig.sentry.say(status=503)
        return lambda: self._rig.sentry.say(status=200)

    def _sentry_slow(self, fault: Planned) -> Callable[[], None]:
        self._rig.sentry.say(slow=4 * fault.choice)
        return lambda: self._rig.sentry.say(slow=0)

    def _sentry_down(self, fault: Planned) -> Callable[[], None]:
        self._rig.sentry.say(down=True)
        return lambda: self._rig.sentry.say(down=False)

    # Sessions of others

    def _lock_rows(self, fault: Planned) -> None:
        self._rig.start_intruder("lock", fault.seconds)

    def _stall_backend(self, fault: Planned) -> Callable[[], None] | None:
        """One of the server's processes stands still: what its client gave up long ago, it carries out later."""
        if self._rig.cluster.frozen:
            return None
        with suppress(psycopg.Error), self._rig.cluster.connect() as conn:
            pids = [
                pid
                for (pid,) in conn.execute(
                    "select pid from pg_stat_activity where usename like 'chaos%' order by state <> 'active', pid"
                ).fetchall()
            ]
            if pids:
                # The square: rather one of those that are at work, which come first.
                pid = pids[int(fault.choice**2 * len(pids))]
                # Woken by a thread: the rig itself may come to wait for a lock that this process holds.
                waking = threading.Timer(fault.seconds, _signal_backend, (pid, signal.SIGCONT))
                waking.daemon = True
                waking.start()
                _signal_backend(pid, signal.SIGSTOP)
                return lambda: _signal_backend(pid, signal.SIGCONT)
        return None

    def _hold_xmin(self, fault: Planned) -> None:
        self._rig.start_intruder("hold", fault.seconds)


def _signal_backend(pid: int, number: signal.Signals) -> None:
    """Unless it has ended meanwhile, and somebody else has its number."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"postgres:"):
            os.kill(pid, number)
