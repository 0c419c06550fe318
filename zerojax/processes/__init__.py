"""Several processes of one run: they start together, agree on what they do, and end together."""

from zerojax.processes._agreement import CommonStop, agree, check_copies
from zerojax.processes._texts import ProcessError, ProcessesDifferError, gather_texts, together
from zerojax.processes._watch import (
    PATIENCE,
    WAIT,
    fail,
    has_started,
    initialize,
    leave,
    set_remedy,
)

__all__ = [
    "PATIENCE",
    "WAIT",
    "CommonStop",
    "ProcessError",
    "ProcessesDifferError",
    "agree",
    "check_copies",
    "fail",
    "gather_texts",
    "has_started",
    "initialize",
    "leave",
    "set_remedy",
    "together",
]
