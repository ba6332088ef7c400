"""An operator on call: runs the blocks of a runbook with the real psql and bash, and nothing else."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.runbooks.blocks import Block, blocks_of

PATIENCE = 40.0


class Psql:
    """One session that stays open, so that what a block has `\\set` the next one knows."""

    def __init__(self, program: Path, dsn: str, directory: Path) -> None:
        self._process = subprocess.Popen(
            [program, "-X", "-w", "-v", "ON_ERROR_STOP=1", "-P", "pager=off", "-d", dsn],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def set(self, name: str, value: object) -> None:
        quoted = str(value).replace("\\", "\\\\").replace("'", "\\'")
        self.run(f"\\set {name} '{quoted}'")

    def run(self, text: str) -> str:
        """What psql answers; fails as soon as a statement does."""
        end = f"end of block {secrets.token_hex(8)}"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and said why
            self._process.stdin.write(f"{text}\n\\echo {end}\n")
        answer: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=PATIENCE)
            except queue.Empty:
                raise AssertionError(f"psql is still busy with\n{text}\n{''.join(answer)}") from None
            assert line is not None, f"psql ended in\n{text}\nand said\n{''.join(answer)}"
            if line.strip() == end:
                return "".join(answer)
            answer.append(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._reader.join(5)
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class Shift:
    """Runs the blocks of one runbook, by name; those that the test has declared and no others."""

    def __init__(
        self,
        runbook: str,
        declared: tuple[str, ...],
        *,
        psql: Path,
        logins: Mapping[str, str],
        directory: Path,
    ) -> None:
        self.runbook = runbook
        self._blocks = {block.name: block for block in blocks_of(runbook)}
        self._left = set(declared)
        self._declared = set(declared)
        self._psql = psql
        self.logins = dict(logins)
        self._sessions: dict[str, Psql] = {}
        self._values: dict[str, object] = {}
        self._directory = directory

    def knows(self, **values: object) -> None:
        """What the operator has seen and now writes for :'event_id' in psql and for $EVENT_ID in a shell."""
        self._values |= values
        for session in self._sessions.values():
            for name, value in values.items():
                session.set(name, value)

    def run(self, *names: str) -> str:
        """Runs these blocks and returns what the last of them printed."""
        answer = ""
        for name in names:
            assert name in self._declared, f"{name} is not declared with @follows"
            block = self._blocks[name]
            answer = self._in_psql(block) if block.language == "sql" else self._in_bash(block)
            self._left.discard(name)
        return answer

    def moves_to(self, **logins: str) -> None:
        """The database is elsewhere from now on: sessions are opened anew."""
        self.close()
        self.logins |= logins

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def require_all_run(self) -> None:
        assert not self._left, f"declared with @follows but never run: {sorted(self._left)}"

    def _in_psql(self, block: Block) -> str:
        if block.login not in self._sessions:
            session = self._sessions[block.login] = Psql(
                self._psql, self.logins[block.login], self._directory
            )
            for name, value in self._values.items():
                session.set(name, value)
        return self._sessions[block.login].run(block.text)

    def _in_bash(self, block: Block) -> str:
        environment: dict[str, Any] = {
            name: value for name, value in os.environ.items() if not name.startswith(("PULSE_OUTBOX_", "PG"))
        }
        environment["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), str(self._psql.parent), environment["PATH"]]
        )
        environment |= {name.upper(): str(value) for name, value in self._values.items()}
        if block.login in self.logins:
            environment["PULSE_OUTBOX_DSN"] = self.logins[block.login]
        done = subprocess.run(
            ["bash", "-eu", "-c", block.text],
            env=environment,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{block} ended with {done.returncode}:\n{block.text}\n{done.stdout}"
        return done.stdout
