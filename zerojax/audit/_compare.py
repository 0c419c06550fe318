"""Two audits side by side."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from zerojax.audit._report import AuditReport


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

    @classmethod
    def of(cls, first: AuditReport, second: AuditReport) -> Comparison:
        """Compare two reports."""
        both = (_figures(first), _figures(second))
        names = list(dict.fromkeys([*both[0], *both[1]]))
        rows = tuple((name, both[0].get(name, 0.0), both[1].get(name, 0.0)) for name in names)
        return cls(
            titles=(first.title, second.title),
            rows=tuple(row for row in rows if row[1] or row[2]),
            appeared=tuple(p for p in second.problems if p not in first.problems),
            vanished=tuple(p for p in first.problems if p not in second.problems),
        )

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


def _figures(report: AuditReport) -> dict[str, float]:
    memory = report.memory
    names = ("parameters", "masters", "optimizer", "gradients", "temporaries", "peak", "host")
    figures: dict[str, float] = {
        "volume (elements per parameter)": report.volume,
        "volume by theory": report.theory_volume,
    }
    figures |= {f"{name} (B/device)": float(getattr(memory, name)) for name in names}
    for record in report.collectives:
        key = f"{record.spelling} (B/device)"
        figures[key] = figures.get(key, 0.0) + record.moved_bytes
    return {**figures, "problems": float(len(report.problems))}


def _text(figure: float) -> str:
    return f"{figure:,.0f}" if figure == int(figure) else f"{figure:,.4f}"
