"""Traced programs: what kinds of equations there are, and running them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Primitives that are kernels of their own: their operands and results lie in memory.
OPAQUE = frozenset(
    {
        "dot_general", "ragged_dot_general", "conv_general_dilated", "sort", "top_k", "cumsum",
        "cumlogsumexp", "cummax", "cummin", "cumprod", "fft", "cholesky", "triangular_solve",
        "eigh", "lu", "qr", "svd", "reduce_window", "reduce_window_sum", "select_and_scatter_add",
        "random_bits", "threefry2x32", "custom_call", "ffi_call", "pure_callback", "pallas_call",
    }
)  # fmt: skip
#: What `jax.checkpoint` is called in a trace, by versions of jax.
REMATERIALISED = frozenset({"remat2", "remat", "checkpoint"})
#: Plain calls: what runs is what they hold.
PLAIN_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
#: All that is written out in its place.
CALLS = REMATERIALISED | PLAIN_CALLS | {
    "custom_jvp_call", "custom_vjp_call", "custom_jvp_call_jaxpr", "custom_vjp_call_jaxpr",
    "shard_map",
}  # fmt: skip
LOOPS = frozenset({"scan", "while", "cond"})
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


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


def called(eqn: Any) -> Any:
    """Give the jaxpr that a call holds."""
    return next(eqn.params[key] for key in _CALLED if key in eqn.params)
