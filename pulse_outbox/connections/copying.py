"""COPY's binary format: rows as PostgreSQL reads them fastest.

It is a signature, the rows and an end mark; a row is the number of its fields, then each field; a field is its length,
then the value as PostgreSQL sends it over the wire. Written here and not by the drivers: so no adapter or codec of the
application changes what is written, and every driver's COPY is as fast as the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain, repeat
from struct import unpack
from typing import Any
from uuid import UUID

Field = Callable[[Any], bytes]

SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
END = b"\xff\xff"
NO_ROW = bytes(2)
"""A row without fields, which no table of ours has: PostgreSQL refuses the COPY."""
_NULL = b"\xff\xff\xff\xff"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def rows_in_binary(columns: Collection[Iterable[bytes]], number: int) -> bytes:
    """That many rows of these columns. Before the first rows of a COPY stands SIGNATURE, after the last ones END."""
    rows = zip(repeat(len(columns).to_bytes(2), number), *columns, strict=True)
    return b"".join(chain.from_iterable(rows))


def shared(field: Field, values: Sequence[object]) -> Iterator[bytes]:
    """A column in which values repeat."""
    made = {value: _NULL if value is None else field(value) for value in set(values)}
    return map(made.__getitem__, values)


def uuid_columns(numbers: Sequence[int]) -> tuple[Iterable[bytes], Iterable[bytes]]:
    """Growing UUIDs, in a column of UUIDs and in one of text."""
    binary = [number.to_bytes(16) for number in numbers]
    if numbers[0] >> 48 != numbers[-1] >> 48:
        return map(b"\0\0\0\x10".__add__, binary), (text_field(str(UUID(int=number))) for number in numbers)
    # Made one after the other, they nearly always differ in their last twelve digits only.
    ends = unpack("20x12s" * len(numbers), b"".join(binary).hex().encode())
    start = text_field(str(UUID(int=numbers[0])))[:-12]
    return map(b"\0\0\0\x10".__add__, binary), map(start.__add__, ends)


def jsonb_column(values: Iterable[bytes]) -> Iterator[bytes]:
    """A column of JSON in UTF-8."""
    return (_jsonb_start(len(value)) + value for value in values)


def text_field(value: str) -> bytes:
    text = value.encode()
    return len(text).to_bytes(4) + text


def jsonb_field(value: str) -> bytes:
    text = value.encode()
    return _jsonb_start(len(text)) + text


@lru_cache(maxsize=4096)
def _jsonb_start(length: int) -> bytes:
    """The version of the format stands before the text."""
    return (length + 1).to_bytes(4) + b"\x01"


def int2_field(value: int) -> bytes:
    return b"\0\0\0\x02" + value.to_bytes(2, signed=True)


def int4_field(value: int) -> bytes:
    return b"\0\0\0\x04" + value.to_bytes(4, signed=True)


def int8_field(value: int) -> bytes:
    return b"\0\0\0\x08" + value.to_bytes(8, signed=True)


def bool_field(value: bool) -> bytes:
    return b"\0\0\0\x01\x01" if value else b"\0\0\0\x01\x00"


def time_field(value: datetime) -> bytes:
    return int8_field((value - _EPOCH) // _MICROSECOND)
