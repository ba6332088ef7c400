"""The figures of a run: what was done to it, and how it took that."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from chaos.topics import TOPICS

if TYPE_CHECKING:
    from chaos.checker import Violation
    from chaos.evidence import Evidence


def figures(evidence: Evidence, facts: dict[str, Any], violations: list[Violation]) -> dict[str, Any]:
    """Name and number, in the order in which they are shown."""
    injected: dict[str, int] = facts["injected"]
    rules = Counter(violation.rule for violation in violations)
    acked = [wish for wish in evidence.wishes if wish.acked is not None]
    born = {step.mark for step in evidence.steps if step.old_status is None}
    unknown = [wish for wish in evidence.wishes if wish.acked is None and not wish.never]
    topics = {step.event_id: step.topic for step in evidence.steps if step.old_status is None}
    # Not those that a timeout or a failed commit has made a failure, whatever the handler thought of it.
    good = Counter(
        run.event
        for run in evidence.runs
        if run.outcome == "ok"
        and not (topic := TOPICS[topics[run.event] or ""]).timed
        and not topic.transactional
    )
    again = sum(count - 1 for count in good.values())
    recoveries = sorted(_recoveries(evidence))
    statuses = Counter(
        (step.old_status, step.status) for step in evidence.steps if step.old_status != step.status
    )
    return {
        "events": len(born),
        "enqueues acknowledged": len(acked),
        "enqueues with unknown outcome": len(unknown),
        "… of which are there": sum(wish.mark in born for wish in unknown),
        "handler executions": len(evidence.runs),
        "completed": sum(
            step.status == "COMPLETED" or (step.status is None and step.old_status == "RUNNING")
            for step in evidence.steps
        ),
        "deaths": statuses["RUNNING", "DEAD_LETTERED"],
        "replays": statuses["DEAD_LETTERED", "PENDING"],
        "discards": sum(step.status == "DISCARDED" for step in evidence.steps),
        "faults injected": sum(injected.values()),
        "… processes killed from outside": sum(
            fault.kind in ("kill", "kill-child") for fault in evidence.faults
        ),
        "… killed at a named point": sum(
            fault.kind == "order" and fault.values["action"] == "KILL" for fault in evidence.faults
        ),
        "… stopped and woken": injected.get("stop-dispatcher", 0)
        + injected.get("stop-child", 0)
        + injected.get("stop-producer", 0)
        + sum(fault.kind == "order" and fault.values["action"] == "STOP" for fault in evidence.faults),
        "… dispatchers killed by a job": sum(
            fault.kind == "ended" and fault.values["who"][0] == "d" and fault.values["code"] in (3, -11)
            for fault in evidence.faults
        ),
        "database crashes": sum(fault.kind == "database" for fault in evidence.faults),
        "failovers to a standby": sum(fault.kind == "failover" for fault in evidence.faults),
        "backends terminated (times)": injected.get("terminate", 0),
        "answers lost after the change was made": sum(fault.kind == "lost" for fault in evidence.faults),
        "… of which to COMMIT": sum(
            fault.kind == "lost" and fault.values["request"] == "commit" for fault in evidence.faults
        ),
        "leases lapsed": sum(
            step.old_status == "RUNNING"
            and step.status in ("RETRYING", "DEAD_LETTERED")
            and step.token is None
            for step in evidence.steps
        ),
        "executions repeated after success": again,
        "… per million executions": round(1e6 * again / max(1, len(evidence.runs))),
        "recovery p50 (s)": _percentile(recoveries, 0.5),
        "recovery p99 (s)": _percentile(recoveries, 0.99),
        "alerts sent": len(evidence.alerts),
        "… accepted": len({alert.alert for alert in evidence.alerts if alert.status < 300}),
        "drained in (s)": None if evidence.drained_in is None else round(evidence.drained_in, 1),
        "lost": rules["lost"],
        "below-budget deaths": rules["budget"],
        "stale writes accepted": rules["fence"],
        "violations": len(violations),
    }


def points(evidence: Evidence) -> dict[str, int]:
    """How often a process was killed or stopped at each of the named points."""
    return dict(
        sorted(Counter(fault.values["point"] for fault in evidence.faults if fault.kind == "order").items())
    )


def as_text(table: dict[str, Any]) -> str:
    """Two columns."""
    width = max(map(len, table))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in table.items())


def _recoveries(evidence: Evidence) -> list[float]:
    """From the kill of a dispatcher to the next start of what ran in it."""
    killed = {
        fault.values["pid"]: fault.at
        for fault in evidence.faults
        if fault.kind == "kill" or (fault.kind == "order" and fault.values["action"] == "KILL")
    }
    starts: dict[str, list[float]] = {}
    for run in evidence.runs:
        starts.setdefault(run.event, []).append(run.started)
    found = []
    for run in evidence.runs:
        at = killed.get(run.pid)
        if at is not None and run.ended is None and run.started < at:
            later = [start for start in starts[run.event] if start > at]
            found += [min(later) - at] if later else []
    return found


def _percentile(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(share * len(values)))], 2) if values else None
