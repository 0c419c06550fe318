"""The update of states that live in the host's memory, leaf by leaf.

Each leaf's gradient goes down to its states, and a barrier holds back the next leaf until this
one's new parameter is there. So beside the gradients the device holds one leaf's copies.

Source: ZeRO-Offload, arXiv 2101.06840, sections 3 and 4.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import compute_on as _compute_on

from zerojax._jaxpr import bind, depending, inputs_of, is_elementwise
from zerojax._traced import Slice, Traced, is_fill, sliced
from zerojax._types import TreeDef
from zerojax.collectives.forms import row_major, shard
from zerojax.layout import Layout, LeafLayout, OptimizerLayout
from zerojax.memory import check_host_memory

#: jax 0.10 has it under another name than 0.12.
_run_on: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True)
class Hosted:
    """Which leaves live in the host's memory.

    Scalars, leaves that are kept whole for their size, and padded leaves stay on the device.
    """

    masters: tuple[bool, ...]  # per parameter
    state: tuple[bool, ...]  # per leaf of the optimizer's state

    def __bool__(self) -> bool:
        return any(self.masters) or any(self.state)


def hosted_leaves(
    offload: bool, layout: Layout, placed: OptimizerLayout, *, has_masters: bool
) -> Hosted:
    """Decide which leaves live in the host's memory; ValueError where the backend has none."""
    if offload:
        check_host_memory("Recipe(offload=True)", layout.devices.flat)

    def is_large(leaf: LeafLayout) -> bool:
        return math.prod(leaf.shape) >= max(layout.min_size, 2) and not leaf.is_padded

    large = {number for number, leaf in enumerate(layout.leaves) if is_large(leaf)}
    masters = (offload and has_masters and n in large for n in range(len(layout.leaves)))
    state = (offload and leaf.parameter in large and is_large(leaf) for leaf in placed.leaves)
    return Hosted(tuple(masters), tuple(state))


class _Slot(NamedTuple):
    owner: int | None
    on_host: bool


@dataclasses.dataclass(frozen=True)
class _Part:
    leaf: LeafLayout
    slice: Slice
    positions: tuple[int, ...]  # among all results
    to_host: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class OffloadedUpdate:
    """Runs an update whose states live in the host's memory."""

    # `function(gradients, held, state, loss)` of lists of logical leaves gives `(scalars, updated,
    # low, state)`: any number of scalars, what the optimizer updates, the same in the parameters'
    # dtype (an empty list where that is no other), and the new state
    function: Callable[..., tuple[Any, list[Any], list[Any], list[Any]]]
    layout: Layout  # the placement
    placed: OptimizerLayout  # the placement of the state
    hosted: Hosted  # the leaves that live on the host

    def __call__(
        self, grads: list[Any], held: list[Any], state: list[Any], loss: Any
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """Run it, with arrays on the host; a ValueError tells of leaves that it mixes."""
        args = (grads, held, state, loss)
        traced = Traced(self.function, args)
        sources, slots = self._slots(traced.out_tree)
        given = inputs_of(traced.program, jax.tree.leaves(args))
        source = dict(zip(traced.inputs, sources, strict=True))
        far = {var for var, slot in source.items() if slot.on_host}
        behind = depending(traced.eqns, far)

        def is_shared(var: Any) -> bool:
            return var not in given and var not in behind and math.prod(var.aval.shape) == 1

        hosted = {x.owner for x in sources if x.on_host and x.owner is not None}
        parts = []
        for index in sorted(hosted):
            at = tuple(n for n, slot in enumerate(slots) if slot.owner == index)
            needed = sliced(traced.eqns, [traced.outputs[n] for n in at], is_shared)
            to_host = tuple(slots[n].on_host for n in at)
            parts.append(_Part(self.layout.leaves[index], needed, at, to_host))
            self._check(index, needed, source)
        shared = list(dict.fromkeys(x for p in parts for x in p.slice.inputs if is_shared(x)))
        rest = [n for n, slot in enumerate(slots) if slot.owner not in hosted]
        near = sliced(traced.eqns, [*(traced.outputs[n] for n in rest), *shared], lambda _: False)
        if mixed := far.intersection(near.inputs):
            told = "computes something for all leaves from states that live there"
            raise _mixes(f"{told} (those of {self._names(source[x].owner for x in mixed)})")
        found = near.run([given[var] for var in near.inputs])
        results = dict(zip(rest, found, strict=False))
        given.update(zip(shared, found[len(rest) :], strict=True))
        token = None
        for part in parts:
            values = [given[var] for var in part.slice.inputs]
            out = self._run(part, values, [var in far for var in part.slice.inputs], token)
            results.update(zip(part.positions, out, strict=True))
            here = (x for x, on_host in zip(out, part.to_host, strict=True) if not on_host)
            token = next(here, token)
        return jax.tree.unflatten(traced.out_tree, [results[n] for n in range(len(slots))])

    def _slots(self, results: TreeDef) -> tuple[list[_Slot], list[_Slot]]:
        low = [_Slot(number, False) for number in range(len(self.layout.leaves))]
        held = [_Slot(number, on_host) for number, on_host in enumerate(self.hosted.masters)]
        pairs = zip(self.placed.leaves, self.hosted.state, strict=True)
        state = [_Slot(leaf.parameter, on_host) for leaf, on_host in pairs]
        scalar = [_Slot(None, False)]
        scalars, _, cast, _ = (part.num_leaves for part in results.children())
        return low + held + state + scalar, scalar * scalars + held + low[:cast] + state

    def _check(self, index: int, needed: Slice, source: dict[Any, _Slot]) -> None:
        path = self.layout.leaves[index].path
        if others := {source[x].owner for x in needed.inputs if x in source} - {None, index}:
            told = "computes the update of one leaf from others"
            raise _mixes(f"{told} ({path!r} from {self._names(others)})")
        mixing = (x for x in needed.eqns if not is_fill(x) and not is_elementwise(x))
        if names := ", ".join(dict.fromkeys(eqn.primitive.name for eqn in mixing)):
            raise _mixes(
                f"uses {names} for leaf {path!r}, on elements that may be on other devices"
            )

    def _names(self, owners: Iterable[Any]) -> str:
        return ", ".join([repr(self.layout.leaves[n].path) for n in sorted({*owners})][:3])

    def _run(self, part: _Part, values: list[Any], hosted: Sequence[bool], token: Any) -> list[Any]:
        near = [
            self._in_order(x, part.leaf) for x, far in zip(values, hosted, strict=True) if not far
        ]
        if token is not None:  # hold them back until it is there
            near = list(jax.lax.optimization_barrier((*near, token)))[:-1]
        anchor = hosted.index(True)
        # A mesh of absent GPUs, and Explicit axes, lose the memory from an array's type.
        is_typed = jax.typeof(values[anchor]).memory_space == _HOST
        moved = iter(jax.device_put(near, _HOST) if is_typed else near)
        there = [x if far else next(moved) for x, far in zip(values, hosted, strict=True)]

        def compute(*given: Any) -> list[Any]:
            def step(eqn: Any, operands: list[Any]) -> list[Any]:
                if not is_typed or not is_fill(eqn):
                    return bind(eqn, operands)
                dtype = eqn.outvars[0].aval.dtype
                nothing = jnp.logical_and(given[anchor] != 0, False).astype(dtype)
                add = jax.lax.bitwise_or if dtype == jnp.bool_ else jax.lax.add
                return [add(nothing, jnp.asarray(operands[0], dtype))]

            return part.slice.run(given, step)

        spaces = [_HOST if far else _DEVICE for far in part.to_host]
        out = _run_on(compute, compute_type="device_host", out_memory_spaces=spaces)(*there)
        leaf, near = part.leaf, [jax.typeof(x).memory_space != _HOST for x in out]
        is_cut = [here and x.shape == leaf.shape for x, here in zip(out, near, strict=True)]
        return [shard(x, leaf, self.layout) if y else x for x, y in zip(out, is_cut, strict=True)]

    def _in_order(self, x: Any, leaf: LeafLayout) -> Any:
        """Hold a gradient as the host's program takes it; XLA on GPUs does not see to it."""
        if self.layout.platform != "gpu" or x.shape != leaf.shape:
            return x
        mesh, spec = self.layout.auto_mesh, leaf.shard_spec
        held = functools.partial(row_major, layout=self.layout)
        return jax.shard_map(held, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _mixes(does: str) -> ValueError:
    return ValueError(
        "states in the host's memory are updated there leaf by leaf, element by element, and this "
        f"optimizer {does}: use one that computes every element for itself, such as Adam (what it "
        "computes of gradients alone, as a norm, may span leaves), or no Recipe(offload=True)"
    )
