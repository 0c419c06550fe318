"""Two audits side by side."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Comparison:
    """What differs between two reports.

    Attributes:
        titles: of the two.
        rows: name, the first's figure, the second's, for everything that either has.
        appeared: problems that only the second has.
        vanished: problems that only the first has.
    """

    titles: tuple[str, str]
    rows: tuple[tuple[str, float, float], ...]
    appeared: tuple[str, ...]
    vanished: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the figures as a table, then the problems that came and went."""
        table = Table(title="\n".join(f"{n}: {t}" for n, t in zip("AB", self.titles, strict=True)))
        table.title_justify = "left"
        table.add_column("figure")
        for name in ("A", "B", "B / A"):
            table.add_column(name, justify="right")
        for name, one, other in self.rows:
            table.add_row(name, _text(one), _text(other), f"{other / one:.3f}" if one else "")
        yield table
        for problem in self.appeared:
            yield Text(f"only B: {problem}", style="red")
        for problem in self.vanished:
            yield Text(f"only A: {problem}", style="green")

    def __str__(self) -> str:
        """Render the comparison as plain text."""
        out = io.StringIO()
        Console(file=out, width=160, color_system=None).print(self)
        return out.getvalue()


def _text(figure: float) -> str:
    return f"{figure:,.0f}" if figure == int(figure) else f"{figure:,.4f}"
