"""`pulse-outbox dead replay`: asks, replays carefully, and tells what came of it."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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
    duration_argument,
    operator_name,
    plural,
    print_json,
    print_table,
    printable,
    rate_argument,
    warn,
)
from pulse_outbox.errors import OutboxError
from pulse_outbox.operations import DeadLetter, Operations
from pulse_outbox.replaying import Replay

if TYPE_CHECKING:
    from collections.abc import Sequence


def add_arguments(verbs: Any) -> None:
    parser = add_verb(verbs, "replay", "run dead letters again, in place", _replay)
    parser.description = """\
Starts a new cycle for dead letters, in place: same event, same idempotency key, the old cycle kept in its history.
More than one: first a canary, the oldest of each kind, is replayed and waited for; the others of its kind follow at
--rate only if it completed, and stop as soon as the same error comes back. Ctrl-C is harmless at any time: what it has
not come to stays dead."""
    parser.epilog = """\
examples:
  pulse-outbox dead replay 0190b5f0-… --generation 0
  pulse-outbox dead replay --all --same-generation --dry-run
  pulse-outbox dead replay --topic order.paid --since 3h --generation 2 --rate 50
"""
    generation = parser.add_mutually_exclusive_group(required=True)
    generation.add_argument(
        "--generation",
        type=_generation,
        metavar="N",
        help="the generation of code that is to run them; 0: any",
    )
    generation.add_argument(
        "--same-generation", action="store_true", help="each keeps the generation that it has"
    )
    add_choice(parser)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--rate", type=rate_argument, default=100.0, metavar="N", help="events per second (default: 100)"
    )
    how.add_argument(
        "--canary",
        action=argparse.BooleanOptionalAction,
        help="one of each kind first, the others if it completes (default: when there is more than one)",
    )
    how.add_argument(
        "--wait",
        type=duration_argument,
        default=timedelta(minutes=2),
        metavar="DURATION",
        help="for the canaries' outcome (default: 2m)",
    )


def _generation(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:
        raise ValueError(text)
    return number


_generation.__name__ = "generation (a number from 0 on)"


def _replay(operations: Operations, args: argparse.Namespace) -> int:
    letters = _found(operations, args)
    by = operator_name(args)
    several = len(letters) > 1
    replay = Replay(
        operations=operations,
        letters=letters,
        generation=None if args.same_generation else args.generation,
        by=by,
        rate=args.rate,
        canary=several if args.canary is None else args.canary,
        patience=args.wait,
    )
    warnings = _warnings(operations, replay)
    if args.dry_run:
        return _show_plan(replay, warnings, json_=args.json)
    if not letters:
        return _nothing_to_do(args)
    if several and not args.json:
        _print_plan(replay)
    for text in warnings:
        warn(text)
    if several or warnings:
        question = f"Replay {plural(len(letters), 'dead letter')} in {operations.database()} as {by}?"
        if not confirm(question, yes=args.yes):
            print("nothing was changed")
            return 1
    progress = Progress("replayed")
    replay.say, replay.progress = progress.say, progress.show
    try:
        replay.run()
    finally:  # Ctrl-C too: what has been done is told
        progress.end()
        _print_result(replay, json_=args.json)
    return (
        0
        if all(kind.fate == "replayed" and not kind.left and not kind.died_again for kind in replay.kinds)
        else 1
    )


def _found(operations: Operations, args: argparse.Namespace) -> list[DeadLetter]:
    """The dead letters that are meant; ids that are no dead letters are named, and refused."""
    selection = chosen(operations, args)
    letters = operations.dead_letters(selection, newest_first=False)
    if selection.event_ids:
        missing = set(selection.event_ids) - {letter.event_id for letter in letters}
        for event_id in selection.event_ids:
            if event_id in missing:
                event = operations.event(event_id)
                state = f"is {event['status']}, not a dead letter" if event else "does not exist (any more)"
                raise OutboxError(f"event {event_id} {state}; nothing was changed")
    return letters


def _warnings(operations: Operations, replay: Replay) -> list[str]:
    """What would keep the replayed events from running."""
    dispatchers = operations.dispatchers()
    pauses = {pause.topic: pause for pause in operations.pauses()}
    warnings = []
    wanted = {
        (letter.topic, letter.generation if replay.generation is None else replay.generation)
        for letter in replay.letters
    }
    unserved = sorted(
        f"{topic} (generation {generation})" if generation else topic
        for topic, generation in wanted
        if not any(dispatcher.serves(topic, generation) for dispatcher in dispatchers)
    )
    if unserved:
        names = ", ".join(unserved[:5]) + (f" and {len(unserved) - 5} more" if len(unserved) > 5 else "")
        warnings.append(
            f"no living dispatcher serves {names}: these events would wait, and so would a canary"
        )
    for topic in sorted({topic for topic, _ in wanted}):
        if pause := pauses.get(topic) or pauses.get(None):
            warnings.append(f"topic {topic} is paused by {pause.paused_by}: {pause.reason}")
    return warnings


PLAN = [
    Column(title="TOPIC", least=10),
    Column(title="ERROR CLASS", least=12),
    Column(title="EVENTS", right=True),
    Column(title="GENERATION", least=10),
    Column(title="WHAT WOULD HAPPEN", least=20),
]


def _plan(replay: Replay) -> list[dict[str, Any]]:
    plan = []
    for kind in replay.kinds:
        number = len(kind.letters)
        now = sorted({letter.generation for letter in kind.letters})
        rest = f"{number - replay.canary:,} at {replay.rate:g}/s"
        if replay.canary:
            what = f"canary, then {rest}" if number > 1 else "canary"
        else:
            what = rest
        plan.append(
            {
                "topic": kind.kind.topic,
                "error_class": kind.kind.error_class,
                "events": number,
                "generations": now,
                "new_generation": replay.generation,
                "what": what,
            }
        )
    return plan


def _print_plan(replay: Replay) -> None:
    print_table(
        PLAN,
        [
            (
                item["topic"],
                item["error_class"] or "-",
                count(item["events"]),
                ", ".join(map(str, item["generations"]))
                + (
                    ""
                    if replay.generation is None or item["generations"] == [replay.generation]
                    else f" -> {replay.generation}"
                ),
                item["what"],
            )
            for item in _plan(replay)
        ],
    )


def _show_plan(replay: Replay, warnings: Sequence[str], *, json_: bool) -> int:
    if json_:
        print_json(
            {
                "dry_run": True,
                "events": len(replay.letters),
                "kinds": _plan(replay),
                "warnings": list(warnings),
            }
        )
        return 0
    if not replay.letters:
        print("no dead letters like that")
        return 0
    _print_plan(replay)
    for text in warnings:
        warn(text)
    print(
        printable(
            f"a dry run: {plural(len(replay.letters), 'dead letter')} would be replayed by {replay.by}"
        ),
        "nothing was changed",
        sep="; ",
    )
    return 0


def _nothing_to_do(args: argparse.Namespace) -> int:
    if args.json:
        print_json({"dry_run": False, "kinds": []})
    else:
        print("no dead letters like that: nothing to do")
    return 0


def _print_result(replay: Replay, *, json_: bool) -> None:
    if json_:
        print_json(
            {
                "dry_run": False,
                "request": replay.request,
                "kinds": [
                    {
                        "topic": kind.kind.topic,
                        "error_class": kind.kind.error_class,
                        "events": len(kind.letters),
                        "replayed": kind.replayed,
                        "left": kind.left,
                        "died_again": kind.died_again,
                        "canary": kind.canary,
                        "outcome": kind.fate,
                        "why": kind.why,
                    }
                    for kind in replay.kinds
                ],
            }
        )
        return
    if len(replay.letters) == 1 and replay.kinds[0].fate == "replayed":
        letter = replay.letters[0]
        if replay.replayed:
            print(printable(f"{letter.event_id} of {letter.topic} replayed by {replay.by}"))
        else:
            print(f"{letter.event_id} was not replayed: it is locked, or no longer dead")
        return
    print()
    print_table(
        [
            Column(title="TOPIC", least=10),
            Column(title="ERROR CLASS", least=12),
            Column(title="REPLAYED", right=True),
            Column(title="LEFT", right=True),
            Column(title="DEAD AGAIN", right=True),
            Column(title="OUTCOME", least=16),
        ],
        [
            (
                kind.kind.topic,
                kind.kind.error_class or "-",
                count(kind.replayed),
                count(kind.left),
                count(kind.died_again),
                f"{kind.fate}: {kind.why}" if kind.why else kind.fate,
            )
            for kind in replay.kinds
        ],
    )
    left = sum(kind.left for kind in replay.kinds)
    stopped = any(kind.fate in ("canary died", "came back") for kind in replay.kinds)
    then = "; the same command goes on with them" + (" when the cause is mended" if stopped else "")
    print(f"\n{replay.replayed:,} replayed, {left:,} left dead{then if left else ''}")
