"""Which blocks of which runbook a test executes: declared, so that a block which nobody executes is found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])

executed: dict[str, set[str]] = defaultdict(set)
"""The blocks of each runbook that some test executes."""

_followed: dict[Any, tuple[str, tuple[str, ...]]] = {}


def follows(runbook: str, *blocks: str) -> Callable[[Test], Test]:
    """The test runs these blocks of the runbook, all of them, and no others."""

    def declare(test: Test) -> Test:
        executed[runbook].update(blocks)
        _followed[test] = (runbook, blocks)
        return test

    return declare


def followed(test: Any) -> tuple[str, tuple[str, ...]]:
    return _followed[test]
