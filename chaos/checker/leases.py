"""Rules about claims and leases: tokens, pauses, and who may lose a lease."""

from __future__ import annotations

import math
from bisect import bisect, bisect_right
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.alive import time_lost
from chaos.checker.lives import TOLERANCE, Life, Violation, claims_of
from chaos.faults import KINDS
from chaos.topics import BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.evidence import Evidence

CUTS_SOMEBODY_OFF = ("exhaust", "full-disk", "failover")
"""Faults of the database after which a living dispatcher may be without a connection that works for a while."""
CALL_DEADLINE = 15.0
"""How long a dispatcher waits for an answer, in seconds."""


def check_tokens(lives: Iterable[Life]) -> Iterator[Violation]:
    """claim: a token belongs to one call of claim, and a handler runs under a claim that exists.

    Repeated because the answer was lost, the call takes nothing new for as long as it holds something: only when all of
    it has been reaped meanwhile may it take others.
    """
    calls: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    taken: Counter[tuple[str | None, int]] = Counter()
    for life in lives:
        claimed = {step.lease_seq: step for verb, _, step in life.changes if verb == "claim"}
        for first, last in claims_of(life):
            taken[first.token, first.transaction] += 1
            known = calls[first.token or ""].get(first.transaction, (first.id, 0))
            calls[first.token or ""][first.transaction] = (min(known[0], first.id), max(known[1], last))
        for lease_seq, run in life.runs.items():
            if lease_seq not in claimed:
                yield Violation("claim", life.event, f"was run under lease {lease_seq}, which nobody had")
            elif run.started < claimed[lease_seq].at - TOLERANCE:
                yield Violation("claim", life.event, f"was run before lease {lease_seq} began")
    for (token, _), number in taken.items():
        if number > BATCH:
            yield Violation("claim", "", f"a call with token {token} took {number}")
    for token, transactions in calls.items():
        spans = sorted(transactions.values())
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                yield Violation(
                    "claim", "", f"a second call with token {token} took more while the first held some"
                )


def check_leases(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """lease: who lives and reaches the database keeps his leases, whatever his handlers do, also after an outage."""
    if not evidence.lease:
        return
    cut_off = [
        (fault.at, fault.at + fault.values["seconds"])
        for fault in evidence.faults
        if fault.kind == "fault" and (kind := fault.values["fault"]) in KINDS
        if KINDS[kind].lane in ("network", "sessions") or kind in CUTS_SOMEBODY_OFF
    ]
    for life in lives:
        for verb, before, step in life.changes:
            if verb != "reap" or before.lease_until is None:
                continue
            beaten = before.lease_until - evidence.lease
            # A call that was cut off is noticed by its deadline, and goes on being tried.
            if any(
                begun - TOLERANCE < step.at and beaten < ended + CALL_DEADLINE for begun, ended in cut_off
            ):
                continue
            lost = time_lost(evidence.alive.get(before.locked_by or "", []), beaten, before.lease_until)
            if lost < evidence.lease / 3:
                yield Violation(
                    "lease",
                    life.event,
                    f"lease {before.lease_seq} was not kept by {before.locked_by}, who lived all the time",
                )


def check_hold(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """hold: when nobody has swept for a while, nothing is reaped for one lease, so that the living can report first."""
    sweeps = sorted(evidence.sweeps)
    swept_in = {sweep.transaction: sweep.at for sweep in sweeps}
    times = [sweep.at for sweep in sweeps]
    after_silence = times[:1] + [
        later for earlier, later in pairwise(times) if later - earlier > evidence.lease * 2 / 3 + TOLERANCE
    ]
    for life in lives:
        for verb, _, step in life.changes:
            if verb != "reap" or (at := swept_in.get(step.transaction)) is None:
                continue
            number = bisect_right(after_silence, at)
            if number and at < after_silence[number - 1] + evidence.lease - TOLERANCE:
                yield Violation(
                    "hold", life.event, f"lease {step.lease_seq} was reaped right after a silence"
                )


def check_pauses(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """pause: a claim that began after the pause of a topic was committed takes nothing of it."""
    pauses: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for pause in evidence.pauses:
        pauses[pause.topic].append((pause.since, pause.until))
    for spans in pauses.values():
        spans.sort()
    for life in lives:
        spans = pauses[life.topic]
        for verb, _, step in life.changes:
            number = bisect(spans, (step.began - TOLERANCE, math.inf)) - 1
            if verb == "claim" and number >= 0 and step.at < spans[number][1] - TOLERANCE:
                yield Violation("pause", life.event, f"{life.topic} was paused, and {step.who} claimed it")
