"""Rows in COPY's binary format."""

from __future__ import annotations

from uuid import UUID

import pytest

from pulse_outbox.connections.copying import text_field, uuid_columns


@pytest.mark.parametrize("start", [2**127, 2**127 - 2**40, 2**48 - 1, 5 << 48])
@pytest.mark.parametrize("number", [1, 2, 100])
def test_uuids_are_written_as_themselves_and_as_text(start, number):
    """Whether or not all but their last twelve digits are the same."""
    numbers = [start + 7 * n * 2**32 for n in range(number)]
    binary, text = uuid_columns(numbers)

    assert [*binary] == [b"\0\0\0\x10" + UUID(int=one).bytes for one in numbers]
    assert [*text] == [text_field(str(UUID(int=one))) for one in numbers]
