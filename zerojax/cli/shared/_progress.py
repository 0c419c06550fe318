"""The long tasks of a command: shown with the seconds they take, ended at once by Ctrl-C."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from zerojax.cli.shared._errors import INTERRUPTED

Result = TypeVar("Result")


class TimedTasks:
    """Shows tasks one below the other: live on a terminal, and as plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the tasks while the block runs; they stay on the screen after it."""
        try:
            with self._progress:
                yield
        except KeyboardInterrupt:
            # A compiler that is at work in a thread can't be stopped, and leaving around it
            # crashes.
            sys.stdout.flush()
            os.write(2, b"zerojax: interrupted\n")
            os._exit(INTERRUPTED)

    def run(self, what: str, work: Callable[[], Result]) -> Result:
        """Do the work of one task in a thread, since a compiler does not hear Ctrl-C."""
        if not self.console.is_terminal:
            self.console.print(Text(f"{what} ..."), soft_wrap=True)
        task = self._progress.add_task(what, total=1)
        start = time.monotonic()
        result = _in_thread(work)
        self._progress.update(task, completed=1)
        seconds = time.monotonic() - start
        if not self.console.is_terminal and seconds >= 1:
            self.console.print(Text(f"  took {seconds:,.0f} s"), soft_wrap=True)
        return result


def _in_thread(work: Callable[[], Result]) -> Result:
    """Run a function in a thread that does not outlive the process, and wait for it."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)  # a wait without an end would not hear Ctrl-C either
    if errors:
        raise errors[0]
    return results[0]
