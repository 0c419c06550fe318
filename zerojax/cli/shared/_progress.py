"""The long tasks of a command: shown with the seconds they take, ended at once by Ctrl-C."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from zerojax.cli.shared._errors import INTERRUPTED

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
