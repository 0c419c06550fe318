"""What the screens of the commands have in common: facts, titles, long tasks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.text import Text

from zerojax.cli.shared._command import INTERRUPTED


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


Result = TypeVar("Result")


def run_task(console: Console, what: str, work: Callable[[], Result]) -> Result:
    """Do long work in a thread, since a compiler does not hear Ctrl-C, and print its seconds."""
    start = time.monotonic()
    try:
        console.print(Text(f"{what} ..."), soft_wrap=True)
        with console.status(""):
            result = _in_thread(work)
    except KeyboardInterrupt:
        # A compiler that is at work in a thread can't be stopped, and leaving around it crashes.
        sys.stdout.flush()
        os.write(2, b"zerojax: interrupted\n")
        os._exit(INTERRUPTED)
    if (seconds := time.monotonic() - start) >= 1:
        console.print(Text(f"  took {seconds:,.0f} s"), soft_wrap=True)
    return result


def _in_thread(work: Callable[[], Result]) -> Result:
    """Run a function in a thread that does not outlive the process, and wait for it."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not future.done():
        time.sleep(0.05)  # a wait without an end would not hear Ctrl-C either
    return future.result()
