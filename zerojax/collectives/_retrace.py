"""Gather where used: the loss re-traced so that each parameter is opened at its first real use.

The user's model is not edited. Its loss is traced to a jaxpr, and the jaxpr is run again with the
parameters in boxes (`_boxed`). A box goes through calls, rematerialised functions, branches, scans
over layers and operations on its own shard (`_structural`); any other operation opens it. So a
scanned layer's weights are gathered inside the loop, and the gradient leaves the loop as shards:

    w:bf16[4,8,8]                                        boxed; each device holds [4,1,8]
    y = scan[jaxpr={ lambda h wi:bf16[8,8].              still boxed; [1,8]
        v = transpose wi                                 still boxed; [8,1]
        o = dot_general h v } ] x w                      opened here: gathered to [8,8]

Outside a function that the user rematerialises, the operation that opens a box is rematerialised
alone: the backward pass gathers again instead of keeping the gathered weight.

Source: arXiv 1910.02054, section 7.2.2 (stage 3 gathers in the forward and the backward pass).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import PartitionSpec as P

from zerojax._jaxpr import PLAIN_CALLS, REMATERIALISED, bind, called, run, run_scan, scan_parts
from zerojax._tree import as_shapes, leaves_by_path, with_leaves_like
from zerojax._types import LossFn, PyTree
from zerojax.collectives._boxed import Boxed, Opening, box, never_saves_gathered
from zerojax.collectives._forms import auto_region
from zerojax.collectives._lookup import is_lookup, look_up
from zerojax.collectives._structural import keep_boxed
from zerojax.collectives._wide import bind_wide
from zerojax.layout import Layout, check_layout

_CALL = "gather_where_used(loss_fn, layout)"


def gather_where_used(loss_fn: LossFn, layout: Layout, *, reduce_dtype: Any = None) -> LossFn:
    """Make `loss_fn(params, *args)` take stored parameters, and gather each where it is used.

    Args:
        loss_fn: the user's function of logical parameters.
        layout: the placement; at stage 3 the parameters come partitioned, else whole.
        reduce_dtype: dtype in which gradients are summed over devices; None is their own.

    Returns:
        A function of stored parameters, with the same outputs; its gradients are stored shards.
    """
    if not callable(loss_fn):
        raise TypeError(f"a loss function is expected, got {type(loss_fn).__name__}; write {_CALL}")
    check_layout(layout, _CALL)
    opening = Opening(layout, reduce_dtype)

    def wrapped(params: PyTree, *args: Any) -> Any:
        stored = layout.flatten(params, "params of the loss", within=True, stored=True)
        gathering = functools.partial(run, params)

        def specs(*given: Any) -> PyTree:
            with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
                return jax.tree.map(lambda _: P(), jax.eval_shape(gathering, *as_shapes(given)))

        return auto_region(gathering, layout, specs)(stored, *args)

    def run(params: PyTree, stored: list[jax.Array], *args: Any) -> Any:
        logical = [
            jax.ShapeDtypeStruct(leaf.shape, x.dtype)
            for leaf, x in zip(layout.leaves, stored, strict=True)
        ]
        # On a mesh that is set, a model may place its activations over axes that are its own.
        with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
            traced, out = jax.make_jaxpr(
                lambda leaves, *args: _unchanged(
                    loss_fn, with_leaves_like(params, layout.structure, leaves), *args
                ),
                return_shape=True,
            )(logical, *args)
        # Below stage 3 a box moves nothing forwards; backwards it asks for a use's gradient summed,
        # and the compiler makes one sum of those of a weight that is used twice.
        boxes = [
            box(x, leaf)
            if leaf.dim is not None or not opening.gathers or opening.widens(x.dtype)
            else x
            for leaf, x in zip(layout.leaves, stored, strict=True)
        ]
        retracer = _Retracer(opening)
        flat = retracer.run(traced, [*boxes, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(out), map(retracer.opened, flat))

    return wrapped


@dataclasses.dataclass(frozen=True)
class _Retracer:
    """Runs programs whose inputs may be boxes.

    Attributes:
        opening: how boxes are opened.
        saved: whether a function that the user rematerialises is around, so that what is gathered
            here is not kept anyway.
        looped: whether a scan is around; its forward and backward pass are loops of their own, so
            that nothing of the one can be merged into the other.
    """

    opening: Opening
    saved: bool = False
    looped: bool = False

    def opened(self, value: Any) -> Any:
        """Open a box; pass anything else on."""
        return self.opening.open_box(value) if isinstance(value, Boxed) else value

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """Run a program; results may be boxes."""
        return run(program, args, self._step)

    def _step(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        """Run one equation, whose inputs may be boxes."""
        if not any(isinstance(v, Boxed) for v in values):
            return bind(eqn, values)
        name = eqn.primitive.name
        if name in PLAIN_CALLS and _is_unplaced(eqn.params):
            return self.run(called(eqn), values)
        if name == REMATERIALISED:
            return self._remat(eqn, values)
        if name == "scan":
            return self._scan(eqn, values)
        if name == "cond":
            return self._cond(eqn, values)
        kept = keep_boxed(eqn, values)
        return self._use(eqn, values) if kept is None else kept

    def _remat(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Enter a rematerialised function with boxes; what it gathers is gathered again."""
        inner = dataclasses.replace(self, saved=True)
        arrays, rebox = _unboxed(values)
        reboxes: list[Any] = []

        def body(*arrays: Any) -> list[Any]:
            out, again = _unboxed(inner.run(called(eqn), rebox(arrays)))
            reboxes[:] = [again]
            return out

        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        if policy is not None and self.opening.gathers:
            policy = never_saves_gathered(policy)
        out = jax.checkpoint(body, prevent_cse=prevent_cse, policy=policy)(*arrays)
        return reboxes[0](out)

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Scan with boxed slices: layers are gathered inside the loop."""
        first = sum(scan_parts(eqn.params))
        whole = [self.opened(v) for v in values[:first]]
        stacks = [self._sliceable(v) for v in values[first:]]
        inner = dataclasses.replace(self, looped=True)

        def body(values: list[Any]) -> list[Any]:
            layer = [
                v.moved(x, tuple(range(1, x.ndim + 1))) if isinstance(v, Boxed) else x
                for v, x in zip(stacks, values[first:], strict=True)
            ]
            out = inner.run(eqn.params["jaxpr"], [*values[:first], *layer])
            return [inner.opened(v) for v in out]

        return run_scan(eqn, [*whole, *_unboxed(stacks)[0]], body)

    def _sliceable(self, value: Any) -> Any:
        """Open a box whose leading dim can't be sliced while it is partitioned."""
        if not isinstance(value, Boxed) or not (
            value.dim == 0 or value.pending or value.entries[0]
        ):
            return value
        if self.opening.gathers and value.dim is not None:
            why = "the loss computes with the whole stack; do that in the scanned layer"
            if value.dim == 0:
                why = (
                    "it is partitioned along the dim that the scan slices; make the layout with "
                    f"rules=[Rule(path={value.path!r}, stacked=1)], or "
                    "rules=zerojax.stacked_rules(loss_fn, params, batch)"
                )
            warnings.warn(
                f"all layers of leaf {value.path!r} are gathered before the loop, because {why}",
                stacklevel=2,
            )
        return self.opened(value)

    def _cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Enter the branches with boxes: only the branch that is taken gathers."""
        arrays, rebox = _unboxed(values[1:])

        def branch(program: Any) -> Callable[..., list[Any]]:
            return lambda *arrays: [self.opened(v) for v in self.run(program, rebox(arrays))]

        return jax.lax.switch(values[0], [*map(branch, eqn.params["branches"])], *arrays)

    def _use(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Open an equation's boxes and run it; alone, it gathers again for its backward pass."""
        arrays, rebox = _unboxed(values)

        def use(*arrays: Any) -> list[Any]:
            return self._open_and_bind(eqn, rebox(arrays))

        if self.saved or not self.opening.gathers:
            return use(*arrays)
        # A plain operation has nothing inside worth keeping; a user's custom derivative may.
        policy = never_saves_gathered(None) if _has_inside(eqn) else None
        return jax.checkpoint(use, prevent_cse=not self.looped, policy=policy)(*arrays)

    def _open_and_bind(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Open boxes and run the equation so that weight gradients are born in the reduce dtype."""
        if is_lookup(eqn, values, self.opening.layout):
            table, indices = values
            return [look_up(eqn, table, indices, self.opening)]
        is_wide = any(isinstance(v, Boxed) and self.opening.widens(v.value.dtype) for v in values)
        if not is_wide or _has_inside(eqn):
            return bind(eqn, [self.opened(v) for v in values])
        wide = self.opening.reduce_dtype
        opened = [
            self.opened(dataclasses.replace(v, dtype=wide) if isinstance(v, Boxed) else v)
            for v in values
        ]
        return bind_wide(eqn, opened, wide, num_weights=sum(isinstance(v, Boxed) for v in values))


def _unchanged(loss_fn: LossFn, params: PyTree, *args: Any) -> Any:
    """Run a loss; refuse it where it writes to its parameters' tree, as an nnx module allows.

    What it writes there belongs to this trace and would be lost.
    """
    before = jax.tree.leaves(params)
    out = loss_fn(params, *args)
    after = leaves_by_path(params)
    changed = [path for path, was in zip(after, before, strict=True) if after[path] is not was]
    if changed:
        raise ValueError(
            f"gather_where_used: the loss writes {changed[0]!r} into the model that it was given, "
            "where it would be lost; return what changes (aux), and pass it in as an argument"
        )
    return out


def _unboxed(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return what the boxes hold, and the function that puts it back."""

    def rebox(arrays: Sequence[Any]) -> list[Any]:
        return [
            v.holding(x) if isinstance(v, Boxed) else x for v, x in zip(values, arrays, strict=True)
        ]

    return [v.value if isinstance(v, Boxed) else v for v in values], rebox


def _has_inside(eqn: Any) -> bool:
    """Whether an equation holds a program of its own."""
    return any(True for _ in core.jaxprs_in_params(eqn.params))


def _is_unplaced(params: dict[str, Any]) -> bool:
    """Whether a nested jit says nothing of placement, so that it can run in its place."""
    given = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    return all(type(s).__name__ == "UnspecifiedValue" for s in given)
