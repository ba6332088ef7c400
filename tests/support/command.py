"""`pulse-outbox run` as a real process, whose log can be waited for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.waiting import wait_until


class Command:
    """A running command. Its standard error is read as it comes, so that it never waits for us."""

    def __init__(self, process: subprocess.Popen[Any], stderr: IO[bytes]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(stderr,), daemon=True)
        self._reader.start()

    def _read(self, stderr: IO[bytes]) -> None:
        try:
            for line in stderr:
                self.lines.append(line.decode().rstrip("\r\n"))
        except OSError:
            pass  # how a pty says that the other end has gone
        finally:
            stderr.close()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines that are JSON."""
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def logged(self, event: str, **fields: object) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == event and fields.items() <= line.items()]

    def wait_for(self, event: str, *, within: float = 20, **fields: object) -> dict[str, Any]:
        """The first log line of this name; fails when the process ends without it."""

        def found() -> dict[str, Any] | None:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join(5)
            lines = self.logged(event, **fields)
            assert lines or not ended, f"ended with {self.process.returncode} before {event}:\n{self.text}"
            return lines[0] if lines else None

        line = wait_until(found, within=within, what=event)
        assert line is not None
        return line

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, within: float = 20) -> int:
        """The exit code, once the process has ended and all of its log has been read."""
        code = self.process.wait(within)
        self._reader.join(5)
        return code


@contextmanager
def running(
    directory: Path, *arguments: str, stderr: int | None = None, dsn: str | None = None, **environment: str
) -> Iterator[Command]:
    """Starts `pulse-outbox run …` in *directory*; killed at the end if it is still there."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PULSE_OUTBOX_")}
    if dsn is not None:
        mine["PULSE_OUTBOX_DSN"] = dsn
    process = subprocess.Popen(
        [sys.executable, "-m", "pulse_outbox.cli", "run", *arguments],
        cwd=directory,
        env={**mine, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if stderr is None else stderr,
    )
    try:
        if stderr is None:
            assert process.stderr is not None
            yield Command(process, process.stderr)
        else:
            yield Command(process, open(os.devnull, "rb"))  # noqa: SIM115  closed by its reader
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
