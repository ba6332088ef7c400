"""Whether the SQL functions do what the model says: each call that can be reached, on the rows that it can find.

The model's database is small enough for that. For every call the table is filled with the rows before it, the real
function is called at a simulated time, and all that can be seen is compared with the rows after it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from tests.explorer.database import Scenario, Transition
from tests.explorer.states import DEAD, ENDED, MANY, NOBODY, RETRYING, RUNNING, Row
from tests.sql.calls import Calls, Claim, seconds

T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)
TICK = 10.1  # seconds; a lease of 30 has run out after three, a gap of 20 is over after two
STRANGER = uuid.UUID(int=999)


def uuid_of(number: int) -> uuid.UUID | None:
    return uuid.UUID(int=number) if number != NOBODY else None


def event_id(number: int) -> uuid.UUID:
    return uuid.UUID(int=500 + number)


def distinct(scenario: Scenario, calls: Iterable[Transition]) -> list[Transition]:
    """The calls that differ in what they are about.

    Without an ordering key rows have nothing to do with each other: then one call stands for all that differ only in a
    row which the call is not about.
    """
    found: dict[object, Transition] = {}
    for call in calls:
        call = plain(call)
        found.setdefault(call if scenario.key else essence(call), call)
    return list(found.values())


def essence(transition: Transition) -> object:
    """What a call is about, without the rows that it leaves as they were and did not look at."""
    before, call, answer, after = transition
    about: set[int] = {number for number in (0, 1) if before[number] != after[number]}
    match call:
        case ("claim", token, _, tuple(considered), *_):
            about |= {*considered, *(n for n in (0, 1) if before[n].token == token)}
        case ("settle", _, int(row), _) | ("replay" | "discard", int(row), _):
            about.add(row)
        case ("reap", tuple(lapsed), *_):
            about |= set(lapsed)
        case _:
            about = {0, 1}
    return call, answer, tuple((n, before[n], after[n]) for n in sorted(about))


def compare(dsn: str, scenario: Scenario, calls: Iterable[Transition]) -> int:
    """Asserts that each of them does the same in SQL; how many were different enough to be tried."""
    tried = distinct(scenario, calls)
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        comparison = Comparison(conn, scenario)
        for call in tried:
            comparison.check(call)
    return len(tried)


def plain(transition: Transition) -> Transition:
    """Without ghosts, and with ids numbered from the call on: what the same calls have in common."""
    known = {NOBODY: NOBODY}

    def name(old: int) -> int:
        return known.setdefault(old, len(known))

    def renamed(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(
            row._replace(
                token=name(row.token),
                alert=name(row.alert) if row.status == DEAD else NOBODY,
                paid=row.paid and row.status == DEAD,
                told=NOBODY,
                spent=0,
            )
            for row in rows
        )

    before, call, answer, after = transition
    match call:
        case ("claim", int(token), *rest):
            call = ("claim", name(token), *rest)
        case ("settle", verb, row, int(token)):
            call = ("settle", verb, row, name(token))
        case ("pay alert", int(alert)):
            call = ("pay alert", name(alert))
    before = renamed(before)
    if call[0] == "next alert":
        assert isinstance(answer, int)
        answer = name(answer)
    return Transition(before, call, answer, renamed(after))


class Comparison:
    """The calls of one scenario on one connection; nothing stays in the database."""

    def __init__(self, conn: psycopg.Connection[Any], scenario: Scenario) -> None:
        self.scenario = scenario
        self.sql = Calls(conn, T0)

    def check(self, transition: Transition) -> None:
        with self.sql.conn.transaction(force_rollback=True):
            self.fill(transition.before)
            ids = self.call(transition)
            found = self.found(ids)
        wanted = [self.visible(row) for row in transition.after[: self.scenario.jobs]]
        assert found == wanted, f"{transition}\nSQL: {found}\nmodel: {wanted}"

    def fill(self, rows: tuple[Row, ...]) -> None:
        for number, row in enumerate(rows[: self.scenario.jobs]):
            running, ended = row.status == RUNNING, row.status in ENDED
            columns: dict[str, Any] = {
                "event_id": event_id(number),
                "seq": number + 1,
                "topic": "mail",
                "payload": Jsonb({}),
                "idempotency_key": str(event_id(number)),
                "status": row.status,
                "attempts": row.attempts,
                "lapses": row.lapses,
                "alone": row.alone,
                "claim_token": uuid_of(row.token) or (STRANGER if running else None),
                "parked": row.parked,
                "ordering_key": "key" if self.scenario.key else None,
                "holds_key": self.scenario.key != "skip",
                "failure_history": Jsonb([{"request": str(uuid_of(request))} for request in row.requests]),
                "producer_max_attempts": self.scenario.budgets[number],
                "max_attempts": self.scenario.budgets[number],
                "lease_until": T0 + seconds(row.lease * TICK if row.lease else -0.1) if running else None,
                "locked_by": "worker" if running else None,
                "completed_at": T0 if ended else None,
                "alert_id": uuid_of(row.alert),
                "alerted_at": T0 if row.paid else None,
                "alert_offered_at": T0 if row.alert else None,
                "next_run_at": T0,
                "created_at": T0,
            }
            names = ", ".join(columns)
            values = ", ".join(f"%({name})s" for name in columns)
            self.sql.conn.execute(
                f"insert into pulse.outbox ({names}) overriding system value values ({values})", columns
            )

    def call(self, transition: Transition) -> dict[int, uuid.UUID]:
        """Makes it; ids that the database minted, by what the model calls them."""
        sql = self.sql
        match transition.call:
            case (
                "claim",
                int(token),
                int(lapses),
                tuple(considered),
                int(limit),
                int(slots),
                bool(fresh),
                passed,
            ):
                self.make_due(considered)
                if passed:
                    sql.conn.execute("insert into pulse.claim_try values (%s, 2, %s)", (uuid_of(token), T0))
                claim = sql.claim(
                    "mail",
                    limit,
                    token=uuid_of(token),
                    p_slots=slots,
                    p_lapses=lapses,
                    p_fresh=fresh,
                    p_try=1 if fresh else 2,
                )
                answer: object = tuple(sorted(e.int - 500 for e in claim.ids))
            case ("settle", str(verb), int(row), int(token)):
                answer = self.settle(verb, row, token)
            case ("reap", tuple(lapsed), int(swept), int(hold)):
                if not self.scenario.clock:
                    self.update("lease_until = %s", [n for n in (0, 1) if n not in lapsed], T0 + seconds(60))
                sql.conn.execute(
                    "insert into pulse.sweep (swept_at, hold_until) values (%s, %s)",
                    (T0 - seconds(swept * TICK), T0 + seconds(hold * TICK)),
                )
                reaped = tuple(sorted(row["event_id"].int - 500 for row in sql.reap()))
                held = sql.conn.execute("select max(hold_until) as until from pulse.sweep").fetchone()
                assert held is not None
                answer = reaped, -(-(held["until"] - T0).total_seconds() // TICK)
            case ("next alert", int(number)):
                alert = transition.before[number].alert
                # Another's is lent at present; this one's loan is over, or it has none yet.
                sql.conn.execute(
                    "update pulse.outbox set alert_offered_at = %s where alert_id = %s",
                    (T0 - seconds(60), uuid_of(alert)),
                )
                [lent] = sql.call("outbox_next_alert")
                minted = {transition.answer: lent["alert_id"]} if alert == NOBODY else {}
                assert minted or lent["alert_id"] == uuid_of(alert)
                return minted  # type: ignore[return-value]
            case ("pay alert", int(alert)):
                sql.call("outbox_pay_alert", uuid_of(alert))
                return {}
            case (str(verb), int(number), int(request)):
                self.operate(verb, number, request)
                return {}
            case _:
                raise AssertionError(transition.call)
        assert answer == transition.answer, f"{transition}\nSQL answers {answer}"
        return {}

    def settle(self, verb: str, row: int, token: int) -> str:
        identity = uuid_of(token)
        assert identity is not None
        claim = Claim(identity, [{"event_id": event_id(row)}])
        match verb:
            case "beat":
                answers = self.sql.heartbeat(claim)
            case "fail" | "die":
                # Of the same kind as a lease that ran out, so that two deaths are one alert.
                answers = self.sql.fail(
                    claim, terminal=verb == "die", failure={"error_class": "LeaseExpired"}
                )
            case _:
                answers = getattr(self.sql, verb)(claim)
        answer = answers.get(event_id(row))
        return "done" if answer in (None, RETRYING, DEAD) else str(answer)

    def operate(self, verb: str, number: int, request: int) -> None:
        arguments = (0, "operator") if verb == "replay" else ("obsolete", "operator")
        try:
            with self.sql.conn.transaction():
                self.sql.call(f"outbox_{verb}", event_id(number), *arguments, p_request=uuid_of(request))
        except psycopg.Error as error:
            if error.sqlstate != "PO002":
                raise

    def make_due(self, considered: tuple[int, ...]) -> None:
        self.update("next_run_at = %s", [n for n in (0, 1) if n not in considered], T0 + seconds(60))

    def update(self, change: str, numbers: list[int], value: datetime) -> None:
        running = "=" if change.startswith("lease") else "<>"
        self.sql.conn.execute(
            f"update pulse.outbox set {change} where event_id = any (%s) and status {running} 'RUNNING'",
            (value, [event_id(number) for number in numbers]),
        )

    def found(self, ids: dict[int, uuid.UUID]) -> list[dict[str, Any]]:
        names = {identity: number for number, identity in ids.items()}
        rows = self.sql.conn.execute("select * from pulse.outbox order by seq").fetchall()
        return [
            {
                "status": row["status"],
                "attempts": row["attempts"],
                "lapses": min(MANY, row["lapses"]),
                "alone": row["alone"],
                "token": self.number_of(row["claim_token"], names),
                "parked": row["parked"],
                "requests": [uuid.UUID(entry["request"]).int for entry in row["failure_history"]],
                "alert": self.number_of(row["alert_id"], names) if row["status"] == DEAD else NOBODY,
                "paid": row["alerted_at"] is not None and row["status"] == DEAD,
            }
            for row in rows
        ]

    def number_of(self, identity: uuid.UUID | None, names: dict[uuid.UUID, int]) -> int:
        if identity is None or identity == STRANGER:
            return NOBODY
        return names.get(identity, identity.int)

    def visible(self, row: Row) -> dict[str, Any]:
        assert len(row.requests) == row.cycles
        return {
            "status": row.status,
            "attempts": row.attempts,
            "lapses": row.lapses,
            "alone": row.alone,
            "token": row.token,
            "parked": row.parked,
            "requests": list(row.requests),
            "alert": row.alert,
            "paid": row.paid,
        }
