"""Gather where used: the loss re-traced so that each parameter is opened at its first real use.

The user's model is not edited. Its loss is traced to a jaxpr, and the jaxpr is run again with the
parameters in boxes (`_boxed`). A box goes through calls, rematerialised functions, branches, scans
over layers and operations on its own shard (`_structural`); any other operation opens it. So a
scanned layer's weights are gathered inside the loop, and the gradient leaves the loop as shards:

    w:bf16[4,8,8]                                        boxed; each device holds [4,1,8]
    y = scan[jaxpr={ lambda h wi:bf16[8,8].              still boxed; [1,8]
        v = transpose wi                                 still boxed; [8,1]
        o = dot_general h v } ] x w                      opened here: gathered to [8,8]

Outside a function that the user rematerialises, and in every loop, the operation that opens a box
is rematerialised alone: the backward pass gathers again instead of keeping the gathered weight.
With `reshard_after_forward=False` it is the inverse: policies always keep what was gathered.

Source: arXiv 1910.02054, section 7.2.2 (stage 3 gathers in the forward and the backward pass).
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from zerojax import _jaxpr
from zerojax._garbage import uncollected
from zerojax._tree import with_leaves_like
from zerojax._types import LossFn, PyTree
from zerojax.collectives._apart import bind_apart, is_apart
from zerojax.collectives._boxed import Boxed, Opening, wrap_policy
from zerojax.collectives._copies import (
    Copied,
    copied,
    copied_if_tied,
    is_enlarged,
    is_used_in_turns,
    meets_examples,
    use_copies,
    use_own_copies,
    uses_of,
)
from zerojax.collectives._forms import auto_region
from zerojax.collectives._grouped import bind_grouped, has_grouped
from zerojax.collectives._structural import dims_after, is_slice, keep_boxed, waits_elementwise
from zerojax.collectives._writes import trace_writing, write_variables
from zerojax.layout import Layout, check_layout
from zerojax.recipe import Precision, Recipe

_CALL = "gather_where_used(loss_fn, layout)"


def gather_where_used(
    loss_fn: LossFn,
    layout: Layout,
    *,
    reduce_dtype: Any = None,
    gather_dtype: Any = None,
    reshard_after_forward: bool = True,
) -> LossFn:
    """Make `loss_fn(params, *args)` take stored parameters, and gather each where it is used.

    >>> grads = jax.grad(zerojax.gather_where_used(loss_fn, layout))(params, batch)

    Args:
        loss_fn: the user's function of logical parameters.
        layout: the placement; at stage 3 the parameters come partitioned, else whole.
        reduce_dtype: dtype in which gradients are summed over devices; None is their own.
        gather_dtype: "int8" or "float8_e4m3fn", as `Precision.gather`; None is the weights' own.
        reshard_after_forward: whether the backward pass gathers again; see `Recipe`.

    Returns:
        A function of stored parameters; gradients are stored shards, or lie as Explicit parameters.

    Raises:
        ValueError: an unknown dtype; a `gather_dtype`, or weights kept gathered, below stage 3.
    """
    if not callable(loss_fn):
        raise TypeError(f"a loss function is expected, got {type(loss_fn).__name__}; write {_CALL}")
    check_layout(layout, _CALL)
    precision = Precision(reduce=reduce_dtype, gather=gather_dtype)
    recipe = Recipe(precision=precision, reshard_after_forward=reshard_after_forward)
    gather_dtype = recipe.gather_dtype(layout.kinds)
    opening = Opening(
        layout, precision.reduce, gather_dtype, keeps=recipe.keeps_gathered(layout.kinds)
    )

    @uncollected()
    def wrapped(params: PyTree, *args: Any, **named: Any) -> Any:
        stored = layout.flatten(params, "params of the loss", within=True, stored=True)
        held, model_of = _arrays(params)  # leaves of an equinox model may be functions
        given, rest_of = _arrays((args, named))  # flags and functions stay as they are
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
        pairs = zip(layout.leaves, stored, strict=True)
        logical = [jax.ShapeDtypeStruct(leaf.shape, x.dtype) for leaf, x in pairs]
        params_of = functools.partial(with_leaves_like, params, layout.structure)
        # On a mesh that is set, a model may place its activations over axes that are its own.
        with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
            traced, out, written[:] = trace_writing(loss, params_of, logical, given)
        # Below stage 3 a box moves nothing forwards; backwards it asks for a use's gradient summed.
        turns = [is_used_in_turns(traced, i) for i in range(len(stored))]
        boxes = [*map(opening.box, stored, layout.leaves, turns)]
        boxes = [copied_if_tied(box, traced, i, opening) for i, box in enumerate(boxes)]
        examples = jax.tree.leaves(given)
        from_batch = _jaxpr.depending_within(traced, [False] * len(boxes) + [True] * len(examples))
        retracer = _Retracer(opening, from_batch)
        flat = [*map(retracer.opened, retracer.run(traced, [*boxes, *examples]))]
        structure = jax.tree.structure(out)
        return structure.unflatten(flat[: structure.num_leaves]), flat[structure.num_leaves :]

    return wrapped


def _arrays(tree: PyTree) -> tuple[dict[int, Any], Callable[[dict[int, Any]], PyTree]]:
    """Return the arrays of a tree by number, and what makes the tree of others in their place."""
    leaves, form = jax.tree.flatten(tree)
    found = {n: x for n, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))}
    return found, lambda new: form.unflatten(new.get(n, x) for n, x in enumerate(leaves))


def _call(loss_fn: LossFn, rest_of: Callable[..., Any], params: PyTree, given: Any) -> Any:
    args, named = rest_of(given)
    return loss_fn(params, *args, **named)


@dataclasses.dataclass(frozen=True)
class _Retracer:
    opening: Opening  # how boxes are opened
    from_batch: set[Any]  # variables computed from the batch; others are of weights and constants
    # whether the user rematerialises what is around, so that what is gathered here is not kept
    saved: bool = False
    # whether a scan is around; its forward and backward pass are loops of their own, so that
    # nothing of the one can be merged into the other
    looped: bool = False
    # what runs the program of a rematerialised function: jax traces layers that share one once
    layers: dict[int, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        return _jaxpr.run(program, args, self._step)

    def opened(self, value: Any) -> Any:
        return self.opening.opened(_uncopied(value))

    def _step(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name, has_box = eqn.primitive.name, any(isinstance(v, Boxed | Copied) for v in values)
        layout = self.opening.layout
        is_own = not has_box and is_apart(eqn, layout, self.from_batch)
        if not has_box and not is_own and not has_grouped(eqn, layout, self.from_batch):
            return _jaxpr.bind(eqn, values)
        if _jaxpr.runs_in_place(eqn):
            return self.run(_jaxpr.called(eqn), values)
        if name == _jaxpr.REMATERIALISED:
            return self._remat(eqn, values)
        if is_own:
            return bind_apart(eqn, values, layout)
        if name == "scan":
            return self._scan(eqn, values)
        is_fixed = self.from_batch.isdisjoint(_jaxpr.variables(eqn.invars))
        if is_fixed and is_enlarged(eqn, values, self.opening):
            values = [copied(v, self.opening) if isinstance(v, Boxed) else v for v in values]
        if any(isinstance(v, Copied) for v in values):
            used = use_copies(eqn, values, self.opening, is_fixed, self._again)
            if used is not None:
                return used
            values = [*map(_uncopied, values)]
        if name == "cond":
            return self._cond(eqn, values)
        if not has_box:
            return bind_grouped(eqn, values, self.opening)
        kept = keep_boxed(eqn, values, self.opening)
        return self._use(eqn, values) if kept is None else kept

    def _remat(self, eqn: Any, values: list[Any]) -> list[Any]:
        program = _jaxpr.called(eqn)
        if id(program) not in self.layers:
            inner = dataclasses.replace(self, saved=True, layers={})
            self.layers[id(program)] = lambda *values: inner.run(program, values)
        body = self.layers[id(program)]
        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        if self.opening.gathers and (policy is not None or self.opening.keeps):
            policy = wrap_policy(policy, keeps=self.opening.keeps)
        return jax.checkpoint(body, prevent_cse=prevent_cse, policy=policy)(*values)

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Scan with boxed slices: layers are gathered inside the loop.

        What all turns use, as those of a recurrence do, is gathered before the loop, and again
        before the one of the backward pass.
        """
        program = eqn.params["jaxpr"]
        consts, carry, stacks = _jaxpr.scan_split(eqn.params, values)
        consts = [
            v if self._meets_examples(program, i) else _uncopied(v) for i, v in enumerate(consts)
        ]
        is_sliced = [self._is_sliced(program, i, v) for i, v in enumerate(consts)]
        stacks = [self._sliceable(_uncopied(v)) for v in stacks]
        # Kept for the backward pass, what each iteration gathers would be the stack again, also
        # where the loop as a whole is rematerialised.
        inner = dataclasses.replace(self, looped=True, saved=False, layers={})

        def body(values: list[Any]) -> list[Any]:
            consts, carry, slices = _jaxpr.scan_split(eqn.params, values)
            layer = [
                v.moved(x, tuple(range(1, x.ndim + 1))) if isinstance(v, Boxed) else x
                for v, x in zip(stacks, slices, strict=True)
            ]
            return [*map(self.opened, inner.run(program, [*consts, *carry, *layer]))]

        def loop(*given: Any) -> list[Any]:
            consts, carry, arrays = _jaxpr.scan_split(eqn.params, given)
            opened = [
                v if is_sliced[i] else self._constant(program, i, v) for i, v in enumerate(consts)
            ]
            return _jaxpr.run_scan(eqn, [*opened, *carry, *arrays], body)

        arrays = [v.value if isinstance(v, Boxed) else v for v in stacks]
        opens = zip(consts, is_sliced, strict=True)
        if any(isinstance(v, Boxed | Copied) and not sliced for v, sliced in opens):
            loop = self._again(loop, wrap_policy(None, keeps=False))
        return loop(*consts, *map(self.opened, carry), *arrays)

    def _constant(self, program: Any, index: int, value: Boxed | Copied) -> Any:
        """Gather what all turns of a loop use; where it meets examples each device has its copy."""
        if isinstance(value, Copied):
            return value.gathered(self.opening)
        if not value.recorded and self._meets_examples(program, index):
            return copied(value, self.opening).gathered(self.opening)
        return self.opened(value)

    def _meets_examples(self, program: Any, index: int) -> bool:
        parts = self.opening.layout.num_batch_parts
        return parts > 1 and meets_examples(program, index, parts, self.from_batch)

    def _is_sliced(self, program: Any, index: int, value: Any) -> bool:
        """Return whether the body of a loop reads slices of a constant, so that it stays boxed.

        Of `h @ dynamic_index_in_dim(stack, i)` a layer is gathered, inside the loop.
        """
        if not isinstance(value, Boxed):
            return not isinstance(value, Copied)
        slices = uses_of(program, index, in_loops=True)
        if not all(map(is_slice, slices)):
            return False
        if all(dims_after(eqn, value, self.opening) is not None for eqn in slices):
            return True
        self._warn_gathered(value)
        return False

    def _sliceable(self, value: Any) -> Any:
        """Open a box whose leading dim can't be sliced while it is partitioned."""
        if not isinstance(value, Boxed) or not (0 in value.held or not waits_elementwise(value)):
            return value
        self._warn_gathered(value)
        return self.opened(value)

    def _warn_gathered(self, value: Boxed) -> None:
        if self.opening.gathers and value.dim is not None:
            why = "the loss computes with the whole stack; do that in the scanned layer"
            if value.dim == 0:
                why = (
                    "it is partitioned along the dim that the loop slices; make the layout with "
                    f"rules=[zerojax.Rule(path={value.path.text!r}, stacked=1)]"
                )
            warnings.warn(
                f"all layers of leaf {value.path.text!r} are gathered before the loop, because "
                f"{why}",
                stacklevel=2,
            )

    def _cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        def branch(program: Any, values: Sequence[Any]) -> list[Any]:
            # What a branch keeps for its backward pass is a result of it, and would lie whole.
            placed = [self.opening.placed(v) if isinstance(v, Boxed) else v for v in values]
            return [*map(self.opened, self.run(program, placed))]

        return _jaxpr.run_bodies(eqn, [self.opened(values[0]), *values[1:]], branch)

    def _use(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Open an equation's boxes and run it; alone, it gathers again for its backward pass."""

        def use(*values: Any) -> list[Any]:
            if has_grouped(eqn, self.opening.layout, self.from_batch):
                return bind_grouped(eqn, [*values], self.opening)
            # So that gradients of weights are born in the reduce dtype, results may be wide.
            out = use_own_copies(eqn, [*values], self.opening)
            out = self.opening.open_and_bind(eqn, [*values]) if out is None else out
            return [x.astype(var.aval.dtype) for x, var in zip(out, eqn.outvars, strict=True)]

        # Of a user's custom derivative the residuals may be kept. Nothing is kept where equations
        # were recorded, whose results are whole weights, nor of a shard_map, one of whose results
        # would be the weight.
        recorded = any(isinstance(v, Boxed) and v.recorded for v in values)
        keeps = _jaxpr.has_inside(eqn) and not recorded and eqn.primitive.name != "shard_map"
        policy = wrap_policy(None, keeps=False) if keeps else None
        return self._again(use, policy)(*values)

    def _again(self, use: Callable[..., Any], policy: Any = None) -> Callable[..., Any]:
        """Make a function gather again for its backward pass, where it is not rematerialised.

        Where gathered weights are kept, what is made of them is not.
        """
        if self.saved or not self.opening.gathers:
            return use
        policy = wrap_policy(policy, keeps=True) if self.opening.keeps else policy
        return jax.checkpoint(use, prevent_cse=not self.looped, policy=policy)


def _uncopied(value: Any) -> Any:
    return value.box if isinstance(value, Copied) else value
