"""Registration: the payload's type from the annotation, and mistakes told at import."""

import functools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Optional, TypeVar

import pytest
from pydantic import BaseModel

from pulse_outbox import Event, Outbox, RetryPolicy, SettingsError
from pulse_outbox.handlers import Handler
from tests.handlers import strings


class OrderPaid(BaseModel):
    order_id: int


@dataclass
class Parcel:
    weight: float


def registered(function: Any, **options: Any) -> Handler:
    outbox = Outbox()
    outbox.handler("order.paid", **options)(function)
    return outbox.handlers["order.paid"]


async def as_model(event: Event[OrderPaid]) -> None: ...
def as_dataclass(event: Event[Parcel]) -> None: ...
def as_list(event: Event[list[OrderPaid]]) -> None: ...
def as_annotated(event: Annotated[Event[OrderPaid], "note"]) -> None: ...
def as_forward(event: Event["OrderPaid"]) -> None: ...
def as_dict(event: Event[dict]) -> None: ...
def as_any(event: Event[Any]) -> None: ...
def as_bare(event: Event) -> None: ...
def as_nothing(event): ...
def with_default(event: Event[OrderPaid], retries: int = 3) -> None: ...


class Shop:
    async def method(self, event: Event[OrderPaid]) -> None: ...

    @staticmethod
    def static(event: Event[OrderPaid]) -> None: ...

    @classmethod
    def of_class(cls, event: Event[OrderPaid]) -> None: ...


class AsyncCallable:
    async def __call__(self, event: Event[OrderPaid]) -> None: ...


async def with_mailer(mailer: object, event: Event[OrderPaid]) -> None: ...


def logged(function: Any) -> Any:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "is_async", "name"),
    [
        (as_model, True, "as_model"),
        (as_annotated, False, "as_annotated"),
        (as_forward, False, "as_forward"),
        (with_default, False, "with_default"),
        (Shop().method, True, "Shop.method"),
        (Shop.static, False, "Shop.static"),
        (Shop.of_class, False, "Shop.of_class"),
        (AsyncCallable(), True, "AsyncCallable.__call__"),
        (functools.partial(with_mailer, object()), True, "with_mailer"),
        (functools.partial(functools.partial(AsyncCallable())), True, "AsyncCallable.__call__"),
        (logged(as_model), True, "as_model"),
        (strings.typed, True, "typed"),
        (strings.other_annotations_do_not_matter, False, "other_annotations_do_not_matter"),
    ],
)
def test_the_model_is_found_whatever_the_function_is(function: Any, is_async: bool, name: str):
    """Functions, methods, partials, callable objects, decorated ones."""
    handler = registered(function)

    assert handler.adapter is not None
    assert handler.decode('{"order_id": 7}').order_id == 7
    assert handler.is_async is is_async
    assert handler.name.endswith(f".{name}")
    assert handler.function is function


def test_other_types_than_models_are_validated_too():
    """Whatever pydantic can validate."""
    assert registered(as_dataclass).decode('{"weight": 1}') == Parcel(weight=1.0)
    assert registered(as_list).decode('[{"order_id": 1}]')[0].order_id == 1


@pytest.mark.parametrize("function", [as_dict, as_any, as_bare, as_nothing, lambda event: None, print])
def test_without_a_model_nothing_is_validated(function: Any):
    """Event[dict] or a bare Event skips validation."""
    handler = registered(function)

    assert handler.adapter is None
    assert handler.decode('[1, "a", null]') == [1, "a", None]


def test_the_function_is_returned_unchanged():
    """So that a test of the application can call it."""
    assert Outbox().handler("t")(as_model) is as_model


def test_a_model_inside_a_function_is_found_where_the_decorator_stands():
    """Tests of applications are written like this."""

    class Local(BaseModel):
        n: int

    outbox = Outbox()

    @outbox.handler("local")
    def handle(event: "Event[Local]") -> None: ...

    assert outbox.handlers["local"].decode('{"n": 1}').n == 1


T = TypeVar("T")


def generator(event: Event[OrderPaid]) -> Iterator[None]:
    yield


async def async_generator(event: Event[OrderPaid]) -> AsyncIterator[None]:
    yield


def nothing() -> None: ...
def two(event: Event[OrderPaid], other: int) -> None: ...
def keyword_only(event: Event[OrderPaid], *, mailer: object) -> None: ...
def not_an_event(event: OrderPaid) -> None: ...
def optional(event: Optional[Event[OrderPaid]]) -> None: ...  # noqa: UP045
def unknown(event: "Event[NoSuchModel]") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def not_validatable(event: Event[Shop]) -> None: ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (nothing, "must be callable with one argument, the event (too many positional arguments)"),
        (two, "must be callable with one argument, the event (missing a required argument: 'other')"),
        (keyword_only, "must be callable with one argument"),
        (generator, "a generator function never runs by itself"),
        (async_generator, "a generator function never runs by itself"),
        (not_an_event, "annotate it as Event[OrderPaid]"),
        (optional, "its parameter gets an Event"),
        (unknown, "NoSuchModel"),
        (strings.hidden, "import it outside `if TYPE_CHECKING:`"),
        (not_validatable, "pydantic can't validate"),
        (Shop, "of a class, register an instance or a method"),
        (3, "a function is needed"),
    ],
)
def test_a_mistake_is_told_at_registration(function: Any, complaint: str):
    """With the handler, its topic and the remedy."""
    with pytest.raises(SettingsError) as caught:
        registered(function)

    assert complaint in str(caught.value)
    assert "'order.paid'" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"retry": 5}, "retry must be a RetryPolicy"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "5"}, "timeout: seconds or a timedelta"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"completed": "archive"}, "completed must be 'keep' or 'delete'"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], complaint: str):
    """At import too."""
    with pytest.raises(SettingsError) as caught:
        registered(as_model, **options)

    assert complaint in str(caught.value)


@pytest.mark.parametrize("topic", ["", "x" * 201, "a\0", 3])
def test_a_topic_that_no_event_could_have_is_refused(topic: Any):
    """It would wait for ever."""
    with pytest.raises(SettingsError, match="topic"):
        Outbox().handler(topic)(as_model)


def test_options_reach_the_handler():
    """Times as seconds."""
    retry = RetryPolicy(max_attempts=9)
    handler = registered(
        as_model,
        retry=retry,
        timeout=timedelta(minutes=1),
        concurrency=3,
        transactional=True,
        completed="delete",
    )

    assert (handler.retry, handler.timeout, handler.concurrency) == (retry, 60.0, 3)
    assert (handler.transactional, handler.completed) == (True, "delete")
    assert registered(as_model).retry == RetryPolicy()


def test_a_topic_has_one_handler():
    """The complaint names both places."""
    outbox = Outbox()
    outbox.handler("order.paid")(as_model)

    with pytest.raises(SettingsError) as caught:
        outbox.handler("order.paid")(as_dict)

    assert "as_model" in str(caught.value)
    assert "as_dict" in str(caught.value)
    assert str(caught.value).count("test_registration.py:") == 2


def test_the_mapping_of_handlers_is_read_only():
    """Registration is the only way in."""
    handlers: Any = Outbox().handlers

    with pytest.raises(TypeError):
        handlers["x"] = 1


def test_a_handler_may_use_what_is_defined_after_it():
    """As in any function: the name has to have a value when the handler is called, not when it is registered."""

    def handle(event: Event[OrderPaid]) -> int:
        return defined_later()

    handler = registered(handle)

    def defined_later() -> int:
        return 7

    assert handler.decode('{"order_id": 1}').order_id == 1
