"""What is left of a run: journals and tables as values, read from the directory that the rig wrote them to."""

from __future__ import annotations

import json
from bisect import bisect
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from chaos import journal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Wish(NamedTuple):
    """One event that a producer wanted, by its mark, and what became of that as far as the producer knows."""

    mark: str
    topic: str
    bad: bool
    key: str | None
    intended: float
    acked: float | None = None
    events: frozenset[str] = frozenset()
    """Ids that were returned; more than one is wrong."""
    never: bool = False
    options: dict[str, Any] | None = None
    """What else was given: dead_key, max_attempts, generation, priority, delay."""


OF_MANY = ("replay_many", "replay_kind", "discard_kind")
"""What operators do to many at once: each call says how many, and a repeated one may change more."""


class Run(NamedTuple):
    """One execution of a handler. `ended` is None when it was never seen to end."""

    event: str
    lease_seq: int
    worker: str
    pid: int
    started: float
    ended: float | None
    outcome: str | None
    """ok, transient, terminal, later: what the specification says must come of it."""
    attempt: int | None = None
    max_attempts: int | None = None
    mark: str | None = None
    """The mark in the payload that the handler was given."""
    raised: str | None = None
    """The class of what it raised; None where nobody could hand that on as it is."""
    said: str = ""
    """The beginning of what that said, as far as it is kept as it is."""


class Step(NamedTuple):
    """One change of a row, as the trigger saw it. `at` is on the clock of the journals."""

    id: int
    at: float
    who: str
    transaction: int
    event_id: str
    old_status: str | None
    status: str | None
    began: float = 0.0
    """When its transaction began."""
    token: str | None = None
    attempts: int = 0
    max_attempts: int | None = None
    lapses: int = 0
    snoozes: int = 0
    lease_seq: int = 0
    lease_until: float | None = None
    next_run_at: float | None = None
    locked_by: str | None = None
    alone: bool = False
    generation: int = 0
    history: int = 0
    request: str | None = None
    rule: str | None = None
    verdict: str | None = None
    alert_id: str | None = None
    alerted: bool = False
    error: str | None = None
    """Empty: there is none. None: not written down, as in evidence of older rigs."""
    failure: dict[str, Any] | None = None
    first_failed_at: float | None = None
    completed_at: float | None = None
    cycle: dict[str, Any] | None = None
    """What it has added to the history."""
    topic: str | None = None
    seq: int | None = None
    ordering_key: str | None = None
    holds_key: bool | None = None
    idempotency_key: str | None = None
    mark: str | None = None
    budget: int | None = None
    priority: int | None = None
    parked: bool | None = None


class Turn(NamedTuple):
    """An event was parked behind an earlier one of its key, or it is its turn. Numbered together with the steps."""

    id: int
    at: float
    transaction: int
    event_id: str
    parked: bool


class Alert(NamedTuple):
    """One alert as it came to Sentry, and what was answered."""

    at: float
    alert: str
    event: str
    status: int


class Act(NamedTuple):
    """What an operator wanted, and what he was told: done, refused, failed, unknown or nothing."""

    at: float
    verb: str
    events: tuple[str, ...]
    request: str
    result: str | None
    told: float | None = None
    asked: dict[str, Any] | None = None
    """By whom, with what, and of which kind; None in evidence of older rigs."""
    calls: int = 1
    """How often he asked, under the same request."""
    refused_again: bool = False
    """Repeated, it was refused."""


class Pause(NamedTuple):
    """A time in which a topic was certainly paused: from the answer to the pause to the next wish to resume it."""

    topic: str
    since: float
    until: float


class Fault(NamedTuple):
    """Something that the rig did."""

    at: float
    kind: str
    values: dict[str, Any]


class Sweep(NamedTuple):
    """One look of a watchdog, on the clock of the journals."""

    at: float
    transaction: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that the checker may look at."""

    wishes: list[Wish] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    strays: int = 0
    """What came to Sentry and was no alert of a death."""
    acts: list[Act] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    rows: dict[str, str] = field(default_factory=dict)
    """The outbox at the end: event and status."""
    histories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """And the cycles of each event that have ended."""
    effects: list[tuple[str, str]] = field(default_factory=list)
    """Event and kind, as often as it happened."""
    business: frozenset[str] = frozenset()
    """Events that the application's own data know of."""
    canaries: list[str] = field(default_factory=list)
    """Places where a secret was found that should hold none."""
    tracebacks: list[str] = field(default_factory=list)
    """Logs of dispatchers in which Python complains about something that nobody caught."""
    alive: dict[str, list[float]] = field(default_factory=dict)
    """Dispatcher → moments at which its process ran and reached the database."""
    lease: float = 0.0
    """The dispatchers' lease in seconds."""
    drained_in: float | None = 0.0
    """Seconds from the end of the faults until nothing was left to do; None: never."""


def load(directory: Path) -> Evidence:
    """Reads what a run has left."""
    facts = json.loads((directory / "facts.json").read_text())
    tables = directory / "tables"
    clock = _clock(directory)
    outbox = list(journal.read(tables / "outbox.jsonl"))
    return Evidence(
        wishes=list(_wishes(directory)),
        runs=list(_runs(directory)),
        steps=list(_steps(directory, clock)),
        turns=list(_turns(directory, clock)),
        alerts=[
            Alert(line["t"], _uuid(line["alert"]), line["event"], line["status"])
            for line in journal.read(directory / "sentry.jsonl")
            if line["what"] == "alert"
        ],
        strays=sum(line["what"] == "stray" for line in journal.read(directory / "sentry.jsonl")),
        acts=list(_acts(directory)),
        pauses=list(_pauses(directory)),
        faults=list(_faults(directory)),
        sweeps=[
            Sweep(clock.at(row["at"]), row["transaction"]) for row in journal.read(tables / "sweep.jsonl")
        ],
        rows={row["event_id"]: row["status"] for row in outbox},
        histories={
            row["event_id"]: [_cycle(entry, clock) for entry in row["failure_history"]]
            for row in outbox
            if "failure_history" in row
        },
        effects=[(row["event_id"], row["kind"]) for row in journal.read(tables / "effect.jsonl")],
        business=frozenset(row["event_id"] for row in journal.read(tables / "business.jsonl")),
        canaries=facts["canaries"],
        tracebacks=facts["tracebacks"],
        alive=_alive(directory),
        lease=facts["lease"],
        drained_in=facts["drained_in"],
    )


def _faults(directory: Path) -> Iterator[Fault]:
    """What the rig did, what processes did to themselves when they were ordered to, and what the proxy lost."""
    wanted = {"order", "lost"}
    others = [path for path in sorted(directory.glob("*-*.jsonl")) if path.name != "rig.jsonl"]
    for path in (directory / "rig.jsonl", directory / "proxy.jsonl", *others):
        for line in journal.read(path):
            if path.name == "rig.jsonl" or line["what"] in wanted:
                yield Fault(line.pop("t"), line.pop("what"), line)


def _wishes(directory: Path) -> Iterator[Wish]:
    for path in sorted(directory.glob("producer-*.jsonl")):
        wishes: dict[str, Wish] = {}
        for line in journal.read(path):
            match line["what"]:
                case "intent":
                    for wish in line["wishes"]:
                        wishes[wish["mark"]] = Wish(
                            wish["mark"],
                            wish["topic"],
                            wish["bad"],
                            wish["key"],
                            line["t"],
                            options=wish.get("options"),
                        )
                case "acked":
                    for mark, event in zip(line["marks"], line["events"], strict=True):
                        known = wishes[mark]
                        wishes[mark] = known._replace(
                            acked=known.acked or line["t"], events=known.events | {event}
                        )
                case "never":
                    for mark in line["marks"]:
                        wishes[mark] = wishes[mark]._replace(never=True)
        yield from wishes.values()


def _runs(directory: Path) -> Iterator[Run]:
    for path in sorted(directory.glob("handlers-*.jsonl")):
        open_runs: dict[tuple[str, int], Run] = {}
        for line in journal.read(path):
            if line["what"] == "start":
                run = Run(
                    line["event"],
                    line["lease_seq"],
                    line["worker"],
                    line["pid"],
                    line["t"],
                    None,
                    None,
                    line["attempt"],
                    line["max_attempts"],
                    line.get("mark"),
                )
                if twice := open_runs.pop((run.event, run.lease_seq), None):
                    yield twice
                open_runs[run.event, run.lease_seq] = run
            elif line["what"] == "end":
                run = open_runs.pop((line["event"], line["lease_seq"]))
                yield run._replace(
                    ended=line["t"],
                    outcome=line["outcome"],
                    raised=line.get("raised"),
                    said=line.get("said", ""),
                )
        yield from open_runs.values()


def _alive(directory: Path) -> dict[str, list[float]]:
    """The last line may be cut off."""
    return {
        path.stem.removeprefix("alive-"): [float(line) for line in path.read_text().split("\n")[:-1]]
        for path in directory.glob("alive-*.txt")
    }


class _Answer(NamedTuple):
    """To one call of an operator; nothing when none was heard."""

    told: float | None = None
    result: str | None = None


def _acts(directory: Path) -> Iterator[Act]:
    for path in sorted(directory.glob("operator-*.jsonl")):
        wanted: dict[str, dict[str, Any]] = {}
        answers: dict[str, list[_Answer]] = {}
        for line in journal.read(path):
            match line["what"]:
                case "act":
                    wanted[line["request"]] = line
                    answers[line["request"]] = [_Answer()]
                case "again":
                    answers[line["request"]].append(_Answer())
                case "result":
                    told = line["t"] if line["result"] != "unknown" else None
                    answers[line["request"]][-1] = _Answer(told, line["result"])
        for request, line in wanted.items():
            yield _act(line, answers[request])


def _act(line: dict[str, Any], answers: list[_Answer]) -> Act:
    """What a call of one event was told to have done stays so; calls of many may each have changed some."""
    done = [answer for answer in answers if answer.result is not None and answer.result.endswith("done")]
    unknown = [answer for answer in answers if answer.told is None]
    told, result = (done or unknown or answers)[0]
    if len(answers) > 1 and line["verb"] in OF_MANY:
        together = sum(int(str(answer.result).split()[0]) for answer in done)
        told, result = (None, "unknown") if unknown else (answers[-1].told, f"{together} done")
    return Act(
        line["t"],
        line["verb"],
        tuple(line["events"]),
        line["request"],
        result,
        told,
        asked=line.get("asked"),
        calls=len(answers),
        refused_again=bool(done)
        and any(answer.result == "refused" for answer in answers[answers.index(done[0]) :]),
    )


def _pauses(directory: Path) -> Iterator[Pause]:
    lines = [
        line
        for path in directory.glob("operator-*.jsonl")
        for line in journal.read(path)
        if line["what"] in ("pausing", "paused", "resuming")
    ]
    lines.sort(key=lambda line: line["t"])
    paused: dict[str, dict[str, float]] = {}
    """For each topic, who has asked for a pause that nobody has wished to end since, and when that was granted."""
    for line in lines:
        who = paused.setdefault(line["topic"], {})
        match line["what"]:
            case "pausing":
                who[line["by"]] = float("inf")
            case "paused" if line["by"] in who:
                who[line["by"]] = line["t"]
            case "resuming":
                since = min(who.values(), default=float("inf"))
                if since < line["t"]:
                    yield Pause(line["topic"], since, line["t"])
                who.clear()


class Clock:
    """Turns times of the database into those of the journals, which never jump and are never adjusted."""

    def __init__(self, notes: list[tuple[float, float]]) -> None:
        self._walls = [wall for wall, _ in notes]
        self._differences = [wall - at for wall, at in notes]

    def at(self, wall: float) -> float:
        number = min(bisect(self._walls, wall), len(self._walls) - 1)
        return wall - self._differences[number]


def _clock(directory: Path) -> Clock:
    lines = journal.read(directory / "rig.jsonl")
    return Clock([(line["wall"], line["t"]) for line in lines if line["what"] == "clock"])


def _steps(directory: Path, clock: Clock) -> Iterator[Step]:
    for row in journal.read(directory / "tables" / "transition.jsonl"):
        row["at"], row["began"] = clock.at(row["at"]), clock.at(row["began"])
        for name in ("lease_until", "next_run_at", "first_failed_at", "completed_at"):
            if row.get(name) is not None:
                row[name] = clock.at(row[name])
        if row.get("cycle") is not None:
            row["cycle"] = _cycle(row["cycle"], clock)
        yield Step(**row)


def _turns(directory: Path, clock: Clock) -> Iterator[Turn]:
    path = directory / "tables" / "turn.jsonl"
    for row in journal.read(path) if path.exists() else ():
        yield Turn(**row | {"at": clock.at(row["at"])})


def _cycle(entry: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """An entry of the history, with its times on the clock of the journals."""
    times = {
        name: clock.at(datetime.fromisoformat(value).timestamp())
        for name, value in entry.items()
        if name.endswith("_at") and value is not None
    }
    return entry | times


def _uuid(text: str) -> str:
    """As PostgreSQL writes it; Sentry leaves the hyphens out."""
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
