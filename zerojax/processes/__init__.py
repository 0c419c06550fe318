"""Several processes of one run: they start together, agree on what they do, and end together."""

from zerojax.processes._stop import CommonStop
from zerojax.processes._texts import ProcessError, agree_on_errors, gather_texts
from zerojax.processes._watch import PATIENCE, fail, has_started, initialize, leave

__all__ = [
    "PATIENCE",
    "CommonStop",
    "ProcessError",
    "agree_on_errors",
    "fail",
    "gather_texts",
    "has_started",
    "initialize",
    "leave",
]
