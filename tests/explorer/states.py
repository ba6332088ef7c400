"""What the explorer looks at: the rows, what each worker remembers, what is still under way, and a few ghosts.

A ghost is what nobody in the real system knows, and what the invariants are about: whether a claim is out of date,
whether an attempt was really spent, whether an alert arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

PENDING, RETRYING, RUNNING = "PENDING", "RETRYING", "RUNNING"
COMPLETED, DEAD, DISCARDED = "COMPLETED", "DEAD_LETTERED", "DISCARDED"
WAITING = (PENDING, RETRYING)
ENDED = (COMPLETED, DEAD, DISCARDED)

NOBODY = 0
"""A token or alert id that is not there, or that nobody could use any more."""
LEASE = 3
"""The length of a lease, and of the watchdog's hold, in ticks; the living beat once in every tick."""
GAP = 2
"""Nobody has swept for so many ticks: the next sweep only holds."""
MANY = 2
"""Lapses are counted up to this: more of them make no difference."""


class Row(NamedTuple):
    """A job in the database. Backoff is not in it: a claim may find any waiting row due or not."""

    status: str = PENDING
    attempts: int = 0
    lapses: int = 0
    alone: bool = False
    token: int = NOBODY
    parked: bool = False
    cycles: int = 0  # the length of failure_history
    requests: tuple[int, ...] = ()  # who wrote those entries
    alert: int = NOBODY
    paid: bool = False
    lease: int = 0  # ticks that are left, where time is counted
    spent: int = 0  # ghost: attempts of this cycle that truly count
    told: int = NOBODY  # ghost: the alert that Sentry has for this death


class Held(NamedTuple):
    """A claim in the memory of a worker."""

    row: int
    stage: str  # waiting, running, or how it ended: ok, failed, bad, unstarted, died
    lapses: int  # 0: in the worker's own process; 1: in a child, with others; 2: in a child, alone
    attempts: int  # only where a variant makes a fence of them
    stale: bool  # ghost: the row has been claimed again since
    token: int


class Call(NamedTuple):
    """A call that the network holds back: it will be executed later, and nobody waits for its answer."""

    verb: str
    row: int = -1
    lapses: int = 0
    attempts: int = 0
    stale: bool = False  # ghost, as above; of a claim: it has been executed again meanwhile
    token: int = NOBODY


class Worker(NamedTuple):
    """The memory of one dispatcher. A crash empties it, and the process is started again."""

    asking: tuple[int, int] | None = None  # a claim without an answer: its token, and which lapses
    held: tuple[Held, ...] = ()
    late: tuple[Call, ...] = ()
    alert: tuple[int, bool] | None = None  # its id, and whether Sentry has answered
    picked: tuple[int, ...] = ()  # only where a variant claims in two steps
    stalled: str = ""  # "stalled", or "late" until its next heartbeat
    beaten: bool = False  # in this tick


class Operator(NamedTuple):
    """Who replays and discards."""

    asking: tuple[str, int, int] | None = None  # a call without an answer: verb, row, request
    late: tuple[tuple[str, int, int], ...] = ()
    requests: int = 0  # made so far


class State(NamedTuple):
    """Everything there is."""

    rows: tuple[Row, ...]
    workers: tuple[Worker, ...]
    operator: Operator
    faults: int  # that may still happen
    minted: int = NOBODY  # the newest token or alert id
    outages: int = 0  # that may still happen
    down: bool = False  # the database is away
    swept: int = GAP  # ticks since the last sweep
    hold: int = 0  # ticks for which no lease is reaped


def canonical(state: State) -> State:
    """The same state as everyone would call it: workers in order, ids numbered anew, useless ids forgotten."""
    one, two = (_without_ids(worker) for worker in state.workers)
    if one < two:
        return _numbered(state, state.workers)
    other_way = _numbered(state, state.workers[::-1])
    if one > two or state.workers[0] == state.workers[1]:
        return other_way
    return min(_numbered(state, state.workers), other_way, key=repr)


def _numbered(state: State, workers: tuple[Worker, ...]) -> State:
    known: dict[int, int] = {NOBODY: NOBODY}

    def name(old: int) -> int:
        if old not in known:
            known[old] = len(known)
        return known[old]

    workers = tuple(_renamed(worker, name) for worker in workers)
    rows = tuple(
        row._replace(
            token=known.get(row.token, NOBODY),
            alert=name(row.alert) if row.status == DEAD else NOBODY,
            told=name(row.told) if row.status == DEAD else NOBODY,
        )
        if row.token or row.alert or row.told
        else row
        for row in state.rows
    )
    return state._replace(rows=rows, workers=workers, minted=len(known) - 1)


def _renamed(worker: Worker, name: Callable[[int], int]) -> Worker:
    if not (worker.held or worker.asking or worker.late or worker.alert):
        return worker
    return worker._replace(
        asking=worker.asking and (name(worker.asking[0]), worker.asking[1]),
        held=tuple(held._replace(token=name(held.token)) for held in worker.held),
        late=tuple(call._replace(token=name(call.token)) for call in worker.late),
        alert=worker.alert and (name(worker.alert[0]), worker.alert[1]),
    )


@cache
def _without_ids(worker: Worker) -> tuple[object, ...]:
    asking, held, late, alert, *rest = worker
    return (
        asking[1] if asking else -1,
        tuple((h.row, h.stage, h.lapses, h.stale, h.attempts) for h in held),
        tuple((c.verb, c.row, c.stale) for c in late),
        alert[1] if alert else -1,
        *rest,
    )


IDLE = Worker()
