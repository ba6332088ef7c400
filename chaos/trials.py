"""The test of the checker: every mutant is run on its course, and the product without one on the same course."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chaos.mutants import COURSES, MUTANTS
from chaos.processes import die_with_parent

UNFINISHED = {"lost", "drain", "alert"}
"""Rules that are broken when a run does not wait for its end."""


TRIES = 3
"""Runs with different seeds in which a mutant may be caught: on a busy machine little happens in one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run, and the rules that were broken in it, each with a number and an example."""

    seconds: float
    broken: Counter[str]
    example: str
    ended_with: int

    def notices(self, rules: tuple[str, ...]) -> bool:
        return any(self.broken[rule] for rule in rules)


def run(names: list[str]) -> int:
    """Runs them, prints a table, and says in the exit code whether every mutant was caught and no course failed."""
    if unknown := [name for name in names if name not in MUTANTS]:
        print(f"no such mutant: {', '.join(unknown)}. There are: {', '.join(MUTANTS)}", file=sys.stderr)
        return 2
    chosen = {name: MUTANTS[name] for name in names or MUTANTS}
    failed = 0
    caught = 0
    for course in COURSES:
        mine = [name for name, mutant in chosen.items() if mutant.course == course]
        if not mine:
            continue
        trial = attempt(course, "")
        passed = trial.ended_with == 0
        failed += not passed
        _say(course, "the product itself", "passes" if passed else "FAILS", trial)
        for name in mine:
            for seed in range(1, TRIES + 1):
                trial = attempt(course, name, seed=seed)
                if trial.notices(chosen[name].noticed_by):
                    caught += 1
                    _say(course, name, "caught", trial)
                    break
                _say(course, name, "MISSED", trial)
    print(f"{caught} of {len(chosen)} mutants caught; {failed} courses failed without one")
    return 0 if caught == len(chosen) and not failed else 1


def attempt(course: str, mutant: str, *, seed: int = 1) -> Trial:
    """One run in a process of its own."""
    settings = COURSES[course]
    # What is noticed in the steps themselves need not be waited for; then what has not ended yet means nothing.
    waits = not mutant or bool(UNFINISHED & set(MUTANTS[mutant].noticed_by))
    directory = Path(tempfile.mkdtemp(prefix="pulse-chaos-trial-"))
    try:
        report = directory / "report.json"
        command = [sys.executable, "-m", "chaos", "--mix", settings.mix, "--seed", str(seed)]
        command += ["--minutes", str(settings.seconds / 60), "--lease", str(settings.lease)]
        command += ["--drain-within", str(settings.drain_within if waits else 10), "--mutant", mutant]
        command += ["--topics", settings.topics, "--rate", str(settings.rate)]
        command += ["--evidence", str(directory / "evidence"), "--report", str(report)]
        started = time.monotonic()
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            preexec_fn=die_with_parent,
        )
        violations = json.loads(report.read_text())["violations"] if report.exists() else []
        if not waits:
            violations = [violation for violation in violations if violation["rule"] not in UNFINISHED]
        if not report.exists():
            print(done.stdout[-3000:], file=sys.stderr)
        if not mutant and violations:
            print(f"{'':<13} its evidence: {shutil.move(directory / 'evidence', tempfile.mkdtemp())}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Trial(
        seconds=time.monotonic() - started,
        broken=Counter(violation["rule"] for violation in violations),
        example=f"{violations[0]['rule']}: {violations[0]['text']}" if violations else "",
        ended_with=done.returncode,
    )


def _say(course: str, name: str, verdict: str, trial: Trial) -> None:
    rules = ", ".join(f"{rule} {count}" for rule, count in trial.broken.most_common()) or "nothing"
    print(f"{course:<13} {name:<37} {verdict:<7} {trial.seconds:4.0f} s  {rules}", flush=True)
    if verdict in ("FAILS", "MISSED") and trial.example:
        print(f"{'':<13} {trial.example}", flush=True)
