"""What the tests of the dispatcher share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pulse_outbox import Outbox
from tests.support.dispatching import Table


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest_asyncio.fixture
async def table(dsn: str) -> AsyncIterator[Table]:
    table = Table(dsn)
    yield table
    await table.close()
