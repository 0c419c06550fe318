"""Ends of a command other than success.

What reads a request raises ValueError or OSError where the user asked for what can't be done, in
one line with the remedy; `refusing` ends the command with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerojax.aot import MissingCompiler

#: Ctrl-C, as shells have it; and preemption, as mail servers say "come again" (EX_TEMPFAIL).
INTERRUPTED, PREEMPTED = 130, 75


class Failure(Exception):
    """Ends the command with one line on stderr and a status.

    Statuses: 2 for a wrong request; 1 for a run that failed; 130 and 75 for one that a signal
    ended, after what there was has been written.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def refusing() -> Iterator[None]:
    """Turn errors about what the user asked for into one line.

    Wrap only what reads the request: a ValueError from within training is a bug and keeps its
    traceback.
    """
    try:
        yield
    except (ValueError, OSError, MissingCompiler) as error:
        raise Failure(str(error)) from error
