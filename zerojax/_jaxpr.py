"""Traced programs: which equations hold other programs, and running a program again.

    >>> jax.make_jaxpr(lambda w, x: jax.jit(jnp.tanh)(w @ x))(w, x)
    { lambda ; a:f32[8,4] b:f32[4]. let
        c:f32[8] = dot_general[dimension_numbers=(([1], [0]), ([], []))] a b
        d:f32[8] = jit[name=tanh jaxpr={ lambda ; e:f32[8]. let f:f32[8] = tanh e in (f,) }] c
      in (d,) }

is a program of two equations. `dot_general` and `jit` are their primitives, what stands in brackets
their parameters. `jit` is a call: it holds a program that runs once, in its place.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

from zerojax._primitives import LISTS, primitives

OPAQUE = primitives("opaque")
#: What `jax.checkpoint` is called in a trace.
REMATERIALISED = "remat2"
#: Calls that say nothing of derivatives, memory or devices: what they hold can run in their place.
PLAIN_CALLS = frozenset({"jit", "closed_call", "eval_jaxpr"})
#: Every call, and every loop and branch, and the parameter that holds its program or programs.
CALLS, LOOPS = LISTS["calls"], LISTS["loops"]


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """Split a jaxpr, closed over constants or not, into the open one and its constants."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def called(eqn: Any) -> Any:
    """Return the program that a call holds; None where the equation is no call."""
    key = CALLS.get(eqn.primitive.name)
    return None if key is None else eqn.params[key]


def bodies(eqn: Any) -> tuple[Any, ...]:
    """Return the body of a scan or while loop, or the branches of a cond; else nothing."""
    key = LOOPS.get(eqn.primitive.name)
    held = () if key is None else eqn.params[key]
    return held if isinstance(held, tuple) else (held,)


def has_inside(eqn: Any) -> bool:
    return any(True for _ in core.jaxprs_in_params(eqn.params))


def refs_of(eqn: Any) -> list[Any]:
    """Return what an equation makes, reads or writes by `jax.new_ref`."""
    atoms = (*eqn.invars, *eqn.outvars)
    return [x for x in atoms if type(x.aval).__name__ == "AbstractRef"]


def with_inner(eqn: Any) -> Iterator[Any]:
    yield eqn
    for program in core.jaxprs_in_params(eqn.params):
        for inner in program.eqns:
            yield from with_inner(inner)


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Count the constants and the carried values among a scan's inputs; slices come after them."""
    if "num_consts" in params:  # jax 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def scan_split(params: dict[str, Any], values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Part the inputs of a scan, or of its body: constants, what is carried and what is sliced."""
    num_consts, num_carry = scan_parts(params)
    first = num_consts + num_carry
    return values[:num_consts], values[num_consts:first], values[first:]


def runs_in_place(eqn: Any) -> bool:
    """Whether an equation is a plain call that says nothing of placement."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    is_open = all(x is None or type(x).__name__ == "UnspecifiedValue" for x in given)
    return is_open and eqn.primitive.name in PLAIN_CALLS


def is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    return list(filter(is_variable, atoms))


def depending(eqns: Iterable[Any], given: Iterable[Any]) -> set[Any]:
    """Return the variables that are computed from some of the given ones, and these.

    In `{ lambda a b. c = sin a; d = add b 1.0; e = mul c d in (d, e) }`, given a: {a, c, e}.
    """
    found = set(given)
    for eqn in eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars, refs_of(eqn))
    return found


def depending_within(program: Any, given: Sequence[bool]) -> set[Any]:
    """Return the variables of a program, and of all that it holds, that depend on some inputs.

    If a loop or branch reads one, all that it carries or returns depends on it. Constants that are
    tracers, or cut over devices, count as inputs: they may be a batch.
    """
    jaxpr, consts = opened(program)
    found = {var for var, is_given in zip(jaxpr.invars, given, strict=True) if is_given}
    found |= {var for var, x in zip(jaxpr.constvars, consts, strict=False) if not _is_constant(x)}
    for eqn in jaxpr.eqns:
        flags = [is_variable(x) and x in found for x in eqn.invars]
        if not any(flags):
            continue
        found.update(eqn.outvars, refs_of(eqn))
        if eqn.primitive.name == "scan":
            first, num_carry = scan_parts(eqn.params)
            flags[first : first + num_carry] = [True] * num_carry
        for inner in core.jaxprs_in_params(eqn.params):
            num = len(inner.invars)
            is_alike = eqn.primitive.name != "while" and num <= len(flags)
            # A cond has the branch's number in front.
            own = flags[len(flags) - num :] if is_alike else [True] * num
            found |= depending_within(inner, own)
    return found


def read_often(program: Any) -> set[Any]:
    """Return the variables of a program, and of all that it holds, that several equations read.

    A call reads a variable as often as the program that it holds does, but a rematerialised one
    once: what is made of a variable for several uses is made within, or it would be kept.
    """
    found, once = set[Any](), set[Any]()
    for eqn in opened(program)[0].eqns:
        own = set(variables(eqn.invars))
        for inner in core.jaxprs_in_params(eqn.params):
            found |= read_often(inner)
            if called(eqn) is not None and eqn.primitive.name != REMATERIALISED:
                pairs = zip(inner.invars, eqn.invars, strict=False)
                found |= own & {x for var, x in pairs if is_variable(x) and var in found}
        found |= own & once
        once |= own
    return found


def used(traced: core.ClosedJaxpr, num_results: int | None = None) -> core.ClosedJaxpr:
    """Leave out of a program, in loops too, what its first results don't need; None is all."""
    wanted = [True] * len(traced.jaxpr.outvars[:num_results])
    wanted += [False] * (len(traced.jaxpr.outvars) - len(wanted))
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, wanted, instantiate=True)
    return core.ClosedJaxpr(jaxpr, traced.consts)


def _is_constant(value: Any) -> bool:
    """Whether what a program is closed over is the same for all batches, and on all devices."""
    if isinstance(value, Tracer):
        return False
    return not isinstance(value, jax.Array) or value.sharding.is_fully_replicated


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    with eqn.ctx.manager:
        return bind_here(eqn, values)


def bind_here(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Run one equation on arrays in the mesh that is set, and not the one that it was traced in."""
    if eqn.primitive.name.startswith("custom_"):  # a user's rule may call methods of constants
        values = [x if isinstance(x, Tracer) or not np.ndim(x) else jnp.asarray(x) for x in values]
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def is_real(atom: Any) -> bool:
    """Whether a value has a gradient: no whole number, truth value or key."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def is_elementwise(eqn: Any) -> bool:
    """Whether each element of the result comes of the same element of the operands, or of scalars.

    Such an equation takes scalars for all of its operands. `cumsum`, `rev` or `transpose` don't.
    """
    if len(eqn.outvars) != 1 or not all(_fits(x.aval, eqn.outvars[0].aval) for x in eqn.invars):
        return False
    if eqn.primitive.name == "custom_jvp_call" or eqn.primitive.name in PLAIN_CALLS:
        return all(map(is_elementwise, opened(called(eqn))[0].eqns))
    if eqn.primitive.name in OPAQUE | {"sharding_constraint"} or has_inside(eqn):
        return False
    scalars = [jax.ShapeDtypeStruct((), x.aval.dtype) for x in eqn.invars]
    try:
        (out,) = jax.eval_shape(lambda *xs: bind(eqn, xs), *scalars)
    except (TypeError, ValueError, IndexError, NameError):  # the last of a device axis
        return False
    return out.shape == ()


def _fits(operand: Any, result: Any) -> bool:
    sizes = zip(operand.shape, result.shape, strict=False)
    return operand.ndim in (0, result.ndim) and all(a in (1, b) for a, b in sizes)


def num_summed(eqn: Any) -> int:
    """Count the elements that a dot product sums over; 0 for anything else."""
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    elif eqn.primitive.name == "dot_general":
        numbers = eqn.params["dimension_numbers"]
    else:
        return 0
    (dims, _), _ = numbers
    return math.prod(eqn.invars[0].aval.shape[d] for d in dims)


def num_products(eqn: Any) -> int:
    """Count the multiplications of a matrix product or a convolution; 0 for anything else."""
    if eqn.primitive.name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec
        return eqn.outvars[0].aval.size * kernel.size // kernel.shape[spec[0]]
    if (count := num_summed(eqn)) and eqn.primitive.name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        (summed, _), _ = ragged.dot_dimension_numbers
        if {*ragged.lhs_ragged_dimensions} & {*summed}:  # groups share the rows
            return eqn.outvars[0].aval.size * count // eqn.invars[2].aval.shape[-1]
    return eqn.outvars[0].aval.size * count if count else 0


#: Runs one equation on values: `(eqn, values) -> results`.
RunEquation = Callable[[Any, list[Any]], Sequence[Any]]


def run(program: Any, args: Iterable[Any], step: RunEquation = bind) -> list[Any]:
    """Run a traced program again, one equation after another.

    `step(eqn, values)` returns an equation's results, for inputs of any type; `bind` runs it as it
    is. One that calls `run` on what a call holds runs that in the call's place.
    """
    jaxpr, _ = opened(program)
    return run_equations(jaxpr.eqns, inputs_of(program, args), jaxpr.outvars, step)


def inputs_of(program: Any, args: Iterable[Any]) -> dict[Any, Any]:
    """Return the values of a program's inputs and constants, by variable."""
    jaxpr, consts = opened(program)
    return dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))


def run_equations(
    eqns: Sequence[Any], inputs: Mapping[Any, Any], outputs: Sequence[Any], step: RunEquation = bind
) -> list[Any]:
    """Run some equations of a program, and return the values of some of its atoms.

    Each runs in the named scopes and with the source line that it was traced with, so that
    profilers, HLO and errors still name the user's model. A value is dropped after its last use.
    """
    values = dict(inputs)
    last = {var: n for n, eqn in enumerate(eqns) for var in (*variables(eqn.invars), *eqn.outvars)}
    last |= dict.fromkeys(variables(outputs), len(eqns))

    def read(atom: Any) -> Any:
        return values[atom] if is_variable(atom) else atom.val

    for number, eqn in enumerate(eqns):
        source = eqn.source_info
        stack = source_info_util.current_name_stack() + source.name_stack
        # What jax itself jits (jnp.roll) has no line of the user's: that of the call is kept.
        line = source if source_info_util.summarize(source) else source_info_util.current()
        with source_info_util.user_context(line.traceback, name_stack=stack):
            results = step(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
        for var in {*variables(eqn.invars), *eqn.outvars}:
            if last[var] == number:
                del values[var]
    return [read(atom) for atom in outputs]


def run_bodies(eqn: Any, values: Sequence[Any], body: Callable[..., list[Any]]) -> list[Any]:
    """Run a call, scan or cond again, each program that it holds as `body(program, values)`."""
    if (inner := called(eqn)) is not None:
        return body(inner, values)
    if eqn.primitive.name == "scan":
        return run_scan(eqn, values, functools.partial(body, eqn.params["jaxpr"]))
    branches = [lambda *given, held=held: body(held, given) for held in bodies(eqn)]
    if (platforms := eqn.params.get("branches_platforms")) is not None:  # lax.platform_dependent
        named = {x: f for xs, f in zip(platforms, branches, strict=True) for x in xs or ["default"]}
        return jax.lax.platform_dependent(*values[1:], **named)
    return jax.lax.switch(values[0], branches, *values[1:])


def run_scan(eqn: Any, values: Sequence[Any], body: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Run a scan again with another body, on constants, carried values and what is sliced.

    The body takes constants, carried values and slices to carried values and what is stacked.
    """
    consts, start, stacks = scan_split(eqn.params, values)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body([*consts, *carry, *slices])
        return out[: len(carry)], out[len(carry) :]

    same = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(step, [*start], [*stacks], **same)
    return [*carry, *stacked]
