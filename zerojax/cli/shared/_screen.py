"""What the screens of the commands have in common: facts, titles, long tasks."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text


class Screen:
    """Prints to stdout, on `width` columns where there is no terminal to say how many."""

    def __init__(self, *, width: int | None = None, quiet: bool = False) -> None:
        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(highlight=False, width=None if known else width, quiet=quiet)

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

    @contextmanager
    def task(self, what: str) -> Iterator[None]:
        """Print what is done, and how long it took; Ctrl-C ends the process at once.

        Python's own handler would wait for the compiler, which does not hear it.
        """
        start, before = time.monotonic(), signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.show(Text(f"{what} ..."))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if (seconds := time.monotonic() - start) >= 1:
            self.show(Text(f"  took {seconds:,.0f} s"))
