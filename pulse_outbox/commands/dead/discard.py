"""`pulse-outbox dead discard`: for events that must never run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from pulse_outbox.commands.dead.choosing import (
    add_choice,
    add_verb,
    chosen,
)
from pulse_outbox.commands.terminal import (
    Column,
    Progress,
    confirm,
    count,
    operator_name,
    plural,
    print_json,
    print_table,
    printable,
)
from pulse_outbox.errors import EventNotFound, OutboxError, TransitionRefused
from pulse_outbox.operations import Kind, Operations

if TYPE_CHECKING:
    from collections.abc import Sequence


BATCH = 500


def add_arguments(verbs: Any) -> None:
    parser = add_verb(verbs, "discard", "put events away that must never run", _discard)
    parser.description = """\
For good: a discarded event never runs, and can't be brought back. Who and why stay in its history until it is pruned,
and later events of its ordering key go on. By id, also events that have not died and do not run now."""
    parser.add_argument(
        "--reason", required=True, metavar="TEXT", help="why it must never run, for the record"
    )
    add_choice(parser)


def _discard(operations: Operations, args: argparse.Namespace) -> int:
    selection = chosen(operations, args)
    by = operator_name(args)
    if selection.event_ids:
        ids = list(selection.event_ids)
        kinds = _discardable(operations, ids)
    else:
        letters = operations.dead_letters(selection, newest_first=False)
        ids = [letter.event_id for letter in letters]
        kinds = {}
        for letter in letters:
            kinds[letter.kind] = kinds.get(letter.kind, 0) + 1
    if not args.json and (len(ids) > 1 or args.dry_run):
        print_table(
            [
                Column(title="TOPIC", least=10),
                Column(title="ERROR CLASS", least=12),
                Column(title="EVENTS", right=True),
            ],
            [(kind.topic, kind.error_class or "-", count(number)) for kind, number in kinds.items()],
        )
    if args.dry_run or not ids:
        return _nothing_discarded(args, kinds, by)
    question = f"Discard {plural(len(ids), 'event')} in {operations.database()} as {by}, for good?"
    if len(ids) > 1 and not confirm(question, yes=args.yes):
        print("nothing was changed")
        return 1
    discarded = _discard_all(operations, ids, args.reason, by, dead_only=not selection.event_ids)
    if args.json:
        print_json(
            {"dry_run": False, "events": len(ids), "discarded": discarded, "left": len(ids) - discarded}
        )
    else:
        print(printable(f"{plural(discarded, 'event')} discarded by {by}"))
        if discarded < len(ids):
            print(
                f"{len(ids) - discarded:,} not: locked, or changed by somebody meanwhile; the same command tries again"
            )
    return 0 if discarded == len(ids) else 1


def _discardable(operations: Operations, ids: Sequence[UUID]) -> dict[Kind, int]:
    kinds: dict[Kind, int] = {}
    for event_id in ids:
        event = operations.event(event_id)
        if event is None:
            raise EventNotFound(f"event {event_id} does not exist (any more); nothing was changed")
        if event["status"] not in {"PENDING", "RETRYING", "DEAD_LETTERED"}:
            raise OutboxError(
                f"event {event_id} is {event['status']} and can't be discarded; nothing was changed"
            )
        kind = Kind(event["topic"], (event["last_failure"] or {}).get("error_class") or "")
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def _nothing_discarded(args: argparse.Namespace, kinds: dict[Kind, int], by: str) -> int:
    if args.json:
        listed = [
            {"topic": kind.topic, "error_class": kind.error_class, "events": number}
            for kind, number in kinds.items()
        ]
        print_json({"dry_run": bool(args.dry_run), "events": sum(kinds.values()), "kinds": listed})
    elif not kinds:
        print("no dead letters like that: nothing to do")
    else:
        print(
            printable(
                f"\na dry run: {plural(sum(kinds.values()), 'event')} would be discarded by {by}; nothing was changed"
            )
        )
    return 0


def _discard_all(
    operations: Operations, ids: Sequence[UUID], reason: str, by: str, *, dead_only: bool
) -> int:
    request, progress = uuid4(), Progress("discarded")
    discarded = 0
    try:
        if dead_only:
            for first in range(0, len(ids), BATCH):
                discarded += operations.discard_many(
                    ids[first : first + BATCH], reason=reason, by=by, request=request
                )
                progress.show(discarded, len(ids))
        else:
            for event_id in ids:
                try:
                    operations.discard(event_id, reason=reason, by=by, request=request)
                except (TransitionRefused, EventNotFound):
                    if len(ids) == 1:
                        raise
                    continue  # of several, those that were discarded must be named
                discarded += 1
                progress.show(discarded, len(ids))
    finally:
        progress.end()
    return discarded
