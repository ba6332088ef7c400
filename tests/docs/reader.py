"""Somebody who has a terminal, an empty directory and a page, and does what it says from the top to the end."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import fcntl
import inspect
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import tomllib
import types
from pathlib import Path

import psycopg
import yaml
from psycopg.conninfo import conninfo_to_dict

from tests.docs.pages import SAMPLES, Block

PATIENCE = 100.0
STANDS_FOR_THE_DATABASE = re.compile(r"(postgresql(?:\+\w+)?)://localhost/shop\b")
# Packages are there already: tests/packaging installs the wheel into an empty environment.
INSTALLATION = re.compile(r"(python3? -m )?(pip install|venv) |\. \.venv/bin/activate|cd \S+$|mkdir ")


class Reader:
    """Follows one page."""

    def __init__(self, directory: Path, dsn: str) -> None:
        self.directory = directory
        self.dsn = dsn
        server = conninfo_to_dict(dsn)
        self._database = str(server["dbname"])
        self._where = f"{server['user']}@/{self._database}?host={server['host']}&port={server['port']}"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PULSE_OUTBOX_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PULSE_OUTBOX_DSN": f"postgresql://{self._where}",
            # Where a page would start a server for its tests, it gets this run's.
            "PULSE_OUTBOX_TEST_DSN": f"postgresql://{self._where}",
            "PGHOST": str(server["host"]),
            "PGPORT": str(server["port"]),
            "PGUSER": str(server["user"]),
            "PGDATABASE": self._database,
            "NO_COLOR": "1",
            "COLUMNS": "160",
        }
        self._names = types.ModuleType("page")
        self._loop = asyncio.new_event_loop()
        self._running: list[Terminal] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Reader:
        """In the page's directory, with its environment, and with modules of its own."""
        before, here = dict(os.environ), os.getcwd()
        modules = set(sys.modules)
        os.environ.update(self._environment)
        os.chdir(self.directory)
        sys.path.insert(0, str(self.directory))
        sys.modules["page"] = self._names

        def leave() -> None:
            for name in sys.modules.keys() - modules:
                origin = getattr(sys.modules[name], "__file__", None) or ""
                if name == "page" or origin.startswith(str(self.directory)):
                    del sys.modules[name]
            sys.path.remove(str(self.directory))
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)

        self._open.callback(leave)
        self._open.callback(self._loop.close)
        self._open.callback(self._close_connections)
        return self

    def __exit__(self, *_: object) -> None:
        for terminal in self._running:
            terminal.kill()
        self._open.close()

    def follow(self, block: Block) -> None:
        """Does what a block asks for."""
        if block.language in SAMPLES or block.elsewhere:
            return
        text = self._own(block.text)
        if (file := block.file) is not None:
            self._write(*file, text)
            return
        match block.language:
            case "python" | "prepare" | "check":
                self._execute(text, str(block))
            case "sql":
                self._execute_sql(text, block.words)
            case "console":
                self._type(text, block)
            case "toml":
                tomllib.loads(text)
            case "yaml":
                list(yaml.safe_load_all(text))
            case "json":
                json.loads(text)
            case "ini":
                pass
            case other:
                raise AssertionError(f"{block}: nobody knows what to do with {other!r}")

    def finish(self) -> None:
        """Ends what runs in the background, as one does with Ctrl-C, and expects it to end well."""
        for terminal in self._running:
            terminal.end()

    def _own(self, text: str) -> str:
        return STANDS_FOR_THE_DATABASE.sub(lambda match: f"{match[1]}://{self._where}", text)

    def _write(self, name: str, more: bool, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if more else ""
        path.write_text(before + text)
        if name.endswith(".py"):
            compile(path.read_text(), name, "exec")

    def _execute(self, text: str, place: str) -> None:
        code = compile(text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            self._loop.run_until_complete(eval(code, vars(self._names)))
        else:
            exec(code, vars(self._names))

    def _execute_sql(self, text: str, words: tuple[str, ...]) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            if words:
                conn.execute(f"set role pulse_{words[0]}".encode())
            conn.execute(text.encode())

    def _type(self, text: str, block: Block) -> None:
        assert text.startswith("$ "), f"{block}: begins with `$ `"
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            last = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
            command, printed = "\n".join(lines[: last + 1]), lines[last + 1 :]
            if INSTALLATION.match(command):
                continue
            terminal = Terminal(command, self.directory, self._environment)
            if "background" in block.words:
                self._running.append(terminal)
                wait_for(terminal, printed, block)
                continue
            terminal.wait()
            self._environment |= terminal.environment
            assert (terminal.code != 0) == ("fails" in block.words), (
                f"{block}: {command}: exit code {terminal.code}\n{terminal.output}"
            )
            missing = first_missing(printed, terminal.output)
            assert missing is None, (
                f"{block}: {command}: does not print {missing!r} there:\n{terminal.output}"
            )

    def _close_connections(self) -> None:
        for value in vars(self._names).values():
            if isinstance(value, psycopg.Connection):
                value.close()
            elif isinstance(value, psycopg.AsyncConnection):
                self._loop.run_until_complete(value.close())


class Terminal:
    """One command of bash, with a terminal of 160 columns around it."""

    def __init__(self, command: str, directory: Path, environment: dict[str, str]) -> None:
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        kept, told = os.pipe()
        self.command = command
        self.output = ""
        self.environment: dict[str, str] = {}
        self._process = subprocess.Popen(
            ["bash", "-c", f"{command}\ncode=$?; env -0 >&{told}; exit $code"],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=its,
            stderr=its,
            pass_fds=[told],
            start_new_session=True,
        )
        os.close(its)
        os.close(told)
        self._readers = [
            threading.Thread(target=self._read_output, args=(ours,), daemon=True),
            threading.Thread(target=self._read_environment, args=(kept,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self, ours: int) -> None:
        pieces = b""
        with (
            open(ours, "rb", buffering=0) as stream,
            contextlib.suppress(OSError),
        ):  # a pty ends with an error
            while piece := stream.read(4096):
                pieces += piece
                text = pieces.decode(errors="replace").replace("\r\n", "\n")
                self.output = re.sub("\x1b\\[[0-9;]*m", "", text)

    def _read_environment(self, kept: int) -> None:
        with open(kept, "rb") as stream:
            pairs = [pair.partition("=") for pair in stream.read().decode().split("\0") if pair]
        self.environment = {name: value for name, _, value in pairs if name not in ("_", "SHLVL", "PWD")}

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def wait(self) -> None:
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.command}: does not end\n{self.output}") from None
        for reader in self._readers:
            reader.join(5)

    def end(self) -> None:
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGINT)
        self.wait()

    def kill(self) -> None:
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def wait_for(terminal: Terminal, printed: list[str], block: Block) -> None:
    from tests.support.waiting import wait_until

    def shown() -> bool:
        assert terminal.code is None, f"{block}: ended with {terminal.code}\n{terminal.output}"
        return first_missing(printed, terminal.output) is None

    wait_until(shown, within=PATIENCE, what=f"{block}: {terminal.command}: {printed}")


def first_missing(printed: list[str], output: str) -> str | None:
    """The first of these lines that is not in the output, in their order; … stands for anything."""
    lines = iter(" ".join(line.split()) for line in output.splitlines())
    for wanted in printed:
        pattern = ".*".join(re.escape(" ".join(part.split())) for part in wanted.split("…"))
        if wanted.strip(" …") and not any(re.search(pattern.replace(r".*\ ", ".*"), line) for line in lines):
            return wanted
    return None
