"""Traced programs: what versions of jax spell differently, and equations run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """Split a jaxpr, closed over constants or not, into the open one and its constants."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Count the constants and the carried values among a scan's inputs; slices come after them."""
    if "num_consts" in params:  # jax 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Run one equation on arrays."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]
