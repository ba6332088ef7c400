"""The text kept of an error: safe to store, safe to send, and never a second failure."""

from __future__ import annotations

import sys
import types
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel, ValidationError

from pulse_outbox.failures import MAX_ERROR_BYTES, REDACT_FAILED, describe_error


class Order(BaseModel):
    order_id: int
    note: str = ""


def validation_error(**fields: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Order.model_validate(fields)
    return caught.value


def test_class_and_message_are_kept():
    """They are what an operator reads first."""
    assert describe_error(ValueError("no such order")) == "ValueError: no such order"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(TimeoutError()) == "TimeoutError"


def test_nul_and_lone_surrogates_are_replaced():
    """PostgreSQL would refuse to store them, and recording a failure must never fail."""
    assert describe_error(ValueError("a\0b\ud800c")) == "ValueError: a\N{REPLACEMENT CHARACTER}b?c"


@pytest.mark.parametrize("letter", ["x", "é", "😀", "\0", "\ud800"])
def test_ten_megabytes_are_capped_in_bytes(letter: str):
    """The column takes 8 KiB; a cut in the middle of a character would not be text."""
    text = describe_error(ValueError(letter * 10_000_000))

    assert MAX_ERROR_BYTES - 4 <= len(text.encode()) <= MAX_ERROR_BYTES
    assert text.endswith("…")


@pytest.mark.parametrize(
    "failure", [RuntimeError("no"), SystemExit(1), KeyboardInterrupt(), RecursionError()]
)
def test_an_error_whose_str_raises_still_has_a_text(failure: BaseException):
    """str() of a stranger's exception is a stranger's code."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise failure

    assert "Unspeakable: [its text can't be had" in describe_error(Unspeakable())


def test_an_error_whose_str_is_no_string_still_has_a_text():
    """TypeError comes from str() itself here."""

    class Odd(Exception):
        def __str__(self) -> str:
            return 3  # type: ignore[return-value]  # noqa: PLE0307  that is the point

    assert "Odd: [its text can't be had" in describe_error(Odd())


def test_a_string_subclass_cannot_interfere():
    """Sanitising calls no method of the text."""

    class Hostile(str):
        def encode(self, *args: object) -> bytes:
            raise RuntimeError

        def __format__(self, spec: str) -> str:
            return "plain"

    class Odd(Exception):
        def __str__(self) -> str:
            return Hostile("x")

    assert describe_error(Odd()).startswith(Odd.__qualname__)


def test_causes_that_form_a_circle_do_no_harm():
    """Python allows it."""
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one

    assert describe_error(one) == "ValueError: one"


def test_a_validation_error_shows_rules_and_no_input():
    """A secret in a payload must be found nowhere; a place may be the key of a dict, which is input too."""
    text = describe_error(validation_error(order_id="secret", note=["secret"]))

    assert text == "ValidationError: Order: …: int_parsing; …: string_type"


def test_many_validation_errors_are_counted():
    """A list of a million bad items is still one line."""

    class Many(BaseModel):
        numbers: list[int]

    with pytest.raises(ValidationError) as caught:
        Many.model_validate({"numbers": ["x"] * 100})

    assert "….19: int_parsing; and 80 more" in describe_error(caught.value)


def test_a_group_shows_its_leaves():
    """The group's own message says nothing."""
    group = ExceptionGroup(
        "tasks", [ValueError("one"), ExceptionGroup("more", [validation_error(order_id="secret")])]
    )

    text = describe_error(group)

    assert text == "ExceptionGroup: tasks (2): ValueError: one; ValidationError: Order: …: int_parsing"


def test_a_group_of_thousands_is_cut():
    """Each leaf briefly, and not all of them."""
    text = describe_error(ExceptionGroup("tasks", [ValueError("x" * 5000) for _ in range(3000)]))

    assert len(text.encode()) <= MAX_ERROR_BYTES


def unique_violation(conn: psycopg.Connection[Any]) -> psycopg.Error:
    conn.execute("create temp table users (email text primary key)")
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        conn.execute("insert into users values ('secret@example.com'), ('secret@example.com')")
    assert "secret" in str(caught.value), "the control: the error's own text does hold it"
    return caught.value


def test_a_database_error_is_shown_without_detail(conn):
    """DETAIL quotes the row."""
    text = describe_error(unique_violation(conn))

    assert text == ('UniqueViolation: duplicate key value violates unique constraint "users_pkey" [23505]')


def test_a_database_error_inside_sqlalchemy_is_shown_without_parameters(conn):
    """str() of SQLAlchemy's errors quotes the statement's parameters."""
    exceptions = pytest.importorskip("sqlalchemy.exc")
    wrapped = exceptions.IntegrityError("insert …", {"email": "secret@example.com"}, unique_violation(conn))
    assert "secret" in str(wrapped)

    text = describe_error(wrapped)

    assert text.startswith("IntegrityError: UniqueViolation: duplicate key value")
    assert "secret" not in text


def test_a_database_error_inside_django_is_shown_without_detail(conn):
    """Django copies the driver's text."""
    utils = pytest.importorskip("django.db.utils")
    original = unique_violation(conn)
    wrapped = utils.IntegrityError(*original.args)
    wrapped.__cause__ = original
    assert "secret" in str(wrapped)

    assert "secret" not in describe_error(wrapped)
    wrapped.__cause__ = None
    assert "secret" not in describe_error(wrapped)


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, name: str, *bases: type[BaseException]) -> Any:
    """A class as a library that is not installed here would have it."""
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    return type(name, bases or (Exception,), {"__module__": module})


def test_wrapped_database_errors_are_known_by_name(conn, monkeypatch):
    """Neither SQLAlchemy nor Django need be installed, here or in production."""
    statement_error = stand_in(monkeypatch, "sqlalchemy.exc", "StatementError")
    wrapped = stand_in(monkeypatch, "sqlalchemy.exc", "IntegrityError", statement_error)("secret parameters")
    wrapped.orig = unique_violation(conn)

    assert "secret" not in describe_error(wrapped)
    assert "users_pkey" in describe_error(wrapped)
    wrapped.orig = None
    assert describe_error(wrapped) == "IntegrityError"


def test_redact_changes_the_text():
    """The message of the handler's own exception is the handler's responsibility; this is its tool."""
    assert (
        describe_error(ValueError("card 4111"), lambda text: text.replace("4111", "…"))
        == "ValueError: card …"
    )


def test_redact_sees_a_secret_that_the_cap_would_cut_in_half():
    """Half a secret would pass it unseen."""
    text = describe_error(ValueError("x" * 8172 + "SECRET and more"), lambda text: text.replace("SECRET", ""))

    assert "SEC" not in text


@pytest.mark.parametrize("result", [None, b"x", ValueError("secret"), SystemExit()])
def test_a_redact_that_fails_lets_nothing_through(result: Any):
    """Rather no evidence than a leak."""

    def redact(text: str) -> str:
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]  # that is the point

    assert describe_error(ValueError("secret"), redact) == REDACT_FAILED


def test_what_redact_returns_is_sanitised_too():
    """It may be the application's worst code."""
    text = describe_error(ValueError(), lambda _: "\0" * 100_000)

    assert "\0" not in text
    assert len(text.encode()) <= MAX_ERROR_BYTES
