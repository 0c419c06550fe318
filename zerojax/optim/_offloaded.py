"""The update of states that live in the host's memory, leaf by leaf.

Each leaf's gradient goes to its states, or its states come to the gradient, and a barrier holds
back the next leaf until this one's new parameter is there. So the device holds the states of one
leaf at most, and beside the gradients no more than one leaf's copies.

Source: ZeRO-Offload, arXiv 2101.06840, sections 3 and 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import compute_on as _compute_on

from zerojax._jaxpr import bind
from zerojax._tree import num_elements
from zerojax.collectives import shard
from zerojax.layout import Layout, LeafLayout, OptimizerLayout
from zerojax.memory import memory_kinds, offloaded_kinds
from zerojax.optim._slices import Slice, Traced, is_fill
from zerojax.recipe import OffloadPolicy

#: jax 0.10 has it under another name than 0.12.
_run_on: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True)
class Hosted:
    """Which leaves live in the host's memory.

    Scalars, leaves that the layout keeps whole for their size, and padded leaves stay on the
    device.

    Attributes:
        masters: per parameter.
        state: per leaf of the optimizer's state.
    """

    masters: tuple[bool, ...]
    state: tuple[bool, ...]

    def __bool__(self) -> bool:
        return any(self.masters) or any(self.state)


def hosted_leaves(
    policy: OffloadPolicy | None, layout: Layout, placed: OptimizerLayout, *, has_masters: bool
) -> Hosted:
    """Decide which leaves live in the host's memory; ValueError where the backend has none."""
    kinds = frozenset() if policy is None else offloaded_kinds(policy, layout.devices.flat)
    if policy is not None and policy.update == "device" and {"optimizer", "master"} & kinds:
        _check_told(layout)

    def is_large(leaf: LeafLayout) -> bool:
        return num_elements(leaf.shape) >= max(layout.min_size, 2) and not leaf.is_padded

    large = [is_large(leaf) for leaf in layout.leaves]
    return Hosted(
        masters=tuple(has_masters and "master" in kinds and one for one in large),
        state=tuple(
            "optimizer" in kinds
            and leaf.parameter is not None
            and large[leaf.parameter]
            and is_large(leaf)
            for leaf in placed.leaves
        ),
    )


def _check_told(layout: Layout) -> None:
    """Refuse to bring states to devices that do not tell where arguments lie."""
    if not memory_kinds(layout.devices.flat[0]):
        raise ValueError(
            f"OffloadPolicy(update='device') brings states from the host's memory, and a mesh of "
            f"{layout.platform} devices that are not here names no memories, so that its compiler "
            "takes the states for the device's own; compile update='host' for it, or "
            "update='device' where the devices are"
        )


@dataclasses.dataclass(frozen=True)
class _Part:
    """Hold one leaf's part of the update: its equations, and which results stay on the host."""

    leaf: LeafLayout
    slice: Slice
    positions: tuple[int, ...]  # among all results
    to_host: tuple[bool, ...]
    replaced: tuple[Any, ...]  # per result, the input whose place it takes

    def is_layered(self, shapes: Sequence[Any]) -> bool:
        """Return whether it can be done layer by layer: elementwise, on stacks of layers alone."""
        of_results = [x.aval.shape for x in self.slice.outputs]
        return (
            self.leaf.stacked > 0
            and not self.slice.not_elementwise()
            and all(shape in ((), self.leaf.shape) for shape in shapes)
            and all(shape == self.leaf.shape for shape in of_results)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class OffloadedUpdate:
    """Runs an update whose states live in the host's memory.

    Attributes:
        function: `function(gradients, held, state, loss)` of lists of logical leaves gives
            `(norm, updated, low, state)`: a scalar, what the optimizer updates, the same in the
            parameters' dtype (an empty list where that is no other), and the new state.
        layout: the placement.
        placed: the placement of the state.
        hosted: the leaves that live on the host.
        on_host: whether the host computes; else the device does.
    """

    function: Callable[..., tuple[Any, list[Any], list[Any], list[Any]]]
    layout: Layout
    placed: OptimizerLayout
    hosted: Hosted
    on_host: bool

    def __call__(
        self, grads: list[Any], held: list[Any], state: list[Any], loss: Any
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """Run it; arrays on the host come and go there.

        Raises:
            ValueError: the optimizer mixes leaves, or on the host elements, through more than
                scalars of the gradients; what to write instead is named.
        """
        args = (grads, held, state, loss)
        traced = Traced(self.function, args)
        given = dict(zip(traced.inputs, jax.tree.leaves(args), strict=True)) | traced.consts
        owners = self._owners(traced)
        far = {
            var
            for var, is_far in zip(traced.inputs, self._far(), strict=True)
            if is_far
        }  # fmt: skip
        behind = traced.depending(far)

        def is_shared(var: Any) -> bool:
            return traced.is_scalar(var) and var not in behind

        parts = [self._part(traced, index, is_shared) for index in self._indices()]
        for part in parts:
            self._check(part, owners)
        shared = list(dict.fromkeys(x for p in parts for x in p.slice.inputs if is_shared(x)))
        taken = {position for part in parts for position in part.positions}
        rest = [n for n in range(len(traced.outputs)) if n not in taken]
        near = traced.slice([*(traced.outputs[n] for n in rest), *shared], lambda _: False)
        if mixed := far.intersection(near.inputs):
            raise ValueError(
                f"{self._fault('computes something for all leaves from states that live there')} "
                f"(those of {', '.join(sorted(self._name(owners[x]) for x in mixed)[:3])})"
            )
        found = near.run([given[var] for var in near.inputs])
        results = dict(zip(rest, found, strict=False))
        given.update(zip(shared, found[len(rest) :], strict=True))
        token = None
        for part in parts:
            values = [given[var] for var in part.slice.inputs]
            is_far = [var in far for var in part.slice.inputs]
            run = self._run_on_host if self.on_host else self._run_on_device
            out = run(part, values, is_far, token)
            results.update(zip(part.positions, out, strict=True))
            token = next(
                (x for x, far_ in zip(out, part.to_host, strict=True) if not far_), token
            )  # fmt: skip
        flat = [results[n] for n in range(len(traced.outputs))]
        return jax.tree.unflatten(traced.out_tree, flat)

    def _indices(self) -> list[int]:
        """List the parameters of which something lives on the host."""
        found = {n for n, is_far in enumerate(self.hosted.masters) if is_far}
        found |= {
            leaf.parameter
            for leaf, is_far in zip(self.placed.leaves, self.hosted.state, strict=True)
            if is_far and leaf.parameter is not None
        }
        return sorted(found)

    def _far(self) -> list[bool]:
        """Return for every input leaf whether it lives on the host."""
        return [False] * len(self.layout.leaves) + [*self.hosted.masters, *self.hosted.state, False]

    def _owners(self, traced: Traced) -> dict[Any, int | None]:
        count = len(self.layout.leaves)
        owners = [*range(count), *range(count), *(x.parameter for x in self.placed.leaves), None]
        return dict(zip(traced.inputs, owners, strict=True))

    def _part(self, traced: Traced, index: int, stop: Callable[[Any], bool]) -> _Part:
        count, num_states = len(self.layout.leaves), len(self.placed.leaves)
        places = {1 + index: self.hosted.masters[index]}
        replaced = [traced.inputs[count + index]]
        first = len(traced.outputs) - num_states
        if first > 1 + count:
            places[1 + count + index] = False
            replaced.append(None)
        for number, leaf in enumerate(self.placed.leaves):
            if leaf.parameter == index:
                places[first + number] = self.hosted.state[number]
                replaced.append(traced.inputs[2 * count + number])
        outputs = [traced.outputs[n] for n in places]
        return _Part(
            leaf=self.layout.leaves[index],
            slice=traced.slice(outputs, stop),
            positions=tuple(places),
            to_host=tuple(places.values()),
            replaced=tuple(replaced),
        )

    def _check(self, part: _Part, owners: dict[Any, int | None]) -> None:
        found = {owners[x] for x in part.slice.inputs if x in owners} - {None}
        others = [n for n in found if self.layout.leaves[n or 0] is not part.leaf]
        if others:
            raise ValueError(
                f"{self._fault('computes the update of one leaf from others')} "
                f"({part.leaf.path!r} from {', '.join(self._name(n) for n in others[:3])})"
            )
        names = part.slice.not_elementwise() if self.on_host else []
        if names:
            raise ValueError(
                f"OffloadPolicy(update='host') needs an optimizer that computes every element for "
                f"itself, and the update of leaf {part.leaf.path!r} uses {', '.join(names)} on "
                "what may be on other devices; write OffloadPolicy(update='device'), which moves "
                "the states instead"
            )

    def _fault(self, does: str) -> str:
        return (
            "states in the host's memory are updated leaf by leaf, and this optimizer "
            f"{does}: use one that treats leaves one by one (what it computes of gradients alone, "
            "such as a global norm, may span leaves), or leave OffloadPolicy out"
        )

    def _name(self, index: int | None) -> str:
        return "no leaf" if index is None else repr(self.layout.leaves[index].path)

    def _run_on_host(
        self, part: _Part, values: Sequence[Any], is_far: Sequence[bool], token: Any
    ) -> list[Any]:
        """Send the gradient down, compute there, bring the parameter up."""
        near = _after([x for x, far in zip(values, is_far, strict=True) if not far], token)
        anchor = is_far.index(True)
        # A mesh of GPUs that are not here, and Explicit axes, lose the memory from an array's type.
        is_typed = jax.typeof(values[anchor]).memory_space == _HOST
        moved = iter(jax.device_put(near, _HOST) if is_typed else near)
        there = [x if far else next(moved) for x, far in zip(values, is_far, strict=True)]

        def compute(*given: Any) -> list[Any]:
            def step(eqn: Any, operands: list[Any]) -> list[Any]:
                if is_typed and is_fill(eqn):
                    return [_fill(operands[0], given[anchor], eqn.outvars[0].aval)]
                return bind(eqn, operands)

            return part.slice.run(given, step)

        spaces = [_HOST if far else _DEVICE for far in part.to_host]
        out = _run_on(compute, compute_type="device_host", out_memory_spaces=spaces)(*there)
        return self._placed(part, out)

    def _run_on_device(
        self, part: _Part, values: Sequence[Any], is_far: Sequence[bool], token: Any
    ) -> list[Any]:
        """Bring the states up, compute here, send them back."""
        values = [
            jax.device_put(x, _HOST) if far and jax.typeof(x).memory_space != _HOST else x
            for x, far in zip(_after(list(values), token), is_far, strict=True)
        ]
        if part.is_layered([jnp.shape(x) for x in values]):
            return self._placed(part, _layer_by_layer(part, values, is_far))
        here = [
            jax.device_put(x, _DEVICE) if far else x for x, far in zip(values, is_far, strict=True)
        ]
        out = self._placed(part, part.slice.run(here))
        return [
            jax.device_put(x, _HOST) if far else x for x, far in zip(out, part.to_host, strict=True)
        ]

    def _placed(self, part: _Part, out: Sequence[Any]) -> list[Any]:
        """Cut the results that are on the device into shards."""
        like = part.leaf
        return [
            x if jax.typeof(x).memory_space == _HOST or x.shape != like.shape
            else shard(x, like, self.layout)
            for x in out
        ]  # fmt: skip


def _layer_by_layer(part: _Part, values: Sequence[Any], is_far: Sequence[bool]) -> list[Any]:
    """Bring up one layer of the states at a time, and write it back into their own buffers."""
    given = dict(zip(part.slice.inputs, values, strict=True))
    first = [
        given[was] if far else jnp.zeros(out.aval.shape, out.aval.dtype)
        for was, far, out in zip(part.replaced, part.to_host, part.slice.outputs, strict=True)
    ]
    place = {was: n for n, was in enumerate(part.replaced) if part.to_host[n]}

    def step(eqn: Any, operands: list[Any]) -> list[Any]:
        if is_fill(eqn):
            shape = (1, *eqn.outvars[0].aval.shape[1:])
            return [jnp.full(shape, operands[0], eqn.outvars[0].aval.dtype)]
        return bind(eqn, operands)

    def update(layer: Any, held: list[Any]) -> list[Any]:
        layers = []
        for var, x, far in zip(part.slice.inputs, values, is_far, strict=True):
            x = held[place[var]] if var in place else x
            if jnp.shape(x):
                x = jax.lax.dynamic_slice_in_dim(x, layer, 1)
            layers.append(jax.device_put(x, _DEVICE) if far else x)
        out = part.slice.run(layers, step)
        return [
            jax.lax.dynamic_update_slice_in_dim(
                was, jax.device_put(x, _HOST) if far else x, layer, 0
            )
            for was, x, far in zip(held, out, part.to_host, strict=True)
        ]

    return jax.lax.fori_loop(0, part.leaf.shape[0], update, first)


def _after(values: list[Any], token: Any) -> list[Any]:
    """Hold values back until the token is there."""
    if token is None:
        return values
    return list(jax.lax.optimization_barrier((*values, token)))[:-1]


def _fill(number: Any, like: jax.Array, aval: Any) -> jax.Array:
    """Fill an array with one number in the memory of another: jax makes it in the device's."""
    nothing = jnp.logical_and(like != 0, False).astype(aval.dtype)
    if aval.dtype == jnp.bool_:
        return jax.lax.bitwise_or(nothing, jnp.asarray(number, bool))
    return jax.lax.add(nothing, jnp.asarray(number, aval.dtype))
