"""The phases of a compilation: shown with the seconds they take, ended at once by Ctrl-C."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

Answer = TypeVar("Answer")


class _Seconds(ProgressColumn):
    """Shows the seconds that a phase has taken."""

    def render(self, task: Task) -> Text:
        """Render one phase."""
        seconds = task.finished_time if task.finished else task.elapsed
        return Text(f"{seconds or 0:,.0f} s", style="cyan")


class Phases:
    """Shows phases one below the other: live on a terminal, and as plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            _Seconds(),
            console=console,
            disable=not console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the phases while the block runs; they stay on the screen after it."""
        with self._progress:
            yield

    def run(self, what: str, work: Callable[[], Answer]) -> Answer:
        """Do the work of one phase in a thread, since a compiler does not hear Ctrl-C."""
        if not self.console.is_terminal:
            self.console.print(Text(f"{what} ..."), soft_wrap=True)
        task = self._progress.add_task(what, total=1)
        start = time.monotonic()
        answer = _in_thread(work)
        self._progress.update(task, completed=1)
        seconds = time.monotonic() - start
        if not self.console.is_terminal and seconds >= 1:
            self.console.print(Text(f"  took {seconds:,.0f} s"), soft_wrap=True)
        return answer


def _in_thread(work: Callable[[], Answer]) -> Answer:
    """Run a function in a thread that does not outlive the process, and wait for it."""
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)  # a wait without an end would not hear Ctrl-C either
    if errors:
        raise errors[0]
    return answers[0]
