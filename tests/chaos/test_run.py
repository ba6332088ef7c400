"""The fault rig itself: a short run of it, and the schedule that the seed makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import faults

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_a_short_run(tmp_path: Path):
    """Every cheap fault, for a few seconds, on real processes. The long runs are for `dev.py chaos`."""
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "chaos",
        "--minutes",
        "0.2",
        "--seed",
        "7",
        "--lease",
        "1.5",
        "--rate",
        "8",
    ]
    command += ["--dispatchers", "2", "--drain-within", "150", "--report", str(report)]
    command += ["--evidence", str(tmp_path / "evidence")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    told = json.loads(report.read_text())
    assert told["violations"] == []
    assert told["figures"]["faults injected"] > 5
    assert told["figures"]["completed"] > 20


def test_the_seed_makes_the_schedule():
    kinds = faults.chosen("all", dear=True)
    one, same, other = (faults.plan(seed, 3600, 3, kinds) for seed in (1, 1, 2))

    assert one == same != other
    assert {fault.kind for fault in one} == set(faults.KINDS)


def test_taking_a_fault_away_leaves_the_other_lanes_alone():
    """Whoever narrows a failure down must not get other faults for it."""
    every = faults.plan(1, 600, 3, faults.chosen("all", dear=True))
    fewer = faults.plan(1, 600, 3, faults.chosen("all,-network", dear=True))

    assert fewer == [fault for fault in every if faults.KINDS[fault.kind].lane != "network"]


@pytest.mark.parametrize(
    ("mix", "kinds"),
    [
        ("none", []),
        ("lose,kill-child", ["lose", "kill-child"]),
        ("sentry,-sentry-slow", ["sentry-busy", "sentry-broken", "sentry-down"]),
        ("failover", ["failover"]),
    ],
)
def test_a_mix_names_lanes_and_kinds(mix: str, kinds: list[str]):
    assert faults.chosen(mix, dear=False) == kinds


def test_dear_faults_are_not_for_short_runs():
    assert "failover" not in faults.chosen("all", dear=False)
    assert "failover" in faults.chosen("all", dear=True)


def test_a_mix_that_nobody_knows_is_wrong_usage():
    done = subprocess.run(
        [sys.executable, "-m", "chaos", "--mix", "earthquake"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "earthquake is no fault" in done.stderr
