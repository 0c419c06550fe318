"""What a loss writes to the model that it is given, as those that hold state in nodes may.

An nnx model counts what it draws and keeps running means: these become results of the traced loss,
and are written into the model that the caller holds. A parameter that is written would be lost.
`nnx.remat` and `nnx.jit` write every Variable back into its module, unchanged: a result that only
passes on what went in. Of `a, b = jit[jaxpr={ lambda x. (x * 2, x) }] w`, `b` is `w`. What is
written to the dicts and lists of a tree is a loss's own, as under jit: each trace makes new ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey, tree_flatten_with_path

from zerojax._jaxpr import bodies, called, opened, scan_parts, used
from zerojax._tree import path_name
from zerojax._types import PyTree


def trace_writing(
    loss_fn: Callable[..., Any],
    params_of: Callable[[Sequence[Any]], PyTree],
    leaves: Sequence[Any],
    given: PyTree,
) -> tuple[core.ClosedJaxpr, Any, list[KeyPath]]:
    """Trace `loss_fn(params_of(leaves), given)`.

    Returns the program, whose results are the loss's and then what it writes into Variables of the
    model; the shapes of the loss's; and where in the model those Variables are. A ValueError tells
    of something new that is written to one of `leaves`, or to what is no Variable.
    """
    paths: list[KeyPath] = []

    def watched(leaves: Sequence[Any], given: PyTree) -> Any:
        params = params_of(leaves)
        before = dict(tree_flatten_with_path(params)[0])
        out = loss_fn(params, given)
        after = dict(tree_flatten_with_path(params)[0]).items()
        nodes = [x for x in after if any(isinstance(step, GetAttrKey) for step in x[0])]
        pairs = {path: (before.get(path, now), now) for path, now in nodes}
        written = {path: (was, now) for path, (was, now) in pairs.items() if now is not was}
        paths[:] = written
        return out, list(written.values())

    traced, (out, _) = jax.make_jaxpr(watched, return_shape=True)(leaves, given)
    if not paths:
        return traced, out, paths
    num_outputs = len(jax.tree.leaves(out))
    results, given = traced.jaxpr.outvars[num_outputs:], traced.jaxpr.invars[: len(leaves)]
    kept, changed = [*range(num_outputs)], []
    for number, (path, was) in enumerate(zip(paths, results[::2], strict=True)):
        if _passed_on(traced.jaxpr, results[2 * number + 1]) is was:
            continue
        if was in given or path[-1] != GetAttrKey("value"):
            raise ValueError(
                f"gather_where_used: the loss writes {path_name(path)!r} into the model that it "
                "is given, where it would be lost; return what changes (aux), and pass it in"
            )
        changed.append(path)
        kept.append(num_outputs + 2 * number + 1)
    jaxpr = traced.jaxpr.replace(outvars=[traced.jaxpr.outvars[n] for n in kept])
    return used(traced.replace(jaxpr=jaxpr), len(kept)), out, changed


def write_variables(model: PyTree, paths: Sequence[KeyPath], values: Sequence[Any]) -> None:
    """Write values into the Variables at some places of a model.

    Raises a ValueError for one in several places: each of them counted for itself in the loss.
    """
    written = set[int]()
    for path, value in zip(paths, values, strict=True):
        variable = model
        for step in path[:-1]:
            if isinstance(step, GetAttrKey):
                variable = getattr(variable, step.name)
            else:
                variable = variable[step.idx if isinstance(step, SequenceKey) else step.key]
        if id(variable) in written:
            raise ValueError(
                f"gather_where_used: the loss writes {path_name(path)!r}, which the model holds in "
                "several places; give each a Variable of its own"
            )
        written.add(id(variable))
        variable[...] = value


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
