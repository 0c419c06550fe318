"""Import jax without the lines that CUDA's libraries write to stderr where no GPU is."""

import contextlib
import importlib
import os
import re
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


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


if "jax" not in sys.modules:
    with quiet_stderr():
        importlib.import_module("jax")
