"""The examples that are one module each: run as processes, and killed at every point by the kit."""

from __future__ import annotations

from datetime import timedelta
from email.utils import format_datetime

import psycopg
import pytest
from psycopg import sql

from pulse_outbox.testing import TestKit
from tests.examples.conftest import EXAMPLES
from tests.support.waiting import wait_until

POINTS = ["after_claim", "before_handler", "after_handler", "before_complete", "after_complete"]


def test_the_script_imports_orders_and_their_events_together(example, conn):
    script = example("psycopg_script")

    script.python("import_orders.py", "30")
    shown = script.burst("import_orders:outbox")

    assert shown.count("is confirmed") == 30
    assert "30 orders were imported" in shown
    # Confirmed ones are deleted, the reminder waits for a week.
    assert conn.execute(
        "select topic, status::text, next_run_at > now() + interval '6 days' from pulse.outbox order by 1"
    ).fetchall() == [("import.finished", "COMPLETED", False), ("order.reminder", "PENDING", True)]
    with pytest.raises(AssertionError, match="UniqueViolation"):
        script.python("import_orders.py", "31")
    assert conn.execute("select count(*) from pulse.outbox").fetchone() == (2,)


# Pure SQL


@pytest.fixture
def billing(dsn):
    """Somebody else's table and program; a connection as that program's login."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("""
            create role billing_owner nologin;
            create role billing_app login password 'x';
            create schema billing authorization billing_owner;
            create table billing.invoice (id integer primary key, cents integer, paid_at timestamptz, note text);
            alter table billing.invoice owner to billing_owner;
            grant usage on schema billing to billing_app;
            grant select, insert, update on billing.invoice to billing_app;
            insert into billing.invoice values (1, 500), (2, 900);
        """)
        try:
            admin.execute((EXAMPLES / "sql_producer/setup.sql").read_bytes())
            with psycopg.connect(dsn, user="billing_app", password="x") as conn:
                yield conn
        finally:
            admin.execute("rollback")
            for role in ("invoice_events", "billing_app", "billing_owner"):
                if admin.execute("select from pg_roles where rolname = %s", (role,)).fetchall():
                    admin.execute(f"drop owned by {role} cascade".encode())
                    admin.execute(f"drop role {role}".encode())


def test_a_trigger_makes_events_of_somebody_elses_updates(example, billing, conn):
    billing.execute("update billing.invoice set paid_at = now(), note = 'by card' where id = 1")
    billing.execute("update billing.invoice set note = 'thanks' where id = 1")
    billing.commit()
    billing.execute("update billing.invoice set paid_at = now() where id = 2")
    billing.rollback()

    assert "thanks for 500 cents of invoice 1" in example("sql_producer").burst("invoices:outbox")
    assert conn.execute("select status::text, payload, source from pulse.outbox").fetchall() == [
        ("COMPLETED", {"invoice_id": 1, "cents": 500}, "billing")
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "select pulse.outbox_enqueue('invoice.paid', '{}')",
        "insert into pulse.outbox (event_id, topic, payload) values (gen_random_uuid(), 'invoice.paid', '{}')",
        "select invoice_events.invoice_was_paid()",
        # On a table of one's own, with columns of the same names.
        "create trigger mine after insert on mine for each row execute function invoice_events.invoice_was_paid()",
        "set role invoice_events",
    ],
)
def test_the_other_program_gets_no_right_on_the_outbox(billing, statement):
    billing.execute("create temp table mine (id integer, cents integer, paid_at timestamptz)")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        billing.execute(statement)


def test_the_function_is_for_nobody_else(billing, conn):
    """The schema's own rights keep others out as well; this is the second lock."""
    may = "select has_function_privilege(%s, 'invoice_events.invoice_was_paid()', 'execute')"

    assert [conn.execute(may, (role,)).fetchone() for role in ("billing_app", "billing_owner")] == [
        (False,)
    ] * 2
    assert conn.execute(may, ("invoice_events",)).fetchone() == (True,)


def test_the_other_program_cant_choose_what_the_trigger_finds(billing, conn):
    """The pitfall of SECURITY DEFINER: a function of the caller's, found before the real one."""
    conn.execute(
        sql.SQL("grant create on database {} to billing_app").format(sql.Identifier(conn.info.dbname))
    )
    conn.commit()
    billing.execute("create schema mine")
    billing.execute("grant usage on schema mine to public")
    billing.execute(
        "create function mine.jsonb_build_object(text, integer, text, integer) returns jsonb "
        "language sql return jsonb '{}'"
    )
    billing.execute("set search_path = mine, pg_catalog")
    billing.execute("update billing.invoice set paid_at = now() where id = 1")
    billing.commit()

    assert conn.execute("select payload from pulse.outbox").fetchall() == [({"invoice_id": 1, "cents": 500},)]


# Payments


@pytest.fixture
def accounts(conn):
    conn.execute("create table account (id integer primary key, cents integer not null)")
    conn.execute("insert into account values (1, 1000)")
    conn.commit()


def test_a_payment_debits_once_and_hands_its_key_on(example, accounts, conn, receiver):
    """The gateway fails once: the second run finds its record, and the gateway gets the same key."""
    payments = example("payments", GATEWAY_URL=receiver.url)
    receiver.answers = [(502, {})]
    conn.execute("""select pulse.outbox_enqueue('payment.requested', '{"account": 1, "cents": 300}'),
                           pulse.outbox_enqueue('payment.requested', '{"account": 1, "cents": 5000}')""")
    conn.commit()
    dispatcher = payments.dispatcher("payments:outbox")

    def is_done() -> bool:
        conn.commit()
        found = conn.execute("select status::text from pulse.outbox order by seq").fetchall()
        return [status for (status,) in found] == ["COMPLETED", "DEAD_LETTERED"]

    wait_until(is_done, within=90)
    assert dispatcher.logged("outbox.dead_lettered", rule="default.terminal")
    assert conn.execute("select cents from account").fetchall() == [(700,)]
    [first, second] = [headers["Idempotency-Key"] for _, headers, _ in receiver.received]
    assert first == second


@pytest.mark.parametrize("point", POINTS)
def test_a_payment_has_one_effect_wherever_it_crashes(example, accounts, conn, receiver, monkeypatch, point):
    monkeypatch.setenv("GATEWAY_URL", receiver.url)
    module = example("payments").module("payments", monkeypatch)
    event = module.outbox.enqueue(conn, "payment.requested", {"account": 1, "cents": 300})
    conn.commit()

    with TestKit(module.outbox, dsn=conn.info.dsn) as kit:
        with kit.crash_at(point):
            kit.run(event)
        kit.advance(minutes=1)
        for ran in kit.drain():
            ran.raise_if_failed()

    assert conn.execute("select cents from account").fetchall() == [(700,)]
    assert len({headers["Idempotency-Key"] for _, headers, _ in receiver.received}) == 1


# The ledger


@pytest.fixture
def entries(conn):
    conn.execute("create table entry (account text not null, cents integer not null)")
    conn.commit()


def test_a_booking_and_what_follows_are_one(example, entries, conn):
    conn.execute(
        """select pulse.outbox_enqueue('ledger.booking', '{"debit": "cash", "credit": "sales", "cents": 5}')"""
    )
    conn.commit()

    assert "5 cents from cash to sales" in example("ledger").burst("ledger:outbox")
    assert conn.execute("select account, cents from entry order by 2").fetchall() == [
        ("cash", -5),
        ("sales", 5),
    ]


@pytest.mark.parametrize("point", POINTS)
def test_the_ledger_balances_wherever_it_crashes(example, entries, conn, monkeypatch, point):
    module = example("ledger").module("ledger", monkeypatch)
    module.outbox.enqueue(conn, "ledger.booking", {"debit": "cash", "credit": "sales", "cents": 5})
    conn.commit()

    with TestKit(module.outbox, dsn=conn.info.dsn) as kit:
        with kit.crash_at(point, topic="ledger.booking"):
            kit.drain()
        kit.advance(minutes=1)
        kit.drain()
        kit.assert_enqueued(topic="ledger.booked", count=1, status="COMPLETED")

    assert conn.execute("select count(*), sum(cents) from entry").fetchall() == [(2, 0)]


# Webhooks


def test_webhooks_come_back_when_the_receiver_says(example, conn, receiver):
    receiver.answers = [(503, {"Retry-After": "1"}), (200, {}), (410, {})]
    webhooks = example("webhooks")
    for number in (1, 2):
        conn.execute(
            "select pulse.outbox_enqueue('webhook', jsonb_build_object('url', %s::text, 'body', '{}'::jsonb),"
            " p_ordering_key => 'a', p_idempotency_key => %s)",
            (f"{receiver.url}/hook", f"key-{number}"),
        )
    conn.commit()
    dispatcher = webhooks.dispatcher("webhooks:outbox")

    dead = dispatcher.wait_for("outbox.dead_lettered", within=90)
    [failed] = dispatcher.logged("outbox.failed")
    assert (failed["delay"], failed["rule"]) == (1.0, "classify:http.503")
    assert (dead["attempt"], dead["rule"]) == (1, "classify:http.410")
    assert [headers["Idempotency-Key"] for _, headers, _ in receiver.received] == ["key-1", "key-1", "key-2"]


@pytest.mark.parametrize(
    ("status", "header", "verdict", "wait"),
    [
        (429, "120", "transient", timedelta(seconds=120)),
        (503, "3600", "transient", timedelta(hours=1)),
        (503, "99999999999999", "transient", timedelta(hours=6)),
        (429, "date", "transient", timedelta(minutes=10)),
        (429, "soon", "transient", None),
        (503, None, "transient", None),
        (500, "120", "transient", None),
        (404, "120", "terminal", None),
        (422, None, "terminal", None),
    ],
)
def test_what_an_answer_means(example, conn, receiver, monkeypatch, status, header, verdict, wait):
    module = example("webhooks").module("webhooks", monkeypatch)
    event = module.outbox.enqueue(conn, "webhook", {"url": receiver.url, "body": {}})
    conn.commit()
    with TestKit(module.outbox, dsn=conn.info.dsn) as kit:
        if header == "date":
            header = format_datetime(kit.now + timedelta(minutes=10))
        receiver.answers = [(status, {"Retry-After": header} if header else {})]
        ran = kit.run(event)

        assert ran.verdict is not None
        assert ran.verdict.kind == verdict
        if wait is not None:
            # A date has no fractions of a second.
            assert wait - timedelta(seconds=2) <= ran.retry_in <= wait
            kit.advance(ran.retry_in)
            assert kit.run(event).status == "COMPLETED"
