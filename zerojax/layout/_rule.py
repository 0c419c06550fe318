"""`Rule`: what a user says of the leaves whose paths match."""

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
        ValueError: a field that can't be meant, or a rule that says nothing.
    """

    path: str
    kind: Literal["parameter", "optimizer"] = "parameter"
    stacked: int | None = None
    dim: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.path)
        except (re.error, TypeError) as error:
            self._refuse("path is a regular expression such as 'blocks/.*/kernel'", str(error))
        if self.kind not in ("parameter", "optimizer"):
            self._refuse("kind is 'parameter' or 'optimizer'", repr(self.kind))
        for name in ("stacked", "dim"):
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                self._refuse(f"{name} is a whole number", repr(number))
        if self.stacked is not None and self.stacked < 0:
            self._refuse("stacked counts leading layer dims", repr(self.stacked))
        if not isinstance(self.whole, bool):
            self._refuse("whole is True or False", repr(self.whole))
        if self.whole and self.dim is not None:
            self._refuse("one of dim and whole is meant", f"dim={self.dim} and whole=True")
        if self.stacked is None and self.dim is None and not self.whole:
            self._refuse("one of stacked, dim and whole is needed", "none")

    def _refuse(self, expected: str, found: str) -> None:
        raise ValueError(f"Rule(path={self.path!r}): {expected}, got {found}")

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
