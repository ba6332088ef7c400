"""The results as Markdown: for the terminal, for report.md, and for the page in the docs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.machine import BUSY_LOAD
from benchmarks.measures import median
from benchmarks.results import Results
from benchmarks.targets import Judgement, judge
from benchmarks.workloads import WORKLOADS

OUR_LABEL = "pulse-outbox"
UNITS = {
    "rate": "jobs/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "p999_ms": "p99.9 ms",
    "durable_p50_ms": "durable p50 ms",
    "durable_p99_ms": "durable p99 ms",
    "durable_p999_ms": "durable p99.9 ms",
    "first_tenth": "first tenth/s",
    "last_tenth": "last tenth/s",
    "last_to_first": "last ÷ first",
    "cpu_worker": "worker CPU s/M",
    "cpu_server": "PostgreSQL CPU s/M",
    "wal_bytes": "WAL bytes/job",
    "ratio": "× bare INSERT",
    "insert_rate": "INSERT/s",
    "reached": "load/s",
    "claim_ratio": "claim time ÷",
    "claim_ms": "claim ms",
    "lanes_ms": "listing ms",
    "heartbeat_ms": "CPU ms a beat",
    "server_ms": "PostgreSQL ms",
    "worker_ms": "dispatcher ms",
    "call_ms": "statement ms",
    "memory_mb": "MB",
    "growth_mb_per_hour": "MB/h",
}


def report(results: Results) -> str:
    """Everything, one section per workload, the targets at the end."""
    parts = [_head(results)]
    parts += [_section(results, name) for name in results.workloads()]
    parts.append("## Targets\n\n" + targets_table(map(target_row, judge(results))))
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    machine, server = results.machine, results.server
    lines = [
        "# Measured",
        "",
        (
            f"{results.started_at}, {machine['cores']} cores ({machine['processor']}), {machine['memory_gb']} GB, "
            f"PostgreSQL {server['server_version']}, Python {machine['python']}. "
            f"Payload about {results.payload} bytes. fsync {server['fsync']}, "
            f"synchronous_commit {server['synchronous_commit']}, "
            f"shared_buffers {server['shared_buffers']}, max_wal_size {server['max_wal_size']}."
        ),
    ]
    if results.quick:
        lines += ["", "**Quick run: the sizes are too small to mean anything.**"]
    if results.busiest > BUSY_LOAD:
        lines += [
            "",
            f"**Others used up to {results.busiest:.1f} cores meanwhile: these numbers are noise.**",
        ]
    missing = [peer for peer in results.peers.values() if peer.get("problem")]
    if missing:
        lines += [
            "",
            "Not measured: " + "; ".join(f"{peer['name']} ({peer['problem']})" for peer in missing) + ".",
        ]
    return "\n".join(lines)


def _section(results: Results, name: str) -> str:
    return f"## {WORKLOADS[name].title} (`{name}`)\n\n{workload_table(results, name)}"


def workload_table(results: Results, name: str) -> str:
    """Everyone's medians in one workload, and how far the rounds lie apart."""
    workload = WORKLOADS[name]
    labels = results.labels(name)
    metrics = [metric for metric in UNITS if any(results.summary(name, label, metric) for label in labels)]
    if workload.metric in metrics:  # what is compared stands first
        metrics.remove(workload.metric)
        metrics.insert(0, workload.metric)
    compared = OUR_LABEL if OUR_LABEL in labels else labels[0]
    header = ["", *(UNITS[metric] for metric in metrics), "spread", f"ratio of {compared}", "settings"]
    body = []
    for label in labels:
        cells = [label]
        for metric in metrics:
            summary = results.summary(name, label, metric)
            cells.append(number(summary.median) if summary else "–")
        main = results.summary(name, label, workload.metric)
        cells.append(f"{number(main.low)} … {number(main.high)}" if main else "–")
        values = results.ratios(name, compared, label, workload.metric)
        if not workload.higher_is_better:
            values = [1 / value for value in values if value]
        cells.append(f"{number(median(values))} ×" if values else "–")
        runs = list(results.of(name, label))
        problems = sorted({run.problem for run in runs if run.problem})
        cells.append("; ".join([runs[0].settings, *problems]).strip("; "))
        body.append(cells)
    rounds = len({run.round for run in results.of(name)})
    return f"{table(header, body)}\n\nMedians of {rounds} round{'s' if rounds > 1 else ''}."


TARGET_HEADER = ("target", "wanted", "measured", "against", "")
TARGET_COLUMNS = len(TARGET_HEADER)


def targets_table(rows: Iterable[Sequence[str]]) -> str:
    return table(TARGET_HEADER, rows)


def target_row(judgement: Judgement) -> list[str]:
    measured = judgement.measured
    return [
        judgement.target.text,
        judgement.target.bound,
        f"{number(measured.value)} {judgement.target.unit}" if measured else "–",
        measured.against if measured else "–",
        judgement.word,
    ]


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    lines = [list(header), *(list(cells) for cells in body)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(header))]
    written = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    written.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(written)


def number(value: float) -> str:
    """Three digits that count, whole numbers from a hundred on."""
    if math.isnan(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
