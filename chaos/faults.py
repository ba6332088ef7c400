"""The faults, and the schedule of a run: made of the seed alone, so that the same seed does the same things again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of fault. Lengths are in leases; those without a length are over at once."""

    lane: str
    weight: float
    shortest: float = 0.0
    longest: float = 0.0
    dear: bool = False
    """Takes many seconds: not for short runs."""


KINDS = {
    # Processes: killed, stopped, replaced.
    "kill-dispatcher": Kind("processes", 6),
    "stop-dispatcher": Kind("processes", 4, 0.2, 2.5),
    "order-dispatcher": Kind("processes", 8),
    "kill-child": Kind("processes", 2),
    "order-child": Kind("processes", 2),
    "stop-child": Kind("processes", 1.5, 0.2, 2.5),
    "deploy": Kind("processes", 3),
    "kill-producer": Kind("processes", 1.5),
    "stop-producer": Kind("processes", 1, 0.2, 2.5),
    "order-producer": Kind("processes", 1.5),
    "kill-operator": Kind("processes", 1),
    "order-operator": Kind("processes", 1.5),
    # The database, one thing at a time.
    "terminate": Kind("database", 6),
    "restart": Kind("database", 2),
    "crash": Kind("database", 2),
    "kill-postmaster": Kind("database", 1),
    "freeze": Kind("database", 2, 0.2, 2.0),
    "exhaust": Kind("database", 2, 0.5, 2.5),
    "full-disk": Kind("database", 2, 0.5, 2.5),
    "failover": Kind("database", 1.5, 2.0, 5.0, dear=True),
    # The network.
    "lose": Kind("network", 8, 1.0, 4.0),
    "reset": Kind("network", 3),
    "delay": Kind("network", 2, 0.5, 3.0),
    "forget": Kind("network", 2, 0.2, 2.0),
    "refuse": Kind("network", 1, 0.2, 2.0),
    # Sentry.
    "sentry-busy": Kind("sentry", 2, 0.5, 3.0),
    "sentry-broken": Kind("sentry", 2, 0.5, 3.0),
    "sentry-slow": Kind("sentry", 2, 0.5, 3.0),
    "sentry-down": Kind("sentry", 2, 0.5, 3.0),
    # Sessions of others.
    "lock-rows": Kind("sessions", 3, 0.3, 3.0),
    "stall-backend": Kind("sessions", 3, 0.2, 4.0),
    "hold-xmin": Kind("sessions", 1, 5.0, 40.0),
}
GAPS = {"processes": 2.0, "database": 3.0, "network": 1.5, "sentry": 2.0, "sessions": 3.0}
"""Leases between the end of one fault and the beginning of the next of the same lane, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault to come: when, what, for how long, and a number from 0 to 1 that chooses whom it hits."""

    at: float
    kind: str
    seconds: float
    choice: float


def chosen(mix: str, *, dear: bool) -> list[str]:
    """The kinds that a mix names: kinds, lanes or `all`, separated by commas; a minus takes one away."""
    kinds: list[str] = []
    for part in mix.split(","):
        name = part.strip().removeprefix("-")
        named = [kind for kind in KINDS if name in (kind, KINDS[kind].lane, "all")]
        if name == "none":
            continue
        if not named:
            lanes = ", ".join(GAPS)
            raise ValueError(
                f"{name} is no fault: a mix names lanes ({lanes}), kinds ({', '.join(KINDS)}) or all"
            )
        if part.strip().startswith("-"):
            kinds = [kind for kind in kinds if kind not in named]
        else:
            kinds += [
                kind for kind in named if kind not in kinds and (dear or name == kind or not KINDS[kind].dear)
            ]
    return kinds


def plan(seed: int, seconds: float, lease: float, kinds: list[str]) -> list[Planned]:
    """What happens in a run of so many seconds."""
    planned = []
    for lane, gap in GAPS.items():
        rng = random.Random(f"{seed} {lane}")
        mine = [kind for kind in kinds if KINDS[kind].lane == lane]
        at = 1.0 + rng.expovariate(1 / (gap * lease))
        while mine and at < seconds:
            [kind] = rng.choices(mine, [KINDS[kind].weight for kind in mine])
            length = rng.uniform(KINDS[kind].shortest, KINDS[kind].longest) * lease
            planned.append(Planned(at=at, kind=kind, seconds=length, choice=rng.random()))
            at += (length if kind != "hold-xmin" else 0.0) + rng.expovariate(1 / (gap * lease))
    return sorted(planned, key=lambda fault: fault.at)
