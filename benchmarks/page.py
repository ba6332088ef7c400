"""Writes docs/speed.md from the results of one or several sessions: words of page.md, numbers of results.json.

What was not measured this time stays as it is on the page, and says so: to measure everything takes hours.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.environments import ROOT
from benchmarks.machine import BUSY_LOAD
from benchmarks.report import TARGET_COLUMNS, number, table, target_row, targets_table, workload_table
from benchmarks.results import Results
from benchmarks.targets import OUR_LABEL, TARGETS, judge
from benchmarks.workloads import WORKLOADS

TEMPLATE = Path(__file__).resolve().parent / "page.md"
PAGE = ROOT / "docs" / "speed.md"
PLOTS = ROOT / "docs" / "speed"
FEWEST_ROUNDS = 3
NOT_YET = "*Not measured yet.*"
EARLIER = " Of an earlier session."
EARLIER_TARGET = " (earlier)"


class NotFit(Exception):
    """Results that must not be published; the message says why."""


def check(results: Results) -> None:
    """Raises NotFit for what would be noise on a page that people decide by."""
    if results.quick:
        raise NotFit("this was a quick run: its sizes are too small to mean anything")
    busy = [run for run in results.runs if run.busy > BUSY_LOAD]
    if len(busy) > len(results.runs) / 20:
        raise NotFit(
            f"others used the machine before {len(busy)} of {len(results.runs)} runs: "
            "measure again when it is quiet (--patience waits for that)"
        )
    few = [
        name
        for name in results.workloads()
        if len({run.round for run in results.of(name)}) < min(FEWEST_ROUNDS, WORKLOADS[name].most_rounds)
    ]
    if few:
        raise NotFit(f"fewer than {FEWEST_ROUNDS} rounds of {', '.join(few)}")


def write(folders: Sequence[Path]) -> None:
    """Checks, writes the page, and copies the plots beside it."""
    results = None
    for folder in folders:
        session = Results.load(folder / "results.json")
        check(session)
        results = session if results is None else results.joined(session)
    PLOTS.mkdir(parents=True, exist_ok=True)
    plots = {path.stem for path in PLOTS.glob("*.svg")} if folders else set()
    for path in plots_of(folders).values():
        shutil.copy(path, PLOTS / path.name)
        plots.add(path.stem)
    PAGE.write_text(render(results, plots, published=PAGE.read_text() if folders else ""))


def plots_of(folders: Sequence[Path]) -> dict[str, Path]:
    return {path.stem: path for folder in folders for path in sorted((folder / "plots").glob("*.svg"))}


def render(results: Results | None, plots: Collection[str], published: str = "") -> str:
    """The page; without results, the same page with nothing in the tables. *published*: what it was until now."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name.startswith("plot:"):
            plot = name.removeprefix("plot:")
            return f"![{plot}](speed/{plot}.svg)" if plot in plots else ""
        if results is None:
            return "" if name in {"machine", "versions"} else NOT_YET
        match name:
            case "status":
                return _when(results)
            case "targets":
                return _targets(results, published)
            case "machine":
                return _machine(results)
            case "versions":
                return _versions(results)
            case "costs":
                return _costs(results)
            case "three-times":
                return _three_times(results)
            case "estimate":
                return _estimate(results)
        title = WORKLOADS[name].title
        if name in results.workloads():
            return f"**{title}**\n\n{workload_table(results, name)}"
        return _kept(title, published) or f"*{title}: not measured yet.*"

    text = re.sub(r"\{\{([a-z0-9:-]+)\}\}", fill, TEMPLATE.read_text())
    return re.sub(r"\n{3,}", "\n\n", text)


def _kept(title: str, published: str) -> str | None:
    """The table of a workload as it was published, which says that it is an earlier one."""
    found = re.search(
        rf"^\*\*{re.escape(title)}\*\*\n\n(?:\|.*\n)+\n(Medians of .*)$", published, re.MULTILINE
    )
    return found and found[0].replace(found[1], found[1].removesuffix(EARLIER) + EARLIER)


def _targets(results: Results, published: str) -> str:
    """All targets; of those that were not measured, what was published."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in published.splitlines() if line[:1] == "|"
    ]
    earlier = {row[0]: row for row in rows if len(row) == TARGET_COLUMNS}
    lines = []
    for judgement in judge(results):
        line = target_row(judgement)
        if judgement.measured is None and (was := earlier.get(judgement.target.text)):
            line = [*was[:-1], was[-1].removesuffix(EARLIER_TARGET) + EARLIER_TARGET]
        lines.append(line)
    return targets_table(lines)


def _when(results: Results) -> str:
    starts = sorted(results.started_at.split(" and "))
    if len(starts) == 1:
        return f"Measured on {starts[0]}."
    return f"Measured in {len(starts)} sessions, the first on {starts[0]}, the last on {starts[-1]}."


def _machine(results: Results) -> str:
    machine, server = results.machine, results.server
    settings = ", ".join(f"`{name}` {value}" for name, value in server.items() if name != "server_version")
    return (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gb']} GB, {machine['system']}, "
        f"Python {machine['python']}, PostgreSQL {server['server_version']} with {settings}. "
        f"Payloads of about {results.payload} bytes."
    )


def _versions(results: Results) -> str:
    return table(
        ["", "version", "language", "lease per", ""],
        [
            [
                peer["name"],
                peer["version"],
                peer["language"],
                peer["lease"],
                peer.get("problem", peer["reason"]),
            ]
            for peer in results.peers.values()
        ],
    )


def _cost(results: Results) -> dict[str, float] | None:
    """Ours in the longest drain that was measured: CPU seconds per million jobs and bytes of WAL per job."""
    for workload in ("drain-1m", "drain"):
        found = {}
        for name in ("cpu_worker", "cpu_server", "wal_bytes", "rate"):
            if summary := results.summary(workload, OUR_LABEL, name):
                found[name] = summary.median
        if len(found) == 4:
            return found
    return None


def _costs(results: Results) -> str:
    if not (cost := _cost(results)):
        return NOT_YET
    worker, server, wal = (number(cost[name]) for name in ("cpu_worker", "cpu_server", "wal_bytes"))
    return (
        f"A million no-op jobs, claimed, run and completed, take {worker} s of the dispatcher's processor time and "
        f"{server} s of PostgreSQL's, and write {wal} bytes of WAL each. Enqueueing comes on top."
    )


def _three_times(results: Results) -> str:
    """What the target that is hardest to reach would take, on this machine."""
    target = next(target for target in TARGETS if target.at_least == 3)
    measured, cost = target.measure(results), _cost(results)
    theirs = results.summary("drain", measured.against, "rate") if measured else None
    if measured is None or cost is None or theirs is None:
        return NOT_YET
    wanted = 3 * theirs.median
    cores = results.machine["cores"]
    worker, server = cost["cpu_worker"], cost["cpu_server"]
    left, most = cores / wanted * 1e6, cores / (worker + server) * 1e6
    return (
        f"Three times {measured.against}, the fastest Python peer, would be {number(wanted)} jobs per second. "
        f"On {cores} cores, if neither ever waited, that leaves {number(left)} µs of processor time for a job; ours "
        f"takes {number(worker)} in the dispatcher and {number(server)} in PostgreSQL, {number(worker + server)} in "
        f"all, so {number(most)} per second is the most that these cores could do."
    )


def _estimate(results: Results, cores: int = 16) -> str:
    if not (cost := _cost(results)):
        return NOT_YET
    both = cost["cpu_worker"] + cost["cpu_server"]
    ceiling = cores / both * 1e6
    of_one = 1e6 / cost["cpu_worker"]
    return (
        f"From the costs above and nothing else: {number(both)} s of processor time per million jobs are "
        f"{number(ceiling)} jobs per second on {cores} cores, if every core were busy with this and nothing waited for "
        f"anything. One dispatcher process can't go beyond {number(of_one)} per second, so that would take "
        f"{math.ceil(ceiling / of_one)} of them, and the log would grow by {number(ceiling * cost['wal_bytes'] / 1e6)} "
        "MB/s, which the disk has to flush. Locks that processes share are not in this sum: take it as a ceiling. "
        f"Measured, on {results.machine['cores']} cores: {number(cost['rate'])} per second."
    )
