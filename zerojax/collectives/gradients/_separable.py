"""Whether a loss is a mean over examples, so that devices may compute it from their own.

The loss is traced for two batch sizes, that of a part and that of the whole batch, since Python may
look at them (`x[:16]`, `if len(x) > 32`). A dim that differs between the traces counts examples; a
constant that differs depends on how many there are. With 4 and 8 examples:

    l:f32[4]  |  l:f32[8]      a value of each example
    s = reduce_sum l           *pooled*: of all examples; grows as their number does, degree 1
    m = div s 4.0 | div s 8.0  degree 0: the average over devices is its value for all examples
    e = exp m                  refused: the mean of exp is not exp of the mean

A pooled value goes through linear operations alone, and none that mixes examples is allowed. The
same holds for gradients in the rules of custom derivatives (`_rules`), which are read as well.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from zerojax import _examples
from zerojax._jaxpr import bodies, called, is_real, is_variable, opened, scan_parts
from zerojax._primitives import primitives
from zerojax._tree import is_key
from zerojax._types import PyTree
from zerojax.collectives.gradients import _mixing, _rules, _traces
from zerojax.collectives.gradients._mixing import Value, meet
from zerojax.collectives.gradients._traces import Refused

#: What a loss should be where parts of the batch are averaged.
REMEDY = (
    "a loss that is a mean over examples; for the mean over a mask, divide the mask by its mean "
    "over the batch before the step, and return jnp.mean(losses * mask)"
)


def why_no_mean(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, count: int, num_parts: int = 1
) -> Refused | None:
    """Return why a loss is not the mean of those of its microbatches; None if it is.

    `loss_fn(params, microbatch, None)` returns the loss and whatever else, of `count` microbatches
    of a batch, one of `num_parts` of the whole. A refusal says the operation, and where it stands.
    """
    batch = jax.eval_shape(lambda batch: _examples.microbatch(batch, 0, count), batch)

    def given(x: Any) -> Any:
        if _examples.is_whole(x):  # a key of it is the same on all devices
            return [Value() for _ in jax.tree.leaves(x)]
        return Value(1) if _examples.has_examples(x) else Value(fresh=_examples.is_own_key(x))

    few = max(_examples.num_examples(batch) or 0, 2)
    values = [
        *(Value() for _ in jax.tree.leaves(params)),
        *jax.tree.leaves(jax.tree.map(given, batch, is_leaf=_examples.is_whole)),
    ]

    def trace(size: int) -> core.ClosedJaxpr:
        return _traces.trace_loss(loss_fn, params, batch, size, num_parts)

    def why(times: int) -> Refused | None:
        try:
            (loss,) = _Reader(few, times).run(trace(few), trace(few * times), values)
            if not loss.degree and _examples.num_examples(batch) == 1:
                return _traces.differs_alone(*map(trace, (1, 2, 4)))
        except Refused as refused:
            return refused
        grows = f"it grows with the number of examples (to the power {loss.degree:g})"
        return Refused(grows) if loss.degree else None

    refused = why(max(count * num_parts, 2))
    # JAX may sort many examples otherwise than few: of sizes near to each other more is told.
    return refused and (why(2) or refused)


def _held(eqn: Any) -> Any:
    if eqn.primitive.name == "call_hi_primitive":  # jax 0.12's searchsorted
        of = eqn.params["_prim"]
        given = jax.tree.unflatten(of.in_tree, [x.aval for x in eqn.invars])
        return jax.make_jaxpr(of.expand)(*given)
    return eqn.params["fwd_jaxpr"] if eqn.primitive.name == "remat_opt" else called(eqn)


def _constant(one: Any, two: Any, times: int) -> Value:
    if isinstance(one, Tracer):
        return Value()
    if is_key(one) and one.shape == two.shape:
        return Value()
    a, b = (np.zeros(x.shape) if is_key(x) else np.asarray(x) for x in (one, two))
    is_number = jnp.issubdtype(a.dtype, np.number)  # NumPy takes bfloat16 for none
    if (a.shape, a.tobytes()) == (b.shape, b.tobytes()):
        return Value(zero=is_number and not a.any())
    has_ratio = is_number and a.size == b.size == 1 and a.any()
    ratio = complex(b.item()) / complex(a.item()) if has_ratio else 0j
    if ratio.real > 0 and not ratio.imag:
        return Value(degree=_power(ratio.real, times, a.dtype))
    raise Refused("a constant in it has entries that depend on the number of examples")


def _power(ratio: float, times: int, dtype: Any) -> float:
    """Return to which power of `times` a ratio is, half powers as far as the dtype tells."""
    power = math.log(ratio) / math.log(times)
    near = round(2 * power) / 2
    exact = 2 * float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
    return near if abs(ratio / times**near - 1) <= max(exact, 1e-6) else round(power, 6)


@dataclasses.dataclass(frozen=True)
class _Reader:
    num_examples: int  # of the first
    times: int  # as many has the second
    differentiated: bool = True  # whether rules of its functions are used
    in_rule: bool = False

    def run(self, one: Any, two: Any, values: Sequence[Value]) -> list[Value]:
        """Return what is known of a program's results, from what is known of its inputs."""
        (one, mine), (two, others) = opened(one), opened(two)
        if (len(one.eqns), len(mine)) != (len(two.eqns), len(others)):
            raise Refused(_traces.DIFFERS)
        known = dict(zip(one.invars, values, strict=True))
        same = (_constant(a, b, self.times) for a, b in zip(mine, others, strict=True))
        known.update(zip(one.constvars, same, strict=True))

        def read(atoms: Sequence[Any], same: Sequence[Any]) -> list[Value]:
            if [*map(is_variable, atoms)] != [*map(is_variable, same)]:
                raise Refused(_traces.DIFFERS)
            return [
                known[a] if is_variable(a) else _constant(a.val, b.val, self.times)
                for a, b in zip(atoms, same, strict=True)
            ]

        for eqn, other in zip(one.eqns, two.eqns, strict=True):
            try:
                counts = ((len(x.invars), len(x.outvars)) for x in (eqn, other))
                if len(set(counts)) > 1:
                    raise Refused("it takes examples one by one")
                results = self._step(eqn, other, read(eqn.invars, other.invars))
            except Refused as refused:
                # What JAX's own functions hold has no line of the user's; what calls them has.
                refused.at(eqn)
                raise
            known.update(zip(eqn.outvars, results, strict=True))
        return read(one.outvars, two.outvars)

    def _step(self, eqn: Any, other: Any, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name != other.primitive.name:
            raise Refused("whether it joins examples can't be told")
        if name.startswith("debug_"):  # a print or a callback changes no loss
            return []
        if name == "axis_index":
            raise Refused("it computes with the place of examples in the batch")
        manual = {*jax.sharding.get_abstract_mesh().manual_axes}
        axes = [eqn.params.get(x) for x in ("axes", "axis_name")]  # of a psum or an all_gather
        along = manual.intersection(jax.tree.leaves(axes))
        if along and name not in primitives("views"):
            raise Refused(f"it computes along {along} with what other devices have")
        if name == "sharding_constraint":
            axes = {*jax.tree.leaves((*getattr(eqn.params["sharding"], "spec", ()),))}
            if along := axes & manual:
                raise Refused(f"it places along {along} an array of which each device has its part")
        if bodies(eqn):
            return self._loop(eqn, other, values)
        has_rule = self.differentiated and name in ("custom_jvp_call", "custom_vjp_call")
        if has_rule and not _rules.is_of_jax(eqn):
            return self._custom(eqn, other, values)
        applied = opened(eqn.params["update_jaxpr"])[0] if name == "scatter" else None
        # What a transpose does with gradients is the user's, and what x.at[i].apply(f) does.
        if name == "linear_call" or (applied is not None and applied.eqns):
            raise Refused("whether it joins examples can't be told")
        if name == "shard_map":
            return self._shards(eqn, other, values)
        if (inner := _held(eqn)) is not None:
            return self.run(inner, _held(other), values)
        if name == "custom_linear_solve":
            # Its operands: the constants of four programs, of which the third solves, and b.
            first, second = (x.params["jaxprs"].solve for x in (eqn, other))
            matvec, vecmat, solve, _ = lengths = eqn.params["const_lengths"]
            consts = values[matvec + vecmat :][:solve]
            return self.run(first, second, [*consts, *values[sum(lengths) :]])
        if name == "select_n" and values[0].zero:  # of x[:, t]: select_n (lt 0 0) 0 16
            return [values[1]]
        dims = [_traces.varying(a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]
        outs = [_traces.varying(a, b) for a, b in zip(eqn.outvars, other.outvars, strict=True)]
        fresh = any(value.fresh for value in values)
        of_examples = any(dim is not None for dim in (*dims, *outs))
        if not of_examples:
            _traces.check_params(eqn, other)
        if not of_examples and not any(value.pooled or value.degree for value in values):
            zero = bool(values) and all(value.zero for value in values)
            zero = zero and (name in _mixing.LINEAR or name in ("gt", "lt", "ne"))
            return [Value(fresh=fresh, zero=zero)] * len(outs)
        if self.in_rule and name in primitives("kernels") and not of_examples:
            return [meet(values)] * len(outs)
        if name == "pallas_call":
            result = _mixing.of_kernel(eqn, values, dims, outs, is_linear=self.in_rule)
            return [dataclasses.replace(result, fresh=fresh)] * len(outs)
        if dims and (dim := dims[0]) is not None:
            ends, others = (_mixing.ends_of(x, dim) for x in (eqn, other))
            if [end * self.times for end in ends] != [*others]:
                raise Refused("it cuts the batch at a number of examples that is fixed")
        _mixing.check_operands(name, values, of_examples=of_examples)
        found = [_mixing.result_of(eqn, values, dims, out, self.num_examples) for out in outs]
        if of_examples:
            _traces.check_params(eqn, other, dims[0] if dims else None, grows=True)
            for one, two, dim in zip(eqn.outvars, other.outvars, outs, strict=True):
                if dim is not None and one.aval.shape[dim] * self.times != two.aval.shape[dim]:
                    raise Refused("it computes with the number of examples")
        return [dataclasses.replace(value, fresh=fresh) for value in found]

    def _custom(self, eqn: Any, other: Any, values: list[Value]) -> list[Value]:
        reader = dataclasses.replace(self, differentiated=False)
        found = reader.run(called(eqn), called(other), values)

        def gradients(atoms: Any, others: Any, values: list[Value]) -> list[Value]:
            known = zip(atoms, others, values, strict=True)
            real = ((v, _traces.varying(a, b)) for a, b, v in known if is_real(a))
            return [_rules.gradient_of(v, dim) for v, dim in real]

        given = gradients(eqn.outvars, other.outvars, found)
        first = eqn.params["num_consts"]
        wanted = gradients(eqn.invars[first:], other.invars[first:], values[first:])
        reader = dataclasses.replace(reader, in_rule=True)
        try:
            pulled = reader.run(_rules.backward(eqn), _rules.backward(other), [*values, *given])
            _rules.check_gradients(pulled, wanted)
        except Refused as refused:
            _rules.name_rule(refused, eqn)
            raise
        return found

    def _shards(self, eqn: Any, other: Any, values: list[Value]) -> list[Value]:
        """Read what each device does with its part of the examples, of which all have as many."""
        inner = eqn.params["jaxpr"].invars
        dims = [_traces.varying(a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]
        found = zip(eqn.invars, inner, dims, strict=True)
        parts = {x.aval.shape[d] // own.aval.shape[d] for x, own, d in found if d is not None}
        if len(parts) != 1:
            raise Refused("whether it joins examples can't be told")
        reader = dataclasses.replace(self, num_examples=self.num_examples // parts.pop())
        return reader.run(eqn.params["jaxpr"], other.params["jaxpr"], values)

    def _map(self, one: Any, two: Any, values: list[Value], at: int, carried: int) -> list[Value]:
        slices = values[at:]
        if carried or any(value != Value(1, fresh=value.fresh) for value in slices):
            raise Refused(f"it goes through examples one after the other ({_mixing.IN_CHUNKS})")
        found = self.run(one, two, [*values[:at], *[Value(fresh=value.fresh) for value in slices]])
        if any(value != Value(fresh=value.fresh) for value in found):
            raise Refused("it joins single examples with what was made of all")
        return [Value(1, fresh=value.fresh) for value in found]

    def _loop(self, eqn: Any, other: Any, values: list[Value]) -> list[Value]:
        mine, others = bodies(eqn), bodies(other)
        if eqn.primitive.name == "cond":
            if values[0].pooled or values[0].degree:
                raise Refused("it is not linear in what was made of all examples")
            found = [self.run(a, b, values[1:]) for a, b in zip(mine, others, strict=True)]
            return [meet(column) for column in zip(*found, strict=True)]
        if eqn.primitive.name == "scan":
            known, (first, carried) = [], scan_parts(eqn.params)
            if eqn.params["length"] != other.params["length"]:
                return self._map(mine[0], others[0], values, first, carried)
        else:
            skipped, first = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            known, values = values[:skipped], values[skipped:]
            carried = len(values) - first
        while True:
            out = self.run(mine[0], others[0], values)
            carry = values[first : first + carried]
            new = [meet(pair) for pair in zip(carry, out[:carried], strict=True)]
            if new == carry:
                break
            values = [*values[:first], *new, *values[first + carried :]]
        if eqn.primitive.name == "while":
            tests = (eqn.params["cond_jaxpr"], other.params["cond_jaxpr"])
            (test,) = self.run(*tests, [*known, *values[first:]])
            if test.pooled or test.degree:
                raise Refused("it is not linear in what was made of all examples")
        return out
