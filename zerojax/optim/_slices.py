"""An update cut into the part of each leaf and the scalars that all leaves share.

Most optimizers treat leaves one by one; what they have in common are scalars: a step count, a
global norm. The traced update is cut there, so that each leaf's part can run where and when the
leaf's states are at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from zerojax._jaxpr import (
    EquationRunner,
    bind,
    called,
    depending,
    is_elementwise,
    opened,
    run,
    run_equations,
    variables,
)
from zerojax._tree import num_elements
from zerojax._types import PyTree


@dataclasses.dataclass(frozen=True)
class Slice:
    """The equations that some results need.

    Attributes:
        inputs: what has to be given: inputs of the whole, and shared scalars.
        eqns: in order.
        outputs: the results; literals may be among them.
    """

    inputs: tuple[Any, ...]
    eqns: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def run(self, values: Sequence[Any], step: EquationRunner = bind) -> list[Any]:
        """Run the equations; `step(eqn, operands)` runs one."""
        given = dict(zip(self.inputs, values, strict=True))
        return run_equations(self.eqns, given, self.outputs, step)

    def not_elementwise(self) -> list[str]:
        """Name the operations that look at other elements than the one they compute."""
        found = (
            eqn.primitive.name for eqn in self.eqns if not is_fill(eqn) and not is_elementwise(eqn)
        )
        return list(dict.fromkeys(found))


class Traced:
    """An update traced to equations, calls inlined.

    Attributes:
        inputs: one variable per input leaf.
        outputs: one variable or literal per output leaf.
        out_tree: the structure of the results.
    """

    def __init__(self, function: Callable[..., PyTree], args: tuple[PyTree, ...]) -> None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        traced, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
        flat = jax.make_jaxpr(lambda *leaves: run(traced, leaves, _inline))(
            *jax.tree.leaves(shapes)
        )
        jaxpr, consts = opened(flat)
        self.inputs = list(jaxpr.invars)
        self.outputs = list(jaxpr.outvars)
        self.out_tree = jax.tree.structure(out)
        self.consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self._eqns = list(jaxpr.eqns)
        self._made = {var: n for n, eqn in enumerate(self._eqns) for var in eqn.outvars}

    def depending(self, given: Iterable[Any]) -> set[Any]:
        """Collect the variables that depend on some of the inputs."""
        return depending(self._eqns, given)

    def slice(self, outputs: Sequence[Any], stop: Callable[[Any], bool]) -> Slice:
        """Collect what outputs need, back to inputs and to variables at which to stop."""
        needed: set[int] = set()
        inputs: dict[Any, None] = {}
        todo = variables(outputs)
        while todo:
            var = todo.pop()
            if var not in self._made or stop(var):
                inputs[var] = None
            elif (number := self._made[var]) not in needed:
                needed.add(number)
                eqn = self._eqns[number]
                todo += variables(eqn.invars)
        return Slice(tuple(inputs), tuple(self._eqns[n] for n in sorted(needed)), tuple(outputs))

    def maker(self, var: Any) -> Any:
        """Return the equation that makes a variable; None for an input."""
        return self._eqns[self._made[var]] if var in self._made else None

    def is_scalar(self, var: Any) -> bool:
        """Whether an equation makes this variable, of one element."""
        return var in self._made and num_elements(var.aval.shape) == 1


def is_fill(eqn: Any) -> bool:
    """Whether an equation fills an array with one number."""
    return eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape


def _inline(eqn: Any, values: list[Any]) -> list[Any]:
    """Run an equation; of a call, what it holds."""
    inner = None if eqn.primitive.name == "shard_map" else called(eqn)
    return bind(eqn, values) if inner is None else run(inner, values, _inline)
