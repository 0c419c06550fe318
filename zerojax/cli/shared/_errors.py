"""Ends of a command other than success."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Failure(Exception):
    """Ends the command with one line on stderr and a status: 2 for a wrong request, 1 otherwise."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


#: Ctrl-C, as shells have it; and preemption, as mail servers say "come again" (EX_TEMPFAIL).
INTERRUPTED, PREEMPTED = 130, 75


class Interrupted(Exception):
    """Ends the command after what there was has been written, by the signal that asked for it."""

    def __init__(self, message: str, status: int = INTERRUPTED) -> None:
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
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from error
