"""The machine: what it is, how busy it is, and how much of it a process has used."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import psutil

BUSY_LOAD = 0.5
"""Runnable processes beside our own from which on a measurement is suspect."""


def describe() -> dict[str, object]:
    """What a reader needs to know about the machine; nothing that names it."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def busy(seconds: float = 1.0) -> float:
    """Cores that others use now, looked at for *seconds* in which we do nothing ourselves."""
    before = psutil.cpu_times()
    time.sleep(seconds)
    after = psutil.cpu_times()
    idle = (after.idle - before.idle) + (getattr(after, "iowait", 0.0) - getattr(before, "iowait", 0.0))
    return max(0.0, (os.cpu_count() or 1) - idle / seconds)


def quiet_enough(patience: float, warn: Callable[[str], None]) -> float:
    """Waits up to *patience* seconds for the machine to be quiet; returns the cores that others use then."""
    deadline = time.monotonic() + patience
    while (load := busy()) > BUSY_LOAD:
        if time.monotonic() >= deadline:
            warn(f"others use {load:.1f} of {os.cpu_count()} cores: this measurement is noise")
            break
    return round(load, 2)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all that it has started, ended children included."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for member in family:
        try:
            used = member.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system
        # What children that have been waited for have used stands in their parent.
        total += getattr(used, "children_user", 0.0) + getattr(used, "children_system", 0.0)
    return total


def memory(pid: int) -> int:
    """Resident bytes of a process and all that it has started."""
    try:
        process = psutil.Process(pid)
        return sum(member.memory_info().rss for member in [process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0
