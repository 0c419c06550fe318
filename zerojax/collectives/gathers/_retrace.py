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
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from zerojax import _jaxpr
from zerojax.collectives.gathers import _copies, _structural
from zerojax.collectives.gathers._boxed import Boxed, Opening, wrap_policy
from zerojax.collectives.gathers._divided import bind_apart, bind_grouped, has_grouped, is_apart

#: The name of what a loop carries.
CARRIED = "zerojax_carried"


@dataclasses.dataclass(frozen=True)
class Retracer:
    """Runs a loss's program again with parameters in boxes."""

    opening: Opening  # how boxes are opened
    from_batch: set[Any]  # variables computed from the batch; others are of weights and constants
    often: set[Any]  # variables that several equations read
    # whether the user rematerialises what is around, so that what is gathered here is not kept
    saved: bool = False
    # whether a scan is around, of whose two passes nothing can be merged
    looped: bool = False
    # whether a policy of `_again` is around, which jax would take for rematerialised functions too
    shielded: bool = False
    # what runs the program of a rematerialised function: jax traces layers that share one once
    layers: dict[int, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        return _jaxpr.run(program, self._shared(_jaxpr.opened(program)[0].invars, args), self._step)

    def opened(self, value: Any) -> Any:
        return self.opening.opened(_uncopied(value))

    def _shared(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        pairs = zip(variables, values, strict=True)
        return [x.shared() if isinstance(x, Boxed) and var in self.often else x for var, x in pairs]

    def _step(self, eqn: Any, values: list[Any]) -> list[Any]:
        return self._shared(eqn.outvars, self._bound(eqn, values))

    def _bound(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        has_box = any(isinstance(v, Boxed | _copies.Copied) for v in values)
        layout = self.opening.layout
        is_own = not has_box and is_apart(eqn, layout, self.from_batch)
        is_grouped = not has_box and not is_own and has_grouped(eqn, layout, self.from_batch)
        is_call = _jaxpr.runs_in_place(eqn)
        is_run = is_call or name in (_jaxpr.REMATERIALISED, "scan", "cond")
        is_held = self.shielded and is_run and _rematerialises(eqn)
        if not (has_box or is_own or is_grouped or is_held):
            if not self.shielded or name != "custom_vjp_call":
                return _jaxpr.bind(eqn, values)
            return self._rule(lambda *own: _jaxpr.bind(eqn, own))(*values)
        if is_call:
            return self.run(_jaxpr.called(eqn), values)
        if name == _jaxpr.REMATERIALISED:
            return self._remat(eqn, values)
        if is_own:
            return bind_apart(eqn, values, layout)
        if name == "scan":
            return self._scan(eqn, values)
        is_fixed = self.from_batch.isdisjoint(_jaxpr.variables(eqn.invars))
        if is_fixed and _copies.is_enlarged(eqn, values, self.opening):
            copied = functools.partial(_copies.copied, opening=self.opening)
            values = [copied(v) if isinstance(v, Boxed) else v for v in values]
        if any(isinstance(v, _copies.Copied) for v in values):
            used = _copies.use_copies(eqn, values, self.opening, is_fixed, self._again)
            if used is not None:
                return used
            values = [*map(_uncopied, values)]
        if name == "cond":
            return self._cond(eqn, values)
        if is_grouped:
            return bind_grouped(eqn, values, self.opening)
        kept = _structural.keep_boxed(eqn, values, self.opening)
        return self._use(eqn, values) if kept is None else kept

    def _remat(self, eqn: Any, values: list[Any]) -> list[Any]:
        program = _jaxpr.called(eqn)
        if id(program) not in self.layers:
            inner = dataclasses.replace(self, saved=True, shielded=False, layers={})
            self.layers[id(program)] = lambda *values: inner.run(program, values)
        body = self.layers[id(program)]
        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        if self.opening.gathers and (policy is not None or self.opening.keeps):
            policy = wrap_policy(policy, keeps=self.opening.keeps)
        layer = jax.checkpoint(body, prevent_cse=prevent_cse, policy=policy)
        return (_own(layer) if self.shielded else layer)(*values)

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Scan with boxed slices: layers are gathered inside the loop.

        Of a scan over `w:[4,8,8]`, cut along dim 1, whose turns also read all of a table
        `e:[512,8]`, and a layer of `v:[4,8,8]` by `dynamic_index_in_dim(v, i)`:

            w    a stack: its array goes in, and each turn boxes its slice [8,8], cut along dim 0
            e    a constant: gathered once, before the first turn
            v    a constant that is sliced: goes in boxed, and each turn opens its slice

        Where something is gathered before the turns, the loop as a whole is rematerialised under a
        policy that keeps all but that. jax would let this policy decide for rematerialised layers
        within too, so that these are `shielded` from it.
        """
        program = eqn.params["jaxpr"]
        consts, carry, stacks = _jaxpr.scan_split(eqn.params, values)
        consts = [v if self._meets(program, i) else _uncopied(v) for i, v in enumerate(consts)]
        is_sliced = [self._is_sliced(program, i, v) for i, v in enumerate(consts)]
        stacks = [self._sliceable(_uncopied(v)) for v in stacks]
        pairs = zip(consts, is_sliced, strict=True)
        settled = functools.partial(_structural.rules_settled, opening=self.opening)
        consts = [settled(v) if sliced else v for v, sliced in pairs]
        # Kept for the backward pass, what each iteration gathers would be the stack again, also
        # where the loop as a whole is rematerialised.
        regathers = self._gathers_again and not all(is_sliced)
        shielded = self.shielded or regathers
        inner = dataclasses.replace(self, looped=True, saved=False, shielded=shielded, layers={})

        def body(values: list[Any]) -> list[Any]:
            consts, carry, slices = _jaxpr.scan_split(eqn.params, values)
            if shielded:  # else jax keeps what it is made of, and stacks it once more from that
                floats = (jnp.issubdtype(x.dtype, jnp.inexact) for x in carry)
                pairs = zip(carry, floats, strict=True)
                carry = [checkpoint_name(x, CARRIED) if is_float else x for x, is_float in pairs]
            layer = [
                v.moved(x, tuple(range(1, x.ndim + 1))) if isinstance(v, Boxed) else x
                for v, x in zip(stacks, slices, strict=True)
            ]
            return [*map(self.opened, inner.run(program, [*consts, *carry, *layer]))]

        def loop(*given: Any) -> list[Any]:
            consts, carry, arrays = _jaxpr.scan_split(eqn.params, given)
            found = enumerate(zip(consts, is_sliced, strict=True))
            opened = [v if cut else self._constant(program, i, v) for i, (v, cut) in found]
            return _jaxpr.run_scan(eqn, [*opened, *carry, *arrays], body)

        arrays = [v.value if isinstance(v, Boxed) else v for v in stacks]
        if regathers:
            loop = self._again(loop, wrap_policy(None, keeps=False))
        return loop(*consts, *map(self.opened, carry), *arrays)

    def _constant(self, program: Any, index: int, value: Boxed | _copies.Copied) -> Any:
        """Gather what all turns of a loop use; where it meets examples each device has its copy."""
        if isinstance(value, _copies.Copied):
            return value.gathered(self.opening)
        if not value.recorded and self._meets(program, index):
            return _copies.copied(value, self.opening).gathered(self.opening)
        return self.opened(value)

    def _meets(self, program: Any, index: int) -> bool:
        parts = self.opening.layout.num_batch_parts
        return parts > 1 and _copies.meets_examples(program, index, parts, self.from_batch)

    def _is_sliced(self, program: Any, index: int, value: Any) -> bool:
        """Return whether a constant goes into a loop as it is: an array, or a box that is sliced.

        Of `h @ dynamic_index_in_dim(stack, i)` a layer is gathered, inside the loop.
        """
        if not isinstance(value, Boxed):
            return not isinstance(value, _copies.Copied)
        slices = [eqn for eqn, _ in _copies.uses_of(program, index, in_loops=True)]
        if not all(map(_structural.is_slice, slices)):
            return False
        if all(_structural.dims_after(eqn, value, self.opening) is not None for eqn in slices):
            return True
        self._warn_gathered(value)
        return False

    def _sliceable(self, value: Any) -> Any:
        """Open a box whose leading dim can't be sliced while it is partitioned."""
        value = _structural.rules_settled(value, self.opening)
        is_box = isinstance(value, Boxed)
        if not is_box or (0 not in value.held and _structural.waits_elementwise(value)):
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
            told = f"all layers of leaf {value.path.text!r} are gathered before the loop: {why}"
            warnings.warn(told, stacklevel=2)

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
            out = _copies.use_own_copies(eqn, [*values], self.opening)
            out = self.opening.open_and_bind(eqn, [*values]) if out is None else out
            return [x.astype(var.aval.dtype) for x, var in zip(out, eqn.outvars, strict=True)]

        name = eqn.primitive.name
        if name == "custom_vjp_call" and (self._gathers_again or self._widens_again):
            return self._rule(use)(*values)
        # Of other derivatives (custom_linear_solve) what is made of examples is kept, unless whole
        # weights were computed before, as equations that waited, or are returned by a shard_map.
        recorded = any(isinstance(v, Boxed) and v.recorded for v in values)
        keeps = _jaxpr.has_inside(eqn) and not recorded and name != "shard_map"
        keeps = keeps and not _rematerialises(eqn)
        return self._again(use, wrap_policy(None, keeps=False) if keeps else None)(*values)

    def _rule(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a user's rule decide what it keeps, but for what it has of weights alone.

        It may count on being run: flax's fp8 scales are its results, of a zero cotangent too.
        """
        return _own(function, functools.partial(_of_rule, retracer=self))

    @property
    def _gathers_again(self) -> bool:
        return self.opening.gathers and not self.saved

    @property
    def _widens_again(self) -> bool:  # else a loop would stack wide weights
        return self.looped and not self.saved and self.opening.reduce_dtype is not None

    def _again(self, use: Callable[..., Any], policy: Any = None) -> Callable[..., Any]:
        """Make a function gather again for its backward pass, where it is not rematerialised.

        Where gathered weights are kept, what is made of them is not.
        """
        if not (self._gathers_again or self._widens_again):
            return use
        policy = wrap_policy(policy, keeps=True) if self.opening.keeps else policy
        return jax.checkpoint(use, prevent_cse=not self.looped, policy=policy)


def _own(function: Callable[..., Any], vjp: Callable[..., Any] = jax.vjp) -> Callable[..., Any]:
    """Make what a function keeps its own matter: jax lets a policy around it decide.

    Its backward pass runs for a zero cotangent too. What is not differentiated stays so: jax
    refuses to differentiate what a rule of the user's own closes over.
    """

    def forward(*values: Any) -> tuple[Any, Any]:
        def used(*own: Any) -> Any:
            stop = jax.lax.stop_gradient
            return function(*jax.tree.map(lambda x, v: v if x.perturbed else stop(v), values, own))

        return vjp(used, *jax.tree.map(lambda x: x.value, values))

    def backward(pull: Any, grads: Any) -> Any:
        return pull(jax.tree.map(_filled, grads))

    own = jax.custom_vjp(function)
    own.defvjp(forward, backward, symbolic_zeros=True)
    return own


def _of_rule(function: Callable[..., Any], *args: Any, retracer: Retracer) -> Any:
    """Do as `jax.vjp` of a user's rule; what it keeps and has of weights alone is made again.

    Of `q = jnp.round(w / s); return x @ (q * s), (x, q, s)` the backward pass gathers `w` for `q`,
    which is as large, and gets `x` and `s`. Each loop is one operation for a policy around it: of a
    fused cross-entropy, which sums the head's gradient over chunks in its forward rule, jax would
    stack what the loop carries, a whole gradient for each chunk, to have the last of them.
    """
    traced, out = jax.make_jaxpr(functools.partial(jax.vjp, function), return_shape=True)(*args)
    jaxpr, leaves, count = traced.jaxpr, jax.tree.leaves(args), len(jax.tree.leaves(out[0]))
    flags = [isinstance(x, Boxed | _copies.Copied) for x in args for _ in jax.tree.leaves(x)]
    weights = [var for var, is_weight in zip(jaxpr.invars, flags, strict=True) if is_weight]
    least = max((var.aval.size for var in weights), default=0) // retracer.opening.layout.num_shards
    others = _jaxpr.depending(jaxpr.eqns, {*jaxpr.invars}.difference(weights))
    of_weights = [
        bool(weights) and not retracer.opening.keeps and x not in others and x.aval.size > least
        for x in jaxpr.outvars[count:]
    ]

    def step(eqn: Any, values: list[Any]) -> list[Any]:
        loops = (x.primitive.name in _jaxpr.LOOPS for x in _jaxpr.with_inner(eqn))
        bind = functools.partial(_jaxpr.bind, eqn)
        return _own(lambda *own: bind(own))(*values) if any(loops) else bind(values)

    found = _jaxpr.run(traced, leaves, step)
    remade, needed = _jaxpr.needed(traced, [*[False] * count, *of_weights])
    given = [x for x, is_needed in zip(leaves, needed, strict=True) if is_needed]
    kept = [x for x, again in zip(found[count:], of_weights, strict=True) if not again]

    def pull(given: list[Any], kept: list[Any], grads: Any) -> Any:
        if not retracer.looped:  # else compilers keep what was gathered, or gather at once
            arrays = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]
            given, _ = jax.lax.optimization_barrier((given, arrays))
        again, own = iter(_jaxpr.run(remade, given)), iter(kept)
        both = [next(again if is_again else own) for is_again in of_weights]
        return jax.tree.structure(out[1]).unflatten(both)(grads)

    value = jax.tree.structure(out[0]).unflatten(found[:count])
    return value, jax.tree_util.Partial(pull, given, kept)


def _filled(grad: Any) -> Any:
    if not isinstance(grad, SymbolicZero):
        return grad
    aval: Any = grad.aval
    zeros = np.zeros if aval.dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(aval.shape, aval.dtype)


def _rematerialises(eqn: Any) -> bool:
    """Whether an equation holds a rematerialised function, or is one."""
    return any(x.primitive.name == _jaxpr.REMATERIALISED for x in _jaxpr.with_inner(eqn))


def _uncopied(value: Any) -> Any:
    return value.box if isinstance(value, _copies.Copied) else value
