"""The application that the rig runs, `pulse-outbox run chaos.app:outbox`: a topic for each way in which jobs behave.

Every handler notes in a journal when it starts and how it ends. Whoever imports this module gets the crash points
that the rig may order and the mutant that CHAOS_MUTANT names, also in the child processes that suspects run in.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg
import psycopg_pool.pool
from pydantic import BaseModel, ValidationError

from chaos import alive, mutants
from chaos.journal import Journal
from chaos.points import Points
from chaos.topics import BACKOFF, BACKOFF_MAX, ENDLESS, SNOOZE, TOPICS
from pulse_outbox import Event, Outbox, RetryLater, RetryPolicy, TerminalHandlerError
from pulse_outbox.dispatcher import intake
from pulse_outbox.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

DSN = os.environ["PULSE_OUTBOX_DSN"]
WHO = os.environ["CHAOS_WHO"]
LEASE = float(os.environ.get("CHAOS_LEASE", "3"))
BUGGY = os.environ.get("CHAOS_GENERATION") == "1"
"""The old generation of this code has a bug that the new one has not."""

DIRECTORY = Path(os.environ["CHAOS_DIR"])

journal = Journal(DIRECTORY / f"handlers-{WHO}-{os.getpid()}.jsonl")
points = Points(DIRECTORY / f"orders-{WHO}", journal)
points.wrap_store()
if Path(sys.argv[0]).name == "cli.py":  # not in children: their parent beats for them
    alive.write_down_when_it_is_well(DSN, DIRECTORY / f"alive-{WHO}.txt")
mutants.patch(os.environ.get("CHAOS_MUTANT", ""))


def _sleep(seconds: Any) -> None:
    threading.Event().wait(seconds)


if "FAKETIME" in os.environ:
    # Under libfaketime the real one fails where the monotonic clock is left alone, which the journals need.
    time.sleep = _sleep
    setattr(psycopg_pool.pool, "sleep", _sleep)  # noqa: B010  it keeps one of its own, and does not export it

_claim = Store.claim


def _claim_together(self: Store, **named: Any) -> Any:
    """The rig's claims are small, and a batch has to stand for their leases nevertheless."""
    return _claim(self, **(named | {"together": named.get("lapses") == 0}))


setattr(Store, "claim", _claim_together)  # noqa: B010  the types would not have it
intake.TOGETHER = 1  # nor do they wait for the disk, in a backlog

outbox = Outbox()


# What every handler does


def _name(event: Event[Any]) -> str:
    """Of this very run: begins the text of most errors, so that nobody takes one for another."""
    return f"{event.id}, lease {event.lease_seq}"


def handles(topic: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a handler whose beginning and end go into the journal."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        options["retry"] = RetryPolicy(
            max_attempts=TOPICS[topic].max_attempts, base_delay=BACKOFF, max_delay=min(BACKOFF_MAX, LEASE / 3)
        )

        @functools.wraps(function)
        async def run_async(event: Event[Any]) -> None:
            _starts(event)
            try:
                await function(event)
            except BaseException as error:
                _ends(event, error)
                raise
            _ends(event, None)

        @functools.wraps(function)
        def run_sync(event: Event[Any]) -> None:
            _starts(event)
            try:
                function(event)
            except BaseException as error:
                _ends(event, error)
                raise
            _ends(event, None)

        wrapped = run_async if inspect.iscoroutinefunction(function) else run_sync
        return outbox.handler(topic, **options)(wrapped)

    return register


def _starts(event: Event[Any]) -> None:
    points.reached("before_handler")
    journal.write(
        "start",
        event=str(event.id),
        lease_seq=event.lease_seq,
        attempt=event.attempt,
        max_attempts=event.max_attempts,
        mark=event.payload.get("mark") if isinstance(event.payload, dict) else None,
        worker=WHO,
        pid=os.getpid(),
    )


def _ends(event: Event[Any], error: BaseException | None) -> None:
    journal.write(
        "end",
        event=str(event.id),
        lease_seq=event.lease_seq,
        outcome=expected_verdict(error, event),
        raised=_class_of(error),
        said=_text_of(error),
    )
    points.reached("after_handler")


def expected_verdict(error: BaseException | None, event: Event[Any]) -> str:
    """What must become of the event, by the specification: written down here once more, apart from the product."""
    if error is None:
        return "ok"
    if isinstance(error, RetryLater):
        spent = error.max_snoozes is not None and event.snoozes >= error.max_snoozes
        return "terminal" if spent else "later"
    return "terminal" if _is_terminal(error) else "transient"


def _is_terminal(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_terminal(inner) for inner in error.exceptions)
    return isinstance(error, TerminalHandlerError | ValidationError | psycopg.IntegrityError)


def _class_of(error: BaseException | None) -> str | None:
    """As the row must name it. Two kinds steer coroutines, and reach nobody as they are."""
    if error is None or isinstance(error, StopIteration | GeneratorExit):
        return None
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text_of(error: BaseException | None) -> str:
    """The beginning of its text, as far as the row must hold it: what is plain, and no input of a model."""
    if error is None or isinstance(error, ValidationError | Unprintable):
        return ""
    text = error.message if isinstance(error, BaseExceptionGroup) else str(error)
    return re.match("[ -~]{0,100}", text)[0]  # type: ignore[index]  # it matches anything


# Those that succeed


@handles("fast")
async def fast(event: Event[dict[str, Any]]) -> None:
    """Nothing to do."""


@handles("deleted", completed="delete")
async def deleted(event: Event[dict[str, Any]]) -> None:
    """Its row goes when it is done."""


@handles("slow")
async def slow(event: Event[dict[str, Any]]) -> None:
    await asyncio.sleep(event.payload["seconds"])


@handles("thread")
def thread(event: Event[dict[str, Any]]) -> None:
    time.sleep(event.payload["seconds"])


@handles("blocks")
async def blocks(event: Event[dict[str, Any]]) -> None:
    time.sleep(event.payload["seconds"])  # the event loop stands still, on purpose


@handles("grabs")
def grabs(event: Event[dict[str, Any]]) -> None:
    """Keeps the interpreter's lock: no other thread of the process gets to do anything, heartbeats included."""
    ctypes.PyDLL(None).usleep(int(event.payload["seconds"] * 1e6))


@handles("ordered")
async def ordered(event: Event[dict[str, Any]]) -> None:
    await asyncio.sleep(event.payload["seconds"])
    if event.attempt <= event.payload["fails"]:
        raise RuntimeError(f"{_name(event)} does not get through yet")


@handles("once")
async def once(event: Event[dict[str, Any]]) -> None:
    await asyncio.sleep(event.payload["seconds"])


@handles("generations")
async def generations(event: Event[dict[str, Any]]) -> None:
    if BUGGY and event.payload["hits_the_bug"]:
        raise LookupError(f"{_name(event)}: the old code has a bug")


# Those with effects

ANSWER_WITHIN = 15
"""Seconds. Their own statements meet a network that swallows answers: without a timeout they would wait for ever."""


@handles("transactional", transactional=True, timeout=ANSWER_WITHIN)
async def transactional(event: Event[dict[str, Any]]) -> None:
    await event.connection.execute(
        "insert into chaos.effect values (%s, 'transactional', %s)", (event.id, event.lease_seq)
    )
    if event.attempt <= event.payload["fails"]:
        raise RuntimeError(f"{_name(event)}: after the effect, which must not stay")
    await asyncio.sleep(event.payload["seconds"])


@handles("transactional.sync", transactional=True, timeout=ANSWER_WITHIN)
def transactional_sync(event: Event[dict[str, Any]]) -> None:
    event.connection.execute(
        "insert into chaos.effect values (%s, 'transactional', %s)", (event.id, event.lease_seq)
    )
    if event.attempt <= event.payload["fails"]:
        raise RuntimeError(f"{_name(event)}: after the effect, which must not stay")
    time.sleep(event.payload["seconds"])


@handles("effect", timeout=ANSWER_WITHIN)
def effect(event: Event[dict[str, Any]]) -> None:
    """Its effect is committed with the record of it; the end of the job comes later, or never."""
    with psycopg.connect(DSN, connect_timeout=5, options="-c statement_timeout=5000") as conn:
        if outbox.first_time(conn, event):
            conn.execute(
                "insert into chaos.effect values (%s, 'first time', %s)", (event.id, event.lease_seq)
            )
    if event.attempt <= event.payload["fails"]:
        raise RuntimeError(f"{_name(event)}: after the effect, which must not happen again")


# Those that fail


class Unprintable(Exception):
    """Whoever wants to print it gets another exception."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class Card(BaseModel):
    """What a payload should look like."""

    number: int
    owner: str


def _group(name: str, *errors: BaseException) -> BaseException:
    return BaseExceptionGroup(name, errors)


def _validation_error(secret: str) -> NoReturn:
    Card.model_validate({"number": secret, "owner": [secret]})
    raise AssertionError("that was valid")


ERRORS: dict[str, Callable[[str], BaseException]] = {
    "terminal": lambda name: TerminalHandlerError(f"{name}: never again"),
    "integrity": lambda name: psycopg.errors.UniqueViolation(f"{name}: duplicate key"),
    "connection": lambda name: ConnectionError(f"{name}: gone"),
    "value": lambda name: ValueError(f"{name}: not now"),
    "operational": lambda name: psycopg.OperationalError(f"{name}: the handler's own database is gone"),
    "exit": lambda _: SystemExit(3),
    "interrupt": lambda _: KeyboardInterrupt(),
    "cancelled": lambda _: asyncio.CancelledError(),
    "group of terminals": lambda name: _group(name, TerminalHandlerError("one"), TerminalHandlerError("two")),
    "mixed group": lambda name: _group(name, TerminalHandlerError("one"), ValueError("two"), SystemExit(4)),
    "unprintable": lambda _: Unprintable(),
    "nul": lambda name: RuntimeError(f"{name}: a\0b"),
    "surrogate": lambda name: RuntimeError(f"{name}: a\ud800b"),
    "huge": lambda name: RuntimeError(name + "x" * 1_000_000),
    "stop": lambda _: StopIteration(7),
    "generator": lambda _: GeneratorExit(),
    "recursion": lambda name: RecursionError(f"{name}: too deep"),
    "memory": lambda _: MemoryError(),
}


def _raise(event: Event[dict[str, Any]]) -> None:
    secret = event.payload["secret"]  # a local variable, as any handler has
    if event.attempt <= event.payload["fails"]:
        if event.payload["error"] == "validation":
            _validation_error(secret)
        raise ERRORS[event.payload["error"]](_name(event))


@handles("raises")
async def raises(event: Event[dict[str, Any]]) -> None:
    await asyncio.sleep(0)
    _raise(event)


@handles("raises in a thread")
def raises_in_a_thread(event: Event[dict[str, Any]]) -> None:
    _raise(event)


@handles("model")
async def model(event: Event[Card]) -> None:
    """Most of what comes here is no Card."""


@handles("later")
async def later(event: Event[dict[str, Any]]) -> None:
    if event.snoozes < event.payload["times"]:
        raise RetryLater(SNOOZE, max_snoozes=event.payload["limit"])


# Those that do not end


@handles("hangs", timeout=0.5)
async def hangs(event: Event[dict[str, Any]]) -> None:
    await asyncio.sleep(ENDLESS)


@handles("hangs in a thread", timeout=0.5)
def hangs_in_a_thread(event: Event[dict[str, Any]]) -> None:
    time.sleep(event.payload["seconds"])


@handles("stubborn", timeout=0.5)
async def stubborn(event: Event[dict[str, Any]]) -> None:
    until = time.monotonic() + event.payload["seconds"]
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue


@handles("kills")
async def kills(event: Event[dict[str, Any]]) -> None:
    if event.lease_seq <= event.payload["times"]:
        _end_process(event.payload["how"])


@handles("kills in a thread")
def kills_in_a_thread(event: Event[dict[str, Any]]) -> None:
    if event.lease_seq <= event.payload["times"]:
        _end_process(event.payload["how"])


def _end_process(how: str) -> None:
    if how == "exit":
        os._exit(3)
    elif how == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)
