"""Frozen policies that a user hands to a layout or a step; they hold choices and no logic."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Overrides the placement of the leaves whose path matches.

    Attributes:
        path: regular expression, searched in the leaf's path ("blocks/.*/kernel"); rules are
            tried in order and the first that matches a leaf decides.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Scales the loss so that small gradients do not become zero in fp16, by as much as fits.

    A step whose gradients are not finite changes nothing but the scale, which it divides by
    `factor`; after `growth_interval` finite steps in a row the scale is multiplied by it. Scales
    are powers of two, so that scaling rounds nothing. A loss that is itself in fp16 takes scales
    up to 2**15; return it in fp32.

    Attributes:
        initial: the scale of the first step.
        growth_interval: finite steps in a row after which the scale grows.
        factor: by what the scale grows and shrinks.
        smallest: the scale shrinks no further.
        largest: the scale grows no further.

    Source: arXiv 1710.03740, section 3.2, for scaling; that the scale follows what overflows is
    common practice (NVIDIA Apex, DeepSpeed).
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    smallest: float = 1.0
    largest: float = 2.0**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of mixed-precision training (arXiv 1910.02054, section 3.1).

    Attributes:
        params: dtype of the parameters that the loss reads and that gathers move; None keeps the
            dtype that the model was initialised with.
        master: dtype of the partitioned copy that the optimizer updates; None keeps no copy and
            updates the parameters themselves.
        reduce: dtype in which gradients are summed over devices; None is the gradients' own dtype.
        loss_scale: how the loss is scaled, for parameters in fp16 with fp32 masters; None does not.
    """

    params: Any = None
    master: Any = None
    reduce: Any = None
    loss_scale: DynamicLossScale | None = None
