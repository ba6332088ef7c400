"""The fault rig itself: a short run of it, and the schedule that the seed makes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from chaos import checker, faults
from tests.support.waiting import wait_until

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


@pytest.mark.timeout(200)
def test_nothing_outlives_the_rig(tmp_path: Path):
    """Killed in the middle of everything: its processes, and what they have started, end with it."""
    evidence = tmp_path / "evidence"
    command = [
        sys.executable,
        "-m",
        "chaos",
        "--minutes",
        "9",
        "--dispatchers",
        "1",
        "--evidence",
        str(evidence),
    ]
    rig = subprocess.Popen(
        [*command, "--mix", "none"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        journal = evidence / "rig.jsonl"
        wait_until(lambda: journal.exists() and '"begin"' in journal.read_text(), within=120, what="faults")
        started = psutil.Process(rig.pid).children(recursive=True)
    finally:
        rig.kill()
        rig.wait()

    assert len(started) > 8
    psutil.wait_procs(started, timeout=30)
    assert [
        process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ] == []


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


def test_the_page_about_the_rig_names_every_fault_and_every_rule():
    page = (ROOT / "docs" / "explanation" / "fault-rig.md").read_text()
    text = "".join(path.read_text() for path in Path(checker.__file__).parent.glob("*.py"))
    rules = set(re.findall(r'Violation\(\s*"([^"]+)"', text))

    assert len(rules) > 15
    assert [name for name in (*faults.KINDS, *faults.GAPS, *sorted(rules)) if f"`{name}`" not in page] == []


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
