"""The topics of the rig's application: what producers, handlers and the checker have to agree on."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """How often it comes (of about 1150), and what the specification says about its jobs."""

    weight: int
    max_attempts: int = 5
    timed: bool = False
    """Has a timeout, so that a run may count as failed whatever it does afterwards."""
    endless: bool = False
    """Does not end by itself for so long that the timeout must have come first."""
    transactional: bool = False
    deleted: bool = False
    """Rows are deleted instead of kept as COMPLETED."""


TOPICS = {
    "fast": Topic(300),
    "deleted": Topic(60, deleted=True),
    "slow": Topic(100),
    "thread": Topic(60),
    "blocks": Topic(3),
    "grabs": Topic(2, max_attempts=2),
    "ordered": Topic(200, max_attempts=3),
    "once": Topic(60, max_attempts=1),
    "generations": Topic(60, max_attempts=2),
    "transactional": Topic(60, timed=True, transactional=True),
    "transactional.sync": Topic(40, timed=True, transactional=True),
    "effect": Topic(50, timed=True),
    "raises": Topic(60, max_attempts=3),
    "raises in a thread": Topic(30, max_attempts=3),
    "model": Topic(20),
    "later": Topic(30),
    "hangs": Topic(6, max_attempts=2, timed=True, endless=True),
    "hangs in a thread": Topic(4, max_attempts=2, timed=True),
    "stubborn": Topic(4, max_attempts=2, timed=True),
    "kills": Topic(1, max_attempts=2),
    "kills in a thread": Topic(1, max_attempts=2),
}


def weights(wanted: str = "") -> dict[str, int]:
    """How often which topic comes: as above, or only those that are named, as in `fast=10,kills=1`."""
    if not wanted:
        return {name: topic.weight for name, topic in TOPICS.items()}
    named = dict(part.split("=") for part in wanted.split(","))
    if unknown := named.keys() - TOPICS.keys():
        raise ValueError(f"no such topic: {', '.join(sorted(unknown))}")
    return {name: int(weight) for name, weight in named.items()}


CONCURRENCY = 20
BATCH = 10
"""Of every dispatcher: so little that a backlog takes many claims, and writes hold more than one of them."""
SOME_TOPICS = ("[!dm]*",)
"""Patterns of the topics that the first dispatcher serves: all but few, or the others would have too much to do."""
RETENTION = 60.0
"""How long operators keep what has ended, in seconds."""
BACKOFF = 0.1
"""The ceiling of the first wait after a failure; each one after that is twice as high."""
BACKOFF_MAX = 1.0
"""The longest wait after a failure, in seconds."""
SNOOZE = 0.2
"""How long a handler asks to be left alone, in seconds."""
ENDLESS = 25.0
"""How long a handler runs that nobody stops, in seconds: its process may stand still for some of them."""
CANARY = "kAnArI"
"""Begins every secret of a payload. It must be found nowhere else."""
