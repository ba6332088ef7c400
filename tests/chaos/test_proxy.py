"""The rig's proxy reads the protocol: it must know a request that changes something, and the end of its answer."""

from __future__ import annotations

from chaos.proxy import Answers, Requests


def message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


STARTUP = message(b"", (196608).to_bytes(4) + b"user\0somebody\0\0")
TLS_REQUEST = message(b"", (80877103).to_bytes(4))


def test_a_simple_query():
    requests = Requests()

    assert requests.feed(STARTUP) == []
    assert requests.feed(message(b"Q", b"BEGIN\0")) == []
    assert requests.feed(message(b"Q", b"COMMIT\0")) == ["commit"]


def test_requests_before_the_startup_message():
    requests = Requests()

    assert requests.feed(TLS_REQUEST + STARTUP + message(b"Q", b"commit\0")) == ["commit"]


def test_a_prepared_statement_counts_when_it_is_executed():
    requests = Requests()
    requests.feed(STARTUP)

    assert requests.feed(message(b"P", b"_pg3_0\0select * from pulse.outbox_claim($1)\0\0\0")) == []
    assert requests.feed(message(b"B", b"\0_pg3_0\0\0\0\0\0")) == ["claim"]
    assert requests.feed(message(b"B", b"\0_pg3_1\0\0\0\0\0")) == []


def test_messages_in_pieces():
    requests = Requests()
    bytes_of_all = (
        STARTUP + message(b"Q", b"select 1\0") + message(b"Q", b"select pulse.outbox_enqueue($1)\0")
    )
    found = [
        name
        for number in range(len(bytes_of_all))
        for name in requests.feed(bytes_of_all[number : number + 1])
    ]

    assert found == ["enqueue"]


def test_the_end_of_an_answer():
    """An answer may come in pieces, and a row may hold any byte."""
    answers = Answers()

    assert not answers.feed(message(b"D", b"ZZZZ") + message(b"C", b"SELECT 1\0"))
    ready = message(b"Z", b"I")
    assert not answers.feed(ready[:3])
    assert answers.feed(ready[3:])
