"""The demo's dispatcher: the real command as a process of its own, and the supervisor that starts the next one."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pulse_outbox

TARGET = "pulse_outbox.demo.shop:outbox"
TIMES = {"lease": 3, "heartbeat": 1, "watchdog": 0.4, "poll": 1, "grace": 3}
"""A tenth of the defaults: nobody wants to look at a lease for half a minute. The watchdog looks more often,
so that its last look is young when the next dispatcher is up: after a longer gap it holds off for another lease."""

LogLine = dict[str, Any]


class Dispatchers:
    """One dispatcher at a time. Its log lines arrive in `lines`, in order."""

    def __init__(self, dsn: str, *, schema: str) -> None:
        self.number = 0
        self.release = 1
        self.started_at = time.monotonic()
        self.lines: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
        self.last_words = ""
        """The newest line that is no log line: a complaint, if it ends."""
        self._dsn = dsn
        self._schema = schema
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, release: int) -> None:
        """Starts one, which takes a second; its first log line says when it is up."""
        self.number += 1
        self.release = release
        self.started_at = time.monotonic()
        options = [f"--{name}={seconds:g}" for name, seconds in TIMES.items()]
        options += [f"--generation={number}" for number in range(1, release + 1)]
        options += [f"--worker=dispatcher {self.number}", f"--schema={self._schema}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pulse_outbox.demo.tethered", "run", TARGET, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment(),
            # Where this very package is found; the user's own directory may hold anything.
            cwd=Path(pulse_outbox.__file__).parents[1],
            # Ctrl-C is for the demo, which then ends this.
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def died(self) -> int | None:
        """The exit code of a dispatcher that has ended, once."""
        if self._process is None or self._process.poll() is None:
            return None
        return self._bury(self._process)

    def terminate(self) -> None:
        """Asks it to finish what runs and to end; `died` says when it has."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends it whatever it is doing; its own children notice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._bury(self._process)

    def _bury(self, process: subprocess.Popen[bytes]) -> int:
        self._process = None
        if self._reader is not None:
            self._reader.join(1)  # a child of its may hold the other end a moment longer
        assert process.stdin is not None
        process.stdin.close()
        return process.returncode

    def _read(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in stderr:
                try:
                    said = json.loads(line)
                except ValueError:
                    said = None
                if isinstance(said, dict):
                    self.lines.put(said)
                else:
                    self.last_words = line.decode(errors="replace").strip().removeprefix("pulse-outbox: ")

    def _environment(self) -> dict[str, str]:
        # Neither the user's settings nor the user's Sentry have anything to do with this.
        mine = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PULSE_OUTBOX_", "SENTRY_"))
        }
        return mine | {"PULSE_OUTBOX_DSN": self._dsn, "PULSE_OUTBOX_DEMO_RELEASE": str(self.release)}


def describe_exit(code: int) -> str:
    """Exit code or signal, in words."""
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
