"""How many instructions the server needs for a job: the same number on a busy machine as on a quiet one.

    python3 dev.py run python -m benchmarks.instructions
    python3 dev.py run python -m benchmarks.instructions --batch 1 --sql without.sql --functions 30

Claims and completions in a loop (`pure_sql/ours.sql`) by a PostgreSQL in its single-user mode, under valgrind's
callgrind. The kernel is not counted, so neither writes nor flushes are, nor what a processor makes of the instructions:
a tenth fewer of them is a hint, and the drain says what it is worth.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pulse_outbox import embedded
from pulse_outbox.schema import migrate

PURE_SQL = Path(__file__).parent / "pure_sql"
LOAD = """
insert into pulse.outbox (event_id, topic, payload, idempotency_key)
select id, 'bench', jsonb_build_object('n', n), id::text
  from (select pulse.uuid7() as id, n from generate_series(1, %s) as n offset 0) as new
"""


@dataclass(frozen=True, slots=True)
class Count:
    """What callgrind counted."""

    per_job: float
    functions: list[tuple[float, str]]
    """Instructions per job of each function and all that it calls, most first."""


def count(*, jobs: int = 10_000, batch: int = 500, sql: str = "") -> Count:
    """Instructions per job; *sql* is done to the empty table first."""
    with tempfile.TemporaryDirectory(prefix="pulse-count-") as folder:
        os.chmod(folder, 0o755)
        with embedded.start(directory=Path(folder) / "server") as server:
            migrate(server.dsn)
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                if sql:
                    conn.execute(sql.encode())
                conn.execute(LOAD, [jobs])
                conn.execute("vacuum analyze")
                database = conn.info.dbname
            process = Path("/proc", str(server.pid))
            binary, data = (process / "exe").resolve(), (process / "cwd").resolve()
            account = process.stat()
        report = Path(folder) / "report"
        report.touch()
        os.chown(report, account.st_uid, account.st_gid)
        done = subprocess.run(
            [
                "valgrind", "--tool=callgrind", "--toggle-collect=ExecuteDoStmt", f"--callgrind-out-file={report}",
                binary, "--single", "-D", data, database,
            ],
            input=_script(batch),
            user=account.st_uid,
            group=account.st_gid,
            text=True,
            capture_output=True,
            check=False,
        )  # fmt: skip
        counted = re.search(r"Collected : (\d+)", done.stderr)
        completed = re.search(r'count = "(\d+)"', done.stdout)
        if counted is None or completed is None or int(completed[1]) != jobs:
            raise RuntimeError(
                f"the jobs were not all completed:\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}"
            )
        return Count(int(counted[1]) / jobs, _functions(report, jobs))


def _script(batch: int) -> str:
    """The loop on one line: to the single-user mode a new line is the end of a statement."""
    loop = re.sub(r"--.*", "", (PURE_SQL / "ours.sql").read_text())
    return "\n".join([
        f"set bench.batch = '{batch}';",
        "set bench.delete = 'false';",
        " ".join(loop.split()),
        "select count(*) from pulse.outbox where status = 'COMPLETED';\n",
    ])  # fmt: skip


def _functions(report: Path, jobs: int) -> list[tuple[float, str]]:
    listed = subprocess.run(
        ["callgrind_annotate", "--inclusive=yes", report], text=True, capture_output=True, check=True
    ).stdout
    found = re.findall(r"^ *([\d,]+) \([ \d.]+%\)  [^:\n]*:([\w.]+)(?: \[|$)", listed, re.MULTILINE)
    return [(int(number.replace(",", "")) / jobs, name) for number, name in found]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.instructions", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=500, help="default: 500")
    parser.add_argument("--jobs", type=int, help="default: 10000, with small batches fewer")
    parser.add_argument("--sql", type=Path, help="a file that is applied after the migrations: a variant")
    parser.add_argument("--functions", type=int, default=0, help="print so many of the costliest functions")
    given = parser.parse_args(arguments)
    if shutil.which("valgrind") is None:
        print("valgrind is needed: apt-get install valgrind", file=sys.stderr)
        return 1
    jobs = given.jobs or min(10_000, 300 * given.batch)
    counted = count(jobs=jobs, batch=given.batch, sql=given.sql.read_text() if given.sql else "")
    print(f"{counted.per_job:,.0f} instructions a job, in batches of {given.batch}")
    for number, name in counted.functions[: given.functions]:
        print(f"{number:12,.0f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
