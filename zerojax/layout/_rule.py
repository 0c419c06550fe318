"""`Rule`: what a user says of the leaves whose paths match."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from zerojax._types import Shape


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

    Raises:
        ValueError: the path is no regular expression, or the rule contradicts itself.
    """

    path: str
    kind: Literal["parameter", "optimizer"] = "parameter"
    stacked: int | None = None
    dim: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        if self.kind not in ("parameter", "optimizer"):
            raise ValueError(f"{self}: kind is 'parameter' or 'optimizer'")
        if self.whole and self.dim is not None:
            raise ValueError(f"{self}: a leaf can't be whole and cut along a dim; leave one out")
        if self.stacked is not None and self.stacked < 0:
            raise ValueError(f"{self}: stacked counts dims; 0 says that there are no layer dims")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(f"{self}: path is no regular expression: {error}") from None

    def matches(self, path: str) -> bool:
        """Return whether the rule is for the leaf with this path."""
        return re.search(self.path, path) is not None

    def dim_of(self, path: str, shape: Shape) -> int | None:
        """Return the dim of a leaf that the rule asks for, counted from the front.

        Raises:
            ValueError: the leaf does not have it.
        """
        if self.dim is None:
            return None
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"{self} asks for a dim that leaf {path!r} {shape} does not have")
        return self.dim % len(shape)
