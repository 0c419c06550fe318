"""What ends a run from outside: at once, or in order and on all of its processes."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from zerojax.processes import CommonStop, gather_texts

MESSAGES = {
    signal.SIGINT: b"\nzerojax: ending after this step; Ctrl-C again ends at once\n",
    signal.SIGTERM: b"\nzerojax: saving and ending after this step (SIGTERM)\n",
    signal.SIGHUP: b"\nzerojax: saving and ending after this step (SIGHUP)\n",
}
#: Stands among the signals for what the run tells and can't write: to a closed pipe, a full disk.
UNWRITTEN = 0
#: What the state is saved for, even where no checkpoints were asked for.
LOSSES = {signal.SIGTERM, signal.SIGHUP, UNWRITTEN}


class Signals:
    """Catches the signals that end a run in order, within a `with` block of the main thread.

    They are SIGINT (Ctrl-C), SIGTERM (preemption) and SIGHUP (a terminal that is closed). SIGHUP
    stays ignored if it was at the start, as under nohup. Any other that this process has `seen`
    ends the run after its step. At most `most_queued` steps start before an earlier one has ended.
    """

    def __init__(self, most_queued: int) -> None:
        self.seen: set[int] = set()
        self.unwritten = ""  # what could not be written first, and why
        self._common_stop = CommonStop(most_queued)

    @contextlib.contextmanager
    def writing(self, where: object) -> Iterator[None]:
        """End the run in order, as a signal does, where what it tells can't be written."""
        try:
            yield
        except (OSError, SystemExit) as error:  # the latter is rich's for a closed pipe
            if not self.seen:
                why = getattr(error, "strerror", "its reader has ended")
                self.unwritten = f"can't write to {where}: {why}; "
                self.seen.add(UNWRITTEN)

    def end_before(self, step: int) -> bool:
        return self._common_stop.is_reached(step - 1, asked=bool(self.seen))

    def everywhere(self) -> set[int]:
        """Return the signals that came to any process; called by all."""
        told = gather_texts("signals", " ".join(map(str, self.seen)))
        return {int(number) for number in " ".join(told).split()}

    def __enter__(self) -> "Signals":
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        caught = MESSAGES.keys() - ({signal.SIGHUP} if under_nohup else set())
        self._before = {number: signal.signal(number, self._handle) for number in caught}
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            # None stands for a handler that Python did not set and can't set again.
            signal.signal(number, before or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self.seen and number == signal.SIGINT:
            # Not raised here: in jax's collector of garbage it would be told, and lost.
            before = self._before[signal.Signals(number)]
            (before if callable(before) else signal.default_int_handler)(number, frame)
        if number not in self.seen:  # a second SIGTERM changes nothing: the state is on its way
            self.seen.add(number)
            # Not through a stream, which may be in the middle of a write; a terminal may be gone.
            with contextlib.suppress(OSError):
                os.write(2, MESSAGES[signal.Signals(number)])
