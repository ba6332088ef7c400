"""The rig: starts everybody, lets the faults loose, heals, waits until all work is done, and gathers the evidence."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from chaos.cluster import Cluster
from chaos.injector import Injector
from chaos.journal import Journal
from chaos.processes import Process
from chaos.topics import BATCH, CANARY, CONCURRENCY, SOME_TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.faults import Planned

ROOT = Path(__file__).resolve().parents[1]
FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
PRODUCERS, OPERATORS = 2, 2
BACKLOG_MAX, BACKLOG_LOW = 1500, 500
"""Producers rest while more than this is unfinished, until it is less than that."""
TICK = 0.05
CLOCK_INTERVAL = 2.0
"""Between notes of what the database's clock says when the one of the journals says this."""
START_DEADLINE = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is told."""

    seconds: float
    seed: int
    lease: float
    rate: float
    """Transactions per second of each producer."""
    drain_within: float
    mutant: str
    topics: str
    """Topics and their weights, or all as they are; see topics.weights."""
    directory: Path
    dispatchers: int
    may_mount: bool
    """Mounts of this process are its own, and end with it."""


class Rig:
    """One run. Single-threaded: what takes time is begun, and ended later."""

    def __init__(self, settings: Settings, plan: list[Planned], say: Callable[[str], None]) -> None:
        self.settings = settings
        self.directory = settings.directory
        self.journal = Journal(self.directory / "rig.jsonl")
        self.skipped: dict[str, str] = {}
        """Kinds of faults that this machine does not permit, and why."""
        self._plan = plan
        self._say = say
        self._random = random.Random(f"{settings.seed} processes of the rig")
        self._numbers = itertools.count(1)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._stack = ExitStack()
        self.dispatchers: list[Process | None] = [None] * settings.dispatchers
        self.producers: list[Process | None] = [None] * PRODUCERS
        self.operators: list[Process | None] = [None] * OPERATORS
        self.generations: list[tuple[int, ...]] = [(1,), *[()] * (settings.dispatchers - 1)]
        """Of each dispatcher; none: all."""
        if settings.dispatchers > 2:
            self.generations[1] = (2,)
        self._topics: list[tuple[str, ...]] = [()] * settings.dispatchers
        """Patterns of what each serves; none: all. The last one has no patterns and no generations."""
        if settings.dispatchers > 1:
            self._topics[0] = SOME_TOPICS
        self.extras: list[Process] = []
        self._ordered_stops: dict[int, float] = {}
        self._ready = False
        """All dispatchers have been there. Producers rest until then: jobs that kill would keep it from happening."""
        self._healing = False
        self._looked_at = 0.0
        self._clock_noted_at = 0.0
        self.backlog: dict[str, int] = {}

    # Phases

    def run(self) -> None:
        """All of it; the evidence is in the directory afterwards."""
        with self._stack:
            self._start()
            self._make_trouble()
            healed_at = time.monotonic()
            self._heal()
            drained = self._drain(healed_at)
            self._stop_everybody()
            self._gather(drained)

    def _start(self) -> None:
        self._say("starting PostgreSQL, the proxy and the Sentry receiver")
        self.cluster = Cluster(may_mount=self.settings.may_mount)
        self._stack.callback(self.cluster.close)
        self.cluster.prepare(self.settings.mutant)
        self.proxy = self._start_extra("proxy", "chaos.proxy", str(self.directory), str(self.settings.seed))
        self.proxy.say(upstream=self.cluster.socket)
        self._proxy_port = self.proxy.hear()
        self.sentry = self._start_extra("receiver", "chaos.receiver", str(self.directory))
        self._sentry_port = self.sentry.hear()
        self.injector = Injector(self)
        (self.directory / "brake").touch()
        self._keep_everybody_running()
        self._wait_for_dispatchers()

    def _wait_for_dispatchers(self) -> None:
        """Starting takes seconds on a busy machine, and faults that hit nobody prove nothing."""
        give_up_at = time.monotonic() + START_DEADLINE
        with self.cluster.connect() as conn:
            while True:
                [(count,)] = conn.execute(
                    "select count(*) from pulse.dispatcher_status where alive"
                ).fetchall()
                if count == self.settings.dispatchers:
                    self._ready = True
                    return
                if time.monotonic() > give_up_at:
                    raise RuntimeError(
                        f"{count} of {self.settings.dispatchers} dispatchers started: see {self.directory}/logs"
                    )
                self._tick()

    def _make_trouble(self) -> None:
        started = time.monotonic()
        self.journal.write("begin")
        for fault in self._plan:
            self.later(started + fault.at, lambda fault=fault: self.injector.begin(fault))  # type: ignore[misc]
        ends = started + self.settings.seconds
        said = started
        while time.monotonic() < ends:
            self._tick()
            if time.monotonic() > said + 10:
                said = time.monotonic()
                self._say(f"{said - started:6.0f} s  {self.injector.in_words()}  backlog {self.backlog}")
        self.journal.write("end")

    def _heal(self) -> None:
        """All faults end; whoever is missing comes back."""
        self._healing = True
        self._due.clear()
        self.injector.heal()
        (self.directory / "brake").touch()
        for process in (*self.dispatchers, *self.producers, *self.operators):
            if process is not None:
                process.signal(signal.SIGCONT)
        for process in (*self.producers, *self.operators):
            if process is not None:
                process.signal(signal.SIGTERM)
        self.journal.write("healed")
        self._say("the faults are over; waiting until nothing is left to do")

    def _drain(self, healed_at: float) -> float | None:
        """How long it took until everything had ended and every alert was paid; None when it never did."""
        give_up_at = healed_at + self.settings.drain_within
        said = time.monotonic()
        resumed = False
        acts = Journal(self.directory / f"operator-rig-{os.getpid()}.jsonl")
        while time.monotonic() < give_up_at:
            self._tick()
            if time.monotonic() > said + 10:
                said = time.monotonic()
                self._say(f"{said - healed_at:6.0f} s  draining: {self.backlog}")
            if any(process is not None for process in (*self.producers, *self.operators)):
                continue
            with suppress(psycopg.Error), self.cluster.connect() as conn:
                if not resumed:  # by an operator who was killed before he could
                    conn.execute("select pulse.outbox_resume(topic, 'the rig') from pulse.pause")
                    resumed = True
                self._free_keys(conn, acts)
                self._look(conn)
                if not sum(self.backlog.values()):
                    return time.monotonic() - healed_at
            time.sleep(0.2)
        return None

    def _free_keys(self, conn: psycopg.Connection[Any], acts: Journal) -> None:
        """Nobody replays any more: dead letters that hold their keys are put away."""
        rows = conn.execute("select event_id from pulse.blocked_key where why = 'dead letter'").fetchall()
        for (event_id,) in rows:
            request = uuid4()
            asked = {"by": "rig", "reason": "the run is over"}
            acts.write("act", verb="discard", events=[str(event_id)], request=str(request), asked=asked)
            with suppress(psycopg.Error):
                conn.execute(
                    "select pulse.outbox_discard(%s, %s, %s, %s)",
                    (event_id, asked["reason"], asked["by"], request),
                )
                acts.write("result", request=str(request), result="done")

    def _stop_everybody(self) -> None:
        """Dispatchers end as on any other day."""
        for process in filter(None, self.dispatchers):
            process.signal(signal.SIGTERM)
        for process in filter(None, self.dispatchers):
            if process.wait(4 * self.settings.lease + 15) is None:
                self.journal.write("stuck", who=process.name)
                process.kill()

    # The main loop

    def later(self, at: float, action: Callable[[], None]) -> None:
        """Does something at that time, if the run has not ended by then."""
        heapq.heappush(self._due, (at, next(self._numbers), action))

    def _tick(self) -> None:
        if time.monotonic() > self._clock_noted_at + CLOCK_INTERVAL:
            self._clock_noted_at = time.monotonic()
            self.journal.write("clock", wall=time.time())
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        self._keep_everybody_running()
        self._wake_the_stopped()
        self._look_at_backlog()
        time.sleep(TICK)

    def _keep_everybody_running(self) -> None:
        """Whoever has ended is started again, as by an init system; what only ends is forgotten."""
        for group, start in (
            (self.dispatchers, self._start_dispatcher),
            (self.producers, self._start_producer),
            (self.operators, self._start_operator),
        ):
            for number, process in enumerate(group):
                if process is not None and process.ended() is not None:
                    self.journal.write("ended", who=process.name, pid=process.pid, code=process.ended())
                    process.kill()
                    group[number] = None
                if group[number] is None and not (self._healing and group is not self.dispatchers):
                    group[number] = start(number)
        for process in list(self.extras):
            if process.ended() is not None:
                process.kill()
                self.extras.remove(process)

    def _wake_the_stopped(self) -> None:
        """Who stopped at a crash point goes on after a while."""
        for process in filter(None, (*self.dispatchers, *self.producers, *self.operators)):
            if process.stopped or not process.is_stopped():
                self._ordered_stops.pop(process.pid, None)
                continue
            lease = self.settings.lease
            until = self._ordered_stops.setdefault(
                process.pid, time.monotonic() + self._random.uniform(0.3 * lease, 2.5 * lease)
            )
            if time.monotonic() > until:
                process.signal(signal.SIGCONT)

    def _look_at_backlog(self) -> None:
        if time.monotonic() < self._looked_at + 2 or self.cluster.frozen:
            return
        self._looked_at = time.monotonic()
        with suppress(psycopg.Error), self.cluster.connect(options="-c statement_timeout=2000") as conn:
            self._look(conn)
        brake = self.directory / "brake"
        unfinished = sum(self.backlog.values())
        if unfinished > BACKLOG_MAX:
            brake.touch()
        elif unfinished < BACKLOG_LOW and self._ready and not self._healing:
            brake.unlink(missing_ok=True)

    def _look(self, conn: psycopg.Connection[Any]) -> None:
        rows = conn.execute(
            "select status::text, count(*) from pulse.outbox where status in ('PENDING', 'RETRYING', 'RUNNING')"
            " group by 1 union all"
            " select 'alerts owed', count(*) from pulse.outbox"
            " where status = 'DEAD_LETTERED' and alerted_at is null having count(*) > 0"
        ).fetchall()
        self.backlog = dict(rows)

    # Processes

    def _environment(self, who: str, role: str) -> dict[str, str]:
        return {
            "PULSE_OUTBOX_DSN": make_conninfo(
                "",
                host="127.0.0.1",
                port=self._proxy_port,
                user=f"chaos_{role}",
                dbname="postgres",
                sslmode="disable",
                gssencmode="disable",
                options=f"-c chaos.who={who}",
            ),
            "CHAOS_WHO": who,
            "CHAOS_DIR": str(self.directory),
            "CHAOS_LEASE": str(self.settings.lease),
            "CHAOS_MUTANT": self.settings.mutant,
            "CHAOS_TOPICS": self.settings.topics,
            "PYTHONPATH": str(ROOT),
        }

    def _start_process(self, who: str, command: list[str], environment: dict[str, str]) -> Process:
        process = Process(who, command, environment=environment, log=self.directory / "logs" / f"{who}.log")
        self._stack.callback(process.kill)
        return process

    def _start_dispatcher(self, number: int) -> Process:
        who = f"d{number}.{next(self._numbers)}"
        lease = self.settings.lease
        times = {
            "lease": lease,
            "heartbeat": lease / 3,
            "watchdog": lease / 3,
            "poll": lease / 3,
            "grace": lease,
        }
        command = ["-m", "pulse_outbox.cli", "run", "chaos.app:outbox", "--worker", who]
        command += ["--concurrency", str(CONCURRENCY), "--batch", str(BATCH)]
        for name, value in times.items():
            command += [f"--{name}", str(value)]
        for generation in self.generations[number]:
            command += ["--generation", str(generation)]
        if self._topics[number]:
            command += ["--topics", *self._topics[number]]
        environment = self._environment(who, "dispatcher") | {
            "SENTRY_DSN": f"http://public@127.0.0.1:{self._sentry_port}/1",
            "CHAOS_GENERATION": str(self.generations[number][0]) if self.generations[number] else "",
        }
        skew = self._random.choice(("", "", "+10m", "-10m"))
        if skew and FAKETIME is not None:
            environment |= {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME": skew,
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        self.journal.write(
            "dispatcher",
            who=who,
            skew=skew if FAKETIME else "",
            generations=self.generations[number],
            topics=self._topics[number],
        )
        return self._start_process(who, command, environment)

    def _start_producer(self, number: int) -> Process:
        who = f"p{number}.{next(self._numbers)}"
        seed = str(self._random.getrandbits(60))
        command = ["-m", "chaos.producer", who, seed, str(self.settings.rate)]
        return self._start_process(who, command, self._environment(who, "producer"))

    def _start_operator(self, number: int) -> Process:
        who = f"o{number}.{next(self._numbers)}"
        command = ["-m", "chaos.operators", who, str(self._random.getrandbits(60))]
        return self._start_process(who, command, self._environment(who, "operator"))

    def _start_extra(self, name: str, module: str, *arguments: str) -> Process:
        process = Process(
            name,
            ["-m", module, *arguments],
            environment={"PYTHONPATH": str(ROOT)},
            log=self.directory / "logs" / f"{name}.log",
            talks=True,
        )
        self._stack.callback(process.kill)
        return process

    def start_intruder(self, what: str, seconds: float) -> None:
        """Somebody else's session."""
        dsn = self.cluster.primary.dsn
        if what == "exhaust":  # as anybody: a superuser would take what is kept for the rig
            dsn = make_conninfo(dsn, user="chaos_producer")
        name = f"{what}-{next(self._numbers)}"
        process = self._start_process(
            name, ["-m", "chaos.intruder", what, dsn, str(seconds)], {"PYTHONPATH": str(ROOT)}
        )
        self.extras.append(process)

    # Evidence

    def _gather(self, drained: float | None) -> None:
        self._say("gathering the evidence")
        tables = self.directory / "tables"
        tables.mkdir()
        with self.cluster.connect() as conn:
            for name, query in _TABLES.items():
                query = f"copy (select to_json(t)::text from ({query}) as t) to stdout"
                with (
                    (tables / f"{name}.jsonl").open("wb") as file,
                    conn.cursor() as cursor,
                    cursor.copy(query.encode()) as copy,
                ):
                    for row in copy:
                        file.write(bytes(row).replace(b"\\\\", b"\\"))  # copy doubles them
            canaries = self._find_canaries(conn)
        facts = {
            "canaries": canaries,
            "drained_in": drained,
            "skipped": self.skipped,
            "injected": self.injector.counts,
            "lease": self.settings.lease,
            "tracebacks": _files_with("Traceback (most recent call last)", *self._logs("d*.log")),
        }
        (self.directory / "facts.json").write_text(json.dumps(facts, indent=1))

    def _logs(self, pattern: str) -> list[Path]:
        return sorted((self.directory / "logs").glob(pattern))

    def _find_canaries(self, conn: psycopg.Connection[Any]) -> list[str]:
        """Places outside of payloads that hold something of one."""
        found = _files_with(CANARY, *self._logs("*.log"), self.directory / "sentry.jsonl")
        rows = conn.execute(
            "select event_id from pulse.outbox o where concat(last_error, last_failure, failure_history, locked_by)"
            " like %s union all select null from pulse.dispatcher d where d::text like %s",
            (f"%{CANARY}%", f"%{CANARY}%"),
        ).fetchall()
        return found + [f"outbox row {event_id}" for (event_id,) in rows]


def _files_with(text: str, *paths: Path) -> list[str]:
    return [str(path) for path in paths if text.encode() in path.read_bytes()]


_STEP = """extract(epoch from at)::float8 as at, extract(epoch from began)::float8 as began,
           extract(epoch from lease_until)::float8 as lease_until,
           extract(epoch from next_run_at)::float8 as next_run_at,
           extract(epoch from first_failed_at)::float8 as first_failed_at,
           extract(epoch from completed_at)::float8 as completed_at"""
_TABLES = {
    "transition": f"""
        select id, {_STEP}, who, transaction::text::bigint as transaction, event_id, old_status, status, token,
               coalesce(attempts, 0) as attempts, max_attempts, coalesce(lapses, 0) as lapses,
               coalesce(snoozes, 0) as snoozes, coalesce(lease_seq, 0) as lease_seq, locked_by,
               coalesce(alone, false) as alone, coalesce(generation, 0) as generation, coalesce(history, 0) as history,
               request, rule, verdict, alert_id, coalesce(alerted, false) as alerted, topic, seq, ordering_key,
               holds_key, idempotency_key, mark, budget, priority, parked, coalesce(error, '') as error,
               coalesce(failure, '{{}}') as failure, cycle
          from chaos.transition order by id""",
    "turn": """
        select id, extract(epoch from at)::float8 as at, transaction::text::bigint as transaction, event_id, parked
          from chaos.turn order by id""",
    "outbox": "select event_id, status, failure_history from pulse.outbox",
    "sweep": "select transaction::text::bigint as transaction, extract(epoch from swept_at)::float8 as at"
    " from chaos.sweep",
    "effect": "select event_id, kind from chaos.effect",
    "business": "select distinct event_id from chaos.business",
}

if sys.platform != "linux":
    raise SystemExit("the fault rig needs Linux: it looks into /proc and ends its processes with itself")
