"""`python3 dev.py chaos --minutes N`: one run of the fault rig, and its verdict."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from chaos import evidence, faults, figures, mutants, trials
from chaos.checker import check
from chaos.rig import Rig, Settings

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18


def main(arguments: list[str]) -> int:
    args = _arguments(arguments)
    if args.check:
        return judge(
            Path(args.check), f"python3 dev.py chaos {shlex.join(arguments)}", report=args.report, keep=True
        )
    if args.mutants is not None:
        return trials.run(args.mutants)
    seconds = args.minutes * 60
    try:
        kinds = faults.chosen(args.mix, dear=seconds >= 120)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    own_mounts = _keep_mounts_to_ourselves()
    directory = Path(args.evidence or tempfile.mkdtemp(prefix="pulse-chaos-evidence-")).absolute()
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    settings = Settings(
        seconds=seconds,
        seed=args.seed,
        lease=args.lease,
        rate=args.rate,
        drain_within=args.drain_within,
        mutant=args.mutant,
        topics=args.topics,
        directory=directory,
        dispatchers=args.dispatchers,
        may_mount=own_mounts,
    )
    plan = faults.plan(args.seed, seconds, args.lease, kinds)
    command = f"python3 dev.py chaos {shlex.join(arguments)}"
    _say(f"{command}: {len(plan)} faults planned; evidence in {directory}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chaos: told to end"))
    Rig(settings, plan, _say).run()
    return judge(directory, command, report=args.report, keep=args.keep or bool(args.evidence))


def judge(directory: Path, command: str, *, report: str | None, keep: bool) -> int:
    """Checks what a run has left, prints the verdict and the figures, and says it in the exit code."""
    _say("checking")
    found = evidence.load(directory)
    violations = check(found)
    facts = json.loads((directory / "facts.json").read_text())
    table = figures.figures(found, facts, violations)
    text = json.dumps(
        {
            "command": command,
            "verdict": "violations" if violations else "nothing was lost",
            "figures": table,
            "injected": facts["injected"],
            "points": figures.points(found),
            "skipped": facts["skipped"],
            "violations": [violation._asdict() for violation in violations[:1000]],
        },
        indent=1,
    )
    (directory / "report.json").write_text(text)
    if report:
        Path(report).write_text(text)
    print(figures.as_text(table))
    for kind, why in facts["skipped"].items():
        print(f"skipped: {kind} ({why})")
    for violation in violations[:40]:
        print(f"VIOLATION {violation.rule}: {violation.event} {violation.text}")
    if violations:
        print(f"{len(violations)} violations; the evidence stays in {directory}")
    else:
        print("verdict: nothing was lost, nothing was done twice that must not be, nobody died below budget")
        if not keep:
            shutil.rmtree(directory)
    print(f"again: {command}")
    return 1 if violations else 0


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 dev.py chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="of faults; healing and checking come after")
    parser.add_argument("--seed", type=int, default=1, help="the same seed plans the same faults")
    parser.add_argument(
        "--mix",
        default="all",
        help="faults: lanes, kinds or all, by commas; a minus takes away (all,-failover)",
    )
    parser.add_argument("--lease", type=float, default=3, help="the dispatchers' lease in seconds")
    parser.add_argument("--rate", type=float, default=15, help="transactions per second of each producer")
    parser.add_argument("--drain-within", type=float, default=180, help="seconds after the last fault")
    parser.add_argument("--topics", default="", help="only these, with their weights: fast=10,kills=1")
    parser.add_argument(
        "--mutant", default="", choices=["", *mutants.MUTANTS], help="break the product first"
    )
    parser.add_argument(
        "--mutants",
        nargs="*",
        metavar="NAME",
        help="the test of the checker: each of these mutants (or all) must be caught, and the product must pass",
    )
    parser.add_argument(
        "--evidence", help="a directory for it, which is kept (default: a new one, kept on violations)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the evidence of a good run too")
    parser.add_argument("--dispatchers", type=int, default=3, help="how many")
    parser.add_argument(
        "--check", metavar="DIRECTORY", help="no run: judge the evidence of an earlier one again"
    )
    parser.add_argument("--report", help="write the verdict there as JSON")
    return parser.parse_args(arguments)


def _keep_mounts_to_ourselves() -> bool:
    """In a namespace of our own, a mount ends with us, however we end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(CLONE_NEWNS) != 0:
        return False
    return bool(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0)


def _say(text: str) -> None:
    print(f"chaos: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
