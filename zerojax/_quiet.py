"""What would disturb a user is kept quiet: lines of CUDA's libraries, and Python's collector."""

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator

# I0000 00:00:1795305195.544227   24974 cudart_stub.cc:31] Could not find cuda drivers on your ...
_NOISE = re.compile(
    r"cudart_stub\.cc|absl::InitializeLog\(\)|InitGoogle\(\)|hlo_rematerialization\.cc"
)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hold back what C++ writes to stderr, and pass on all of it but the known noise."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            kept = os.dup(2)
        except OSError:  # no stderr, or no room for what it gets: then nothing is held back
            yield
            return
        _flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if not _NOISE.search(line.decode(errors="replace")):
                    os.write(2, line)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Trace, or read a program, while no cycles of objects are looked for.

    Both make many objects that stay: walking them again and again is half of the time of a trace.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


# The command: imports turn a KeyboardInterrupt into other errors, or drop it.
_is_command = sys.orig_argv[1:3] == ["-m", "zerojax"] or "".join(sys.argv[:1]).endswith("/zerojax")
if _is_command and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if "jax" not in sys.modules:
    with quiet_stderr():
        importlib.import_module("jax")
