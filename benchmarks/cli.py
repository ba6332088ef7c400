"""The command: `python3 dev.py bench`."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine, page
from benchmarks.bench import Bench, Entry, Workload
from benchmarks.environments import (
    BENCH,
    OURS,
    PLOTTING,
    Installed,
    Peer,
    Unavailable,
    find_peers,
    install,
    python_with,
    revision,
)
from benchmarks.postgres import Postgres
from benchmarks.protocol import DriverFailed
from benchmarks.report import number, report
from benchmarks.results import Results, RunResult
from benchmarks.workloads import WORKLOADS

PLOT_SCRIPT = Path(__file__).resolve().parent / "plots.py"


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.list:
        _list()
        return 0
    if args.page is not None:
        return _write_page([Path(folder) for folder in args.page])
    try:
        workloads = [_sized(WORKLOADS[name], args) for name in _chosen(args.workloads, WORKLOADS, "workload")]
        peers = [*_chosen_peers(args.peers), *map(revision, args.against)]
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    out = Path(args.out) if args.out else BENCH / "results" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    results = Measuring(args, workloads, peers, out).run()
    text = report(results)
    (out / "report.md").write_text(text)
    print(text)
    _draw(out)
    say(f"results.json, report.md and plots are in {out}")
    return 0


def _draw(out: Path) -> None:
    """The plots, in an environment that has matplotlib; without it there are none, which is said."""
    try:
        python = python_with("plots", PLOTTING)
        subprocess.run(
            [python, PLOT_SCRIPT, out / "results.json", out / "plots"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"no plots: {(getattr(error, 'stderr', '') or str(error)).strip().splitlines()[-1][:200]}")


def _write_page(folders: Sequence[Path]) -> int:
    try:
        page.write(folders)
    except (page.NotFit, ValueError, OSError) as error:
        print(f"bench: the page is as it was: {error}", file=sys.stderr)
        return 1
    say(f"{page.PAGE.name} is written")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dev.py bench",
        description="Measures pulse-outbox and its peers, interleaved, on one fresh durable PostgreSQL.",
        epilog="""\
examples:
  dev.py bench                                          everything; takes hours
  dev.py bench --quick                                  everything, in sizes that only show that it works
  dev.py bench --workloads drain idle-latency --peers none --rounds 3
  dev.py bench --workloads drain --set count=200000 --payload 1000
  dev.py bench --peers none --against HEAD              what is not committed yet, beside what is
  PULSE_OUTBOX_POSTGRES_BIN=/usr/lib/postgresql/15/bin dev.py bench --workloads drain

--peers takes names as --list prints them, `all`, or `none` for ours alone. Environments are made below .bench.
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="print the peers and the workloads")
    parser.add_argument("--peers", nargs="+", default=["all"], metavar="NAME")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="REVISION", help="commits of this repository, as peers"
    )
    parser.add_argument("--workloads", nargs="+", default=["all"], metavar="NAME")
    parser.add_argument("--rounds", type=int, help="how often each is measured (default 5; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="sizes that take seconds and mean nothing")
    parser.add_argument("--payload", type=int, default=10, metavar="BYTES", help="default: 10")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="SIZE=VALUE", help="another size for every chosen workload"
    )
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to wait for a quiet machine before each run"
    )
    parser.add_argument("--seed", type=int, help="of the order in each round")
    parser.add_argument("--out", metavar="DIR", help="default: below .bench/results")
    parser.add_argument(
        "--page",
        nargs="*",
        metavar="DIR",
        help="measure nothing: write docs/speed.md from the results in these folders (none: without numbers)",
    )
    return parser


def _list() -> None:
    print("peers:")
    for peer in find_peers().values():
        print(
            f"  {peer.key:20} {peer.name} {peer.version}, {peer.language}, lease per {peer.lease}: {peer.reason}"
        )
    print("workloads:")
    for workload in WORKLOADS.values():
        sizes = ", ".join(f"{name}={value}" for name, value in workload.sizes.items())
        print(f"  {workload.name:20} {workload.title} ({sizes})")


def _chosen(names: Sequence[str], known: Mapping[str, object], what: str) -> list[str]:
    if list(names) == ["all"]:
        return list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}; there are: {', '.join(known)}")
    return [name for name in known if name in names]


def _chosen_peers(names: Sequence[str]) -> list[Peer]:
    """Ours, and those that are named."""
    peers = find_peers()
    keys = [] if list(names) == ["none"] else [name.replace("-", "_") for name in names]
    return [peers[key] for key in _chosen(keys if keys == ["all"] else [OURS, *keys], peers, "peer")]


def _sized(workload: Workload, args: argparse.Namespace) -> tuple[Workload, dict[str, Any]]:
    sizes = dict(workload.sizes) | (dict(workload.quick) if args.quick else {})
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text!r}: SIZE=VALUE is needed")
        if name in sizes:
            sizes[name] = json.loads(value)
    return workload, sizes


class Measuring:
    """One session: installs, starts the servers, measures, and keeps what it has after every run."""

    def __init__(
        self,
        args: argparse.Namespace,
        workloads: Sequence[tuple[Workload, dict[str, Any]]],
        peers: Sequence[Peer],
        out: Path,
    ) -> None:
        self._args = args
        self._workloads = workloads
        self._peers = peers
        self._out = out
        self._random = random.Random(args.seed)
        self._rounds = args.rounds or (1 if args.quick else 5)
        self._servers: dict[str, Postgres] = {}

    def run(self) -> Results:
        installed, peers = self._install()
        try:
            self._results = Results(
                machine=machine.describe(),
                server=self._server({}).settings(),
                started_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                quick=self._args.quick,
                payload=self._args.payload,
                sizes={workload.name: sizes for workload, sizes in self._workloads},
                peers=peers,
            )
            for workload, sizes in self._workloads:
                self._measure(workload, sizes, installed)
        finally:
            for server in self._servers.values():
                server.close()
        return self._results

    def _install(self) -> tuple[dict[str, Installed], dict[str, dict[str, str]]]:
        installed: dict[str, Installed] = {}
        described: dict[str, dict[str, str]] = {}
        for peer in self._peers:
            described[peer.key] = {
                "name": peer.name,
                "version": peer.version,
                "language": peer.language,
                "lease": peer.lease,
                "reason": peer.reason,
            }
            try:
                installed[peer.key] = install(peer)
            except Unavailable as error:
                described[peer.key]["problem"] = str(error)
                say(f"{peer.name} is not measured: {error}")
        return installed, described

    def _server(self, settings: Mapping[str, str]) -> Postgres:
        """The server with these further settings. One is up at a time, so that none idles beside another's run."""
        key = repr(sorted(settings.items()))
        if key not in self._servers:
            for server in self._servers.values():
                server.close()
            self._servers = {key: Postgres(dict(settings))}
        return self._servers[key]

    def _measure(self, workload: Workload, sizes: dict[str, Any], installed: Mapping[str, Installed]) -> None:
        bench = Bench(
            self._server(workload.server),
            installed,
            payload=sizes.get("payload", self._args.payload),
            logs=self._out / "logs",
        )
        entries = workload.entries([peer for peer in self._peers if peer.key in installed])
        for number_ in range(1, min(self._rounds, workload.most_rounds) + 1):
            order = self._random.sample(entries, len(entries))
            for place, entry in enumerate(order, start=1):
                self._results.runs.append(self._run_one(bench, workload, sizes, entry, number_, place))
                self._results.save(self._out / "results.json")

    def _run_one(
        self, bench: Bench, workload: Workload, sizes: dict[str, Any], entry: Entry, number_: int, place: int
    ) -> RunResult:
        where = f"{workload.name} {number_}/{self._rounds} {entry.label}"
        busy = machine.quiet_enough(self._args.patience, lambda text: say(f"{where}: {text}"))
        self._results.load_average.append(os.getloadavg())
        try:
            outcome = workload.run(bench, entry, sizes)
        except (DriverFailed, KeyError, NotImplementedError) as error:
            problem = " ".join(str(error).split())
            say(f"{where}: {problem}")
            return RunResult(
                workload=workload.name, label=entry.label, key=entry.key, round=number_, place=place,
                busy=busy, metrics={}, problem=problem,
            )  # fmt: skip
        shown = ", ".join(f"{name} {number(value)}" for name, value in list(outcome.metrics.items()))
        say(f"{where}: {shown}")
        return RunResult(
            workload=workload.name,
            label=entry.label,
            key=entry.key,
            round=number_,
            place=place,
            busy=busy,
            metrics=outcome.metrics,
            settings=outcome.settings,
            progress=outcome.progress,
            latencies=outcome.latencies,
            database=outcome.database,
            samples=outcome.samples,
        )


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
