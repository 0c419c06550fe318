"""What a loss writes to the tree of parameters that it is given, as models with state in nodes may.

`nnx.remat` and `nnx.jit` write every parameter back into its module, unchanged: a result that only
passes on what went in. Of `a, b = jit[jaxpr={ lambda x. (x * 2, x) }] w`, `b` is `w`. Anything else
belongs to this trace and would be lost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from zerojax._jaxpr import bodies, called, opened, scan_parts, used
from zerojax._tree import leaves_by_path
from zerojax._types import PyTree


def trace_unwritten(
    loss_fn: Callable[..., Any],
    params_of: Callable[[Sequence[Any]], PyTree],
    leaves: Sequence[Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> tuple[core.ClosedJaxpr, Any]:
    """Trace `loss_fn(params_of(leaves), *args, **named)`; return its shapes too.

    Raises a ValueError where it writes something new to a leaf of its parameters.
    """
    paths: list[str] = []

    def watched(leaves: Sequence[Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        params = params_of(leaves)
        before = jax.tree.leaves(params)
        out = loss_fn(params, *args, **named)
        pairs = zip(leaves_by_path(params).items(), before, strict=True)
        written = {path: (was, now) for (path, now), was in pairs if now is not was}
        paths[:] = written
        return out, list(written.values())

    traced, (out, _) = jax.make_jaxpr(watched, return_shape=True)(leaves, args, named)
    if not paths:
        return traced, out
    num_outputs = len(jax.tree.leaves(out))
    results = traced.jaxpr.outvars[num_outputs:]
    for path, was, now in zip(paths, results[::2], results[1::2], strict=True):
        if _passed_on(traced.jaxpr, now) is not was:
            raise ValueError(
                f"gather_where_used: the loss writes {path!r} into the model that it was given, "
                "where it would be lost; return what changes (aux), and pass it in as an argument"
            )
    return used(traced, num_outputs), out


def _passed_on(jaxpr: Any, var: Any) -> Any:
    while maker := next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None):
        scan = maker.primitive.name == "scan"
        consts, carry = scan_parts(maker.params) if scan else (0, 0)
        program = bodies(maker)[0] if scan else called(maker)
        place = maker.outvars.index(var)
        if program is None or place < carry:
            return None
        inner = opened(program)[0]
        source = _passed_on(inner, inner.outvars[place])
        if source not in inner.invars[consts + carry :]:
            return None
        var = maker.invars[inner.invars.index(source)]
    return var
