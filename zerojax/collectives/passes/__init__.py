"""What is rearranged in a program that is differentiated already, and when its gathers happen."""

from zerojax.collectives.passes._fences import fenced
from zerojax.collectives.passes._joined import JOINED
from zerojax.collectives.passes._prefetch import BUCKET, prefetched
