"""Gather where used: the loss re-traced so that each parameter is opened at its first real use.

The user's model is not edited. Its loss is traced to a jaxpr, and the jaxpr is run again with the
parameters in boxes (`_boxed`). A box goes through calls, rematerialised functions, branches, scans
over layers and operations on its own shard (`_structural`); any other operation opens it. So a
scanned layer's weights are gathered inside the loop, and the gradient leaves the loop as shards.

Outside a function that the user rematerialises, the operation that opens a box is rematerialised
alone: the backward pass gathers again instead of keeping the gathered weight.

Source: arXiv 1910.02054, section 7.2.2 (stage 3 gathers in the forward and the backward pass).
"""

from __future__ import annotations

import dataclasses
import functools
import string
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from zerojax._jaxpr import bind, opened, scan_parts
from zerojax._types import LossFn, PyTree
from zerojax.collectives._boxed import Boxed, Opening, box, never_saves_gathered
from zerojax.collectives._lookup import is_lookup, look_up
from zerojax.collectives._structural import keep_boxed
from zerojax.layout import Layout


def gather_where_used(loss_fn: LossFn, layout: Layout, *, reduce_dtype: Any = None) -> LossFn:
    """Make `loss_fn(params, *args)` take stored parameters and gather each where it is used.

    Args:
        loss_fn: the user's function of logical parameters.
        layout: the placement; at stage 3 the parameters come partitioned, else whole.
        reduce_dtype: dtype in which gradients are summed over devices; None is their own.

    Returns:
        A function of stored parameters, with the same outputs; its gradients are stored shards.
    """
    opening = Opening(layout, layout.partitions("parameter"), reduce_dtype)

    def wrapped(params: PyTree, *args: Any) -> Any:
        stored = layout.structure.flatten_up_to(params)
        logical = [
            jax.ShapeDtypeStruct(leaf.shape, x.dtype)
            for leaf, x in zip(layout.leaves, stored, strict=True)
        ]
        # On a mesh that is set, a model may place its activations over axes that are its own.
        with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
            traced, out = jax.make_jaxpr(
                lambda leaves, *args: loss_fn(layout.structure.unflatten(leaves), *args),
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
        retracer = _Retracer(opening, saved=False, looped=False)
        flat = retracer.run(*opened(traced), [*boxes, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(out), map(retracer.opened, flat))

    return wrapped


class _Retracer:
    """Runs jaxprs whose inputs may be boxes.

    Attributes:
        opening: how boxes are opened.
        saved: whether a function that the user rematerialises is around, so that what is gathered
            here is not kept anyway.
        looped: whether a scan is around; its forward and backward pass are loops of their own, so
            that nothing of the one can be merged into the other.
    """

    def __init__(self, opening: Opening, *, saved: bool, looped: bool) -> None:
        self.opening = opening
        self.saved = saved
        self.looped = looped

    def opened(self, value: Any) -> Any:
        """Open a box; pass anything else on."""
        return self.opening.open_box(value) if isinstance(value, Boxed) else value

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Run a jaxpr; results may be boxes."""
        env: dict[Any, Any] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
        )

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        last = _last_uses(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            values = [read(atom) for atom in eqn.invars]
            if any(isinstance(v, Boxed) for v in values):
                out = self.step(eqn, values)
            else:
                out = bind(eqn, values)
            env.update(zip(eqn.outvars, out, strict=True))
            for var in last.get(index, ()):
                env.pop(var, None)
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Run one equation that has boxes among its inputs."""
        name, params = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit") and _is_plain(params):
            return self.run(*opened(params["jaxpr"]), values)
        if name in ("closed_call", "core_call"):
            return self.run(*opened(params["call_jaxpr"]), values)
        if name in ("checkpoint", "remat2"):
            return self._remat(params, values)
        if name == "scan":
            return self._scan(params, values)
        if name == "cond":
            return self._cond(params, values)
        kept = keep_boxed(eqn, values, bind)
        return self._use(eqn, values) if kept is None else kept

    def _remat(self, params: dict[str, Any], values: list[Any]) -> list[Any]:
        """Enter a rematerialised function with boxes; what it gathers is gathered again."""
        inner = _Retracer(self.opening, saved=True, looped=self.looped)
        raw, rebox = _unboxed(values)
        shapes: list[Any] = []

        def body(*raw: Any) -> list[Any]:
            out, again = _unboxed(inner.run(*opened(params["jaxpr"]), rebox(raw)))
            shapes[:] = [again]
            return out

        policy = params["policy"]
        if policy is not None and self.opening.gathers:
            policy = never_saves_gathered(policy)
        out = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=policy)(*raw)
        return shapes[0](out)

    def _scan(self, params: dict[str, Any], values: list[Any]) -> list[Any]:
        """Scan with boxed slices: layers are gathered inside the loop."""
        num_consts, num_carry = scan_parts(params)
        first = num_consts + num_carry
        fixed = [self.opened(v) for v in values[:num_consts]]
        carry = [self.opened(v) for v in values[num_consts:first]]
        slices = [self._sliceable(v) for v in values[first:]]
        raw = [v.value if isinstance(v, Boxed) else v for v in slices]
        inner = _Retracer(self.opening, saved=self.saved, looped=True)

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            layer = [
                v.moved(x, tuple(range(1, x.ndim + 1))) if isinstance(v, Boxed) else x
                for v, x in zip(slices, xs, strict=True)
            ]
            out = inner.run(*opened(params["jaxpr"]), [*fixed, *carry, *layer])
            out = [inner.opened(v) for v in out]
            return out[:num_carry], out[num_carry:]

        carry, ys = jax.lax.scan(
            body, carry, raw, length=params["length"], reverse=params["reverse"],
            unroll=params["unroll"],
        )  # fmt: skip
        return [*carry, *ys]

    def _sliceable(self, value: Any) -> Any:
        """Open a box whose partitioned dim is the one that the scan slices."""
        if not isinstance(value, Boxed):
            return value
        if value.dim == 0 or value.pending or value.entries[0]:
            if self.opening.gathers and value.dim is not None:
                warnings.warn(
                    f"all layers of leaf {value.path!r} are gathered before the loop, because "
                    + (
                        "it is partitioned along the dim that the scan slices; say so when the "
                        f"layout is made: Rule(path={value.path!r}, stacked=1), or "
                        "make_layout(..., loss_fn=, batch=)"
                        if value.dim == 0
                        else "the loss computes with the whole stack; do that in the scanned layer"
                    ),
                    stacklevel=2,
                )
            return self.opened(value)
        return value

    def _cond(self, params: dict[str, Any], values: list[Any]) -> list[Any]:
        """Enter the branches with boxes: only the branch that is taken gathers."""
        raw, rebox = _unboxed(values[1:])

        def branch(closed: Any) -> Any:
            def run(*raw: Any) -> list[Any]:
                out = self.run(*opened(closed), rebox(raw))
                return [self.opened(v) for v in out]

            return run

        return jax.lax.switch(values[0], [branch(b) for b in params["branches"]], *raw)

    def _use(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Open an equation's boxes and run it; alone, it gathers again for its backward pass."""
        raw, rebox = _unboxed(values)

        def use(*raw: Any) -> list[Any]:
            return self._open_and_bind(eqn, rebox(raw))

        if self.saved or not self.opening.gathers:
            return use(*raw)
        # A plain operation has nothing inside worth keeping; a user's custom derivative may.
        policy = never_saves_gathered(None) if _has_inside(eqn) else None
        return jax.checkpoint(use, prevent_cse=not self.looped, policy=policy)(*raw)

    def _open_and_bind(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Open boxes and run the equation so that weight gradients are born in the reduce dtype."""
        wide = self.opening.reduce_dtype
        if is_lookup(eqn, values, self.opening.layout):
            table, indices = values
            return [look_up(eqn, table, indices, self.opening)]
        boxed = [v for v in values if isinstance(v, Boxed)]
        if not any(self.opening.widens(v.value.dtype) for v in boxed):
            return bind(eqn, [self.opened(v) for v in values])
        if _has_inside(eqn):
            return bind(eqn, [self.opened(v) for v in values])
        opened = [
            self.opened(dataclasses.replace(v, dtype=wide) if isinstance(v, Boxed) else v)
            for v in values
        ]
        if eqn.primitive.name == "dot_general" and len(boxed) == 1:
            return [_wide_dot(eqn, opened)]
        upcast = [
            x.astype(wide) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x
            for x in opened
        ]
        narrow = [aval.aval.dtype for aval in eqn.outvars]
        return [x.astype(t) for x, t in zip(bind(eqn, upcast), narrow, strict=True)]


def _unboxed(values: Sequence[Any]) -> tuple[list[Any], Any]:
    """Take the arrays out of boxes, and give the function that puts them back."""
    boxes = [v if isinstance(v, Boxed) else None for v in values]

    def rebox(raw: Sequence[Any]) -> list[Any]:
        return [
            x if b is None else b.moved(x, tuple(range(x.ndim)))
            for b, x in zip(boxes, raw, strict=True)
        ]

    return [v.value if isinstance(v, Boxed) else v for v in values], rebox


def _has_inside(eqn: Any) -> bool:
    """Tell whether an equation holds a program of its own."""
    return any(key in eqn.params for key in ("jaxpr", "call_jaxpr", "body_jaxpr", "branches"))


def _is_plain(params: dict[str, Any]) -> bool:
    """Tell whether a nested jit says nothing of placement, so that it can be run in line."""
    given = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    return all(type(s).__name__ == "UnspecifiedValue" for s in given)


def _last_uses(jaxpr: core.Jaxpr) -> dict[int, list[Any]]:
    """Say after which equation each variable is no longer needed."""
    kept = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal) and atom not in kept:
                last[atom] = index
    by_index: dict[int, list[Any]] = {}
    for var, index in last.items():
        by_index.setdefault(index, []).append(var)
    return by_index


def _wide_dot(eqn: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """Multiply by a weight whose gradient is accumulated and returned in the weight's dtype.

    The weight comes in a wide dtype and is multiplied in the narrow one that the equation was
    traced with.
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    left, right = operands
    types = tuple(atom.aval.dtype for atom in eqn.invars)
    letters = iter(string.ascii_letters)
    lhs = [next(letters) for _ in range(left.ndim)]
    rhs = [""] * right.ndim
    for a, b in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        rhs[b] = lhs[a]
    rhs = [letter or next(letters) for letter in rhs]
    out = [lhs[d] for d in lhs_batch]
    out += [lhs[d] for d in range(left.ndim) if d not in (*lhs_sum, *lhs_batch)]
    out += [rhs[d] for d in range(right.ndim) if d not in (*rhs_sum, *rhs_batch)]
    to_left = f"{''.join(out)},{''.join(rhs)}->{''.join(lhs)}"
    to_right = f"{''.join(lhs)},{''.join(out)}->{''.join(rhs)}"
    einsum = functools.partial(jnp.einsum, precision=eqn.params["precision"])

    @jax.custom_vjp
    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        return bind(eqn, [left.astype(types[0]), right.astype(types[1])])[0]

    def forward(left: jax.Array, right: jax.Array) -> tuple[jax.Array, Any]:
        return dot(left, right), (left.astype(types[0]), right.astype(types[1]))

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = (operands[0].dtype, operands[1].dtype)
        return (
            einsum(to_left, cotangent, kept[1], preferred_element_type=wide[0]),
            einsum(to_right, kept[0], cotangent, preferred_element_type=wide[1]),
        )

    dot.defvjp(forward, backward)
    return dot(left, right)
