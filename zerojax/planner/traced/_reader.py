"""Reads a jaxpr, traced for two numbers of examples, into `Operations`."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from zerojax import _jaxpr
from zerojax._primitives import primitives
from zerojax._tree import num_bytes
from zerojax.planner.traced._operations import Line, Op, Operations, Value

#: Kinds of operations by how their primitives' names begin.
_KINDS = {"scatter": "scatter", "gather": "gather", "random_": "kernel"}
_KINDS |= dict.fromkeys(("reduce_", "argm"), "reduce")


def read_operations(jaxpr: Any, other: Any, batches: tuple[int, int]) -> Operations:
    """Flatten a jaxpr that was traced twice, for two numbers of examples, the smaller first.

    What nobody reads, in loops too, no compiler computes: it is left out.
    """
    return _Reader(batches).read((_jaxpr.used(jaxpr).jaxpr, _jaxpr.used(other).jaxpr))


#: The value that a variable of a jaxpr became.
Env = dict[Any, int | None]


class _Reader:
    def __init__(self, batches: tuple[int, int]) -> None:
        self._batches = batches
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._region = self._num_regions = 0

    def read(self, pair: tuple[Any, Any]) -> Operations:
        env: Env = {}
        self._enter(env, pair, "constvars")
        inputs = self._enter(env, pair, "invars")
        self._run(pair, env)
        outputs = tuple(_read(env, var) for var in pair[0].outvars)
        return Operations(tuple(self._values), tuple(self._ops), inputs, outputs)

    def _enter(self, env: Env, pair: tuple[Any, Any], name: str) -> tuple[int, ...]:
        found = [(one, self._new(one, two)) for one, two in _zip(pair, name)]
        env.update(found)
        return tuple(value for _, value in found)

    def _run(self, pair: tuple[Any, Any], env: Env) -> None:
        for one, two in _zip(pair, "eqns"):
            name = one.primitive.name
            if name != two.primitive.name:
                raise ValueError(f"{name} for one batch is {two.primitive.name} for another")
            if (held := _jaxpr.called(one)) is not None:
                self._call(one, (_jaxpr.opened(held)[0], _jaxpr.opened(_jaxpr.called(two))[0]), env)
            elif name in primitives("views"):
                env |= {var: _read(env, x) for var, x in zip(one.outvars, one.invars, strict=True)}
            else:
                self._op(one, two, env)

    def _call(self, eqn: Any, pair: tuple[Any, Any], env: Env) -> None:
        given = zip(pair[0].invars, eqn.invars, strict=True)
        inner: Env = {var: _read(env, one) for var, one in given}
        self._enter(inner, pair, "constvars")
        outside = self._region
        if eqn.primitive.name == _jaxpr.REMATERIALISED:
            self._region = self._num_regions = self._num_regions + 1
        self._run(pair, inner)
        self._region = outside
        for var, result in zip(eqn.outvars, pair[0].outvars, strict=True):
            env[var] = _read(inner, result)

    def _op(self, one: Any, two: Any, env: Env) -> None:
        name, params = one.primitive.name, one.params
        inputs = tuple(_read(env, var) for var in one.invars)
        outputs = self._enter(env, (one, two), "outvars")
        held = tuple(
            _Reader(self._batches).read((_jaxpr.opened(body)[0], _jaxpr.opened(twin)[0]))
            for body, twin in zip(_jaxpr.bodies(one), _jaxpr.bodies(two), strict=True)
        )
        carry = len(one.outvars) if name == "while" else 0
        if name == "scan":
            _, carry = _jaxpr.scan_parts(params)
        self._ops.append(
            Op(
                name=name,
                kind=_kind(name, bool(held)),
                inputs=inputs,
                outputs=outputs,
                bodies=held,
                length=self._line(params.get("length", 1), two.params.get("length", 1)),
                num_carry=carry,
                flops=self._line(*(0 if held else _flops(x) for x in (one, two))),
                contracted=self._line(_jaxpr.num_summed(one), _jaxpr.num_summed(two)),
                is_wide=name in primitives("products")
                and any(x.aval.dtype.itemsize >= 4 for x in one.invars[:2]),
                region=self._region,
            )
        )

    def _new(self, var: Any, twin: Any) -> int:
        aval = var.aval
        shape, other = (getattr(a, "shape", ()) for a in (aval, twin.aval))
        dims = tuple(self._line(*sizes) for sizes in zip(shape, other, strict=True))
        dtype = getattr(aval, "dtype", None)
        if sum(dim.each != 0 for dim in dims) > 1:
            raise ValueError(
                f"an array of {dtype}{list(shape)} for {self._batches[0]} examples is "
                f"{list(other)} for {self._batches[1]}, which grows faster than the batch"
            )
        sizes = (0 if dtype is None else num_bytes(one, dtype) for one in (shape, other))
        self._values.append(Value(shape, dtype, self._line(*sizes), dims))
        return len(self._values) - 1

    def _line(self, one: float, two: float) -> Line:
        if one == two:
            return Line(float(one))
        few, many = self._batches
        each = (two - one) / (many - few)
        return Line(one - each * few, each)


def _zip(pair: tuple[Any, Any], name: str) -> Iterator[tuple[Any, Any]]:
    one, two = (getattr(jaxpr, name) for jaxpr in pair)
    if len(one) != len(two):
        raise ValueError(f"{len(one)} {name} for one batch are {len(two)} for another")
    return zip(one, two, strict=True)


def _read(env: Env, atom: Any) -> int | None:
    return None if isinstance(atom, core.Literal) else env[atom]


def _flops(eqn: Any) -> int:
    """Count those of all products within; of a Pallas kernel what its author says, if anything."""
    name, params, times = eqn.primitive.name, eqn.params, 1
    if name == "pallas_call":
        if cost := params["cost_estimate"]:
            return cost.flops
        times = math.prod(x for x in params["grid_mapping"].grid if isinstance(x, int))
    elif name == "shard_map":
        times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    elif name == "scan":
        times = params["length"]
    inner = sum(_flops(x) for program in core.jaxprs_in_params(params) for x in program.eqns)
    return 2 * _jaxpr.num_products(eqn) + times * inner


def _kind(name: str, is_loop: bool) -> str:
    if is_loop:
        return "loop"
    if name in _jaxpr.OPAQUE:
        return "kernel"
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "fused")
