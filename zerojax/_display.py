"""How results show themselves: as a line, as tables of text, and as HTML in a notebook.

A result yields texts and tables of rich once. A terminal prints them, `str` renders them on 80
columns, and a notebook shows that text in colours that suit light and dark pages alike.
"""

import io
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

#: Columns of a table as plain text, and those of a bar in it.
WIDTH, BAR_WIDTH = 80, 10
#: A notebook's page may be light or dark: text has the page's own colour, and red, green and the
#: bars are told from white and from black.
_COLOURS = TerminalTheme(
    *((255, 255, 255), (0, 0, 0)), [(0, 0, 0), (217, 67, 58), (43, 138, 75), *[(74, 135, 184)] * 5]
)
_PAGE = '<pre style="line-height:normal;font-family:monospace">{code}</pre>'


class Shown:
    """A result that shows itself: its summary, and below it the parts that a subclass yields."""

    _style = "bold"  # of the summary

    @property
    def _summary(self) -> str:
        raise NotImplementedError

    def _parts(self) -> Iterator[Text | Table]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._summary}>"

    def __str__(self) -> str:
        return "\n".join(map(str.rstrip, self._printed().export_text().splitlines())) + "\n"

    def _repr_html_(self) -> str:
        return self._printed().export_html(theme=_COLOURS, code_format=_PAGE, inline_styles=True)

    def _printed(self) -> Console:
        printed = Console(file=io.StringIO(), width=WIDTH, record=True, force_jupyter=False)
        printed.print(self)
        return printed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._summary, style=self._style)
        yield from self._parts()


def make_table(*columns: str, title: str | None = None, padding: int = 1) -> Table:
    """Make a table without rows; `>peak` is a column of numbers with the name peak."""
    titles: Any = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
    sides: Any = {"pad_edge": False, "padding": (0, padding), "collapse_padding": True}
    made = Table(title=title, box=box.SIMPLE_HEAD, **titles, **sides)
    for name in columns:
        numeric = name.startswith(">")
        justify, overflow = ("right", "ellipsis") if numeric else ("left", "fold")
        made.add_column(name.removeprefix(">"), justify=justify, no_wrap=numeric, overflow=overflow)
    return made


def make_bar(part: float, size: float) -> Bar:
    """Make the part of a bar of `size` in all."""
    bar = Bar(size or 1.0, 0, min(part, size), width=BAR_WIDTH)
    bar.style = Style(color="blue")  # without a background, which a page has of its own
    return bar


def wrapped(*lines: str) -> str:
    """Join the lines of an error, each of them wrapped for a terminal of 100 columns."""
    wrapper = textwrap.TextWrapper(98, subsequent_indent=" " * 4, break_long_words=False)
    wrapper.break_on_hyphens = False
    return "\n".join(map(wrapper.fill, lines))


class Unit(NamedTuple):
    """A number of bytes; the largest figure of a column has at least `least` of its unit."""

    name: str
    size: float
    least: float

    def number(self, count: float | None) -> str:
        """Write bytes as a number of this unit: 79.11 GiB as 79.11, 31.4 GB as 31.4."""
        if count is None:
            return "-"
        return f"{count / self.size:,.2f}" if self in BINARY else amount(count / self.size)

    def words(self, count: float) -> str:
        return f"{self.number(count)} {self.name}"


BINARY = (Unit("GiB", 2**30, 0.1), Unit("MiB", 2**20, 0))
DECIMAL = (Unit("GB", 1e9, 10), Unit("MB", 1e6, 10), Unit("kB", 1e3, 10), Unit("bytes", 1, 0))


def unit_for(largest: float, units: tuple[Unit, ...]) -> Unit:
    return next(unit for unit in units if largest >= unit.least * unit.size)


def binary(count: float) -> str:
    """Write bytes with the power of 1024 that suits them: 79.11 GiB."""
    return unit_for(count, BINARY).words(count)


def decimal(count: float) -> str:
    """Write bytes with the power of 1000 that suits them: 84.9 GB."""
    return next((unit for unit in DECIMAL if count >= unit.size), DECIMAL[-1]).words(count)


def duration(seconds: float) -> str:
    """Write a time in ms, from a second on in s: 28.13 ms, 17.97 s."""
    return f"{1e3 * seconds:#.4g} ms" if seconds < 0.99995 else f"{seconds:.2f} s"


def amount(value: float) -> str:
    """Write a figure as the paper does: 120, 31.4, 1.9; below one with three digits."""
    if value and value < 1:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0")
