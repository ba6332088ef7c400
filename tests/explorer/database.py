"""The SQL functions of 0001_outbox.sql in a few lines each, and the mistakes that a variant makes in them.

Every change of a row goes through `Database.change`, which refuses what the state machine does not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.explorer.states import (
    COMPLETED,
    DEAD,
    DISCARDED,
    GAP,
    LEASE,
    MANY,
    NOBODY,
    PENDING,
    RETRYING,
    RUNNING,
    WAITING,
    Call,
    Row,
    State,
)

# What a settling call wants to find when it comes a second time.
WANTED = {
    "complete": (COMPLETED,),
    "fail": (RETRYING, DEAD),
    "die": (RETRYING, DEAD),
    "lapse": (RETRYING, DEAD),
    "release": WAITING,
    "beat": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the product works. Every other value than the default is a mistake."""

    fence: Literal["token", "nothing", "attempts"] = "token"
    claim: Literal["locked", "two steps", "too many"] = "locked"
    claim_finds_its_rows: bool = True
    late_claims_take: bool = False  # also after their repetition
    read_back: bool = True
    refund: Literal["in company", "never", "always"] = "in company"
    release_refunds: int = 1
    once_claimed_ahead: bool = False
    once_lapses: bool = False  # a budget of one is given back like any other
    reap_keeps_token: bool = False
    hold_off: bool = True
    heartbeat_revives: bool = False
    keys_wait: bool = True
    unpark: bool = True
    replay_checks: bool = True
    replay_knows_its_request: Literal["any entry", "last entry", "no"] = "any entry"
    replay_appends: bool = True
    alert: Literal["debt", "in memory", "paid first", "new id each time"] = "debt"
    budget_off_by: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who does what, and how much of it: what bounds the search."""

    name: str
    jobs: int = 2
    budgets: tuple[int, int] = (2, 2)
    key: Literal["", "hold", "skip"] = ""  # both rows have one ordering key; what a dead letter does to it
    ends: tuple[str, ...] = ("ok", "failed")  # how a run of the first job may end: ok, failed, bad, kill
    other_ends: tuple[str, ...] = ("ok",)  # and of the second
    slots: int = 1
    room: int = 2  # claims that a worker holds at most
    faults: int = 2  # lost answers, delayed calls, crashes
    crashes: bool = True
    late: bool = True
    gives_back: bool = False
    requests: int = 0  # of the operator
    discards: bool = False
    alerts: bool = False
    clock: bool = False  # False: a lease may run out at any moment
    outages: int = 0  # one: of two in one lease only the watchdog might see the time between


class Transition(NamedTuple):
    """One call of one function: what it found, what it was asked, what it answered, what it left."""

    before: tuple[Row, ...]
    call: tuple[object, ...]
    answer: object
    after: tuple[Row, ...]


class Database:
    """The rows during one step. `wrong` says what must not have happened."""

    def __init__(self, state: State, scenario: Scenario, rules: Rules) -> None:
        self.rows = list(state.rows)
        self.scenario = scenario
        self.rules = rules
        self.wrong = ""
        self.log: list[Transition] = []

    def note(self, before: list[Row], call: tuple[object, ...], answer: object) -> None:
        self.log.append(Transition(tuple(before), call, answer, tuple(self.rows)))

    def say(self, what: str) -> None:
        self.wrong = self.wrong or what

    def change(self, number: int, **columns: object) -> None:
        old = self.rows[number]
        new: Row = old._replace(**columns)  # type: ignore[arg-type]
        self.rows[number] = new
        if old.status == new.status == RUNNING or (old.status in WAITING and new.status in WAITING):
            return
        if old.status in (COMPLETED, DISCARDED) and new.status != old.status:
            self.say(f"{job(number)} was {old.status} and is {new.status} again")
        ended_cycle = new.status == DISCARDED or (old.status == DEAD and new.status == PENDING)
        if new.status != old.status and new.cycles != old.cycles + ended_cycle:
            self.say(f"{job(number)} has {new.cycles} entries in its history after {old.cycles}")
        if old.status == DEAD and new.status not in (DEAD, PENDING, DISCARDED):
            self.say(f"{job(number)} was dead and is {new.status}")

    # Keys

    def in_the_way(self, row: Row) -> bool:
        return row.status in (PENDING, RETRYING, RUNNING) or (
            row.status == DEAD and self.scenario.key == "hold"
        )

    def blocked(self, number: int) -> bool:
        """An earlier one of its key is unfinished, or a later one is running."""
        if not self.scenario.key or not self.rules.keys_wait:
            return False
        other = self.rows[1 - number]
        return other.status == RUNNING or (number == 1 and self.in_the_way(other))

    def unpark(self) -> None:
        if self.scenario.key and self.rules.unpark:
            for number, row in enumerate(self.rows):
                if self.in_the_way(row):  # the head
                    if row.parked:
                        self.change(number, parked=False)
                    return

    # Workers

    def due(self, lapses: int) -> list[int]:
        """What a claim may look at."""
        return [
            n
            for n, row in enumerate(self.rows)
            if row.status in WAITING and not row.parked and row.lapses == lapses
        ]

    def claim(
        self,
        token: int,
        lapses: int,
        considered: Iterable[int],
        limit: int,
        slots: int,
        fresh: bool,
        passed: bool = False,
    ) -> tuple[list[int], list[int]]:
        """The rows that it answers with, and which of them were taken now. *passed*: its repetition came first."""
        before = self.rows.copy()
        if passed and not self.rules.late_claims_take:
            rows: list[int] = []
            taken: list[int] = []
        else:
            rows, taken = self._claim(token, lapses, considered, limit, slots, fresh)
        self.note(
            before, ("claim", token, lapses, tuple(considered), limit, slots, fresh, passed), tuple(rows)
        )
        return rows, taken

    def _claim(
        self, token: int, lapses: int, considered: Iterable[int], limit: int, slots: int, fresh: bool
    ) -> tuple[list[int], list[int]]:
        mine = [n for n, row in enumerate(self.rows) if row.status == RUNNING and row.token == token]
        if mine and not fresh and self.rules.claim_finds_its_rows:
            return mine, []
        asked = limit
        if self.rules.claim == "too many":
            limit += 1
        taken: list[int] = []
        for number in considered:
            if len(taken) == limit:
                break
            if self.blocked(number):
                self.change(number, parked=True)
            elif self.scenario.budgets[number] > 1 or slots > 0 or self.rules.once_claimed_ahead:
                slots -= self.scenario.budgets[number] == 1
                self.take(number, token)
                taken.append(number)
        if len(taken) > asked:
            self.say("a claim took more than it was asked for")
        return taken, taken

    def take(self, number: int, token: int) -> None:
        row = self.rows[number]
        if row.status not in WAITING:
            self.say(f"{job(number)} was {row.status} and has been claimed")
        if self.scenario.key:
            other = self.rows[1 - number]
            if other.status == RUNNING:
                self.say("two of one key run at once")
            elif number == 1 and self.in_the_way(other):
                self.say("the second of a key runs before the first has ended")
        self.change(
            number,
            status=RUNNING,
            attempts=row.attempts + 1,
            token=token,
            alone=row.lapses >= MANY,
            lease=LEASE if self.scenario.clock else 0,
        )

    def holds(self, call: Call) -> bool:
        """The fence."""
        row = self.rows[call.row]
        match self.rules.fence:
            case "token":
                same = row.token == call.token
            case "attempts":
                same = row.attempts == call.attempts
            case _:
                same = True
        return same and row.status == RUNNING

    def settle(self, call: Call) -> str:
        """'done' or 'lost'."""
        before = self.rows.copy()
        answer = self._settle(call)
        self.note(before, ("settle", call.verb, call.row, call.token), answer)
        return answer

    def _settle(self, call: Call) -> str:
        row = self.rows[call.row]
        revived = (
            call.verb == "beat"
            and self.rules.heartbeat_revives
            and row.token == call.token
            and row.status == RETRYING
        )
        if not revived and not self.holds(call):
            by_me = row.token == call.token and row.status in WANTED[call.verb]
            if call.verb in ("fail", "die"):
                self.unpark()  # harmless: who has not the turn is parked again by the next claim
            return "done" if by_me and self.rules.read_back else "lost"
        if call.stale:
            self.say(f"a {call.verb} of an older claim of {job(call.row)} was accepted")
        match call.verb:
            case "beat":
                self.change(call.row, status=RUNNING, lease=LEASE)
            case "complete":
                self.change(call.row, status=COMPLETED, lease=0)
            case "release":
                attempts = row.attempts - self.rules.release_refunds
                status = RETRYING if row.attempts > 1 or row.lapses else PENDING
                self.change(call.row, status=status, attempts=max(0, attempts), lease=0)
            case _:
                self.fail(call.row, terminal=call.verb == "die", lapsed=call.verb == "lapse")
        self.unpark()
        return "done"

    def fail(
        self, number: int, *, terminal: bool = False, lapsed: bool = False, reaped: bool = False
    ) -> None:
        """record_failure: the one place where retry or dead letter is decided."""
        row, budget = self.rows[number], self.scenario.budgets[number]
        counts = not lapsed or row.alone or budget == 1
        match self.rules.refund:
            case "in company":
                refund = not counts
            case "never":
                refund = False
            case _:
                refund = lapsed
        if self.rules.once_lapses and lapsed and not row.alone:
            refund = True
        spent = row.spent + counts
        attempts = row.attempts - refund
        if terminal or not (refund or row.attempts < budget + self.rules.budget_off_by):
            status = DEAD
            if not terminal and spent != budget:
                self.say(f"{job(number)} died with {spent} of its {budget} attempts spent")
        else:
            status = RETRYING
            if spent >= budget:
                self.say(f"{job(number)} goes on with {spent} of its {budget} attempts spent")
        self.change(
            number,
            status=status,
            attempts=attempts,
            lapses=min(MANY, row.lapses + lapsed),
            token=NOBODY if reaped and not self.rules.reap_keeps_token else row.token,
            lease=0,
            spent=spent,
            alert=NOBODY,
            paid=False,
            told=NOBODY,
        )

    def reap(self, lapsed: Iterable[int], swept: int = 0, hold: int = 0) -> tuple[tuple[int, ...], int]:
        """A sweep: what it reaped, and the hold from now on. *lapsed*: leases that have run out."""
        before, lapsed = self.rows.copy(), tuple(lapsed)
        call = ("reap", lapsed, swept, hold)
        if swept >= GAP:
            hold = LEASE
        reaped = () if hold and self.rules.hold_off else lapsed
        for number in reaped:
            self.fail(number, lapsed=True, reaped=True)
        self.unpark()
        self.note(before, call, (reaped, hold))
        return reaped, hold

    # Alerts

    def next_alert(self, number: int, new_id: int) -> int:
        """Lends the alert of a dead letter; one without an id gets it together with all others without."""
        before = self.rows.copy()
        alert = self.rows[number].alert
        if alert == NOBODY or self.rules.alert == "new id each time":
            alert = new_id
            for other, row in enumerate(self.rows):
                if row.status == DEAD and not row.paid and row.alert in (NOBODY, self.rows[number].alert):
                    self.change(other, alert=alert, paid=self.rules.alert == "paid first")
        self.note(before, ("next alert", number), alert)
        return alert

    def pay_alert(self, alert: int) -> None:
        before = self.rows.copy()
        for number, row in enumerate(self.rows):
            if row.status == DEAD and row.alert == alert and not row.paid:
                self.change(number, paid=True)
        self.note(before, ("pay alert", alert), None)

    # Operators

    def operate(self, verb: str, number: int, request: int) -> None:
        """Replay or discard; what is refused changes nothing."""
        before = self.rows.copy()
        self._operate(verb, number, request)
        self.note(before, (verb, number, request), None)

    def _operate(self, verb: str, number: int, request: int) -> None:
        row = self.rows[number]
        known = {
            "any entry": request in row.requests,
            "last entry": row.requests[-1:] == (request,),
            "no": False,
        }[self.rules.replay_knows_its_request]
        if known:
            return
        allowed = row.status == DEAD or (verb == "discard" and row.status in WAITING)
        if not allowed and (self.rules.replay_checks or row.status == RUNNING):
            return
        if request in row.requests:
            self.say(f"one {verb} of {job(number)} was carried out twice")
        entry = {"cycles": row.cycles + self.rules.replay_appends, "requests": (*row.requests, request)}
        if verb == "discard":
            self.change(number, status=DISCARDED, parked=False, **entry)
            self.unpark()
        else:
            new = Row(status=PENDING, **entry)  # type: ignore[arg-type]
            self.change(number, **new._asdict())


def job(number: int) -> str:
    return f"job {'AB'[number]}"
