"""What a check of `zerojax doctor` finds, and what it leaves for those after it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Status = Literal["ok", "warning", "failed", "not tried"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found: failed is what zerojax can't work without, a warning what it can.

    Attributes:
        status: the mark.
        found: what there is.
        remedy: what to do about it; nothing where all is well.
        traceback: where an error came from that no check foresaw.
    """

    status: Status
    found: str
    remedy: str = ""
    traceback: str = ""


@dataclasses.dataclass
class Bench:
    """What checks leave for those after them.

    Attributes:
        devices: those of a run, once they have been found.
        step: the proof's step.
        state: the proof's state after a step.
        compiled: the proof's step, compiled.
    """

    devices: list[Any] = dataclasses.field(default_factory=list)
    step: Any = None
    state: Any = None
    compiled: Any = None
