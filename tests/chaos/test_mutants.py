"""The test of the checker: a broken product does not pass. `dev.py chaos --mutants` runs them all; two run here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from chaos import checker
from chaos.mutants import COURSES, MUTANTS, change_database

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_can_be_made(dsn: str, name: str):
    """The words that it changes are still there, and what it makes of them is valid SQL."""
    mutant = MUTANTS[name]
    with psycopg.connect(dsn, autocommit=True) as conn:
        change_database(conn, name)
        for function, _, new in mutant.changes:
            [(text,)] = conn.execute("select prosrc from pg_proc where proname = %s", (function,)).fetchall()
            assert new in text

    assert mutant.changes or mutant.patch
    assert mutant.course in COURSES
    rules = "".join(path.read_text() for path in Path(checker.__file__).parent.glob("*.py"))
    assert all(f'"{rule}"' in rules for rule in mutant.noticed_by)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["plain subquery claim", "enqueue outside the transaction"])
def test_mutant_is_caught(tmp_path: Path, name: str):
    """Without a single fault: the product itself is wrong. `test_a_short_run` shows that an unbroken one passes."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "chaos", "--mix", "none", "--mutant", name, "--minutes", "0.1"]
    command += ["--lease", "1.5", "--rate", "20", "--drain-within", "5"]
    command += ["--evidence", str(tmp_path / "evidence"), "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stdout[-6000:] + done.stderr[-3000:]
    broken = {violation["rule"] for violation in json.loads(report.read_text())["violations"]}
    assert broken & set(MUTANTS[name].noticed_by), broken
