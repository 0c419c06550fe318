"""The `zerojax` command, also as `python -m zerojax`; without its packages, one line says so."""

import gc
import os
import signal
import sys
import threading
from types import FrameType

from zerojax._extras import MissingExtra, extra


def main() -> int:
    """Run the command line and return its exit status."""
    os.environ["MPLBACKEND"] = "agg"  # plots are files, whatever the environment draws with
    if os.environ.get("COLUMNS") == "0":  # not known: rich would print lines of no width
        del os.environ["COLUMNS"]
    try:
        with extra("cli", "the zerojax command"):
            from zerojax import cli
    except MissingExtra as missing:
        sys.stderr.write(f"zerojax: {missing}\n")
        return 2
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see _quiet
        signal.signal(signal.SIGINT, _interrupt)
    return cli.main()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; later where it would be lost, in a callback of the collector."""
    callbacks = {getattr(x, "__code__", None) for x in gc.callbacks}  # jax has one
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()


if __name__ == "__main__":
    sys.exit(main())
