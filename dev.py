#!/usr/bin/env python3
"""Everything a checkout needs, with nothing but Python: makes .venv and runs the project's commands in it.

    python3 dev.py demo            see it working
    python3 dev.py test            every check: ruff, mypy, import-linter, pytest
    python3 dev.py test ARGS…      pytest alone, with these arguments
    python3 dev.py lint            the checks without pytest
    python3 dev.py bench ARGS…     measure beside the peers; --help says how
    python3 dev.py chaos           the fault rig: --minutes N --seed S (--help tells more)
    python3 dev.py run CMD ARGS…   any command of the environment

Standard library only. The first call installs requirements-dev.txt (pinned, with hashes); later calls see
that nothing changed and start at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "dev-stamp"
LOCK = ROOT / ".venv.lock"
REQUIREMENTS = ROOT / "requirements-dev.txt"
OLDEST_PYTHON = (3, 11)

CHECKS: dict[str, list[str]] = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy", "--strict"],
    "import-linter": ["lint-imports", "--no-logo"],
}
TESTS: dict[str, list[str]] = {"pytest": ["pytest", "-n", "2", "--dist", "worksteal"]}


def main(arguments: Sequence[str]) -> int:
    if sys.version_info < OLDEST_PYTHON:
        fail(f"Python {version()} is too old: run this with Python 3.11 or newer")
    match list(arguments):
        case ["demo", *rest]:
            prepare()
            become(["pulse-outbox", "demo", *rest])
        case ["test"]:
            prepare()
            return run_stages(CHECKS | TESTS)
        case ["test", *rest]:
            prepare()
            become(["pytest", *rest])
        case ["lint"]:
            prepare()
            return run_stages(CHECKS)
        case ["bench", *rest]:
            prepare()
            become(["python", "-m", "benchmarks", *rest])
        case ["chaos", *rest]:
            prepare()
            become(["python", "-m", "chaos", *rest])
        case ["run", command, *rest]:
            prepare()
            become([command, *rest])
        case ["setup"]:
            prepare()
            return 0
        case [] | ["-h" | "--help" | "help"]:
            print((__doc__ or "").strip())
            return 0
        case _:
            print((__doc__ or "").strip(), file=sys.stderr)
            return 2


# The environment


def prepare() -> None:
    """Leave .venv as requirements-dev.txt and pyproject.toml want it; quick when it already is."""
    if is_ready():
        return
    if not os.access(ROOT, os.W_OK):
        fail(f"{ROOT} is not writable for this user: clone the repository into a folder of your own")
    with locked():
        if is_ready():  # another dev.py was at it while this one waited
            return
        started = time.monotonic()
        say(f"making .venv with Python {version()}")
        # An interrupted run leaves no stamp, so the next one comes here and starts from nothing.
        STAMP.unlink(missing_ok=True)
        try:
            installers = [*uv_installer(), *pip_installers()]
            if not installers:
                fail(
                    "this Python has neither pip nor ensurepip and there is no uv: apt-get install python3-pip"
                )
            for number, install in enumerate(installers, start=1):
                try:
                    install()
                    break
                except subprocess.CalledProcessError as error:
                    print(str(error.output)[-3000:], file=sys.stderr)
                    if number == len(installers):
                        fail(
                            f"installing failed ({shown(error.cmd)}): is the network there? Then run this again"
                        )
                    say("that failed; trying another way")
        except OSError as error:
            fail(f"cannot make .venv ({error}): remove {VENV} and run this again")
        STAMP.write_text(fingerprint())
        say(f"ready in {time.monotonic() - started:.1f} s")


def is_ready() -> bool:
    # The interpreter is a symbolic link: exists() also notices that the Python behind it is gone.
    try:
        return STAMP.read_text() == fingerprint() and (BIN / "python").exists()
    except OSError:
        return False


def fingerprint() -> str:
    """What the environment depends on; the place too, since scripts and the editable install name it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # The settings of ruff, mypy and pytest are in that file too, and change nothing here.
    installed = [project["build-system"], project["project"], project["tool"]["hatch"]]
    digest = hashlib.sha256(REQUIREMENTS.read_bytes())
    digest.update(repr([str(ROOT), sys.version_info[:2], installed]).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def locked() -> Iterator[None]:
    # The kernel drops the lock with its process, however that ends. The file stays: removing it would let
    # one process lock the old file and another the new one.
    with LOCK.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another dev.py that is making .venv")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def uv_installer() -> list[Callable[[], None]]:
    uv = shutil.which("uv")
    if not uv:
        return []

    def install() -> None:
        say("installing requirements-dev.txt with uv")
        remove_venv()
        quietly([uv, "venv", "--quiet", "--no-project", "--python", interpreter(), str(VENV)])
        target = [uv, "pip", "install", "--quiet", "--python", str(BIN / "python")]
        quietly([*target, "--require-hashes", "-r", str(REQUIREMENTS)])
        say("installing the project (editable)")
        quietly([*target, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])

    return [install]


def pip_installers() -> list[Callable[[], None]]:
    python = str(BIN / "python")
    outside = outside_pip(python)
    ensurepip = importlib.util.find_spec("ensurepip")
    if not outside and not (ensurepip and ensurepip.origin):
        return []

    def install() -> None:
        say("installing requirements-dev.txt with pip; this takes about half a minute, once")
        remove_venv()
        # Making the environment without pip and installing from outside works on Debian, whose venv may
        # lack ensurepip; it is also quicker. requirements-dev.txt brings a pip of its own.
        quietly([interpreter(), "-m", "venv", *(["--without-pip"] if outside else []), str(VENV)])
        inside = [python, "-m", "pip"]
        quietly([*(outside or inside), "install", "--quiet", "--require-hashes", "-r", str(REQUIREMENTS)])
        say("installing the project (editable)")
        quietly([*inside, "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT)])

    return [install]


def outside_pip(python: str) -> list[str]:
    """A pip that can install for *python*, which has none (since 22.3); empty if there is no such pip."""
    # This file is how `pip --python` does it. Started directly, pip is our child and ends when we do.
    find_runner = "import os, pip; print(os.path.join(pip.__path__[0], '__pip-runner__.py'))"
    runner = answer_of([interpreter(), "-c", find_runner]).strip()
    if runner and Path(runner).exists():
        return [python, runner]
    for pip in filter(None, map(shutil.which, ("pip3", "pip"))):
        if answer_of([pip, "--python", interpreter(), "--version"]):
            return [pip, "--python", python]
    return []


def answer_of(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    return answer.stdout if answer.returncode == 0 else ""


def interpreter() -> str:
    """The Python below any virtual environment: .venv must not be made by itself."""
    return str(getattr(sys, "_base_executable", sys.executable))


def remove_venv() -> None:
    if VENV.is_symlink():
        fail(f"{VENV} is a symbolic link: remove it and run this again")
    if VENV.exists():
        shutil.rmtree(VENV)


def quietly(command: list[str]) -> None:
    """Run a step of the installation; its output is shown only when it fails."""
    with forwarding_signals() as adopt:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment(),
            cwd=ROOT,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        adopt(process)
        output, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output)


def environment() -> dict[str, str]:
    """The caller's environment without what would lead pip or Python astray."""
    astray = {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in astray}
    return kept | {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}


# Running things


def become(command: list[str]) -> NoReturn:
    """Replace this process: signals, the terminal and the exit code then need no care."""
    program = BIN / command[0]
    if not program.exists():
        fail(f"there is no command {command[0]} in .venv")
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execve(program, [str(program), *command[1:]], environment())


def run_stages(stages: dict[str, list[str]]) -> int:
    """Run all of them, also after one has failed: one run should tell everything."""
    failed = []
    for name, (program, *arguments) in stages.items():
        say(f"{name}: {shown([program, *arguments])}")
        with forwarding_signals() as adopt:
            process = subprocess.Popen(
                [BIN / program, *arguments],
                stdin=subprocess.DEVNULL,
                env=environment(),
                cwd=ROOT,
                process_group=0,
                preexec_fn=die_with_parent,
            )
            adopt(process)
            code = process.wait()
        if code:
            failed.append(name)
    if failed:
        say(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


Adopt = Callable[["subprocess.Popen[str] | subprocess.Popen[bytes]"], None]


@contextlib.contextmanager
def forwarding_signals() -> Iterator[Adopt]:
    """Pass Ctrl-C and termination on to the child, wait for it to clean up, then end the same way.

    The child has a process group of its own, so that a Ctrl-C at the terminal reaches it once, from here.
    """
    received: list[int] = []
    child: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None

    def forward(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if len(received) == 1:
                child.send_signal(signum)
            else:
                os.killpg(child.pid, signal.SIGKILL)

    def adopt(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
        nonlocal child
        child = process
        if received:
            process.send_signal(received[0])

    passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {signum: signal.signal(signum, forward) for signum in passed_on}
    try:
        yield adopt
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if received:
        sys.exit(128 + received[0])


def die_with_parent() -> None:
    """In the child, before its program starts: `kill -9` on dev.py ends it too (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# Words


def say(text: str) -> None:
    print(f"dev.py: {text}", flush=True)


def fail(text: str) -> NoReturn:
    sys.exit(f"dev.py: {text}")


def shown(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


def version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
