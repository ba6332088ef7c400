"""The README's example is executed, not quoted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_run_it_does_what_it_says(tmp_path, dsn, conn):
    """The files that it names, in an empty directory, and the commands under them."""
    files = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README, re.DOTALL))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    [command] = re.findall(r"^\$ pulse-outbox (run .*)$", README, re.MULTILINE)

    def call(*arguments: str) -> str:
        environment = {**os.environ, "PULSE_OUTBOX_DSN": dsn}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ).stdout

    assert files.keys() == {"shop.py", "pay.py"}
    call("pay.py")
    shown = call("-m", "pulse_outbox.cli", *command.split())

    assert '"receipt for order 7"' in shown
    assert conn.execute("select status::text from pulse.outbox").fetchall() == [("COMPLETED",)]
    assert conn.execute("select paid from orders where id = 7").fetchone() == (True,)


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
