"""What the screens of the commands have in common: tables, bytes in words, long tasks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
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


def table(*columns: str, padding: int = 1) -> Table:
    """Make a table without rows; `>peak` is a column of numbers with the name peak."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    for name in columns:
        is_number = name.startswith(">")
        justify = "right" if is_number else "left"
        made.add_column(name.removeprefix(">"), justify=justify, no_wrap=is_number, overflow="fold")
    return made


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


def amount(value: float) -> str:
    """Write a figure as the paper does: 120, 31.4, 1.9; below one with three digits."""
    if value and value < 1:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0")


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
