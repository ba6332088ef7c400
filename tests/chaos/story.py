"""Hand-made histories: what happened to a few events, told step by step, as evidence for the checker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chaos.checker import Violation, check
from chaos.evidence import Act, Alert, Evidence, Run, Step, Wish

LEASE = 3.0
TICK = 0.1


class Story:
    """Each method is one thing that happens, a tenth of a second after the last one."""

    def __init__(self) -> None:
        self.now = 100.0
        self.evidence = Evidence()
        self._rows: dict[str, Step] = {}

    # What is checked

    def violations(self, **changed: Any) -> list[Violation]:
        rows = {event: row.status for event, row in self._rows.items() if row.status is not None}
        return check(replace(self.evidence, **{"rows": rows, **changed}))

    def rules(self, **changed: Any) -> set[str]:
        """The rules that were broken."""
        return {violation.rule for violation in self.violations(**changed)}

    def row(self, event: str) -> Step:
        """As it is now."""
        return self._rows[event]

    # Producers

    def enqueue(
        self, event: str, topic: str = "fast", *, acked: bool = True, bad: bool = False, **values: Any
    ) -> Story:
        """Wanted, there, and acknowledged."""
        self.wish(event, topic, bad=bad, key=values.get("ordering_key"))
        self.appear(event, topic, **values)
        if acked:
            self.ack(event)
        return self

    def wish(self, event: str, topic: str = "fast", *, bad: bool = False, key: str | None = None) -> Story:
        self._tick()
        self.evidence.wishes.append(Wish(f"mark {event}", topic, bad, key, self.now))
        return self

    def ack(self, event: str, returned: str | None = None) -> Story:
        self._tick()
        return self._wished(event, acked=self.now, events=frozenset({returned or event}))

    def never(self, event: str) -> Story:
        return self._wished(event, never=True)

    def _wished(self, event: str, **values: Any) -> Story:
        wishes = self.evidence.wishes
        [number] = [n for n, wish in enumerate(wishes) if wish.mark == f"mark {event}"]
        wishes[number] = wishes[number]._replace(**values)
        return self

    def appear(self, event: str, topic: str = "fast", **values: Any) -> Story:
        """The row is inserted."""
        self._tick()
        born = Step(
            len(self.evidence.steps),
            self.now,
            "producer",
            self._transaction(),
            event,
            None,
            "PENDING",
            topic=topic,
        )
        values = {"mark": f"mark {event}", "holds_key": True, **values}
        self._add(born._replace(**values))
        return self

    # Dispatchers

    def step(self, event: str, status: str | None, who: str = "worker", **values: Any) -> Story:
        """Any change of the row: what is not named stays as it was."""
        self._tick()
        old = self._rows[event]
        unsaid: dict[str, Any] = {
            "topic": None,
            "mark": None,
            "ordering_key": None,
            "holds_key": None,
            "budget": None,
            "priority": None,
            "parked": None,
            "cycle": None,
        }
        given: dict[str, Any] = {
            "id": len(self.evidence.steps),
            "at": self.now,
            "began": self.now,
            "who": who,
        }
        given |= {"transaction": self._transaction(), "old_status": old.status, "status": status}
        self._add(old._replace(**unsaid)._replace(**given | values))
        return self

    def claim(self, event: str, who: str = "worker", **values: Any) -> Story:
        old = self._rows[event]
        born = next(step for step in self.evidence.steps if step.event_id == event)
        given = {
            "token": f"token {len(self.evidence.steps)}",
            "attempts": old.attempts + 1,
            "lease_seq": old.lease_seq + 1,
            "max_attempts": born.budget
            or {"ordered": 3, "once": 1, "raises": 3, "kills": 2}.get(born.topic or "", 5),
            "lease_until": self.now + TICK + LEASE,
            "locked_by": who,
            "alone": old.lapses >= 2,
        }
        return self.step(event, "RUNNING", who, **given | values)

    def run(
        self, event: str, outcome: str | None = "ok", *, lease: int | None = None, pid: int | None = None
    ) -> Story:
        """The handler starts and ends; None: it is never seen to end. Suspects have a process of their own."""
        row = self._rows.get(event)
        lease = lease or (row.lease_seq if row else 1)
        pid = pid or (2 if row and row.lapses else 1)
        started = self._tick()
        ended = self._tick() if outcome is not None else None
        self.evidence.runs.append(Run(event, lease, "worker", pid, started, ended, outcome))
        return self

    def complete(self, event: str, who: str = "worker", **values: Any) -> Story:
        return self.step(event, "COMPLETED", who, **_UNLEASED | values)

    def fail(self, event: str, *, dead: bool = False, verdict: str = "transient", **values: Any) -> Story:
        given = {**_UNLEASED, "verdict": verdict, "rule": "a rule"}
        return self.step(event, "DEAD_LETTERED" if dead else "RETRYING", **given | values)

    def reap(self, event: str, *, dead: bool = False, **values: Any) -> Story:
        """After the lease has run out."""
        old = self._rows[event]
        self.now = max(self.now, (old.lease_until or 0.0))
        refund = 0 if old.alone or old.max_attempts == 1 else 1
        given = {**_UNLEASED, "token": None, "attempts": old.attempts - refund, "lapses": old.lapses + 1}
        return self.step(event, "DEAD_LETTERED" if dead else "RETRYING", "watchdog", **given | values)

    def release(self, event: str, **values: Any) -> Story:
        given = {**_UNLEASED, "attempts": self._rows[event].attempts - 1}
        return self.step(event, "PENDING", **given | values)

    def work(self, event: str) -> Story:
        """Claimed, run, completed."""
        return self.claim(event).run(event).complete(event)

    def die(self, event: str, **values: Any) -> Story:
        """Claimed, run, failed for good."""
        return self.claim(event).run(event, "terminal").fail(event, dead=True, verdict="terminal", **values)

    # Alerts and operators

    def alert(self, event: str, alert_id: str = "a1", *, status: int = 200) -> Story:
        """Stamped, sent, and paid when it was accepted."""
        self.step(event, "DEAD_LETTERED", alert_id=alert_id)
        self._tick()
        self.evidence.alerts.append(Alert(self.now, alert_id, event, status))
        return self.step(event, "DEAD_LETTERED", alerted=True) if status == 200 else self

    def replay(
        self,
        event: str,
        request: str = "r1",
        *,
        result: str | None = "done",
        asked: dict[str, Any] | None = None,
        **values: Any,
    ) -> Story:
        self._tick()
        told = None if result in (None, "unknown") else self.now + 0.1
        self.evidence.acts.append(Act(self.now, "replay", (event,), request, result, told, asked))
        given: dict[str, Any] = {
            "token": None,
            "attempts": 0,
            "max_attempts": None,
            "lapses": 0,
            "snoozes": 0,
        }
        given |= {"alone": False, "alert_id": None, "alerted": False, "request": request, "verdict": None}
        given["history"] = self._rows[event].history + 1
        return self.step(event, "PENDING", "operator", **given | values)

    def discard(
        self, event: str, request: str = "r2", *, asked: dict[str, Any] | None = None, **values: Any
    ) -> Story:
        self._tick()
        self.evidence.acts.append(Act(self.now, "discard", (event,), request, "done", asked=asked))
        given = {"history": self._rows[event].history + 1, "request": request}
        return self.step(event, "DISCARDED", "operator", **given | values)

    # Inside

    def _tick(self) -> float:
        self.now += TICK
        return self.now

    def _transaction(self) -> int:
        return 1000 + len(self.evidence.steps)

    def _add(self, step: Step) -> None:
        self.evidence.steps.append(step)
        self._rows[step.event_id] = step


_UNLEASED: dict[str, Any] = {"lease_until": None, "locked_by": None}
