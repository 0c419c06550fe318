"""The few ways in which compilers depart from the plain rules, read off compiled programs."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How a compiler departs from the plain rules."""

    #: whether elementwise operations and slices are merged into the one dot product that reads
    #: them, and reductions into the one that makes what they read (TPU); else operands of a dot
    #: product lie in memory, and what a gather reads is merged into it (GPU, CPU)
    fuses_operands: bool = False
    #: output tiles below which a dot product is split along what it sums over to keep all cores
    #: busy; where that does not divide, padded copies of both operands are made first (GPU; 0
    #: elsewhere)
    splits_contraction: int = 0
    #: whether the gather of the next weight is under way while one is used
    prefetches: bool = False
    #: whether operations run as late as possible (GPU); else in their order
    runs_late: bool = False


BACKENDS: Mapping[str, Backend] = {
    "gpu": Backend(splits_contraction=132, prefetches=True, runs_late=True),
    "tpu": Backend(fuses_operands=True, prefetches=True),
    "cpu": Backend(),
}
