"""How the demo is shown: lines as things happen and, on a terminal, a table below them that follows the events."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from pulse_outbox.demo.story import Scene, TopicCount

WIDEST = 100
MARKS = {"✓": "green", "↻": "yellow", "✗": "red", "$": "bold cyan", "·": "dim", " ": "dim"}
COLUMNS = {
    "topic": ("", 14),
    "waiting": ("", 7),
    "running": ("cyan", 7),
    "retrying": ("yellow", 12),
    "completed": ("green", 9),
    "dead": ("red", 6),
}
"""Headings, with the colour and the width of what is below them."""


class View(Protocol):
    """Whatever shows the demo."""

    def tell(self, mark: str, text: str) -> None:
        """Something has happened. The mark is a key of MARKS."""

    def show(self, scene: Scene) -> None:
        """This is how things stand."""

    def end(self, summary: Iterable[str], advice: Iterable[str]) -> None:
        """The last words."""


class PlainView:
    """Lines of text: for pipes, logs and terminals that can do no more."""

    def __init__(self, title: str) -> None:
        self._started_at = time.monotonic()
        self._scene: Scene | None = None
        self._write(title)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tell(self, mark: str, text: str) -> None:
        self._write(f"{time.monotonic() - self._started_at:5.1f} s  {mark} {text}")

    def show(self, scene: Scene) -> None:
        self._scene = scene

    def end(self, summary: Iterable[str], advice: Iterable[str]) -> None:
        if self._scene is not None:
            rows = [tuple(COLUMNS), *((row.topic, *counts_of(row)) for row in self._scene.topics)]
            self._write("")
            for topic, *counts in rows:
                self._write(f"  {topic:16}" + "".join(f"{number:>11}" for number in counts))
        self._write("")
        for line in (*summary, "", *advice):
            self._write(line)

    def _write(self, line: str) -> None:
        sys.stdout.write(line.rstrip() + "\n")
        sys.stdout.flush()


class LiveView:
    """The same lines in colour, and below them the table, drawn again and again. Needs rich."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._started_at = time.monotonic()
        self._console = Console(highlight=False)
        self._title = title
        self._scene: Scene | None = None
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=False)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from rich.text import Text

        self._console.print(Text(self._title, style="bold"))
        self._stack.enter_context(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tell(self, mark: str, text: str) -> None:
        from rich.table import Table
        from rich.text import Text

        # A grid, so that what does not fit goes on below its beginning.
        line = Table.grid(padding=(0, 1))
        line.add_column(width=7, justify="right")
        line.add_column(width=1)
        line.add_column(overflow="fold")
        style = MARKS[mark]
        seconds = f"{time.monotonic() - self._started_at:.1f} s"
        line.add_row(
            Text(seconds, style="dim"),
            Text(mark, style=style),
            Text(text, style=style if mark == "$" else ""),
        )
        self._console.print(line, width=self._width)
        self._live.refresh()

    def show(self, scene: Scene) -> None:
        self._scene = scene
        self._live.update(self._draw(scene), refresh=True)

    def end(self, summary: Iterable[str], advice: Iterable[str]) -> None:
        from rich.console import Group
        from rich.text import Text

        if self._scene is not None:
            self._live.update(Group(self._header(self._scene), self._table(self._scene)), refresh=True)
        self._stack.close()
        first, *others = summary
        self._console.print(Text(first, style="bold green"))
        for line in (*others, "", *advice):
            self._console.print(Text(line), soft_wrap=True)

    @property
    def _width(self) -> int:
        return min(self._console.width, WIDEST)

    def _draw(self, scene: Scene) -> RenderableType:
        from rich.console import Group

        return Group(
            self._header(scene), self._table(scene), self._note(scene.dispatcher), self._note(scene.now)
        )

    def _header(self, scene: Scene) -> Table:
        from rich.table import Table
        from rich.text import Text

        header = Table.grid(expand=False)
        header.add_column(width=self._width // 2)
        header.add_column(width=self._width - self._width // 2 - 1, justify="right")
        seconds = time.monotonic() - self._started_at
        header.add_row(
            Text(" pulse-outbox demo", style="bold"),
            Text(f"{scene.orders} orders, {seconds:.0f} s", style="dim"),
        )
        return header

    def _table(self, scene: Scene) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.HORIZONTALS, width=self._width, header_style="dim", border_style="dim")
        for heading, (style, width) in COLUMNS.items():
            justify: Literal["left", "right"] = "left" if heading == "topic" else "right"
            # The widths are fixed, or the table would jump with each number.
            table.add_column(heading, style=style, justify=justify, no_wrap=True, min_width=width)
        for row in scene.topics:
            waiting, running, retrying, completed, dead = (
                number if number != "0" else Text("·", style="dim") for number in counts_of(row)
            )
            if row.next_retry is not None:
                retrying = f"{row.retrying}, in {row.next_retry:.1f} s"
            table.add_row(row.topic, waiting, running, retrying, completed, dead)
        return table

    def _note(self, text: str) -> Text:
        from rich.text import Text

        return Text(f" {text}", style="dim", no_wrap=True, overflow="ellipsis")


def counts_of(row: TopicCount) -> tuple[str, ...]:
    """The numbers of a table's row, under their headings."""
    return tuple(str(number) for number in (row.waiting, row.running, row.retrying, row.completed, row.dead))
