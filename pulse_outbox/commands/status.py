"""`pulse-outbox status`: what waits, runs and is dead, topic by topic, and who serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulse_outbox.commands.database import add_database_arguments, dsn_of, schema_of
from pulse_outbox.commands.terminal import (
    Column,
    count,
    duration,
    moment,
    plural,
    print_json,
    print_table,
    printable,
    rate,
)
from pulse_outbox.operations import DispatcherStatus, Operations, TopicStatus, connect

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
What is unfinished, by topic. DUE could run now, LATER is scheduled or backs off, PARKED waits for an earlier event of
its ordering key; RETRY counts those of the three that have failed before. WAIT is how long the oldest due event has
been due, RUN how long ago the oldest running one was claimed. Completed events are not counted: RATE, of each topic
and each dispatcher, says how many complete in a second, measured over the last heartbeats."""
    parser.epilog = """\
examples:
  pulse-outbox status
  pulse-outbox status --json | jq '.topics[] | select(.unserved > 0).topic'
"""
    add_database_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args: argparse.Namespace) -> int:
    with connect(dsn_of(args), name="pulse-outbox status") as conn:
        operations = Operations(conn, schema_of(args))
        operations.require_supported()
        topics, dispatchers, pauses = operations.topics(), operations.dispatchers(), operations.pauses()
        if args.json:
            print_json(
                {
                    "at": operations.now(),
                    "database": operations.database(),
                    "schema": operations.schema,
                    "topics": topics,
                    "unserved_topics": [topic.topic for topic in topics if topic.unserved],
                    "pauses": pauses,
                    "dispatchers": dispatchers,
                    "rate": sum(one.rate or 0 for one in dispatchers if one.alive),
                }
            )
            return 0
    if any(pause.topic is None for pause in pauses):
        print("ALL TOPICS ARE PAUSED; pulse-outbox resume --all goes on\n")
    _print_topics(topics)
    for pause in pauses:
        name = "all topics" if pause.topic is None else pause.topic
        print(printable(f"paused: {name}, {moment(pause.paused_at)}, by {pause.paused_by}: {pause.reason}"))
    print()
    _print_dispatchers(dispatchers)
    if dead := sum(topic.dead for topic in topics):
        print(f"\n{plural(dead, 'dead letter')}: pulse-outbox dead list")
    return 0


def _print_topics(topics: Sequence[TopicStatus]) -> None:
    if not topics:
        print("no unfinished events, and no topic is served")
        return
    columns = [Column(title="TOPIC", least=6)]
    columns += [
        Column(title=name, right=True)
        for name in ("DUE", "LATER", "RUNNING", "RETRY", "PARKED", "DEAD", "WAIT", "RUN", "RATE")
    ]
    columns.append(Column(title="SERVED BY", least=9))
    print_table(
        columns,
        [
            (
                topic.topic,
                *map(
                    count, (topic.due, topic.later, topic.running, topic.retrying, topic.parked, topic.dead)
                ),
                duration(topic.oldest_wait),
                duration(topic.longest_running),
                rate(topic.rate),
                served_by(topic),
            )
            for topic in topics
        ],
    )


def served_by(topic: TopicStatus) -> str:
    """Who serves it, after what keeps it from being served."""
    words = ["PAUSED"] if topic.paused is not None else []
    if not topic.served_by:
        words.append("NOBODY")
    elif topic.unserved:
        words.append(f"{count(topic.unserved)} OF A GENERATION THAT NOBODY SERVES")
    return " ".join([*words, ", ".join(topic.served_by)]).strip()


def _print_dispatchers(dispatchers: Sequence[DispatcherStatus]) -> None:
    if not any(dispatcher.alive for dispatcher in dispatchers):
        print("NO DISPATCHER IS ALIVE: start one with pulse-outbox run MODULE:ATTR")
    if not dispatchers:
        return
    columns = [
        Column(title="DISPATCHER", least=12),
        Column(title="VERSION", least=7),
        Column(title="GENERATIONS", least=11),
        Column(title="IN FLIGHT", right=True),
        Column(title="RATE", right=True),
        Column(title="SEEN"),
        Column(title="TOPICS", least=8),
    ]
    print_table(
        columns,
        [
            (
                one.worker,
                one.version,
                "all" if one.generations is None else ", ".join(map(str, one.generations)),
                one.in_flight,
                rate(one.rate),
                f"{duration(one.last_seen)} ago" + ("" if one.alive else ", GONE?"),
                ", ".join(one.topics),
            )
            for one in dispatchers
        ],
    )
