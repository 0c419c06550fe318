"""`gather_where_used`: a loss of logical parameters becomes one of stored parameters."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from zerojax import _jaxpr
from zerojax._quiet import uncollected
from zerojax._tree import unwrapped, with_leaves_like
from zerojax._types import LossFn, PyTree
from zerojax.collectives.forms import auto_region
from zerojax.collectives.gathers._boxed import Opening
from zerojax.collectives.gathers._copies import copied_if_tied, is_used_in_turns
from zerojax.collectives.gathers._retrace import Retracer
from zerojax.collectives.gathers._writes import trace_writing, write_variables
from zerojax.layout import Layout, check_layout
from zerojax.recipe import Recipe, as_recipe

_CALL = "gather_where_used(loss_fn, layout)"


def gather_where_used(loss_fn: LossFn, layout: Layout, recipe: Recipe | None = None) -> LossFn:
    """Make `loss_fn(params, *args)` take stored parameters, and gather each where it is used.

    Its gradients are stored shards, or lie as Explicit parameters.

    >>> grads = jax.grad(zerojax.gather_where_used(loss_fn, layout))(params, batch)

    Args:
        loss_fn: the user's function of logical parameters.
        layout: the placement; at stage 3 the parameters come partitioned, else whole.
        recipe: of it `reshard_after_forward`, `precision.gather` and `precision.reduce`; what else
            it says is for the loop to do.

    Raises:
        ValueError: narrow gathers, or weights kept gathered, below stage 3; or it is called where
            devices run the loss each for itself, as under `reduce="once"`.
    """
    if not callable(loss_fn):
        raise TypeError(f"a loss function is expected, got {type(loss_fn).__name__}; write {_CALL}")
    check_layout(layout, _CALL)
    return gathering(loss_fn, layout, as_recipe(recipe))


def gathering(loss_fn: LossFn, layout: Layout, recipe: Recipe) -> LossFn:
    gathers, keeps = recipe.gather_dtype(layout.kinds), recipe.keeps_gathered(layout.kinds)
    opening = Opening(layout, recipe.precision.reduce, gathers, keeps=keeps)
    asks = keeps or gathers is not None or recipe.precision.reduce is not None
    may_leave = layout.mesh == layout.auto_mesh and not asks

    @uncollected()
    def wrapped(params: PyTree, *args: Any, **named: Any) -> Any:
        if along := set(jax.sharding.get_abstract_mesh().manual_axes) & {*layout.batch_axes}:
            raise ValueError(
                f"{_CALL} was called within a shard_map along {', '.join(sorted(along))}, where a "
                "device has its part alone, as in a train step under reduce='once': call it "
                "outside, or write Recipe(reduce='each')"
            )
        params = unwrapped(params)  # of a train state
        stored = layout.flatten(params, "params of the loss", within=True, stored=True)
        held, model_of = _arrays(params)  # leaves of an equinox model may be functions
        given, rest_of = _arrays((args, named))  # flags and functions stay as they are
        # With jax.vmap over examples each has a gradient, [examples, *shape], which is cut along
        # them: the shards of a weight's would be another order, batch / N times the parameters.
        is_mapped = any(type(x).__name__ == "BatchTracer" for x in given.values())
        if is_mapped and may_leave and [*map(np.shape, stored)] == [x.shape for x in layout.leaves]:
            return loss_fn(params, *args, **named)
        loss = functools.partial(_call, loss_fn, rest_of)
        written: list[KeyPath] = []

        def gathering(held: dict[int, jax.Array], *given: Any) -> tuple[Any, list[Any]]:
            return run(loss, model_of(held), written, *given)

        out, values = auto_region(gathering, layout, lambda _: P())(held, stored, given)
        write_variables(params, written, values)
        return out

    def run(
        loss: LossFn, params: PyTree, written: list[KeyPath], stored: list[jax.Array], given: Any
    ) -> tuple[Any, list[Any]]:
        dtypes = [x.dtype for x in stored]
        logical = [*map(jax.ShapeDtypeStruct, (leaf.shape for leaf in layout.leaves), dtypes)]
        params_of = functools.partial(with_leaves_like, params, layout.structure)
        # On a mesh that is set, a model may place its activations over axes that are its own.
        with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
            traced, out, written[:] = trace_writing(loss, params_of, logical, given)
        own, results = traced.jaxpr.invars[: len(stored)], traced.jaxpr.outvars
        if _jaxpr.depending(traced.eqns, own).isdisjoint(_jaxpr.variables(results)):
            told = "the loss reads no parameter, so that nothing is trained"
            warnings.warn(f"{told}: compute it with the params that it is given", stacklevel=2)
        # Below stage 3 a box moves nothing forwards; backwards it asks for a use's gradient summed.
        turns = [is_used_in_turns(traced, i) for i in range(len(stored))]
        boxes = [*map(opening.box, stored, layout.leaves, turns)]
        boxes = [copied_if_tied(box, traced, i, opening) for i, box in enumerate(boxes)]
        examples = jax.tree.leaves(given)
        from_batch = _jaxpr.depending_within(traced, [False] * len(boxes) + [True] * len(examples))
        retracer = Retracer(opening, from_batch, _jaxpr.read_often(traced))
        flat = [*map(retracer.opened, retracer.run(traced, [*boxes, *examples]))]
        count = len(jax.tree.leaves(out))
        return jax.tree.unflatten(jax.tree.structure(out), flat[:count]), flat[count:]

    return wrapped


def _arrays(tree: PyTree) -> tuple[dict[int, Any], Callable[[dict[int, Any]], PyTree]]:
    """Return the arrays of a tree by number, and what makes the tree of others in their place."""
    leaves, form = jax.tree.flatten(tree)
    found = {n: x for n, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))}
    return found, lambda new: form.unflatten(new.get(n, x) for n, x in enumerate(leaves))


def _call(loss_fn: LossFn, rest_of: Callable[..., Any], params: PyTree, given: Any) -> Any:
    args, named = rest_of(given)
    return loss_fn(params, *args, **named)
