"""Updates whose optimizer needs whole matrices, on devices that own whole ones."""

from zerojax.optim.whole._dims import has_matrices
from zerojax.optim.whole._jobs import OWNERS
from zerojax.optim.whole._regions import update_whole
