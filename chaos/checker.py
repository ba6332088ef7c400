"""The checker: a pure function from what was remembered to what was wrong with it.

Each rule is a function of its own, and the name of a violation. The rules about one event see its whole life: the
steps of its row in order, each with the verb of the state machine that it must have been, and the runs of its handler.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_right
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from chaos.alive import longest_gap
from chaos.faults import KINDS
from chaos.topics import TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.evidence import Evidence, Run, Step, Wish

ENDED = frozenset({"COMPLETED", "DEAD_LETTERED", "DISCARDED"})
CUTS_SOMEBODY_OFF = ("exhaust", "full-disk", "failover")
"""Faults of the database after which a living dispatcher may be without a connection that works for a while."""
CALL_DEADLINE = 15.0
"""How long a dispatcher waits for an answer, in seconds."""
TOLERANCE = 0.05
"""Seconds by which two processes may disagree about the order of things that they did at the same time."""


class Violation(NamedTuple):
    """A rule that was broken, by which event, and what shows it."""

    rule: str
    event: str
    text: str


class Change(NamedTuple):
    """A step with the one before it and its verb ('' when the state machine knows no such step)."""

    verb: str
    before: Step
    step: Step


class Life(NamedTuple):
    """All that is known of one event."""

    event: str
    topic: str
    born: Step
    changes: list[Change]
    runs: dict[int, Run]
    wish: Wish | None

    @property
    def last(self) -> Step:
        return self.changes[-1].step if self.changes else self.born

    def cycles(self) -> Iterator[list[Change]]:
        """From birth or replay to the next replay."""
        cycle: list[Change] = []
        for change in self.changes:
            if change.verb == "replay":
                yield cycle
                cycle = []
            cycle.append(change)
        yield cycle


def check(evidence: Evidence) -> list[Violation]:
    """Everything that is wrong, rule by rule."""
    lives, found = _lives(evidence)
    found += _check_wishes(evidence, lives)
    for life in lives.values():
        found += _check_steps(life)
        found += _check_fence(life)
        found += _check_results(life)
        found += _check_budget(life)
        found += _check_end(life)
    found += _check_tokens(lives.values())
    found += _check_pauses(evidence, lives.values())
    found += _check_leases(evidence, lives.values())
    found += _check_hold(evidence, lives.values())
    found += _check_rows(evidence, lives)
    found += _check_keys(evidence, lives.values())
    found += _check_effects(evidence, lives)
    found += _check_alerts(evidence, lives)
    found += _check_acts(evidence, lives)
    found += [Violation("canary", "", f"a secret is in {place}") for place in evidence.canaries]
    found += [
        Violation("traceback", "", f"an error that nobody caught is in {log}") for log in evidence.tracebacks
    ]
    if not any(run.outcome == "ok" for run in evidence.runs):
        found.append(Violation("idle", "", "no handler has ended well: this run proves nothing"))
    if evidence.drained_in is None:
        found.append(Violation("drain", "", "the backlog did not drain in time after the faults had ended"))
    return found


# Lives


def _lives(evidence: Evidence) -> tuple[dict[str, Life], list[Violation]]:
    steps: defaultdict[str, list[Step]] = defaultdict(list)
    for step in sorted(evidence.steps, key=lambda step: step.id):
        steps[step.event_id].append(step)
    wishes = {wish.mark: wish for wish in evidence.wishes}
    runs: defaultdict[str, dict[int, Run]] = defaultdict(dict)
    found = []
    for run in evidence.runs:
        if run.lease_seq in runs[run.event]:
            found.append(Violation("claim", run.event, f"lease {run.lease_seq} was run twice"))
        runs[run.event][run.lease_seq] = run
    found += [
        Violation("claim", event, "was run, and the outbox never had it")
        for event in runs.keys() - steps.keys()
    ]
    lives = {}
    for event, its in steps.items():
        if its[0].old_status is not None:
            found.append(Violation("state machine", event, "has no beginning"))
            continue
        changes = [Change(_verb(before, step), before, step) for before, step in pairwise(its)]
        lives[event] = Life(
            event, its[0].topic or "", its[0], changes, runs.get(event, {}), wishes.get(its[0].mark or "")
        )
    return lives, found


def _verb(before: Step, step: Step) -> str:
    """Which step of the state machine this was, by what it did to the row."""
    match (step.old_status, step.status):
        case (None, _):
            return ""
        case (_, None):
            return "delete"
        case ("PENDING" | "RETRYING", "RUNNING"):
            return "claim"
        case ("RUNNING", "RUNNING"):
            return "heartbeat"
        case ("RUNNING", "COMPLETED"):
            return "complete"
        case ("RUNNING", "RETRYING" | "DEAD_LETTERED") if step.lapses == before.lapses + 1:
            return "lapse" if step.token else "reap"
        case ("RUNNING", "RETRYING") if step.snoozes == before.snoozes + 1:
            return "snooze"
        case ("RUNNING", "PENDING" | "RETRYING") if step.attempts == before.attempts - 1:
            return "release"
        case ("RUNNING", "RETRYING" | "DEAD_LETTERED"):
            return "fail"
        case ("DEAD_LETTERED", "DEAD_LETTERED"):
            return "alert"
        case ("DEAD_LETTERED", "PENDING"):
            return "replay"
        case ("PENDING" | "RETRYING" | "DEAD_LETTERED", "DISCARDED"):
            return "discard"
        case _:
            return ""


# Rules about one event


def _check_steps(life: Life) -> Iterator[Violation]:
    """state machine: every change is one that the specification has, and changes what it should and nothing else."""
    if (life.born.status, life.born.attempts, life.born.lease_seq, life.born.token) != (
        "PENDING",
        0,
        0,
        None,
    ):
        yield Violation("state machine", life.event, f"was born as {life.born}")
    for verb, before, step in life.changes:
        if step.old_status != before.status:
            yield Violation("state machine", life.event, f"a step is missing between {before} and {step}")
        if not verb:
            yield Violation("state machine", life.event, f"{before.status} became {step.status}: {step}")
        elif verb == "delete":
            if step.old_status not in ("COMPLETED", "DISCARDED") and not _deletes(life, step):
                yield Violation("state machine", life.event, f"was deleted while {step.old_status}")
        elif wrong := [
            f"{name}: {getattr(before, name)} became {getattr(step, name)}"
            for name, wanted in _wanted(verb, before, step).items()
            if getattr(step, name) != wanted
        ]:
            yield Violation("state machine", life.event, f"{verb} changed {', '.join(wrong)}")
        if verb == "claim" and (step.token is None or step.locked_by != step.who):
            yield Violation("state machine", life.event, f"claimed by {step.who}, for {step.locked_by}")


def _deletes(life: Life, step: Step) -> bool:
    topic = TOPICS.get(life.topic)
    return step.old_status == "RUNNING" and topic is not None and topic.deleted


def _wanted(verb: str, before: Step, step: Step) -> dict[str, object]:
    """The values that a step must have left; what may be anything is not named."""
    same = {
        name: getattr(before, name)
        for name in ("token", "attempts", "max_attempts", "lapses", "snoozes", "lease_seq", "alone")
    } | {"history": before.history, "generation": before.generation}
    match verb:
        case "claim":
            same["attempts"] = before.attempts + 1
            same["lease_seq"] = before.lease_seq + 1
            for free in ("token", "max_attempts", "alone"):
                del same[free]
        case "release":
            same["attempts"] = before.attempts - 1
        case "snooze":
            same["attempts"] = before.attempts - 1
            same["snoozes"] = before.snoozes + 1
        case "lapse" | "reap":
            # What lapsed in company gets its attempt back, unless it was promised not to start twice.
            same["attempts"] = before.attempts - (not before.alone and before.max_attempts != 1)
            same["lapses"] = before.lapses + 1
            if verb == "reap":
                same["token"] = None
        case "replay":
            same |= {
                "token": None,
                "attempts": 0,
                "max_attempts": None,
                "lapses": 0,
                "snoozes": 0,
                "alone": False,
            }
            same["history"] = before.history + 1
            del same["generation"]
        case "discard":
            same["history"] = before.history + 1
    return same


def _check_fence(life: Life) -> Iterator[Violation]:
    """fence: what happens to a claimed row is done by whoever claimed it, or after its lease has run out."""
    for verb, before, step in life.changes:
        if before.status != "RUNNING":
            continue
        if verb == "reap":
            if before.lease_until is not None and step.at < before.lease_until - TOLERANCE:
                yield Violation("fence", life.event, f"lease {before.lease_seq} was reaped before it ran out")
        elif step.who != before.locked_by:
            yield Violation(
                "fence",
                life.event,
                f"{verb} by {step.who}, while {before.locked_by} held lease {before.lease_seq}",
            )


def _check_results(life: Life) -> Iterator[Violation]:
    """result: what is stored for a claim is what came of the handler's run under that very claim."""
    for verb, before, step in life.changes:
        if before.status != "RUNNING" or not (wrong := _wrong_result(life, verb, before, step)):
            continue
        run = life.runs.get(before.lease_seq)
        known = f"its run ended {run.outcome}" if run else "its handler never ran"
        yield Violation("result", life.event, f"lease {before.lease_seq}: {wrong}, but {known}")


def _wrong_result(life: Life, verb: str, before: Step, step: Step) -> str:
    run = life.runs.get(before.lease_seq)
    if run is not None and run.ended is not None and run.ended > step.at + TOLERANCE:
        run = run._replace(outcome=None)  # it had not ended by then
    outcome = run.outcome if run else None
    topic = TOPICS[life.topic]
    if verb == "complete" or (verb == "delete" and step.old_status == "RUNNING"):
        return "" if outcome == "ok" else "completed"
    if verb == "snooze":
        return "" if outcome == "later" else "snoozed"
    if verb == "release":
        # Started and given back: only when it was cancelled by a shutdown, and never under a budget of one.
        cancelled = outcome == "transient" and before.max_attempts != 1
        return "" if run is None or cancelled else "released"
    if verb == "fail" and outcome == "terminal" and step.status != "DEAD_LETTERED":
        return "goes on"
    if verb == "fail" and step.verdict == "terminal":
        bad = run is None and life.wish is not None and life.wish.bad
        return "" if outcome == "terminal" or bad else "failed as terminal"
    if verb == "fail":
        # A timeout fails a run that goes on or ends well; a transaction may fail after its handler has ended.
        excused = run is not None and (topic.timed or topic.transactional)
        return "" if outcome == "transient" or excused else "failed as transient"
    return ""


def _check_budget(life: Life) -> Iterator[Violation]:
    """budget: dead only when terminal or when all attempts were spent; a budget of one is never started twice."""
    allowed = life.born.budget or TOPICS[life.topic].max_attempts
    for cycle in life.cycles():
        starts = 0
        for verb, before, step in cycle:
            if verb == "claim":
                if step.max_attempts != allowed:
                    yield Violation(
                        "budget", life.event, f"claimed with a budget of {step.max_attempts}, not {allowed}"
                    )
                run = life.runs.get(step.lease_seq)
                starts += run is not None and run.outcome != "later"
            if step.status == "DEAD_LETTERED" and verb in ("fail", "lapse", "reap"):
                terminal = verb == "fail" and step.verdict == "terminal"
                if not terminal and step.attempts < allowed:
                    yield Violation(
                        "budget",
                        life.event,
                        f"dead after {step.attempts} of {allowed} attempts ({before.lease_seq})",
                    )
                if not terminal and (spent := _really_spent(life, cycle, step)) < allowed:
                    yield Violation(
                        "budget", life.event, f"dead, and only {spent} of {allowed} attempts were made"
                    )
            if step.status == "RETRYING" and verb == "fail" and step.attempts >= allowed:
                yield Violation("budget", life.event, f"goes on after {step.attempts} of {allowed} attempts")
        if allowed == 1 and starts > 1:
            yield Violation("budget", life.event, f"was started {starts} times with a budget of one")


def _really_spent(life: Life, cycle: list[Change], death: Step) -> int:
    """Attempts for which there is evidence outside the row: a run that failed, or a claim that died alone."""
    spent = 0
    for verb, before, step in cycle:
        if step.id > death.id:
            break
        failed = verb == "fail" and before.lease_seq in life.runs
        died = verb in ("lapse", "reap") and (before.alone or before.max_attempts == 1)
        spent += failed or died
    return spent


def _check_end(life: Life) -> Iterator[Violation]:
    """lost: whatever was enqueued has ended."""
    last = life.last
    if last.status is not None and last.status not in ENDED:
        yield Violation("lost", life.event, f"is still {last.status} at the end: {last}")


# Rules about all of them


def _check_wishes(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """lost, twice: an acknowledged enqueue is there, once; another one at most once; a rolled-back one never."""
    born: defaultdict[str, list[Life]] = defaultdict(list)
    for life in lives.values():
        born[life.born.mark or ""].append(life)
    for wish in evidence.wishes:
        its = sorted(born.get(wish.mark, []), key=lambda life: life.born.id)
        if wish.never and its:
            yield Violation("rolled back", its[0].event, "its transaction was rolled back, and it is there")
        for event in wish.events:
            if event not in lives:
                yield Violation("lost", event, f"was acknowledged ({wish.topic}), and is not there")
        if wish.acked is not None and not its:
            yield Violation("lost", "", f"mark {wish.mark} was acknowledged, and no event has it")
        for first, second in pairwise(its):
            # A key is unique while its row exists: after it was pruned, the same key is a new event.
            if first.last.status is not None or first.last.id > second.born.id:
                yield Violation("twice", second.event, f"is the same as {first.event}")


def _check_tokens(lives: Iterable[Life]) -> Iterator[Violation]:
    """claim: a token belongs to one call of claim, and a handler runs under a claim that exists.

    Repeated because the answer was lost, the call takes nothing new for as long as it holds something: only when all of
    it has been reaped meanwhile may it take others.
    """
    calls: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for life in lives:
        claimed = {step.lease_seq: step for verb, _, step in life.changes if verb == "claim"}
        for first, last in _claims(life):
            known = calls[first.token or ""].get(first.transaction, (first.id, 0))
            calls[first.token or ""][first.transaction] = (min(known[0], first.id), max(known[1], last))
        for lease_seq, run in life.runs.items():
            if lease_seq not in claimed:
                yield Violation("claim", life.event, f"was run under lease {lease_seq}, which nobody had")
            elif run.started < claimed[lease_seq].at - TOLERANCE:
                yield Violation("claim", life.event, f"was run before lease {lease_seq} began")
    for token, transactions in calls.items():
        spans = sorted(transactions.values())
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                yield Violation(
                    "claim", "", f"a second call with token {token} took more while the first held some"
                )


def _check_leases(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
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
            gap = longest_gap(evidence.alive.get(before.locked_by or "", []), beaten, before.lease_until)
            if gap < evidence.lease / 3:
                yield Violation(
                    "lease",
                    life.event,
                    f"lease {before.lease_seq} was not kept by {before.locked_by}, who lived all the time",
                )


def _check_hold(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
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


def _claims(life: Life) -> Iterator[tuple[Step, int]]:
    """Each claim, and the step that ended it."""
    claim: Step | None = None
    for verb, _, step in life.changes:
        if verb == "claim":
            claim = step
        elif claim is not None and step.status != "RUNNING":
            yield claim, step.id
            claim = None
    if claim is not None:
        yield claim, 1 << 62


def _check_pauses(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
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


def _check_rows(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """rows: the table at the end is what the steps lead to."""
    led_to = {event: life.last.status for event, life in lives.items() if life.last.status is not None}
    for event in sorted(led_to.keys() | evidence.rows.keys()):
        if led_to.get(event) != evidence.rows.get(event):
            yield Violation(
                "rows", event, f"steps lead to {led_to.get(event)}, the table has {evidence.rows.get(event)}"
            )


def _check_keys(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """order: of one key one runs at a time, and a later event waits until the earlier one has ended."""
    keys: defaultdict[str, list[Life]] = defaultdict(list)
    for life in lives:
        if life.born.ordering_key is not None:
            keys[life.born.ordering_key].append(life)
    told = {act.request: act.told for act in evidence.acts if act.told is not None}
    for key, its in keys.items():
        yield from _check_one_at_a_time(key, its)
        yield from _check_order(key, its, told)


def _check_one_at_a_time(key: str, its: list[Life]) -> Iterator[Violation]:
    held: list[tuple[int, int, str]] = []
    for life in its:
        held += [(claim.id, end, life.event) for claim, end in _claims(life)]
    held.sort()
    for (_, end, first), (start, _, second) in pairwise(held):
        if start < end:
            yield Violation("order", second, f"ran at the same time as {first}, of the same key {key}")


class Hold(NamedTuple):
    """From which step to which an event kept later ones of its key waiting; seen by claims that began after *told*."""

    since: int
    until: int
    told: float
    life: Life


def _check_order(key: str, its: list[Life], told: dict[str, float]) -> Iterator[Violation]:
    """Only of transactions that did not overlap: the earlier was acknowledged before the later was begun."""
    known = [life for life in its if life.wish is not None]
    holds = sorted((hold for life in known for hold in _holds(life, told)), key=lambda hold: hold.since)
    claims = [(step, life) for life in known for verb, _, step in life.changes if verb == "claim"]
    claims.sort(key=lambda claim: claim[0].id)
    # All that is unfinished at the moment of each claim; few at any time, since a key drains in order.
    position = 0
    unfinished: list[Hold] = []
    for claim, later in claims:
        while position < len(holds) and holds[position].since < claim.id:
            unfinished.append(holds[position])
            position += 1
        unfinished = [hold for hold in unfinished if hold.until > claim.id]
        for hold in unfinished:
            if hold.life is later or hold.told > claim.began or not _before(hold.life, later):
                continue
            yield Violation(
                "order",
                later.event,
                f"was claimed before {hold.life.event}, the earlier one of key {key}, had ended",
            )


def _before(earlier: Life, later: Life) -> bool:
    assert earlier.wish is not None
    assert later.wish is not None
    acked = earlier.wish.acked
    return acked is not None and acked < later.wish.intended and len(earlier.wish.events) == 1


def _holds(life: Life, told: dict[str, float]) -> Iterator[Hold]:
    since: int | None = life.born.id
    visible = -math.inf
    for verb, _, step in life.changes:
        waits = step.status in ("PENDING", "RETRYING", "RUNNING") or (
            step.status == "DEAD_LETTERED" and life.born.holds_key is True
        )
        if since is not None and not waits:
            yield Hold(since, step.id, visible, life)
            since = None
        elif since is None and waits and verb == "replay":
            since, visible = step.id, told.get(step.request or "", math.inf)
    if since is not None:
        yield Hold(since, 1 << 62, visible, life)


def _check_effects(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """effect: once for each event that completed; never for one that did not. The application's data likewise."""
    counted: defaultdict[tuple[str, str], int] = defaultdict(int)
    for event, kind in evidence.effects:
        counted[kind, event] += 1
    for (kind, event), count in counted.items():
        if count > 1:
            yield Violation("effect", event, f"its effect ({kind}) happened {count} times")
        if event not in lives:
            yield Violation("effect", event, f"has an effect ({kind}), and the outbox never had it")
    for life in lives.values():
        if TOPICS[life.topic].transactional:
            completed = any(verb == "complete" for verb, _, _ in life.changes)
            if completed != (counted["transactional", life.event] > 0):
                yield Violation("effect", life.event, f"completed: {completed}, its effect says otherwise")
        elif life.topic == "effect":
            well = any(run.outcome == "ok" for run in life.runs.values())
            if well and not counted["first time", life.event]:
                yield Violation("effect", life.event, "ran to its end, and its effect is not there")
    for event in sorted(evidence.business - lives.keys()):
        yield Violation("business", event, "the application's data were committed without it")


def _check_alerts(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """alert: each death is alerted, unless somebody dealt with it first, under one id that is known beforehand."""
    accepted = {alert.alert for alert in evidence.alerts if 200 <= alert.status < 300}
    stamped: dict[str, float] = {}
    for life in lives.values():
        owed = False
        alert_id: str | None = None
        for verb, _, step in life.changes:
            if step.status == "DEAD_LETTERED" and verb != "alert":
                owed, alert_id = True, None
                if step.alert_id is not None or step.alerted:
                    yield Violation("alert", life.event, "was born dead with an alert of an earlier death")
            elif verb == "alert":
                if alert_id is not None and step.alert_id != alert_id:
                    yield Violation("alert", life.event, f"its alert {alert_id} became {step.alert_id}")
                alert_id = step.alert_id
                if alert_id is not None:
                    stamped.setdefault(alert_id, step.at)
                if step.alerted and alert_id not in accepted:
                    yield Violation(
                        "alert", life.event, f"counts as alerted, and Sentry never had {alert_id}"
                    )
                owed = not step.alerted
            elif verb in ("replay", "discard", "delete"):
                owed = False
        if owed:
            yield Violation("alert", life.event, "is dead, and nobody was told")
    for alert in evidence.alerts:
        if alert.alert not in stamped:
            yield Violation("alert", alert.event, f"Sentry has the alert {alert.alert}, which no row has had")
        elif alert.at < stamped[alert.alert] - TOLERANCE:
            yield Violation("alert", alert.event, f"alert {alert.alert} was sent before it was on the row")


def _check_acts(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """replay: what an operator was told is what happened, once; and each of it is an entry of the history."""
    done: defaultdict[str, list[str]] = defaultdict(list)
    for life in lives.values():
        changed = 0
        for verb, _, step in life.changes:
            if verb not in ("replay", "discard"):
                continue
            changed += 1
            if step.request is not None:
                done[step.request].append(life.event)
        if (last := life.last).status is not None and last.history != changed:
            yield Violation(
                "replay", life.event, f"{changed} replays and discards, {last.history} in its history"
            )
    for act in evidence.acts:
        events = done.get(act.request, [])
        if len(events) != len(set(events)):
            yield Violation("replay", events[0], f"one request changed it more than once ({act.verb})")
        if act.result == "done" and not events:
            yield Violation("replay", act.events[0], f"{act.verb} was acknowledged, and did not happen")
        if act.result == "refused" and events:
            yield Violation("replay", events[0], f"{act.verb} was refused, and happened")
        if act.result is not None and act.result.endswith(" done"):
            told = int(act.result.split()[0])
            if told != len(events):
                yield Violation("replay", act.events[0], f"{act.verb} said {told}, and changed {len(events)}")
