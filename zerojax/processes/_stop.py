"""Ending a loop of steps before the same step on all processes."""

from __future__ import annotations

import jax

from zerojax.processes._texts import connection

_ASKED, _STEP = "zerojax/stop/asked/", "zerojax/stop/step/"


class CommonStop:
    """Any process may ask to stop; process 0 says before which step all do.

    A process that has done its collectives of step n knows that process 0 has started step n. So
    process 0 writes down a step that nobody can have passed, before it starts its next one; whoever
    arrives there has waited for that step of process 0, and reads it.

    Args:
        most_queued: steps that a process may start before an earlier one has ended.
    """

    def __init__(self, most_queued: int) -> None:
        self._most_queued = most_queued
        self._has_asked = False
        self._step: int | None = None

    def is_reached(self, step: int, *, asked: bool) -> bool:
        """Return whether to end after `step` steps; called before each, by all processes."""
        if jax.process_count() == 1:
            return asked
        if self._step is None:
            self._step = self._agreed_step(step, asked)
        return self._step is not None and step >= self._step

    def _agreed_step(self, step: int, asked: bool) -> int | None:
        client, index = connection().client, jax.process_index()
        if asked and not self._has_asked:
            client.key_value_set(f"{_ASKED}{index}", "")
            self._has_asked = True
        if index:
            told = client.key_value_dir_get(_STEP)
            return int(told[0][1]) if told else None
        if not client.key_value_dir_get(_ASKED):
            return None
        last = step + self._most_queued + 1
        client.key_value_set(f"{_STEP}last", str(last))
        return last
