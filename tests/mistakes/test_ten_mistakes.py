"""The ten most likely mistakes, each with the whole message: one line that says what, where and what to do about it."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from pydantic import BaseModel

from pulse_outbox import EnqueueError, Event, Outbox, OutboxError, SettingsError, schema
from pulse_outbox.cli import main
from pulse_outbox.schema import Migration

SHOP = """
    from pulse_outbox import Event, Outbox

    outbox = Outbox()

    @outbox.handler("order.paid")
    def send_receipt(event: Event) -> None: ...
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A directory that holds an application, and is the current one."""
    (tmp_path / "mistaken_shop.py").write_text(dedent(SHOP))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("PULSE_OUTBOX_DSN", "PULSE_OUTBOX_SCHEMA", "PULSE_OUTBOX_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def complaint(capsys):
    """Runs the command, which must fail with one line and nothing else."""

    def run(*arguments: str, code: int = 1) -> str:
        assert main(arguments) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err[-1:]) == ("", 1, "\n")
        return str(err).strip()

    return run


def raised(kind: type[OutboxError], call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_1_the_wrong_connection():
    outbox: Any = Outbox()
    engine = sa.create_engine("postgresql+psycopg://localhost/shop")

    assert raised(EnqueueError, outbox.enqueue, engine, "order.paid", {}) == (
        "this is an engine: pass a connection of it (`with engine.begin() as conn:`)"
    )
    assert raised(EnqueueError, outbox.enqueue, "postgresql://localhost/shop", "order.paid", {}) == (
        "a connection is needed, not builtins.str: pass the psycopg, SQLAlchemy, Django, asyncpg or other DB-API "
        "connection, or the Session, whose transaction it belongs to"
    )


def test_2_no_transaction(connect):
    assert raised(EnqueueError, Outbox().enqueue, connect(autocommit=True), "order.paid", {}) == (
        "the connection is in autocommit and no transaction is open, so the event would not commit together with "
        "your data: use `with conn.transaction():`, or say outside_transaction=True if that is meant"
    )


def test_3_an_unmigrated_database(shop, complaint, empty_dsn):
    with psycopg.connect(empty_dsn) as conn:
        assert raised(EnqueueError, Outbox().enqueue, conn, "order.paid", {}) == (
            "this database has no outbox in schema 'pulse', or an old one: run `pulse-outbox migrate`"
        )
    words = "pulse-outbox: this database has no schema {}: run `pulse-outbox migrate{}`"
    assert complaint("run", "mistaken_shop:outbox", "--dsn", empty_dsn) == words.format("pulse", "")
    assert complaint("status", "--dsn", empty_dsn, "--schema", "shop") == words.format(
        "shop", " --schema shop"
    )


def test_4_a_handler_registered_twice():
    outbox = Outbox()

    @outbox.handler("order.paid")
    def send_receipt(event: Event[Any]) -> None: ...

    def again(event: Event[Any]) -> None: ...

    here = re.escape(f"{__name__}.test_4_a_handler_registered_twice.<locals>")
    file = re.escape(__file__)
    assert re.fullmatch(
        rf"'order\.paid' has two handlers: {here}\.send_receipt \({file}:\d+\) and {here}\.again \({file}:\d+\); "
        "a topic has one: call both from it, or enqueue two events",
        raised(SettingsError, outbox.handler("order.paid"), again),
    )


def test_5_an_annotation_that_can_not_be_resolved():
    outbox = Outbox()

    def send_receipt(event: Event[Nowhere]) -> None: ...  # type: ignore[name-defined]  # noqa: F821  the mistake

    assert re.fullmatch(
        r"handler \S+\.send_receipt of 'order\.paid' \(\S+\.py:\d+\): the annotation 'Event\[Nowhere\]' can't be "
        r"resolved \(name 'Nowhere' is not defined\); define the model at module level, import it outside "
        r"`if TYPE_CHECKING:`, or annotate with a bare Event",
        raised(SettingsError, outbox.handler("order.paid"), send_receipt),
    )


class OrderPaid(BaseModel):
    order_id: int
    paid_with: str


def test_6_a_payload_that_does_not_fit(conn):
    """What can't be written is refused when it is enqueued; what the handler's model refuses dies with its place."""
    outbox = Outbox()

    @outbox.handler("order.paid")
    def send_receipt(event: Event[OrderPaid]) -> None: ...

    assert raised(EnqueueError, outbox.enqueue, conn, "order.paid", {"items": [{"price": float("nan")}]}) == (
        "payload.items[0].price: NaN and infinity are not JSON"
    )
    assert raised(EnqueueError, outbox.enqueue, conn, "order.paid", "x" * 2_000_000) == (
        "payload: 2,000,002 bytes of JSON, above the limit of 1,048,576; store the data elsewhere and enqueue a "
        "reference, or raise Outbox(max_payload_bytes=…)"
    )
    assert raised(OutboxError, outbox.handlers["order.paid"].decode, '{"order_id": "secret"}') == (
        "the payload does not fit OrderPaid: order_id: int_parsing; paid_with: missing"
    )


def test_7_a_module_or_attribute_that_is_not_there(shop, complaint):
    def run(target):
        return complaint("run", target, "--dsn", "host=/nowhere", code=2)

    assert run("mistaken_shp:outbox") == (
        f"pulse-outbox: no module 'mistaken_shp' in {shop} or among the installed packages: "
        "did you mean 'mistaken_shop'?"
    )
    assert run("mistaken_shop:outbx") == (
        "pulse-outbox: mistaken_shop has no attribute 'outbx': there is mistaken_shop:outbox"
    )
    assert run("mistaken_shop.py:outbox") == (
        "pulse-outbox: 'mistaken_shop.py' is a file: name the module, as in mistaken_shop:outbox"
    )


def test_8_a_database_that_can_not_be_reached(shop, complaint):
    """And nothing of the password."""
    dsn = "postgresql://shop:hunter2@127.0.0.1:1/shop"
    for command in (["run", "mistaken_shop:outbox"], ["migrate"], ["status"], ["doctor"]):
        line = complaint(*command, "--dsn", dsn)

        assert line.startswith("pulse-outbox: cannot reach the database: ")
        assert "127.0.0.1" in line
        assert "Connection refused" in line
        assert line.endswith(": check --dsn and that the server is up")
        assert "hunter2" not in line


def test_9_a_schema_that_is_too_old(shop, complaint, dsn, monkeypatch):
    shipped = schema.find_migrations()
    newer = Migration(version=len(shipped) + 1, name="more", text="")
    monkeypatch.setattr(schema, "find_migrations", lambda: (*shipped, newer))
    words = (
        rf"pulse-outbox: schema pulse is at {len(shipped)} and pulse-outbox [\d.]+ needs {len(shipped) + 1}: "
        "run `pulse-outbox migrate`"
    )

    assert re.fullmatch(words, complaint("run", "mistaken_shop:outbox", "--dsn", dsn))
    assert re.fullmatch(words, complaint("status", "--dsn", dsn))


def test_10_a_topic_without_a_handler(dsn, conn, capsys):
    """Nothing is claimed or lost: the event waits, `status` shows it and `doctor` says what to do."""
    Outbox().enqueue(conn, "order.piad", {})
    conn.commit()

    assert main(["status", "--dsn", dsn]) == 0
    assert re.search(r"^order\.piad .* NOBODY$", capsys.readouterr().out, re.MULTILINE)
    assert main(["doctor", "--dsn", dsn]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "nobody serves topic order.piad, and 1 events wait in it do: start a dispatcher whose application has a "
        "handler for it, or find out who renamed the topic"
    ) in said


def test_10_a_dispatcher_without_a_handler(shop, complaint):
    """The other side of the same mistake: the modules that register handlers were never imported."""
    (shop / "mistaken_empty.py").write_text("from pulse_outbox import Outbox\n\noutbox = Outbox()\n")

    assert complaint("run", "mistaken_empty:outbox", "--dsn", "host=/nowhere", code=2) == (
        "pulse-outbox: mistaken_empty:outbox has no handlers: decorate functions with @outbox.handler(topic), and "
        "import the modules that do so from this one"
    )
