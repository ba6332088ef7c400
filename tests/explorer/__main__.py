"""Explores the model and prints what it found: `python -m tests.explorer [--large] [--no-sql] [WORD]`.

First every scenario under the product's own rules, with each call that can be reached compared with the SQL functions;
then every variant with one mistake in it, with the shortest story that shows the mistake. WORD: only names with it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from tests.explorer.conformance import compare
from tests.explorer.scenarios import LARGE, SCENARIOS, VARIANTS
from tests.explorer.search import Found, explore
from tests.support import testbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__)
    parser.add_argument(
        "word", nargs="?", default="", help="only scenarios and variants whose name contains it"
    )
    parser.add_argument("--large", action="store_true", help="one more fault in every scenario")
    parser.add_argument("--no-sql", action="store_true", help="the model alone")
    arguments = parser.parse_args()
    scenarios = LARGE if arguments.large else SCENARIOS
    bad = 0
    with ExitStack() as stack:
        dsn = None
        if not arguments.no_sql:
            dsn = stack.enter_context(stack.enter_context(testbed.running()).database())
        for name, scenario in scenarios.items():
            if arguments.word in name:
                found = explore(scenario)
                compared = (
                    f", {compare(dsn, scenario, found.calls)} calls as in SQL"
                    if dsn and not found.wrong
                    else ""
                )
                print(f"{name}: {size(found)}{compared}", flush=True)
                tell(found)
                bad += bool(found.wrong)
    for name, variant in VARIANTS.items():
        if arguments.word in name:
            found = explore(SCENARIOS[variant.scenario], variant.rules)
            print(
                f"{'' if found.wrong else 'MISSED: '}{name} (in “{variant.scenario}”, {size(found)})",
                flush=True,
            )
            tell(found)
            bad += not found.wrong
    return bool(bad)


def size(found: Found) -> str:
    return f"{found.states:,} states, {found.steps:,} steps, {found.seconds:.1f} s"


def tell(found: Found) -> None:
    if found.wrong:
        for number, sentence in enumerate(found.story, start=1):
            print(f"  {number:2}. {sentence}")
        print(f"      → {found.wrong}\n")


if __name__ == "__main__":
    sys.exit(main())
