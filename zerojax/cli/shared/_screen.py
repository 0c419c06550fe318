"""What the screens of the commands have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


class Screen:
    """Prints to stdout, or to stderr.

    Args:
        width: columns where there is no terminal to say how many; None leaves it to rich.
        quiet: print nothing.
        stderr: print to stderr.
    """

    def __init__(
        self, *, width: int | None = None, quiet: bool = False, stderr: bool = False
    ) -> None:
        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(
            highlight=False, width=None if known else width, quiet=quiet, stderr=stderr
        )

    def show(self, what: RenderableType) -> None:
        """Print a table, or text on as many columns as it takes."""
        self.console.print(what, soft_wrap=isinstance(what, Text))

    def facts(self, rows: Mapping[str, str]) -> None:
        """Print names and what they are, one below the other; nothing of what is empty."""
        width = max(map(len, rows)) + 1
        for name, text in rows.items():
            lines = text.replace("\n", "\n" + " " * width)
            if text:
                self.show(Text.assemble((f"{name:<{width}}", "bold"), lines))

    def title(self, text: str) -> None:
        """Print the title of a table."""
        self.show(Text(f"\n{text}", style="bold"))

    def say(self, text: str) -> None:
        """Print one line of what a reader may skip."""
        self.show(Text(text, style="dim"))

    def wrote(self, *paths: Path | None) -> None:
        """Print which files were written; None is one that nobody asked for."""
        if names := ", ".join(str(path) for path in paths if path is not None):
            self.say(f"wrote {names}")


def table(*columns: str, padding: int = 1) -> Table:
    """Make a table without rows; `>peak` is a column of numbers with the name peak."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    for name in columns:
        is_number = name.startswith(">")
        justify = "right" if is_number else "left"
        made.add_column(name.removeprefix(">"), justify=justify, no_wrap=is_number, overflow="fold")
    return made
