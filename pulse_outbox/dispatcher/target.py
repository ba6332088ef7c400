"""MODULE:ATTR: how the command, and every child process that it starts, finds the application's Outbox."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from pulse_outbox.errors import OutboxError, SettingsError
from pulse_outbox.failures import describe_error
from pulse_outbox.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

LINES_SHOWN = 12


class ApplicationFailed(OutboxError):
    """The application's own code raised while it was being loaded; `lines` say where."""

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.lines = lines


def load_outbox(target: str, *, schema: str | None = None) -> Outbox:
    """The Outbox that MODULE:ATTR names, from the current directory or the installed packages.

    Without :ATTR the module's only Outbox. A *schema* is used instead of the one that the Outbox was made with.
    """
    module_name, colon, attribute = target.partition(":")
    _check_module_name(module_name)
    module = _import(module_name)
    outbox = _find(module, attribute) if colon else _find_only(module)
    if schema is not None:
        outbox.use_schema(schema)
    return outbox


def _check_module_name(name: str) -> None:
    if name.endswith(".py"):
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        raise SettingsError(f"{name!r} is a file: name the module, as in {dotted}:outbox")
    if all(part.isidentifier() for part in name.split(".")):
        return
    raise SettingsError(f"{name!r} is not a module's name: MODULE:ATTR is needed, as in shop.handlers:outbox")


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise SettingsError(_describe_missing(name, missing, here)) from error
        raise _failed(f"importing {name}", error) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a script without a `__main__` guard
        raise _failed(f"importing {name}", error) from error


def _describe_missing(name: str, missing: str, here: str) -> str:
    known = {path.stem for path in Path(here).glob("*.py")}
    known |= {path.parent.name for path in Path(here).glob("*/__init__.py")}
    near = difflib.get_close_matches(missing, sorted(known), n=1)
    part = "" if missing == name else f" (needed for {name!r})"
    remedy = f"did you mean {near[0]!r}?" if near else "change to the directory that holds it, or install it"
    return f"no module {missing!r}{part} in {here} or among the installed packages: {remedy}"


def _find(module: ModuleType, attribute: str) -> Outbox:
    found: object = module
    path = module.__name__ + ":"
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise SettingsError(
                f"{path.rstrip(':.')} has no attribute {name!r}: {_describe_outboxes(module)}"
            ) from error
        path += f"{name}."
    if not isinstance(found, Outbox):
        raise SettingsError(
            f"{module.__name__}:{attribute} is {_article(type(found).__name__)}, not an Outbox: "
            f"{_describe_outboxes(module)}"
        )
    return found


def _find_only(module: ModuleType) -> Outbox:
    outboxes = _outboxes(module)
    if len({id(outbox) for outbox in outboxes.values()}) == 1:
        return next(iter(outboxes.values()))
    raise SettingsError(f"which Outbox of {module.__name__}? {_describe_outboxes(module)}")


def _outboxes(module: ModuleType) -> dict[str, Outbox]:
    return {name: value for name, value in sorted(vars(module).items()) if isinstance(value, Outbox)}


def _describe_outboxes(module: ModuleType) -> str:
    names = [f"{module.__name__}:{name}" for name in _outboxes(module)]
    if not names:
        return f"there is no Outbox in {module.__name__}: make one at module level, `outbox = Outbox()`"
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _failed(doing: str, error: BaseException) -> ApplicationFailed:
    return ApplicationFailed(f"{doing} failed: {describe_error(error)}", last_lines(error))


def last_lines(error: BaseException) -> list[str]:
    """The end of the traceback, from where the application's own code begins."""
    frames = error.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # the exception's own str() or repr() may raise
        text = "".join(traceback.format_tb(frames)) + describe_error(error)
    lines = text.splitlines()
    return lines if len(lines) <= LINES_SHOWN else ["  …", *lines[-LINES_SHOWN:]]


def _is_machinery(filename: str) -> bool:
    return (
        filename.startswith("<frozen importlib")
        or filename == importlib.__file__
        or Path(filename).is_relative_to(Path(__file__).parents[1])
    )
