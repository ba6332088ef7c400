"""However the owner ends, its server's processes and its folder end too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pulse_outbox import embedded
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Owner:
    """A process that owns an embedded server, and what is known of that server."""

    def __init__(self, *wishes: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.owner", *wishes],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As a shell does it: Ctrl-C then reaches the owner and not pytest.
            process_group=0,
        )

    def listen(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        said: dict[str, Any] = json.loads(line)
        self.base = Path(said["base"])
        server = psutil.Process(said["pid"])
        self.processes = [server, *server.children(recursive=True), *mentioning(said["base"])]
        assert len(self.processes) > 3
        return said

    def is_all_gone(self) -> bool:
        return not self.base.exists() and not any(map(is_alive, self.processes))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mentioning(path: str) -> list[psutil.Process]:
    """The watchdog and the server's main process have the folder's name on their command lines."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(path in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def list_matching(folder: str, pattern: str) -> list[Path]:
    return list(Path(folder).glob(pattern))


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    started: list[Owner] = []
    yield started
    for owner in started:
        if owner.process.poll() is None:
            owner.process.kill()
        owner.process.wait()
        for stream in (owner.process.stdin, owner.process.stdout, owner.process.stderr):
            assert stream is not None
            stream.close()


def test_control_a_living_owner_keeps_its_server(owners):
    """Shows that the other tests here could fail."""
    owners.append(owner := Owner())
    said = owner.listen()

    assert owner.base.exists()
    assert is_alive(psutil.Process(said["pid"]))
    assert not owner.is_all_gone()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda owner: owner.stdin.close(), id="normal exit"),
        pytest.param(
            lambda owner: (owner.stdin.write("leave\n"), owner.stdin.flush()), id="exit without clean-up"
        ),
        pytest.param(lambda owner: os.killpg(owner.pid, signal.SIGINT), id="Ctrl-C"),
        pytest.param(lambda owner: owner.terminate(), id="SIGTERM"),
        pytest.param(lambda owner: owner.kill(), id="kill -9"),
        pytest.param(lambda owner: os.killpg(owner.pid, signal.SIGKILL), id="kill -9 on its process group"),
    ],
)
def test_nothing_is_left_after(owners, end):
    owners.append(owner := Owner())
    owner.listen()

    end(owner.process)

    wait_until(owner.is_all_gone, what=f"{owner.base} and its processes are gone")


def test_nothing_is_left_after_an_exception(owners):
    """Here the owner has cleaned up itself when it ends: nobody has to wait."""
    owners.append(owner := Owner("raise"))
    said, errors = owner.process.communicate()
    base = json.loads(said)["base"]

    assert "on purpose" in errors
    assert not Path(base).exists()
    assert not mentioning(base)


def test_nothing_is_left_when_killed_while_starting(owners):
    """The watchdog knows of initdb and of the server before they run."""
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        for stage in ("s", "data.new/base", "data/postmaster.pid"):
            owners.append(owner := Owner(TMPDIR=folder))
            wait_until(partial(list_matching, folder, f"*/{stage}"), what=f"{stage} exists")
            owner.process.kill()

            wait_until(lambda: not mentioning(folder), what=f"killed at {stage}, no process")
            wait_until(lambda: not os.listdir(folder), what=f"killed at {stage}, no folder")


def test_a_kept_directory_is_left_in_order(owners):
    """The server gets the time to end by itself: its lock file is gone, its data stay."""
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        kept = Path(folder) / "kept"
        owners.append(owner := Owner(f"keep={kept}"))
        owner.listen()
        owner.process.kill()

        wait_until(owner.is_all_gone, what="all but the data is gone")
        assert not (kept / "data" / "postmaster.pid").exists()
        with embedded.start(directory=kept) as server:
            assert server.is_running


def test_a_forked_child_does_not_keep_the_server(owners):
    """multiprocessing and some servers fork; their children must not count as the owner."""
    owners.append(owner := Owner("fork"))
    said = owner.listen()
    try:
        owner.process.kill()

        wait_until(owner.is_all_gone, what="all is gone although a child lives")
        assert is_alive(psutil.Process(said["child"]))
    finally:
        os.kill(said["child"], signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
def test_an_ordinary_user_needs_nothing_else(owners):
    [packaged] = embedded._packaged_binaries()
    if not all(folder.stat().st_mode & 0o005 == 0o005 for folder in (packaged, *packaged.parents)):
        pytest.skip("other users can't enter this checkout")
    owners.append(owner := Owner("as-nobody"))
    said = owner.listen()

    assert psutil.Process(said["pid"]).username() == "nobody"
    owner.process.kill()
    wait_until(owner.is_all_gone, what="all is gone")
