"""Pauses of Python's cyclic garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Trace, or read a program, while no cycles of objects are looked for.

    Both make many objects that stay: the collector walks all of them again and again, half of the
    time that tracing takes, and finds little.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
