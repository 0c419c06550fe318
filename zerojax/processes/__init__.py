"""Several processes of one run: they start together, agree on what they do, and end together."""

from zerojax.processes._agreement import CommonStop, agree, check_copies, check_present
from zerojax.processes._texts import ProcessError, gather_texts, together
from zerojax.processes._texts import ProcessesDifferError as ProcessesDifferError
from zerojax.processes._watch import LAUNCHED, PATIENCE, WAIT, fail, has_started, leave, set_remedy
from zerojax.processes._watch import initialize as initialize
