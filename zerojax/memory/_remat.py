"""What the backward pass computes again, keeps, cuts over the mesh or fetches from the host.

A policy is applied to a function that nobody edits: its jaxpr is run again, and each layer in it is
handed to `jax.checkpoint` under the rules that the policy asks for. What goes from layer to layer
is a layer's input, the paper's activation checkpoint.

Source: arXiv 1910.02054, section 6.1 (Pa, Pa+cpu).
"""

import difflib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from zerojax import _jaxpr
from zerojax._types import platform_of
from zerojax.memory._inputs import check_axis, cut_input, mesh_parts, whole, whole_gradient
from zerojax.recipe import HOST_MEMORY, LAYER_INPUT, Remat, RematPolicy, as_remat


def check_names(jaxpr: Any, wanted: Sequence[str]) -> None:
    """Refuse names that a function does not have; the message lists those that it has."""
    eqns = itertools.chain(*map(_jaxpr.with_inner, _jaxpr.opened(jaxpr)[0].eqns if wanted else ()))
    there = {LAYER_INPUT, *(eqn.params["name"] for eqn in eqns if eqn.primitive.name == "name")}
    for name in wanted:
        if name not in there:
            known = difflib.get_close_matches(name, sorted(there), n=len(there), cutoff=0)
            raise ValueError(
                f"RematPolicy: no value of the function has the name {name!r}; names, nearest "
                f"first: {', '.join(known)}; jax.ad_checkpoint.checkpoint_name gives one its name"
            )


def has_layers(program: Any) -> bool:
    return any(
        eqn.primitive.name in (_jaxpr.REMATERIALISED, "scan")
        or (_jaxpr.runs_in_place(eqn) and has_layers(_jaxpr.called(eqn)))
        for eqn in _jaxpr.opened(program)[0].eqns
    )


def works_outside(program: Any) -> bool:
    eqns = _jaxpr.opened(program)[0].eqns
    outside = [eqn for eqn in eqns if eqn.primitive.name != _jaxpr.REMATERIALISED]
    if any(eqn.primitive.name in _jaxpr.OPAQUE | _jaxpr.LOOPS.keys() for eqn in outside):
        return True
    return any(works_outside(held) for held in map(_jaxpr.called, outside) if held is not None)


def carries(body: Any, moving: Sequence[bool], num_consts: int, num_carry: int) -> list[bool]:
    """Return which inputs of a scan's body are activations that it carries on.

    Of `{ lambda w h i s. h2 = dot_general h w; i2 = add i 1 in (h2, i2) }` with w constant, h and i
    carried and s sliced, where h comes from the batch: (False, True, False, False). `moving` says
    which inputs come from activations; constants are first among them, then what is carried.
    """
    jaxpr = _jaxpr.opened(body)[0]
    flags, before = list(moving), -1
    while sum(flags) != before:
        before = sum(flags)
        moves = _jaxpr.depending(jaxpr.eqns, itertools.compress(jaxpr.invars, flags))
        for number, var in enumerate(jaxpr.outvars[:num_carry]):
            if not moves.isdisjoint(_jaxpr.variables([var])):
                flags[num_consts + number] = True
    last = num_consts + num_carry
    return [num_consts <= number < last and flag for number, flag in enumerate(flags)]


def check_host_memory(asked: str, devices: Iterable[Any]) -> None:
    device = next(iter(devices))
    kinds = memory_kinds(device)
    # The description of a GPU that you don't have names no memory; real ones and compilers have.
    if HOST_MEMORY in kinds or (not kinds and platform_of(device) == "gpu"):
        return
    others = ", only " * bool(kinds) + ", ".join(kinds)
    told = f"{asked} needs {HOST_MEMORY!r} memory, and the backend {device.platform!r} of this mesh"
    raise ValueError(f"{told} ({device.device_kind}) has none{others}; leave the offload out")


def memory_kinds(device: Any) -> tuple[str, ...]:
    return tuple(memory.kind for memory in device.addressable_memories())


def check_policy(policy: RematPolicy, mesh: Any) -> None:
    if policy.partition is not None:
        check_axis(policy.partition, mesh)
    if policy.offload:
        check_host_memory(f"RematPolicy(offload={policy.offload})", mesh.devices.flat)


def rematerialised(
    function: Callable[..., Any], policy: RematPolicy | Remat, *, is_loss: bool = False
) -> Callable[..., Any]:
    """Make a function whose layers are rematerialised as a policy says.

    Layers are what it hands to `jax.checkpoint` itself, and the bodies of its scans, apart from
    those whose products all lie in such layers; a function without any is a layer itself. What is
    rematerialised within a layer, attention say, stays so except for "none". Layer inputs are the
    floating values that a scan carries, and those that come from arguments after the weights.

    Args:
        function: of arrays, `function(weights, *rest)`: a loss, a model, or one layer.
        policy: a `RematPolicy`, or what one has as `recompute`.
        is_loss: whether the function is a whole loss, as `Recipe(remat=)` says, and so no layer.

    Raises:
        ValueError: when it is called: a name that no layer has, with those that there are; an axis
            that the mesh which is set does not have. `Recipe(remat=)` sets the mesh. A loss without
            layers, of which the policy would keep nothing, computes all again and saves no memory.
    """
    chosen = as_remat(policy) or RematPolicy(recompute="none")

    def wrapped(*args: Any) -> Any:
        mesh_parts(chosen.partition)
        traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
        check_names(traced, (*chosen.keep, *chosen.offload))
        weights = len(jax.tree.leaves(args[:1]))
        flat = jax.tree.leaves(args)
        moving = [number >= weights for number in range(len(flat))]
        runner = _Runner(chosen)
        if chosen.recompute != "none" and not has_layers(traced):
            if is_loss and chosen.recompute == "full" and not (chosen.keep or chosen.offload):
                raise ValueError(
                    "Recipe(remat='full'): the loss has no layers that can be told apart, so that "
                    "nothing would be saved; scan over the layers, or hand each to jax.checkpoint: "
                    "x = jax.checkpoint(layer)(layer_params, x). Recipe(remat='dots') needs none"
                )
            result = runner.layer(traced, moving)(flat)
        else:
            result = runner.run(traced, flat, moving)
        return jax.tree.unflatten(jax.tree.structure(out), result)

    return wrapped


class _Runner:
    def __init__(self, policy: RematPolicy) -> None:
        self.policy = policy
        self.saves = _saves(policy)
        # Layer inputs are kept under a name, rather than as what `jax.checkpoint` is given.
        self.names = policy.partition is not None or LAYER_INPUT in policy.offload

    def run(self, program: Any, args: Sequence[Any], moving: Sequence[bool]) -> list[Any]:
        jaxpr, _ = _jaxpr.opened(program)
        moves = _jaxpr.depending(jaxpr.eqns, itertools.compress(jaxpr.invars, moving))

        def step(eqn: Any, values: list[Any]) -> list[Any]:
            flags = [_jaxpr.is_variable(x) and x in moves for x in eqn.invars]
            inner = _jaxpr.called(eqn)
            if eqn.primitive.name == _jaxpr.REMATERIALISED:
                return self.layer(inner, flags, prevent_cse=eqn.params["prevent_cse"])(values)
            if _jaxpr.runs_in_place(eqn) and has_layers(inner):
                return self.run(inner, values, flags)
            if eqn.primitive.name == "scan":
                return self._scan(eqn, values, flags)
            return _jaxpr.bind(eqn, values)

        return _jaxpr.run(program, args, step)

    def layer(
        self, program: Any, moving: Sequence[bool], *, prevent_cse: bool = True
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """Return a layer as a function of its inputs, rematerialised as asked for."""
        if self.policy.recompute == "none":
            return functools.partial(self.run, program, moving=moving)

        def layer(args: Sequence[Any]) -> list[Any]:
            given = [
                cut_input(x, self.policy.partition) if self.names and flag else x
                for x, flag in zip(args, moving, strict=True)
            ]
            return [whole_gradient(y, self.policy.partition) for y in _jaxpr.run(program, given)]

        return jax.checkpoint(layer, policy=self.saves, prevent_cse=prevent_cse)

    def _scan(self, eqn: Any, values: list[Any], moving: list[bool]) -> list[Any]:
        num_consts, num_carry = _jaxpr.scan_parts(eqn.params)
        body = eqn.params["jaxpr"]
        # Only what is carried differs from layer to layer and is stacked for the backward pass.
        carried = carries(body, moving, num_consts, num_carry)
        # A scan's forward and backward pass are loops of their own: nothing could be merged.
        if has_layers(body) and not works_outside(body):
            layer = functools.partial(self.run, body, moving=carried)
        else:
            layer = self.layer(body, carried, prevent_cse=False)
        out = _jaxpr.run_scan(eqn, values, layer)
        # What the last layer gives is whole, and so is its gradient, with which the backward pass
        # begins: how a loop starts decides how it carries on.
        return [*[whole(x, self.policy.partition) for x in out[:num_carry]], *out[num_carry:]]


def _saves(policy: RematPolicy) -> Callable[..., Any] | None:
    policies = jax.checkpoint_policies
    inputs = (LAYER_INPUT,) if policy.partition and LAYER_INPUT not in policy.offload else ()
    named = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*policy.keep, *inputs],
        names_which_can_be_offloaded=list(policy.offload),
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )
    if policy.recompute == "dots":
        dots = policies.dots_with_no_batch_dims_saveable

        def either(primitive: Any, *avals: Any, **params: Any) -> Any:
            # jax.checkpoint_policies.save_from_both_policies takes no policy that offloads.
            if primitive.name == "name":
                return named(primitive, *avals, **params)
            return dots(primitive, *avals, **params)

        return either
    return named if policy.keep or policy.offload or inputs else None
