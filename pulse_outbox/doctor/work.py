"""Checks of the work: who runs it, what waits, what is dead or blocked."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pulse_outbox.doctor.findings import Finding, lasting, literal, quoted, rows, shell
from pulse_outbox.operations import Selection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pulse_outbox.operations import Operations

LONG_WAIT = timedelta(minutes=5)
LAPSED_FOR = timedelta(seconds=60)
ALERT_OWED_FOR = timedelta(minutes=1)
RECENT_DEATH = timedelta(days=1)
MOST_NAMED = 5
MANY = 10


def check_dispatchers(operations: Operations) -> Iterator[Finding]:
    dispatchers = operations.dispatchers()
    for one in dispatchers:
        if not one.alive:
            yield Finding(
                check="dispatchers",
                severity="warning",
                what=f"dispatcher {one.worker} (host {one.host}, pid {one.pid}) has not been seen for "
                f"{lasting(one.last_seen)}; it had {one.in_flight} in flight",
                remedy="look at that process; its events come back when their leases lapse, and its row goes by itself",
                runbook="a-worker-is-stuck.md",
            )
    if not any(one.alive for one in dispatchers):
        yield Finding(
            check="dispatchers",
            severity="error",
            what="no dispatcher is alive: nothing runs",
            remedy="pulse-outbox run MODULE:ATTR",
            runbook="the-backlog-grows.md",
        )
    versions = sorted({one.version for one in dispatchers if one.alive})
    if len(versions) > 1:
        yield Finding(
            check="dispatchers",
            severity="info",
            what=f"dispatchers of several releases are alive: {', '.join(versions)}",
            remedy="nothing during a rollout; afterwards stop the old ones",
            runbook="roll-out-a-generation.md",
        )


def check_topics(operations: Operations) -> Iterator[Finding]:
    pauses = {pause.topic: pause for pause in operations.pauses()}
    for topic in operations.topics():
        waits = topic.due + topic.later + topic.parked
        if topic.unserved and not topic.served_by:
            yield Finding(
                check="unserved",
                severity="error",
                what=f"nobody serves topic {topic.topic}, and {topic.unserved:,} events wait in it",
                remedy="start a dispatcher whose application has a handler for it, or find out who renamed the topic",
                runbook="the-backlog-grows.md",
            )
        elif topic.unserved:
            yield Finding(
                check="unserved",
                severity="error",
                what=f"{topic.unserved:,} events of topic {topic.topic} are of a generation that nobody serves",
                remedy=f"start a dispatcher with that --generation; which ones: select distinct generation from "  # noqa: S608
                f"{quoted(operations.schema)}.outbox where topic = {literal(topic.topic)} and status in "
                "('PENDING', 'RETRYING');",
                runbook="roll-out-a-generation.md",
            )
        pause = pauses.get(topic.topic) or pauses.get(None)
        if not pause and topic.oldest_wait and topic.oldest_wait > LONG_WAIT and topic.served_by:
            yield Finding(
                check="backlog",
                severity="warning",
                what=f"topic {topic.topic}: the oldest of {topic.due:,} due waits for {lasting(topic.oldest_wait)}",
                remedy="pulse-outbox status shows whether the dispatchers move; start more, or raise --concurrency",
                runbook="the-backlog-grows.md",
            )
        if pause and waits:
            yield Finding(
                check="paused",
                severity="warning",
                what=f"topic {topic.topic} is paused by {pause.paused_by}: {pause.reason}; {waits:,} events wait",
                remedy="pulse-outbox resume " + ("--all" if pause.topic is None else shell(topic.topic)),
                runbook="the-backlog-grows.md",
            )
    for pause in pauses.values():
        name = "all topics are" if pause.topic is None else f"topic {pause.topic} is"
        yield Finding(
            check="paused",
            severity="warning" if pause.topic is None else "info",
            what=f"{name} paused since {pause.paused_at:%Y-%m-%d %H:%M %Z} by {pause.paused_by}: {pause.reason}",
            remedy="pulse-outbox resume " + ("--all" if pause.topic is None else shell(pause.topic)),
            runbook="the-backlog-grows.md",
        )


def check_dead(operations: Operations) -> Iterator[Finding]:
    now = operations.now()
    kinds = operations.dead_kinds(Selection())
    for kind in kinds[:MOST_NAMED]:
        recent = now - kind.last_died_at < RECENT_DEATH
        yield Finding(
            check="dead",
            severity="warning" if recent else "info",
            what=f"{kind.dead:,} dead of topic {kind.topic} by {kind.error_class or 'an error without a class'}, "
            f"the last {lasting(now - kind.last_died_at)} ago",
            remedy=f"pulse-outbox dead list --topic {shell(kind.topic)}",
            runbook="a-job-died.md" if kind.dead < MANY else "many-jobs-died.md",
        )
    if len(kinds) > MOST_NAMED:
        others = kinds[MOST_NAMED:]
        recent = any(now - kind.last_died_at < RECENT_DEATH for kind in others)
        yield Finding(
            check="dead",
            severity="warning" if recent else "info",
            what=f"{sum(kind.dead for kind in others):,} dead of {len(others)} more kinds",
            remedy="pulse-outbox dead list",
            runbook="many-jobs-died.md",
        )


def check_blocked_keys(operations: Operations) -> Iterator[Finding]:
    blocked = operations.blocked_keys()
    for key in blocked[:MOST_NAMED]:
        waiting = f"{key.waiting}{' or more' if key.waiting >= 1000 else ''}"
        if key.why == "dead letter":
            remedy = f"pulse-outbox dead show {key.event_id}, then dead replay or dead discard"
            what = f"ordering key {key.ordering_key}: {waiting} wait behind dead letter {key.event_id} of {key.topic}"
        else:
            remedy = "a living dispatcher frees it within seconds: start one, and look again"
            what = f"ordering key {key.ordering_key}: its first event {key.event_id} is parked behind nothing"
        yield Finding(
            check="blocked_keys", severity="warning", what=what, remedy=remedy, runbook="a-job-died.md"
        )
    if len(blocked) > MOST_NAMED:
        yield Finding(
            check="blocked_keys",
            severity="warning",
            what=f"{len(blocked) - MOST_NAMED:,} more ordering keys are blocked",
            remedy=f"table {quoted(operations.schema)}.blocked_key;",
            runbook="a-job-died.md",
        )


def check_leases(operations: Operations) -> Iterator[Finding]:
    found = rows(
        operations,
        """select locked_by, count(*) as events, clock_timestamp() - min(lease_until) as since
             from {schema}.running()
            where lease_until < clock_timestamp() - %(tolerance)s
            group by locked_by
            order by events desc
            limit 5""",
        tolerance=LAPSED_FOR,
    )
    for row in found:
        yield Finding(
            check="leases",
            severity="error",
            what=f"{row['events']:,} leases of worker {row['locked_by']} lapsed {lasting(row['since'])} ago, "
            "and nobody reaps them",
            remedy="any living dispatcher reaps them within a minute: start one",
            runbook="a-worker-is-stuck.md",
        )


def check_alerts(operations: Operations) -> Iterator[Finding]:
    [row] = rows(
        operations,
        """select count(*) as owed, clock_timestamp() - min(completed_at) as since
             from {schema}.outbox
            where indexed_as = 'DEAD_LETTERED'
              and alerted_at is null
              and completed_at < clock_timestamp() - %(tolerance)s""",
        tolerance=ALERT_OWED_FOR,
    )
    if row["owed"]:
        yield Finding(
            check="alerts",
            severity="warning",
            what=f"{row['owed']:,} dead letters are not alerted yet, the oldest for {lasting(row['since'])}",
            remedy="a living dispatcher pays them when Sentry answers: look for outbox.alert_failed in its log",
            runbook="a-job-died.md",
        )
