"""Signals: the first one asks the run to end after its step, a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

MESSAGES = {
    signal.SIGINT: b"\nzerojax: ending after this step; Ctrl-C again ends at once\n",
    signal.SIGTERM: b"\nzerojax: saving and ending after this step (SIGTERM)\n",
}


class Signals:
    """Catches SIGINT (Ctrl-C) and SIGTERM (preemption) within a `with` block of the main thread.

    Attributes:
        requested: whether the run should end.
        preempted: whether it is SIGTERM that asks for it.
    """

    def __init__(self) -> None:
        self.requested = False
        self.preempted = False
        self._interrupted = False

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._handle) for number in MESSAGES}
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            # None stands for a handler that Python did not set and can't set again.
            signal.signal(number, before or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if self.preempted:  # a second one changes nothing: the state is on its way
                return
            self.preempted = True
        elif self._interrupted:
            raise KeyboardInterrupt
        else:
            self._interrupted = True
        self.requested = True
        # Not through a stream: it may be in the middle of a write.
        os.write(2, MESSAGES[signal.Signals(number)])
