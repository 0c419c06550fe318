"""When gradients are summed over devices: once a step, or once a microbatch."""

from __future__ import annotations

import numbers
from collections.abc import Collection
from typing import Any, Literal, get_args

from zerojax._types import Kind

Reduce = Literal["once", "each"]


def check_reduce(reduce: Any) -> None:
    """Raise a ValueError unless `reduce` is "once", "each" or None."""
    if reduce not in (None, *get_args(Reduce)):
        raise ValueError(f"reduce must be 'once', 'each' or None, got {reduce!r}")


def find_reduction(reduce: Reduce | None, accumulate: int, kinds: Collection[Kind]) -> Reduce:
    """Return when gradients are summed over devices; None asks for the default.

    The default is "once" for several microbatches where gradients stay whole (stages 0 and 1), else
    "each".

    Args:
        reduce: what the user asked for.
        accumulate: microbatches per step.
        kinds: kinds of tensor that are partitioned (`Layout.kinds`).

    Raises:
        ValueError: "once" where parameters are partitioned.
    """
    if reduce == "once" and "parameter" in kinds:
        raise ValueError(
            "reduce='once' needs a whole gradient on each device, and stage 3 never holds one; "
            "use reduce='each', or stage 1 or 2"
        )
    if reduce is None:
        return "once" if accumulate > 1 and "gradient" not in kinds else "each"
    return reduce


def check_count(name: str, value: Any) -> int:
    """Return a positive whole number as an int, or raise a ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return int(value)
