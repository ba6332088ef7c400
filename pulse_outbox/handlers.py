"""Handlers: the application's functions, each bound to a topic, a payload type and a retry policy.

Whatever is wrong with a registration is said when the module is imported, not when the first event arrives.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from pulse_outbox.errors import SettingsError
from pulse_outbox.events import MAX_TOPIC_CHARACTERS, Event, as_timedelta, check_text
from pulse_outbox.failures import PayloadError, describe_validation, error_class
from pulse_outbox.retry import RetryPolicy

if typing.TYPE_CHECKING:
    from datetime import timedelta

Function = Callable[[Event[Any]], Any]
WhenCompleted = Literal["keep", "delete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """One registered function and how its events are run."""

    topic: str
    name: str
    """Module and qualified name: what `event_handled`, logs and alerts call it."""
    place: str
    """File and line, for complaints."""
    function: Function
    is_async: bool
    adapter: TypeAdapter[Any] | None
    """Validates the payload; None where the annotation asks for no validation."""
    retry: RetryPolicy
    timeout: float | None
    """Seconds."""
    concurrency: int | None
    transactional: bool
    completed: WhenCompleted

    def decode(self, text: str | bytes) -> Any:
        """The payload, from the row's JSON text; whatever goes wrong is a PayloadError that holds no value of it."""
        try:
            if self.adapter is None:
                return from_json(text)
            return self.adapter.validator.validate_json(text)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # validators are the application's code and may raise anything
            complaint = PayloadError(_describe_decoding(error, self.adapter))
        # Outside the except block: with the original as its context, a traceback would print the input.
        raise complaint


def make_handler(
    topic: str,
    function: Function,
    *,
    retry: RetryPolicy | None = None,
    timeout: float | timedelta | None = None,
    concurrency: int | None = None,
    transactional: bool = False,
    completed: WhenCompleted = "keep",
    local_names: Mapping[str, object] | None = None,
) -> Handler:
    """Checks a registration and gives it its payload type.

    *local_names*: where annotations may look beside the function's module, for models defined inside a function.
    """
    check_text("topic", topic, MAX_TOPIC_CHARACTERS, SettingsError)
    plain = _plain_function(function)
    name = _name_of(plain)
    place = _place_of(plain)
    who = f"handler {name} of {topic!r} ({place})"
    if isinstance(function, type) or not callable(function):
        raise SettingsError(f"{who}: a function is needed; of a class, register an instance or a method")
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise SettingsError(f"{who}: a generator function never runs by itself; take out the `yield`")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise SettingsError(f"{who}: retry must be a RetryPolicy")
    seconds = (
        None if timeout is None else as_timedelta(f"{who}: timeout", timeout, SettingsError).total_seconds()
    )
    if seconds == 0:
        raise SettingsError(f"{who}: timeout must be above 0")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise SettingsError(f"{who}: concurrency must be an integer of at least 1")
    if completed not in ("keep", "delete"):
        raise SettingsError(f"{who}: completed must be 'keep' or 'delete'")
    return Handler(
        topic=topic,
        name=name,
        place=place,
        function=function,
        is_async=inspect.iscoroutinefunction(plain),
        adapter=_payload_adapter(who, function, plain, local_names or {}),
        retry=retry or RetryPolicy(),
        timeout=seconds,
        concurrency=concurrency,
        transactional=bool(transactional),
        completed=completed,
    )


def _plain_function(function: Any) -> Any:
    """The function that will do the work, under partials, methods and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, type) or inspect.isroutine(function) or not callable(function):
            return function
        else:
            function = type(function).__call__


def _name_of(plain: Any) -> str:
    module = getattr(plain, "__module__", None) or "?"
    return f"{module}.{getattr(plain, '__qualname__', type(plain).__qualname__)}"


def _place_of(plain: Any) -> str:
    code = getattr(inspect.unwrap(plain) if callable(plain) else plain, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "no source"


def _payload_adapter(
    who: str, function: Function, plain: Any, local_names: Mapping[str, object]
) -> TypeAdapter[Any] | None:
    annotation = _event_annotation(who, function, plain, local_names)
    if annotation in (inspect.Parameter.empty, Any, Event):
        return None
    if typing.get_origin(annotation) is not Event:
        shown = getattr(annotation, "__name__", annotation)
        raise SettingsError(f"{who}: its parameter gets an Event; annotate it as Event[{shown}] or Event")
    [payload_type] = typing.get_args(annotation)
    if payload_type in (Any, dict, object) or isinstance(payload_type, typing.TypeVar):
        return None
    try:
        return TypeAdapter(payload_type)
    except Exception as error:
        raise SettingsError(
            f"{who}: pydantic can't validate {payload_type!r}; use a model, a dataclass or Event[dict]"
        ) from error


def _event_annotation(who: str, function: Function, plain: Any, local_names: Mapping[str, object]) -> Any:
    """The resolved annotation of the parameter that gets the event."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return inspect.Parameter.empty  # written in C: takes what it takes
    try:
        signature.bind(object())
    except TypeError as error:
        raise SettingsError(f"{who}: must be callable with one argument, the event ({error})") from error
    first = next(iter(signature.parameters.values()))
    if first.annotation is inspect.Parameter.empty:
        return first.annotation

    def probe() -> None:
        """Carries the one annotation: those of other parameters need not be resolvable."""

    probe.__annotations__ = {"event": first.annotation}
    unwrapped = inspect.unwrap(plain)
    closure = _closure_of(unwrapped) if inspect.isfunction(unwrapped) else {}
    try:
        hints = typing.get_type_hints(
            probe, getattr(unwrapped, "__globals__", {}), {**local_names, **closure}
        )
    except Exception as error:
        raise SettingsError(
            f"{who}: the annotation {first.annotation!r} can't be resolved ({error}); define the model at "
            "module level, import it outside `if TYPE_CHECKING:`, or annotate with a bare Event"
        ) from error
    return hints["event"]


def _closure_of(function: types.FunctionType) -> dict[str, Any]:
    """The names of enclosing functions that it uses, but for those that have no value yet."""
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is assigned further down
            closure[name] = cell.cell_contents
    return closure


def _describe_decoding(error: BaseException, adapter: TypeAdapter[Any] | None) -> str:
    if isinstance(error, ValidationError):
        return f"the payload does not fit {error.title}: {describe_validation(error, _known_names(adapter))}"
    if adapter is None and isinstance(error, ValueError):
        return f"the payload can't be decoded: {error}"  # the JSON parser's words: a position, no content
    return f"the payload can't be decoded: {error_class(error)}"


@functools.lru_cache(maxsize=256)
def _known_names(adapter: TypeAdapter[Any] | None) -> frozenset[str]:
    """The field names of a payload type: what an error may name without naming data."""
    names: set[str] = set()
    if adapter is None:
        return frozenset()
    for by_alias in (True, False):
        try:
            waiting: list[Any] = [adapter.json_schema(by_alias=by_alias)]
        except Exception:  # some types have no JSON schema; then places stay unnamed
            return frozenset()
        while waiting:
            match waiting.pop():
                case {"properties": dict(properties), **rest}:
                    names.update(properties)
                    waiting.extend([*properties.values(), *rest.values()])
                case dict(other):
                    waiting.extend(other.values())
                case list(items):
                    waiting.extend(items)
    return frozenset(names)
