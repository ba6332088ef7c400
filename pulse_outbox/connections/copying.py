"""COPY's binary format: rows as PostgreSQL reads them fastest.

It is a signature, the rows and an end mark; a row is the number of its fields, then each field; a field is its length,
then the value as PostgreSQL sends it over the wire. Written here and not by the drivers: so no adapter or codec of the
application changes what is written, and every driver's COPY is as fast as the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, repeat
from typing import Any
from uuid import UUID

Field = Callable[[Any], bytes]

_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
# How much is sent at a time, in rows: the server works on one part while the next is made.
_ROWS_SENT_AT_ONCE = 100
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def in_binary(columns: Collection[Iterable[bytes]], number: int) -> Iterator[bytes]:
    """That many rows of these columns, in parts of a good size."""
    rows = zip(repeat(len(columns).to_bytes(2), number), *columns, strict=True)
    yield _SIGNATURE
    while part := b"".join(chain.from_iterable(islice(rows, _ROWS_SENT_AT_ONCE))):
        yield part
    yield _END


def shared(field: Field, values: Sequence[object]) -> Iterator[bytes]:
    """A column in which values repeat."""
    made = {value: _NULL if value is None else field(value) for value in set(values)}
    return map(made.__getitem__, values)


def uuid_column(values: Iterable[UUID]) -> Iterator[bytes]:
    for value in values:
        yield b"\0\0\0\x10" + value.bytes


def uuid_text_column(values: Iterable[UUID]) -> Iterator[bytes]:
    """These UUIDs as text."""
    for value in values:
        # Two bytes between two dashes; of the dashes, four are right.
        text = value.bytes.hex("-", 2).encode()
        yield b"\0\0\0\x24" + text[:4] + text[5:29] + text[30:34] + text[35:]


def jsonb_column(values: Iterable[bytes]) -> Iterator[bytes]:
    """A column of JSON in UTF-8."""
    return map(_jsonb_field, values)


def text_field(value: str) -> bytes:
    text = value.encode()
    return len(text).to_bytes(4) + text


def jsonb_field(value: str) -> bytes:
    return _jsonb_field(value.encode())


def _jsonb_field(value: bytes) -> bytes:
    """The version of the format stands before the text."""
    return (len(value) + 1).to_bytes(4) + b"\x01" + value


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
