"""What the demo tells: a shop at work, four kinds of ends that an event can have, and the count that must come out."""

from __future__ import annotations

import queue
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row

from pulse_outbox.demo import shop
from pulse_outbox.demo.dispatchers import Dispatchers, LogLine, describe_exit
from pulse_outbox.errors import OutboxError
from pulse_outbox.failures import FailureCycle

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from pulse_outbox.demo.views import View

ORDERS = 25
BETWEEN_ORDERS = 0.25
CUSTOMERS = ("Ada", "Alan", "Barbara", "Donald", "Edsger", "Frances", "Jean", "Ken", "Margaret", "Niklaus")
TROUBLE = {
    3: "Greylisted Grace",
    6: "Bankrupt Bob",
    8: "Greylisted Grace",
    10: "Poisonous Pete",
}
LEAVING, DECLINED, POISONOUS = 4, 6, 10
OPERATOR = "demo"

TURN = 0.05
PATIENCE = 40.0
"""How long one part of the story may take on a slow machine, in seconds."""

LOOK = """
select event_id, topic, status::text, attempts, max_attempts, lapses, last_error, failure_history, locked_by,
       (payload ->> 'number')::integer as number,
       extract(epoch from next_run_at - clock_timestamp())::float8 as due_in,
       extract(epoch from lease_until - clock_timestamp())::float8 as lease
  from {}
"""


Key = tuple[str, int]
"""An event of the demo by its topic and the order's number."""


class DemoFailed(OutboxError):
    """It did not go as it must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCount:
    """How many events of a topic are where."""

    topic: str
    waiting: int
    running: int
    retrying: int
    completed: int
    dead: int
    next_retry: float | None
    """Seconds until the first of those that wait for their backoff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that a view shows of one moment."""

    topics: tuple[TopicCount, ...]
    orders: int
    dispatcher: str
    now: str


class Story:
    """Plays the shop's customers, the supervisor and the operator, all in one thread."""

    def __init__(self, dsn: str, *, schema: str, view: View) -> None:
        self._view = view
        self._schema = schema
        self._dispatchers = Dispatchers(dsn, schema=schema)
        self._dsn = dsn
        self._rows: dict[Key, Any] = {}
        self._keys: dict[str, Key] = {}
        self._served = 0
        self._opened_at = 0.0
        self._deaths: list[int] = []
        self._children: set[int] = set()
        self._children_died = 0
        self._up = False
        self._stopping = False
        self._now = ""
        self._retried: set[Key] = set()
        self._reaped: list[LogLine] = []
        self.summary: tuple[str, ...] = ()

    def play(self) -> None:
        """All of it; raises DemoFailed if the end is not what it must be."""
        shop.outbox.use_schema(self._schema)
        with psycopg.connect(self._dsn, autocommit=True, row_factory=namedtuple_row) as self._conn:
            self._conn.execute(shop.TABLES)
            try:
                self._work()
                self._deploy()
                self._replay()
                self._finish()
            finally:
                self._dispatchers.kill()

    # The acts

    def _work(self) -> None:
        self._tell(
            "·", f"the shop opens: an order and its {len(shop.outbox.handlers)} events are one transaction"
        )
        self._opened_at = time.monotonic()
        self._dispatchers.start(1)
        self._wait("the shop is open, a dispatcher is starting", lambda: self._up)
        self._wait("events run within milliseconds of their commit", lambda: self._deaths)
        self._wait("the dead dispatcher's leases lapse", lambda: self._poison.lapses > 0)
        self._wait(
            "what ran beside it is suspect too and runs with it, in a child process", self._neighbours_done
        )
        self._tell("✓", f"{count(self._neighbours(), 'event')} that ran beside it: COMPLETED")
        self._wait(
            "it runs alone, in a child process of its own, until its budget is spent",
            lambda: self._poison.status == "DEAD_LETTERED",
        )
        self._wait("the shop closes, the last orders are worked off", self._all_ended)

    def _deploy(self) -> None:
        self._tell(
            "·",
            f"release 2 mends the invoices: dispatcher {self._dispatchers.number} gets SIGTERM and finishes",
        )
        self._stop()
        self._dispatchers.start(2)
        self._wait("release 2 is being deployed", lambda: self._up)

    def _replay(self) -> None:
        replay = sql.SQL("select {}({}, 2, {})").format(
            sql.Identifier(self._schema, "outbox_replay"),
            sql.Literal(str(self._poison.event_id)),
            sql.Literal(OPERATOR),
        )
        # As one would type it: an identifier that needs no quotes gets none.
        typed = replay.as_string(self._conn).replace('"', "")
        self._tell("$", typed + ";")
        self._conn.execute(typed.encode())
        self._wait(
            "the dead letter is replayed, for generation 2 only", lambda: self._poison.status == "COMPLETED"
        )
        cycles = [FailureCycle.model_validate(cycle) for cycle in self._poison.failure_history]
        self._tell(
            "✓",
            f"{self._label(self._poison)} COMPLETED; failure_history has {count(cycles, 'cycle')}:",
        )
        for cycle in cycles:
            self._tell(
                " ",
                f"generation {cycle.generation}, {cycle.attempts} attempts, {cycle.last_error}, "
                f"replayed by {cycle.replayed_by}",
            )

    def _finish(self) -> None:
        self._wait("the last events", self._all_ended)
        self._stop()
        self._look()
        self._now = "done"
        self._view.show(self._scene())
        differences = self._differences()
        if differences:
            raise DemoFailed(f"the demo did not end as it must: {'; '.join(differences)}")

    def _stop(self) -> None:
        """Ends the dispatcher as an orchestrator does."""
        self._stopping = True
        self._dispatchers.terminate()
        self._wait("the dispatcher finishes what it is doing", lambda: self._dispatchers.pid is None)
        self._stopping = False

    # The end

    def _differences(self) -> list[str]:
        """What is not as it must be; fills `summary` on the way."""
        [[orders]] = self._conn.execute("select count(*) from demo_shop.orders").fetchall()
        reserved = Counter(
            number
            for (number,) in self._conn.execute("select order_number from demo_shop.reservation").fetchall()
        )
        events = orders * len(shop.outbox.handlers)
        statuses = Counter(row.status for row in self._rows.values())
        completed, dead = statuses["COMPLETED"], statuses["DEAD_LETTERED"]
        ghosts = [row for row in self._rows.values() if row.number == LEAVING]
        twice = sum(number - 1 for number in reserved.values())
        neighbours = self._neighbours()
        survived = sum(row.status == "COMPLETED" for row in neighbours)
        lost = events - completed - dead
        children = f"{self._children_died} child processes"
        self.summary = (
            f"{orders} orders, {events} events: COMPLETED {completed}, DEAD_LETTERED {dead}, lost {lost}",
            f"  dead letter     card.charge of order {DECLINED}; it waits for an operator",
            f"  rolled back     order {LEAVING}: {len(ghosts) or 'none'} of its events ever ran",
            f"  stock reserved  for {count(reserved, 'order')}, for {twice or 'none'} of them twice",
            f"  killed          {count(self._deaths, 'dispatcher')}, then {children}, by order {POISONOUS}",
            f"  beside it       {count(neighbours, 'event')}, of which {survived} COMPLETED",
        )
        expected = {
            "orders": (orders, ORDERS - 1),
            "COMPLETED": (completed, events - 1),
            "DEAD_LETTERED": (dead, 1),
            "events of the rolled back order": (len(ghosts), 0),
            "orders with a reservation": (len(reserved), orders),
            "reservations made twice": (twice, 0),
            "dispatchers killed": (len(self._deaths), 1),
            "attempts of the declined card": (self._rows["card.charge", DECLINED].attempts, 1),
            "cycles in the failure_history": (len(self._poison.failure_history), 1),
        }
        return [
            f"{what} {found} instead of {wanted}"
            for what, (found, wanted) in expected.items()
            if found != wanted
        ]

    # One turn

    def _wait(self, now: str, condition: Callable[[], object]) -> None:
        """Lets everything go on until the condition holds."""
        give_up_at = time.monotonic() + PATIENCE
        self._now = now
        while not condition():
            if time.monotonic() > give_up_at:
                raise DemoFailed(f"no end of this within {PATIENCE:g} s: {now}")
            self._serve_customers()
            self._listen()
            self._supervise()
            self._look()
            self._view.show(self._scene())
            time.sleep(TURN)

    def _serve_customers(self) -> None:
        while self._served < ORDERS and time.monotonic() >= self._opened_at + arrival(self._served + 1):
            self._served += 1
            number = self._served
            order = shop.Order(
                number=number, customer=TROUBLE.get(number, CUSTOMERS[number % len(CUSTOMERS)])
            )
            try:
                shop.place_order(self._conn, order, customer_leaves=number == LEAVING)
            except shop.CustomerLeft:
                self._tell("·", f"order {number} is rolled back: neither it nor its events were ever there")

    def _supervise(self) -> None:
        code = self._dispatchers.died()
        if code is None:
            return
        self._listen()
        self._up = False
        self._children.clear()
        if self._stopping and code == 0:
            return
        if code >= 0:
            raise DemoFailed(f"the dispatcher gave up: {self._dispatchers.last_words or describe_exit(code)}")
        self._deaths.append(code)
        self._look()
        held = [row for row in self._rows.values() if row.status == "RUNNING"]
        self._tell(
            "✗",
            f"dispatcher {self._dispatchers.number} died: {describe_exit(code)}, while it ran {count(held, 'event')}",
        )
        self._dispatchers.start(self._dispatchers.release)

    def _look(self) -> None:
        rows: list[Any] = self._conn.execute(
            sql.SQL(LOOK).format(sql.Identifier(self._schema, "outbox"))
        ).fetchall()
        self._rows = {(row.topic, row.number): row for row in rows}
        self._keys = {str(row.event_id): key for key, row in self._rows.items()}
        for key in sorted(self._retried):
            row = self._rows[key]
            if row.status == "COMPLETED":
                self._retried.discard(key)
                self._tell("✓", f"{self._label(row)} COMPLETED at attempt {row.attempts}")

    # What the dispatcher says

    def _listen(self) -> None:
        while True:
            try:
                line = self._dispatchers.lines.get_nowait()
            except queue.Empty:
                break
            self._hear(line)
        if self._reaped:
            reaped, self._reaped = self._reaped, []
            self._tell(
                "↻",
                f"{count(reaped, 'lease')} of the dead dispatcher lapsed; the events come back as suspects",
            )

    def _hear(self, line: LogLine) -> None:
        match line:
            case {"event": "outbox.started"}:
                self._up = True
                of = self._dispatchers
                self._tell(
                    "·", f"dispatcher {of.number} is up: pid {of.pid}, release {of.release} of the shop"
                )
            case {"event": "outbox.failed", "attempt": attempt, "delay": delay}:
                self._retried.add(self._key(line))
                self._tell(
                    "↻",
                    f"{self._label_of(line)}: {line['error']}; "
                    f"attempt {attempt + 1} of {line['max_attempts']} in {delay:.1f} s",
                )
            case {"event": "outbox.dead_lettered", "rule": rule}:
                self._tell(
                    "✗", f"{self._label_of(line)} DEAD_LETTERED at once: {line['error']} (rule {rule})"
                )
            case {"event": "outbox.reaped"}:
                self._reaped.append(line)
            case {"event": "outbox.child_started", "pid": pid}:
                if not self._children and self._poison.status != "DEAD_LETTERED":  # not of a spare one
                    self._tell("·", f"child process {pid} started for suspects")
                self._children.add(pid)
            case {"event": "outbox.child_died", "pid": pid, "error": error}:
                self._children.discard(pid)
                self._children_died += 1
                how = error.removeprefix("worker process ")
                self._tell("✗", f"child process {pid} {how}; dispatcher {self._dispatchers.number} lives on")
            case {"event": "outbox.lapsed", "status": status} if self._key(line) == (
                "invoice.render",
                POISONOUS,
            ):
                self._tell_of_poison(line, status)
            case _:
                pass

    def _tell_of_poison(self, line: LogLine, status: str) -> None:
        self._look()
        row = self._poison
        if status == "DEAD_LETTERED":
            self._tell(
                "✗", f"{self._label(row)} DEAD_LETTERED after {row.attempts} attempts: {row.last_error}"
            )
        elif not row.attempts:
            self._tell("↻", f"{self._label(row)} had company, so no attempt is spent; next time alone")
        else:
            self._tell(
                "↻",
                f"{self._label(row)} was alone: attempt {row.attempts} of {row.max_attempts}; "
                f"again in {max(row.due_in, 0):.1f} s",
            )

    # Words and numbers

    @property
    def _poison(self) -> Any:
        return self._rows["invoice.render", POISONOUS]

    def _neighbours(self) -> list[Any]:
        """The events whose lease lapsed because of the poisonous one."""
        return [row for row in self._rows.values() if row.lapses and row is not self._poison]

    def _neighbours_done(self) -> bool:
        return self._children_died > 0 and all(row.status == "COMPLETED" for row in self._neighbours())

    def _all_ended(self) -> bool:
        ended = all(row.status in {"COMPLETED", "DEAD_LETTERED"} for row in self._rows.values())
        return ended and self._served == ORDERS

    def _key(self, line: LogLine) -> Key:
        if line["event_id"] not in self._keys:
            self._look()
        return self._keys[line["event_id"]]

    def _label_of(self, line: LogLine) -> str:
        return "{} of order {}".format(*self._key(line))

    def _label(self, row: Any) -> str:
        return f"{row.topic} of order {row.number}"

    def _tell(self, mark: str, text: str) -> None:
        self._view.tell(mark, text)

    def _scene(self) -> Scene:
        return Scene(
            topics=tuple(self._count(topic) for topic in shop.outbox.handlers),
            orders=len({row.number for row in self._rows.values()}),
            dispatcher=self._describe_dispatcher(),
            now=self._describe_leases() or self._now,
        )

    def _count(self, topic: str) -> TopicCount:
        rows = [row for row in self._rows.values() if row.topic == topic]
        statuses = Counter(row.status for row in rows)
        return TopicCount(
            topic=topic,
            waiting=statuses["PENDING"],
            running=statuses["RUNNING"],
            retrying=statuses["RETRYING"],
            completed=statuses["COMPLETED"],
            dead=statuses["DEAD_LETTERED"],
            next_retry=min(
                (row.due_in for row in rows if row.status == "RETRYING" and row.due_in > 0), default=None
            ),
        )

    def _describe_dispatcher(self) -> str:
        dispatchers = self._dispatchers
        if dispatchers.pid is None:
            return "no dispatcher"
        state = "up" if self._up else "starting"
        return (
            f"dispatcher {dispatchers.number}, release {dispatchers.release}, pid {dispatchers.pid}: {state}"
        )

    def _describe_leases(self) -> str:
        """What a dead dispatcher has left behind."""
        mine = f"dispatcher {self._dispatchers.number}"
        left = [row for row in self._rows.values() if row.status == "RUNNING" and row.locked_by != mine]
        if not left or not self._deaths:
            return ""
        lapse = max(0.0, *(row.lease for row in left))
        return f"{count(left, 'event')} leased to a dead dispatcher: lapse in {lapse:.1f} s (30 s by default)"


def arrival(number: int) -> float:
    """When a customer comes. The poisonous one is soon followed by three at once: they run beside it when it kills."""
    together = POISONOUS < number <= POISONOUS + 3
    return (POISONOUS if together else number - 1) * BETWEEN_ORDERS


def count(things: Sized, noun: str) -> str:
    """1 event, 2 events."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
