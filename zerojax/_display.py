"""How results show themselves: as a line, as tables of text, and as HTML in a notebook.

A result yields texts and tables of rich once. A terminal prints them, `str` renders them on 80
columns, and a notebook shows the same rows as HTML without scripts, whose colours suit light and
dark pages alike.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

#: Columns of a table as plain text, and those of a bar in it.
WIDTH, BAR_WIDTH = 80, 10
#: Text has the page's own colour; the others are told from black and from white. A notebook has a
#: style of its own for tables, which `table .left` is as specific as.
_STYLE = """<style>
.zerojax { font-size: .9em }
.zerojax table { border-collapse: collapse; margin: .4em 0 .8em }
.zerojax table, .zerojax caption, .zerojax th, .zerojax td { color: inherit; background: none }
.zerojax caption { text-align: left; font-weight: bold; caption-side: top }
.zerojax th, .zerojax td { padding: .15em .8em .15em 0; border: 0; vertical-align: top }
.zerojax th, .zerojax .last td { border-bottom: 1px solid #8888 }
.zerojax table .left { text-align: left }
.zerojax table .right { text-align: right; font-variant-numeric: tabular-nums }
.zerojax p { margin: .2em 0 }
.zerojax .bold { font-weight: bold }
.zerojax .dim { opacity: .75 }
.zerojax .red { color: #d9433a }
.zerojax .green { color: #2b8a4b }
.zerojax .bar { width: 8em; height: .8em; margin-top: .25em; background: #8883 }
.zerojax .bar div { height: 100%; background: #4a87b8 }
</style>"""


class Shown:
    """A result that shows itself: its summary, and below it the parts that a subclass yields."""

    _style = "bold"  # of the summary

    @property
    def _summary(self) -> str:
        """What it is, in one line."""
        raise NotImplementedError

    def _parts(self) -> Iterator[Text | Table]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._summary}>"

    def __str__(self) -> str:
        """Render the tables as plain text."""
        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print on a terminal."""
        yield Text(self._summary, style=self._style)
        yield from self._parts()

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        parts = [Text(self._summary, style=self._style), *self._parts()]
        return f'{_STYLE}<div class="zerojax">{"".join(map(_html, parts))}</div>'


def make_table(*columns: str, title: str | None = None, padding: int = 1) -> Table:
    """Make a table without rows; `>peak` is a column of numbers with the name peak."""
    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, padding),
        collapse_padding=True,
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )
    for name in columns:
        is_number = name.startswith(">")
        justify = "right" if is_number else "left"
        made.add_column(name.removeprefix(">"), justify=justify, no_wrap=is_number, overflow="fold")
    return made


def make_bar(end: float, size: float, begin: float = 0.0) -> Bar:
    """Make the part of a bar from `begin` to `end`, of `size` in all."""
    return Bar(size or 1.0, begin, min(end, size), width=BAR_WIDTH)


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
        """Write bytes with this unit: 79.11 GiB."""
        return f"{self.number(count)} {self.name}"


BINARY = (Unit("GiB", 2**30, 0.1), Unit("MiB", 2**20, 0))
DECIMAL = (Unit("GB", 1e9, 10), Unit("MB", 1e6, 10), Unit("kB", 1e3, 10), Unit("bytes", 1, 0))


def unit_for(largest: float, units: tuple[Unit, ...]) -> Unit:
    """Return the unit that suits figures of which this is the largest."""
    return next(unit for unit in units if largest >= unit.least * unit.size)


def binary(count: float) -> str:
    """Write bytes with the power of 1024 that suits them: 79.11 GiB."""
    return unit_for(count, BINARY).words(count)


def decimal(count: float) -> str:
    """Write bytes with the power of 1000 that suits them: 84.9 GB."""
    return next((unit for unit in DECIMAL if count >= unit.size), DECIMAL[-1]).words(count)


def duration(seconds: float) -> str:
    """Write a time in ms, from a second on in s: 28.13 ms, 17.97 s."""
    return f"{1e3 * seconds:#.4g} ms" if seconds < 1 else f"{seconds:.2f} s"


def amount(value: float) -> str:
    """Write a figure as the paper does: 120, 31.4, 1.9; below one with three digits."""
    if value and value < 1:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0")


def _html(part: Text | Table) -> str:
    if isinstance(part, Text):
        return f'<p class="{part.style}">{escape(part.plain)}</p>'
    sides = [str(column.justify) for column in part.columns]
    lines = [_row([column.header for column in part.columns], sides, "th")] * part.show_header
    for row, *cells in zip(part.rows, *(column.cells for column in part.columns), strict=True):
        style = f"{row.style or ''}{' last' * row.end_section}"
        lines.append(_row(cells, sides, "td", style))
    title = f"<caption>{escape(str(part.title))}</caption>" if part.title else ""
    caption = f'<p class="dim">{escape(str(part.caption))}</p>' if part.caption else ""
    return f"<table>{title}{''.join(lines)}</table>{caption}"


def _row(cells: Sequence[RenderableType], sides: Sequence[str], tag: str, style: str = "") -> str:
    pairs = zip(cells, sides, strict=True)
    return f'<tr class="{style}">{"".join(_cell(cell, side, tag) for cell, side in pairs)}</tr>'


def _cell(cell: RenderableType, side: str, tag: str) -> str:
    if isinstance(cell, Bar):
        left, width = cell.begin / cell.size, (cell.end - cell.begin) / cell.size
        inner = f'<div style="margin-left:{left:.2%};width:{width:.2%}"></div>'
        return f'<td><div class="bar">{inner}</div></td>'
    text, style = (cell.plain, cell.style) if isinstance(cell, Text) else (str(cell), "")
    return f'<{tag} class="{side} {style}">{escape(text)}</{tag}>'
