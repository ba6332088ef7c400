"""The wheel, installed where there is no checkout, brings everything that the code reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import pulse_outbox
from pulse_outbox import schema

ROOT = Path(__file__).parents[2]


def build(kind: str, source: Path, into: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into],
        cwd=source,
        check=True,
        capture_output=True,
    )
    [built] = into.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The bin folder of an environment with the wheel and, from ours, its dependencies: no network needed."""
    place = tmp_path_factory.mktemp("clean")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    [packages] = place.glob("lib/python*/site-packages")
    # As a plain line of a .pth, our site-packages are searched last and their own .pth files, the editable
    # install among them, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--force-reinstall", str(wheel)], check=True, capture_output=True)
    return place / "bin"


def run(clean: Path, program: str, *arguments: str, **environment: str) -> str:
    answer = subprocess.run(
        [clean / program, *arguments],
        cwd=clean,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_package_is_the_installed_one(clean):
    """Control: the other tests here say something about the wheel and not about the checkout."""
    where = run(clean, "python", "-c", "import pulse_outbox; print(pulse_outbox.__file__)").strip()

    assert Path(where).is_relative_to(clean.parent)


def test_the_release_is_the_same_everywhere(clean, wheel):
    assert run(clean, "pulse-outbox", "--version").split()[-1] == pulse_outbox.__version__
    assert wheel.name.startswith(f"pulse_outbox-{pulse_outbox.__version__}-")


def test_its_migrations_are_those_of_the_checkout(clean):
    asked = """
import json
from pulse_outbox import schema

print(json.dumps([[migration.label, migration.checksum] for migration in schema.find_migrations()]))
"""

    found = json.loads(run(clean, "python", "-c", asked))

    assert found == [[migration.label, migration.checksum] for migration in schema.find_migrations()]
    assert [label for label, _ in found] == sorted(file.stem for file in (ROOT / "migrations").glob("*.sql"))


def test_it_migrates_a_database(clean, empty_dsn):
    first = run(clean, "pulse-outbox", "migrate", PULSE_OUTBOX_DSN=empty_dsn)
    run(clean, "pulse-outbox", "migrate", PULSE_OUTBOX_DSN=empty_dsn)
    run(clean, "pulse-outbox", "migrate", "--check", PULSE_OUTBOX_DSN=empty_dsn)

    assert "0001_outbox" in first


def test_it_holds_runbooks_types_and_licence(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    assert {f"pulse_outbox/runbooks/{file.name}" for file in (ROOT / "runbooks").glob("*.md")} <= names
    assert "pulse_outbox/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_holds_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0].split("-")[0] for name in names} == {"pulse_outbox"}


def test_a_wheel_from_the_source_distribution_is_the_same(wheel, tmp_path):
    """Distributors and `pip install --no-binary` build from it."""
    source = build("sdist", ROOT, tmp_path / "sdist")
    subprocess.run(["tar", "-xzf", source, "-C", tmp_path], check=True)
    again = build("wheel", tmp_path / source.name.removesuffix(".tar.gz"), tmp_path / "again")

    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
