"""What a compiled step was when somebody accepted it, and what has changed since."""

from zerojax.lock._compare import compare as compare
from zerojax.lock._record import StepRecord as StepRecord
from zerojax.lock._record import read_lock, write_lock
from zerojax.lock._steps import CheckedStep, checked, find_steps
