"""The harness's end of the protocol with a driver (its other end: benchmarks/driver.py, peers/common.mjs)."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.driver import Task
from benchmarks.machine import cpu_seconds

READY_DEADLINE = 60.0
ENDING = 3.0
"""What a driver gets to end by itself after it has said that it is done, in seconds."""


class DriverFailed(Exception):
    """A driver ended without saying that it was done, or took too long over it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One line of a driver."""

    event: str
    fields: Mapping[str, Any]


def parse_line(line: str) -> Message | None:
    """The message of a line; None when a product has printed something of its own."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    return Message(fields.pop("event"), fields)


class DriverProcess:
    """A running driver. Leaving the context ends it, in whatever state it is."""

    def __init__(
        self, command: Sequence[str | Path], task: Task, *, environment: Mapping[str, str], log: Path
    ) -> None:
        self.task = task
        self.settings = ""
        self._log_path = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [*map(str, command), json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(environment),
        )
        self._messages: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = parse_line(line)
            if message is None:
                self._log.write(line)
            else:
                self._messages.put(message)
        self._messages.put(None)

    def wait_for(self, event: str, deadline: float) -> Mapping[str, Any]:
        """The fields of the next message of that name; *deadline* in seconds from now."""
        limit = time.monotonic() + deadline
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise DriverFailed(f"{self._name} did not say {event!r} within {deadline:.0f} s") from None
            if message is None:
                raise DriverFailed(f"{self._name} ended early: {self._last_words()}")
            if message.event == event:
                return message.fields

    def wait_ready(self) -> None:
        self.settings = str(self.wait_for("ready", READY_DEADLINE).get("settings", ""))

    def go(self) -> None:
        self._send("go")

    def stop(self) -> None:
        """Asks a worker to report now."""
        self._send("stop")

    def _send(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()

    @property
    def _name(self) -> str:
        return f"the driver ({self.task.action}, log {self._log_path.name})"

    def _last_words(self) -> str:
        self._log.flush()
        lines = [
            line.strip() for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()
        ]
        return lines[-1][:300] if lines else "without a word"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # the end of the harness, as far as the driver knows
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING if kind is None else 0.1)
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def started(process: DriverProcess) -> Iterator[DriverProcess]:
    """A driver that is ready, and ended at the end."""
    with process:
        process.wait_ready()
        yield process
