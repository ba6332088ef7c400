"""What is left of a run: journals and tables as values, read from the directory that the rig wrote them to."""

from __future__ import annotations

import json
from bisect import bisect
from dataclasses import dataclass, field
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
    """What else was given: dead_key, max_attempts, generation, delay."""


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
    topic: str | None = None
    seq: int | None = None
    ordering_key: str | None = None
    holds_key: bool | None = None
    idempotency_key: str | None = None
    mark: str | None = None
    budget: int | None = None


class Alert(NamedTuple):
    """One alert as it came to Sentry, and what was answered."""

    at: float
    alert: str
    event: str
    status: int


class Act(NamedTuple):
    """What an operator wanted, and what he was told: done, refused, unknown or nothing."""

    at: float
    verb: str
    events: tuple[str, ...]
    request: str
    result: str | None
    told: float | None = None


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
    alerts: list[Alert] = field(default_factory=list)
    strays: int = 0
    """What came to Sentry and was no alert of a death."""
    acts: list[Act] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    rows: dict[str, str] = field(default_factory=dict)
    """The outbox at the end: event and status."""
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
    return Evidence(
        wishes=list(_wishes(directory)),
        runs=list(_runs(directory)),
        steps=list(_steps(directory, clock)),
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
        rows={row["event_id"]: row["status"] for row in journal.read(tables / "outbox.jsonl")},
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
                yield run._replace(ended=line["t"], outcome=line["outcome"])
        yield from open_runs.values()


def _alive(directory: Path) -> dict[str, list[float]]:
    """The last line may be cut off."""
    return {
        path.stem.removeprefix("alive-"): [float(line) for line in path.read_text().split("\n")[:-1]]
        for path in directory.glob("alive-*.txt")
    }


def _acts(directory: Path) -> Iterator[Act]:
    for path in sorted(directory.glob("operator-*.jsonl")):
        acts: dict[str, Act] = {}
        for line in journal.read(path):
            if line["what"] == "act":
                acts[line["request"]] = Act(
                    line["t"], line["verb"], tuple(line["events"]), line["request"], None
                )
            elif line["what"] == "result":
                acts[line["request"]] = acts[line["request"]]._replace(
                    result=line["result"], told=line["t"] if line["result"] != "unknown" else None
                )
        yield from acts.values()


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
        for name in ("lease_until", "next_run_at"):
            if row.get(name) is not None:
                row[name] = clock.at(row[name])
        yield Step(**row)


def _uuid(text: str) -> str:
    """As PostgreSQL writes it; Sentry leaves the hyphens out."""
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
