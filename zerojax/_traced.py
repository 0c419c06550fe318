"""Updates as equations, and the slices of one that some of its results need."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _jaxpr

#: What Python or optax say of an argument that an update lacks.
_LACKS = re.compile(r"missing \d+ required [\w-]+ arguments?: '(\w+)'|^(\w+) must be provided")


def run_update(tx: Any, grads: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
    """Run an optax optimizer's update, with `value=` and `grad=` if it takes them.

    Raises a ValueError where it needs more: a line search needs the loss as a function.
    """
    given = {"value": loss, "grad": grads}
    while True:
        try:
            return tx.update(grads, state, params, **given)
        except (TypeError, ValueError) as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused and given.pop(refused[1], None) is not None:
                continue
            if (lacks := _LACKS.search(str(error))) is None:
                raise
            name = lacks[1] or lacks[2]
            raise ValueError(
                f"the optimizer's update needs {name}=, and a step gives it value= and grad= alone;"
                f" write a loop: sharded(tx, layout).update(grads, state, params, {name}=...)"
            ) from error


@dataclasses.dataclass(frozen=True)
class Slice:
    """The equations that some results need."""

    inputs: tuple[Any, ...]  # what has to be given: inputs of the whole, and shared scalars
    eqns: tuple[Any, ...]  # in order
    outputs: tuple[Any, ...]  # the results; literals may be among them

    def run(self, values: Sequence[Any], step: _jaxpr.RunEquation = _jaxpr.bind) -> list[Any]:
        given = dict(zip(self.inputs, values, strict=True))
        return _jaxpr.run_equations(self.eqns, given, self.outputs, step)


def sliced(eqns: Sequence[Any], outputs: Sequence[Any], stop: Callable[[Any], bool]) -> Slice:
    """Collect what outputs need, back to inputs and to variables at which to stop."""
    made = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars}
    needed, inputs, todo = set[int](), dict[Any, None](), _jaxpr.variables(outputs)
    while todo:
        var = todo.pop()
        if var not in made or stop(var):
            inputs[var] = None
        elif (number := made[var]) not in needed:
            needed.add(number)
            todo += _jaxpr.variables(eqns[number].invars)
    return Slice(tuple(inputs), tuple(eqns[n] for n in sorted(needed)), tuple(outputs))


class Traced:
    """An update traced to a program of equations `eqns`, calls inlined."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        shapes = jax.tree.map(_shape_of, args)
        program, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
        run = functools.partial(_jaxpr.run, program, step=_Inline())
        self.program = jax.make_jaxpr(lambda *leaves: run(leaves))(*jax.tree.leaves(shapes))
        jaxpr, _ = _jaxpr.opened(self.program)
        self.inputs = list(jaxpr.invars)
        self.outputs = list(jaxpr.outvars)
        self.out_tree = jax.tree.structure(out)
        self.eqns = list(jaxpr.eqns)
        self._made = {var: n for n, eqn in enumerate(self.eqns) for var in eqn.outvars}

    def run(self, *args: Any) -> Any:
        return self.out_tree.unflatten(_jaxpr.run(self.program, jax.tree.leaves(args)))

    def is_zero(self, atom: Any) -> bool:
        """Whether a variable is 0 whatever is given, as a result of `optax.set_to_zero` is."""
        if not _jaxpr.is_variable(atom):
            return bool(atom.val == 0)
        eqn = self.eqns[self._made[atom]] if atom in self._made else None
        return eqn is not None and is_fill(eqn) and self.is_zero(eqn.invars[0])


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def is_fill(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape


class _Inline:
    """Runs equations; of a call, what it holds, within branches too.

    jax may trace a function once for several leaves: calls of it would share their variables. Of
    `optax.tree.vdot(x, y)`, which Prodigy and MoMo use, jax makes

        a = reshape[new_sizes=(512,)] x;  b = reshape[new_sizes=(512,)] y;  c = dot_general a b

    and the partitioner gathers leaves whole to make rows of them. The sum of x * y is the same.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Any, Any]] = {}  # by its id a vector, and of what it was made

    def __call__(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if _jaxpr.called(eqn) is not None or name == "cond":
            return _jaxpr.run_bodies(eqn, values, functools.partial(_jaxpr.run, step=self))
        if name == "dot_general" and not (result := eqn.outvars[0].aval).shape:
            x, y = (self._rows.get(id(v), (v, v))[1] for v in values)
            (of_x, of_y), _ = eqn.params["dimension_numbers"]
            if of_x != of_y:  # the trace of x @ y, which XLA gets wrong of some placements
                y = y.transpose([of_y[of_x.index(dim)] for dim in range(len(of_x))])
            is_sum = jnp.ndim(x) > 1 and x.shape == y.shape
            if is_sum and jnp.issubdtype(result.dtype, jnp.inexact):
                wide = jnp.promote_types(result.dtype, jnp.float32)
                products = x.astype(wide) * y.astype(wide)
                return [jax.lax.reduce_sum(products, [*range(x.ndim)]).astype(result.dtype)]
        found = _jaxpr.bind(eqn, values)
        if name == "reshape" and found[0].ndim == 1 and eqn.params["dimensions"] is None:
            self._rows[id(found[0])] = found[0], values[0]
        return found
