"""Processes of the rig: none outlives it, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """In the child, before its program starts. To be started from the main thread: the kernel watches threads."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """One program of the rig's, in a session of its own, with its output in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        talks: bool = False,
    ) -> None:
        self.name = name
        self.stopped = False
        """By the rig, with SIGSTOP."""
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  the rig has no threads
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """Its exit code, when it has ended."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def is_stopped(self) -> bool:
        """Whether it stands still, whoever stopped it."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def children(self) -> list[int]:
        """The processes that it has started."""
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
                return [int(pid) for pid in file.read().split()]
        except OSError:
            return []

    def say(self, **order: Any) -> None:
        """An order for a program that listens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """A line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def wait(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Ends it and its group, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
