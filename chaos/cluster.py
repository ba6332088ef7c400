"""The database of a run: an embedded PostgreSQL with durable settings, and on request a standby to fail over to."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from chaos import mutants
from chaos.processes import die_with_parent
from pulse_outbox import embedded, schema

ROLES = ("dispatcher", "producer", "operator")
SMALL_DISK = "3g"
SETTINGS = {
    "max_connections": "90",
    "max_wal_size": "512MB",
    "wal_level": "replica",
    "hot_standby": "on",
    "log_min_messages": "warning",
}


class Cluster:
    """The server that is the primary at present. Clients reach it through the proxy; the rig reaches it directly."""

    def __init__(self, *, may_mount: bool) -> None:
        self._may_mount = may_mount
        self._base = Path(tempfile.mkdtemp(prefix="pulse-chaos-"))
        self._base.chmod(0o755)
        self._number = 1
        self.small_disk: Path | None = None
        """A file system of a few gigabytes under the outbox's tables, where mounting one is permitted."""
        self.primary = embedded.start(durable=True, settings=SETTINGS)
        self.standby: embedded.Server | None = None
        self.frozen = False

    def _new_home(self) -> Path:
        self._number += 1
        return self._base / f"server-{self._number}"

    def close(self) -> None:
        self.thaw()
        for server in (self.standby, self.primary):
            if server is not None:
                with suppress(embedded.EmbeddedError):
                    server.crash()
                    server.stop()
        if self.small_disk is not None:
            subprocess.run(["umount", "-l", self.small_disk], check=False)
        shutil.rmtree(self._base, ignore_errors=True)

    def prepare(self, mutant: str) -> None:
        """Our schema, the trigger that remembers, and a login for each role."""
        with self.connect() as conn:
            if self._mount_small_disk():
                conn.execute(f"create tablespace small location '{self._tablespace(1)}'".encode())
                conn.execute("alter database postgres set default_tablespace = small")
        schema.migrate(self.primary.dsn)
        with self.connect() as conn:
            conn.execute("alter database postgres reset default_tablespace")
            conn.execute("set default_tablespace = ''")
            conn.execute((Path(__file__).parent / "transitions.sql").read_bytes())
            for role in ROLES:
                conn.execute(f"create role chaos_{role} login in role pulse_{role}".encode())
            if mutant:
                mutants.change_database(conn, mutant)

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.primary.dsn, autocommit=True, connect_timeout=10, **options)

    @property
    def socket(self) -> str:
        """Where the proxy finds the primary."""
        return f"{self.primary.socket_directory}/.s.PGSQL.5432"

    # The small disk

    def _mount_small_disk(self) -> bool:
        if not self._may_mount:
            return False
        place = self._base / "small"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK},mode=755", "tmpfs", place],
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            self.small_disk = place
        return self.small_disk is not None

    def _tablespace(self, number: int) -> Path:
        assert self.small_disk is not None
        place = self.small_disk / f"space-{number}"
        place.mkdir()
        owner = self.primary.data_directory.stat()
        os.chown(place, owner.st_uid, owner.st_gid)
        return place

    def fill_disk(self) -> None:
        """Not a byte is left."""
        assert self.small_disk is not None
        with (self.small_disk / "filler").open("wb") as file:
            size = 1 << 30
            while size >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
                except OSError:
                    size //= 2

    def free_disk(self) -> None:
        if self.small_disk is not None:
            (self.small_disk / "filler").unlink(missing_ok=True)

    # What may happen to it

    def crash(self) -> None:
        """The server is killed with all its processes, and started again."""
        self.primary.crash()
        self.primary.start()

    def kill_postmaster(self) -> None:
        """Only the main process is killed; the others notice. Started again when they are gone."""
        main, *others = self._processes()
        os.kill(main, signal.SIGKILL)
        self.primary.crash()
        for pid in others:  # one that another fault has stopped would never notice
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        give_up_at = time.monotonic() + 30
        while not self.primary.is_running:
            try:
                self.primary.start()
            except embedded.EmbeddedError:
                # Its shared memory is in use for as long as one of the others lives.
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.1)

    def restart(self) -> None:
        """An immediate stop, and a start with recovery."""
        self.primary.restart(immediate=True)

    def freeze(self) -> None:
        """All processes of the server stand still."""
        self.frozen = True
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            for pid in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _processes(self) -> list[int]:
        pid = self.primary.pid
        return [pid, *embedded._children(pid)]

    # Failover

    def begin_standby(self) -> None:
        """Begins to copy the primary: `continue_standby` is to be called until the standby is there."""
        self._standby_home = home = self._new_home()
        home.mkdir(mode=0o700)
        owner = self.primary.data_directory.stat()
        os.chown(home, owner.st_uid, owner.st_gid)
        mapping = []
        if self.small_disk is not None:
            [old] = self.small_disk.glob("space-*")
            mapping = ["-T", f"{old}={self._tablespace(self._number)}"]
        self._backup = subprocess.Popen(
            [
                self.primary.bin_directory / "pg_basebackup",
                *("-D", str(home / "data"), "-R", "-c", "fast", "-X", "stream", *mapping),
                *("-d", f"{self.primary.dsn}&application_name=standby"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            user=owner.st_uid,
            group=owner.st_gid,
            extra_groups=[],
            cwd="/",
            preexec_fn=die_with_parent,  # noqa: PLW1509  the rig has no threads
        )

    def continue_standby(self) -> bool:
        """Whether the standby follows the primary synchronously: what is acknowledged from now on, it has."""
        if self.standby is None:
            code = self._backup.poll()
            if code is None:
                return False
            assert self._backup.stderr is not None
            with self._backup.stderr as complaints:
                if code:
                    raise embedded.EmbeddedError(f"pg_basebackup failed: {complaints.read()}")
            self.standby = embedded.start(durable=True, settings=SETTINGS, directory=self._standby_home)
        with self.connect() as conn:
            row = conn.execute(
                "select sync_state from pg_stat_replication where application_name = 'standby' and state = 'streaming'"
            ).fetchone()
            if row == ("async",):
                conn.execute("alter system set synchronous_standby_names = 'standby'")
                conn.execute("select pg_reload_conf()")
            return row == ("sync",)

    def _promoted(self) -> bool:
        try:
            with self.connect() as conn:
                conn.execute("select pg_promote(true, 30)")
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return True  # recovery is over
        except psycopg.Error:
            return False
        return False

    def drop_standby(self) -> None:
        """The primary goes on without one."""
        with self.connect() as conn:
            conn.execute("alter system reset synchronous_standby_names")
            conn.execute("select pg_reload_conf()")
        if self._backup.poll() is None:
            self._backup.kill()
            self._backup.wait()
        if self.standby is not None:
            self.standby.crash()
            self.standby.stop()
            self.standby = None
        if self.small_disk is not None:
            shutil.rmtree(self.small_disk / f"space-{self._number}", ignore_errors=True)

    def promote(self) -> None:
        """The primary is gone for good, and the standby takes its place."""
        assert self.standby is not None
        old = self.primary
        old.crash()
        self.primary, self.standby = self.standby, None
        give_up_at = time.monotonic() + 120
        while not self._promoted():
            if time.monotonic() > give_up_at:
                raise embedded.EmbeddedError("the standby was not promoted within 120 s")
            time.sleep(0.2)
        spaces = [place.resolve() for place in (old.data_directory / "pg_tblspc").iterdir()]
        old.stop()
        for place in (old.data_directory.parent, *spaces):
            shutil.rmtree(place, ignore_errors=True)
