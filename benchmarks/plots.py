"""Draws the plots of a results.json. Runs as a script in an environment that has matplotlib and nothing of ours:

python plots.py RESULTS_JSON FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "pulse-outbox", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})

from matplotlib import pyplot  # noqa: E402  # the backend must have been chosen

OURS = "pulse_outbox"
Runs = list[Mapping[str, Any]]


def main(results: Path, folder: Path) -> None:
    runs: Runs = [run for run in json.loads(results.read_text())["runs"] if run["metrics"]]
    folder.mkdir(parents=True, exist_ok=True)
    for workload in ("drain", "drain-1m", "held-500", "held-50"):
        draw(folder / f"throughput-{workload}.svg", progress, of(runs, workload))
        draw(folder / f"table-{workload}.svg", table, of(runs, workload))
    for workload in ("idle-latency", "steady", "enqueue-bare"):
        draw(folder / f"latency-{workload}.svg", distribution, of(runs, workload))
    draw(folder / "memory.svg", memory, of(runs, "memory"))


def of(runs: Runs, workload: str) -> Runs:
    """The round of each entry that lies in the middle of its rounds: one that happened, not a mean of several."""
    by_label: dict[str, Runs] = {}
    for run in runs:
        if run["workload"] == workload:
            by_label.setdefault(run["label"], []).append(run)
    middle = []
    for rounds in by_label.values():
        name = next(iter(rounds[0]["metrics"])) if "rate" not in rounds[0]["metrics"] else "rate"
        rounds.sort(key=lambda run: float(run["metrics"].get(name, 0)))
        middle.append(rounds[len(rounds) // 2])
    return sorted(middle, key=lambda run: (run["key"] != OURS, run["label"]))


def draw(path: Path, how: Callable[[Any, Runs], bool], runs: Runs) -> None:
    """One file, unless there is nothing to see."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    if runs and how(axes, runs):
        axes.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def style(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"label": run["label"], "linewidth": 2.2 if run["key"] == OURS else 1.0}


def progress(axes: Any, runs: Runs) -> bool:
    """Jobs per second over the course of the run: by share, since the quick ones would end at the left edge."""
    drawn = False
    for run in runs:
        points = list(rates(run["progress"]))
        if len(points) < 3:
            continue
        axes.plot([done for done, _ in points], [rate for _, rate in points], **style(run))
        drawn = True
    axes.set(xlabel="jobs done, %", ylabel="jobs/s", ylim=(0, None))
    return drawn


def rates(points: list[list[float]], pieces: int = 20) -> Iterator[tuple[float, float]]:
    """(per cent done, jobs per second) over about so many equal pieces of a run."""
    if len(points) < 3:
        return
    total = points[-1][1]
    last_time, last_count = points[0]
    for when, count in points[1:]:
        if count - last_count >= total / pieces and when > last_time:
            yield count / total * 100, (count - last_count) / (when - last_time)
            last_time, last_count = when, count


def table(axes: Any, runs: Runs) -> bool:
    """Dead rows (lines) and size (dashes) over time."""
    size = axes.twinx()
    drawn = False
    for run in runs:
        database = run["database"]
        if not database or len(database["times"]) < 3:
            continue
        [line] = axes.plot(database["times"], database["dead"], **style(run))
        size.plot(
            database["times"],
            [number / 2**20 for number in database["size"]],
            linestyle="--",
            linewidth=0.8,
            color=line.get_color(),
        )
        drawn = True
    axes.set(xlabel="seconds", ylabel="dead rows", ylim=(0, None))
    size.set(ylabel="tables and indexes, MB (dashed)", ylim=(0, None))
    size.grid(visible=False)
    return drawn


def distribution(axes: Any, runs: Runs) -> bool:
    """Which share of the jobs waited no longer than so many milliseconds."""
    for run in runs:
        for name, values in run["latencies"].items():
            shares = [(place + 1) / len(values) for place in range(len(values))]
            label = run["label"] if len(run["latencies"]) == 1 else f"{run['label']}, {name}"
            # A start that the worker saw before the producer had its answer counts as the shortest wait.
            shown = [max(value * 1000, 0.05) for value in values]
            axes.plot(shown, shares, **(style(run) | {"label": label}))
    axes.set(xscale="log", xlabel="milliseconds", ylabel="share of the jobs", ylim=(0, 1.01))
    return True


def memory(axes: Any, runs: Runs) -> bool:
    for run in runs:
        samples = run["samples"]["memory"]
        axes.plot([when / 60 for when, _ in samples], [size for _, size in samples], **style(run))
    axes.set(xlabel="minutes", ylabel="resident memory, MB", ylim=(0, None))
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
