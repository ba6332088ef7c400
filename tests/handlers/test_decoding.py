"""A payload that can't be decoded fails alone and shows nothing of itself."""

from __future__ import annotations

import traceback
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pulse_outbox import Event, Outbox, RetryPolicy, TerminalHandlerError
from pulse_outbox.failures import PayloadError, describe_error
from pulse_outbox.handlers import Handler

SECRET = "4111-secret"


class Kind(Enum):
    CARD = "card"


class Payment(BaseModel):
    model_config = ConfigDict(extra="forbid")

    amount: int = Field(0, alias="amountInCents")
    kind: Kind = Kind.CARD
    state: Literal["new", "done"] = "new"
    limits: dict[str, int] = {}
    notes: list[str] = []
    card: str = ""
    either: int | list[int] = 0

    @field_validator("card")
    @classmethod
    def refuse(cls, value: str) -> str:
        match value:
            case "value":
                raise ValueError(f"bad card {SECRET}")
            case "key":
                raise KeyError(SECRET)
            case "recursion":
                raise RecursionError(SECRET)
            case "exit":
                raise SystemExit(SECRET)
        return value


def handler_of(payload_type: Any = Payment) -> Handler:
    outbox = Outbox()

    @outbox.handler("payment")
    def handle(event: Event[payload_type]) -> None: ...

    return outbox.handlers["payment"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'{{"amountInCents": "{SECRET}"}}', "the payload does not fit Payment: amountInCents: int_parsing"),
        (f'{{"kind": "{SECRET}"}}', "kind: enum"),
        (f'{{"state": "{SECRET}"}}', "state: literal_error"),
        (f'{{"limits": {{"{SECRET}": "x"}}}}', "limits.…: int_parsing"),
        (f'{{"{SECRET}": 1}}', "…: extra_forbidden"),
        (f'{{"notes": ["a", ["{SECRET}"]]}}', "notes.1: string_type"),
        (f'{{"either": "{SECRET}"}}', "either.…: int_parsing; either.…: list_type"),
        ('{"card": "value"}', "card: value_error"),
        ('{"card": "key"}', "the payload can't be decoded: KeyError"),
        ('{"card": "recursion"}', "the payload can't be decoded: RecursionError"),
        ('{"card": "exit"}', "the payload can't be decoded: SystemExit"),
        (f'["{SECRET}"]', "model_type"),
        (f'{{"card": "{SECRET}', "json_invalid"),
        ("[" * 300 + "]" * 300, "json_invalid"),
    ],
)
def test_the_complaint_names_the_place_and_no_value(text: str, shown: str):
    """Not in its text, not in its traceback."""
    with pytest.raises(PayloadError) as caught:
        handler_of().decode(text)

    assert shown in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in describe_error(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("text", ["[" * 7000 + "]" * 7000, "9" * 5001, f'{{"a": "{SECRET}'])
def test_a_row_that_python_cannot_read_fails_alone(text: str):
    """PostgreSQL accepts the first two from other producers."""
    with pytest.raises(PayloadError) as caught:
        handler_of(dict).decode(text)

    assert "the payload can't be decoded: " in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_payload_error_is_terminal():
    """It will not decode better next time."""
    with pytest.raises(PayloadError) as caught:
        handler_of().decode("{")

    assert isinstance(caught.value, TerminalHandlerError)
    assert RetryPolicy().judge(caught.value).kind == "terminal"


def test_an_interrupt_from_the_keyboard_is_not_swallowed():
    """It is the operator's, not the payload's."""

    class Interrupted(BaseModel):
        a: int

        @field_validator("a")
        @classmethod
        def interrupt(cls, value: int) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        handler_of(Interrupted).decode('{"a": 1}')
