"""dev.py and the pinned requirements: what a fresh checkout starts with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import dev
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
REQUIREMENTS = (ROOT / "requirements-dev.txt").read_text()


def test_dev_needs_the_standard_library_alone():
    """-I and -S hide everything that was ever installed."""
    answer = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "dev.py", "--help"], capture_output=True, text=True, check=True
    )

    assert "dev.py demo" in answer.stdout


def test_wrong_usage_is_exit_code_2():
    answer = subprocess.run(
        [sys.executable, ROOT / "dev.py", "nonsense"], capture_output=True, text=True, check=False
    )

    assert answer.returncode == 2
    assert "dev.py test" in answer.stderr


def test_requirements_name_no_registry():
    assert not re.search(r"https?:|--(extra-)?index|--find-links|--trusted", REQUIREMENTS)


def test_requirements_are_pinned_with_hashes():
    entries = re.split(r"\n(?=[a-z])", REQUIREMENTS)

    assert len(entries) > 20
    for entry in entries:
        assert re.match(r"[a-z0-9-]+(\[[a-z,]+\])?==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry


def test_requirements_hold_what_pyproject_asks_for():
    """A dependency added without compiling again would be missing on the next fresh machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *(entry for extra in project["project"]["optional-dependencies"].values() for entry in extra),
    ]
    names = {re.split(r"[\[><=~ ;]", entry)[0].lower() for entry in wanted} - {"pulse-outbox"}

    assert names <= set(re.findall(r"^([a-z0-9-]+)==", REQUIREMENTS, re.MULTILINE))


def test_settings_of_the_checkers_do_not_rebuild_the_environment(monkeypatch, tmp_path):
    text = (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    prints = []
    for version in (text, text + "\n[tool.other]\nx = 1\n", text.replace("tenacity>=8.2", "tenacity>=8.3")):
        (tmp_path / "pyproject.toml").write_text(version)
        prints.append(dev.fingerprint())

    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


def test_every_stage_runs_and_the_failed_ones_are_named(capfd):
    code = dev.run_stages(
        {
            "first": ["python", "-c", "raise SystemExit(3)"],
            "second": ["python", "-c", "print('second was here')"],
            "third": ["python", "-c", "raise SystemExit(1)"],
        }
    )
    said = capfd.readouterr().out

    assert code == 1
    assert "second was here" in said
    assert said.splitlines()[-1] == "dev.py: FAILED: first, third"


@pytest.fixture
def stage() -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """dev.py in the middle of a stage that would take a minute, and that stage's process."""
    command = (
        "import dev, sys; sys.exit(dev.run_stages({'slow': ['python', '-c', 'import time; time.sleep(60)']}))"
    )
    process = subprocess.Popen([sys.executable, "-c", command], cwd=ROOT, stdout=subprocess.DEVNULL)
    parent = psutil.Process(process.pid)
    [child] = wait_until(
        lambda: [child for child in parent.children() if "import time; time.sleep(60)" in child.cmdline()],
        what="the stage has started",
    )
    yield process, child
    process.kill()
    process.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_stage_too(stage, signum):
    process, child = stage
    os.kill(process.pid, signum)

    assert process.wait(10) == 128 + signum
    assert not child.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_kill_9_ends_the_stage_too(stage):
    process, child = stage
    process.kill()

    wait_until(
        lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, what="the stage is gone"
    )
