"""A journal: lines of JSON, each on disk before its writer goes on. It survives whatever happens to the writer."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Journal:
    """Appends to one file. Safe from several threads: a line is one write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, what: str, **values: Any) -> None:
        """One line, with the time. The clock is the machine's monotonic one, which all processes share."""
        line = json.dumps({"t": time.monotonic(), "what": what, **values}, separators=(",", ":"))
        os.write(self._file, f"{line}\n".encode())
        os.fdatasync(self._file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one journal. A last line without its end was cut off by the writer's death and does not count."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
