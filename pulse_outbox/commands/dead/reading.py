"""`pulse-outbox dead list` and `dead show`."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pulse_outbox.commands.dead.choosing import (
    add_filters,
    add_verb,
    event_id_argument,
    positive_argument,
    selection_of,
)
from pulse_outbox.commands.terminal import (
    Column,
    count,
    duration,
    moment,
    plain,
    plural,
    print_json,
    print_table,
    printable,
)
from pulse_outbox.errors import EventNotFound
from pulse_outbox.operations import Operations, Selection

if TYPE_CHECKING:
    pass


def add_list(verbs: Any) -> None:
    parser = add_verb(verbs, "list", "what died, by kind, and the newest of them", _list)
    parser.description = """\
Dead letters by kind first (one kind is one topic and one class of error, most often one bug), then the newest ones.
AGAIN counts those that were replayed before and died again."""
    add_filters(parser)
    parser.add_argument(
        "--limit",
        type=positive_argument,
        default=10,
        metavar="N",
        help="how many of the newest (default: 10)",
    )


def _list(operations: Operations, args: argparse.Namespace) -> int:
    selection = selection_of(operations, args)
    kinds = operations.dead_kinds(selection)
    newest = operations.dead_letters(selection)
    now = operations.now()
    total = sum(kind.dead for kind in kinds)
    if args.json:
        print_json({"at": now, "dead": total, "kinds": kinds, "newest": newest})
        return 0
    if not kinds:
        print("no dead letters" + (" like that" if selection != Selection(limit=args.limit) else ""))
        return 0
    print(f"{plural(total, 'dead letter')} of {plural(len(kinds), 'kind')}\n")
    print_table(
        [
            Column(title="TOPIC", least=10),
            Column(title="ERROR CLASS", least=12),
            Column(title="DEAD", right=True),
            Column(title="AGAIN", right=True),
            Column(title="FIRST", right=True),
            Column(title="LAST", right=True),
            Column(title="LAST ERROR", least=12),
        ],
        [
            (
                kind.topic,
                kind.error_class or "-",
                count(kind.dead),
                count(kind.died_before),
                duration(now - kind.first_died_at),
                duration(now - kind.last_died_at),
                kind.last_error,
            )
            for kind in kinds
        ],
    )
    print(f"\nthe newest{f' {len(newest)} of {total:,}' if len(newest) < total else ''}\n")
    print_table(
        [
            Column(title="EVENT"),
            Column(title="DIED", right=True),
            Column(title="TOPIC", least=8),
            Column(title="ERROR", least=10),
        ],
        [
            (
                letter.event_id,
                duration(now - letter.dead_lettered_at),
                letter.topic,
                letter.last_error or letter.error_class,
            )
            for letter in newest
        ],
    )
    print("\ntimes are how long ago; pulse-outbox dead show EVENT tells all about one")
    return 0


def add_show(verbs: Any) -> None:
    parser = add_verb(verbs, "show", "everything about one event, dead or not", _show)
    parser.description = (
        "Everything about one event: its state, its error, and every cycle that ended before."
    )
    parser.add_argument("event_id", type=event_id_argument, metavar="EVENT_ID")
    parser.add_argument(
        "--payload", action="store_true", help="with payload and headers, which may hold secrets"
    )


def _show(operations: Operations, args: argparse.Namespace) -> int:
    event = operations.event(args.event_id, payload=args.payload)
    if event is None:
        raise EventNotFound(
            f"no event {args.event_id}: what completed may have been pruned; `pulse-outbox dead list`"
        )
    if args.json:
        print_json(event)
        return 0
    history = event.pop("failure_history")
    long = {
        name: event.pop(name)
        for name in ("last_error", "last_failure", "headers", "payload")
        if name in event
    }
    for name, value in event.items():
        if value is not None and value != "":
            shown = moment(value) if isinstance(value, datetime) else printable(str(value))
            print(f"{name:<17}{shown}")
    failure = long.get("last_failure") or {}
    for name, value in failure.items():
        print(f"{name:<17}{printable(str(value))}")
    if long["last_error"]:
        print("\nlast_error")
        _print_indented(long["last_error"])
    if history:
        print(f"\n{plural(len(history), 'earlier cycle')}")
    for number, cycle in enumerate(history, 1):
        print(f"  {number}. {printable(_cycle_in_words(cycle))}")
        if cycle.get("last_error"):
            _print_indented(cycle["last_error"], "     ")
    for name in ("headers", "payload"):
        if name in long:
            print(f"\n{name}")
            # ASCII, so that nothing in it can command the terminal.
            _print_indented(json.dumps(plain(long[name]), indent=2))
    return 0


def _print_indented(text: str, indent: str = "  ") -> None:
    for line in text.splitlines():
        print(indent + printable(line))


def _cycle_in_words(cycle: dict[str, Any]) -> str:
    died = cycle.get("dead_lettered_at")
    words = [
        f"died {_iso(died)} after {plural(cycle.get('attempts') or 0, 'attempt')}" if died else "not dead",
        f"generation {cycle.get('generation')}",
    ]
    if "replayed_by" in cycle:
        words.append(f"replayed {_iso(cycle.get('replayed_at'))} by {cycle['replayed_by']}")
    if "discarded_by" in cycle:
        words.append(
            f"discarded {_iso(cycle.get('discarded_at'))} by {cycle['discarded_by']}: {cycle.get('reason')}"
        )
    return ", ".join(words)


def _iso(text: str | None) -> str:
    return moment(datetime.fromisoformat(text)) if text else "-"
