"""Numbers out of measurements: quantiles, spread, rates out of marks, and ratios round by round."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Marks = Sequence[tuple[int, float]]
"""(jobs so far, seconds) in ascending order."""


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which *share* of them lie, by the nearest rank: an observed value, never a mean of two."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    if not values:
        return math.nan
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, slots=True)
class Summary:
    """Several rounds of one number."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """How far the rounds lie apart, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else math.nan


def summarise(values: Sequence[float]) -> Summary:
    return Summary(median(values), min(values), max(values), len(values))


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ours by theirs for each round that both have: what the machine did in a round, it did to both."""
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys()) if theirs[number]]


def rate(marks: Marks, ended: float | None = None) -> float:
    """Jobs per second from the first job's start to the end (the last mark, or when the last was durable)."""
    if len(marks) < 2:
        return math.nan
    (first, began), (last, finished) = marks[0], marks[-1]
    seconds = (finished if ended is None else ended) - began
    return (last - first) / seconds if seconds > 0 else math.nan


def time_of(marks: Marks, count: float) -> float:
    """When so many jobs had been run, between two marks by a straight line."""
    place = bisect_left(marks, (count, -math.inf))
    if place == 0:
        return marks[0][1]
    if place == len(marks):
        return marks[-1][1]
    (below, then), (above, later) = marks[place - 1], marks[place]
    return then + (later - then) * (count - below) / (above - below)


def tenths(marks: Marks) -> tuple[float, float]:
    """Jobs per second over the first and over the last tenth of the jobs."""
    total = marks[-1][0]
    first = total * 0.1 / (time_of(marks, total * 0.1) - marks[0][1])
    last = total * 0.1 / (marks[-1][1] - time_of(marks, total * 0.9))
    return first, last


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The rise of the straight line through the points (least squares), per unit of their first number."""
    if len(points) < 2:
        return math.nan
    middle = [sum(point[axis] for point in points) / len(points) for axis in (0, 1)]
    run = sum((across - middle[0]) ** 2 for across, _ in points)
    rise = sum((across - middle[0]) * (up - middle[1]) for across, up in points)
    return rise / run if run else math.nan


def latency_metrics(values: Sequence[float], prefix: str = "") -> dict[str, float]:
    """The usual quantiles, in milliseconds."""
    return {
        f"{prefix}{name}_ms": round(quantile(values, share) * 1000, 3)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))
    }


def thinned(values: Sequence[float], most: int = 2000) -> list[float]:
    """Evenly spaced ones of the sorted values: enough to draw their distribution."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (most - 1))] for place in range(most)]
