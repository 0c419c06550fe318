"""`Rule`: what a user says of the leaves whose paths match."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Override the placement of the leaves whose path matches.

    Attributes:
        path: regular expression, searched in the leaf's path ("blocks/.*/kernel"); rules are
            tried in order. Of those that match a leaf, the first that names layer dims decides on
            them, and the first with `dim` or `whole` decides how the leaf is cut.
        kind: what the path is of: a "parameter", whose gradient, master and optimizer leaves follow
            it, or a leaf of the "optimizer"'s state ("0/mu/blocks/kernel").
        stacked: number of leading layer dims, as a model that scans over layers has them; these
            dims are never partitioned.
        dim: the dim to partition; it is padded where it does not divide.
        whole: keep the leaf whole on every device.
    """

    path: str
    kind: Literal["parameter", "optimizer"] = "parameter"
    stacked: int | None = None
    dim: int | None = None
    whole: bool = False
