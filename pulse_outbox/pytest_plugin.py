"""The pytest plugin: fixtures that cost nothing until a test asks for one.

    outbox_testkit      runs the application's events: see pulse_outbox.testing.TestKit
    outbox_dsn          a migrated database of the test's own

To be told more by a project's conftest.py, which may override these:

    outbox_under_test   the application's Outbox; else the setting `pulse_outbox = "shop.handlers:outbox"` of pytest
    outbox_prepare      a function that puts the application's own tables into what every test gets a copy of
    outbox_connection   the test's own connection or session, where everything happens in one transaction

The server: PULSE_OUTBOX_TEST_DSN, else an embedded one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pulse_outbox.outbox import Outbox
    from pulse_outbox.testing.databases import Databases
    from pulse_outbox.testing.kit import TestKit
    from pulse_outbox.testing.loop import Loop

SETTING = "pulse_outbox"
ADDRESS = "pulse_outbox_desk"

_desk = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(SETTING, 'the application\'s Outbox for outbox_testkit: "shop.handlers:outbox"', default="")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In xdist's controller, for each worker: tells it where to ask for the server."""
    from pulse_outbox.testing.sharing import open_desk

    stash = node.config.stash
    if _desk not in stash:
        stash[_desk] = open_desk(_schema())
    desk = stash[_desk]
    node.workerinput[ADDRESS] = desk and desk.address


def pytest_unconfigure(config: pytest.Config) -> None:
    desk = config.stash.get(_desk, None)
    if desk is not None:
        desk.close()
        del config.stash[_desk]


def _schema() -> str:
    return os.environ.get("PULSE_OUTBOX_SCHEMA") or "pulse"


@pytest.fixture(scope="session")
def outbox_databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """Makes databases on the run's server, which xdist's workers share."""
    from pulse_outbox.testing.databases import serving
    from pulse_outbox.testing.sharing import is_here, joining

    address = getattr(request.config, "workerinput", {}).get(ADDRESS)
    found = joining(str(address), _schema()) if is_here(address) else serving(schema=_schema())
    with found as databases:
        yield databases


@pytest.fixture(scope="session")
def outbox_prepare() -> Callable[[str], None] | None:
    """Override: a function that gets a DSN, once in a run, and puts the application's own tables there."""
    return None


@pytest.fixture
def outbox_dsn(outbox_databases: Databases, outbox_prepare: Callable[[str], None] | None) -> Iterator[str]:
    """A migrated database of the test's own, as a URI. Override: a database that you have prepared yourself."""
    with outbox_databases.database(prepare=outbox_prepare) as dsn:
        yield dsn


@pytest.fixture
def outbox_connection() -> object:
    """Override: the test's own connection or session, and the kit works inside its transaction."""
    return None


@pytest.fixture
def outbox_under_test(request: pytest.FixtureRequest) -> Outbox:
    """The application's Outbox. Override, or say `pulse_outbox = "shop.handlers:outbox"` in pytest's settings."""
    from pulse_outbox.dispatcher.target import load_outbox

    target = request.config.getini(SETTING)
    if not target:
        pytest.fail(
            'outbox_testkit does not know the application\'s Outbox: put pulse_outbox = "your.module:outbox" into '
            "pytest's settings, or override the fixture outbox_under_test",
            pytrace=False,
        )
    return load_outbox(str(target))


@pytest.fixture(scope="session")
def _outbox_loop() -> Iterator[Loop]:
    from pulse_outbox.testing.loop import Loop

    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def outbox_testkit(
    request: pytest.FixtureRequest, outbox_under_test: Outbox, outbox_connection: object, _outbox_loop: Loop
) -> Iterator[TestKit]:
    """Runs the application's events through its own handlers, on a real database and on simulated time."""
    from pulse_outbox.testing.kit import TestKit

    where: dict[str, Any] = (
        {"connection": outbox_connection}
        if outbox_connection is not None
        else {"dsn": request.getfixturevalue("outbox_dsn")}
    )
    with TestKit(outbox_under_test, loop=_outbox_loop, **where) as kit:
        yield kit
