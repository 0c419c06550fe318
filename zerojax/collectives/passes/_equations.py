"""The equations of a program whose calls are in place, and what a pass plants among them.

A pass over a differentiated program follows values back to what they are made of, and plants what
it runs beside the program's own equations or in their place. Of

    b = mul w 2.0; c = GATHER b; d = dot_general h c

the path to `b` is `b`, `w`; before the product `_order` plants a barrier that hands on `h` and `c`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from zerojax._jaxpr import bind, inputs_of, is_variable, opened, run_equations, variables
from zerojax._tree import num_bytes
from zerojax.collectives.gathers import makes_gathered

#: The name of what a backward loop starts with.
BACKWARD = "zerojax_backward"


class Planted(NamedTuple):
    run: Callable[[list[Any]], Sequence[Any]]  # takes the values of `invars` to those of `outvars`
    invars: Sequence[Any]
    outvars: Sequence[Any]
    source_info: Any


class Equations:
    """The equations of a program, by their places in it and by what they make."""

    def __init__(self, program: Any) -> None:
        self.program, (self.jaxpr, _) = program, opened(program)
        self.eqns = self.jaxpr.eqns
        self.places = {var: at for at, eqn in enumerate(self.eqns) for var in eqn.outvars}

    def path_to(self, var: Any) -> tuple[list[Any], Any]:
        """Return the values that one is made of, one from the next, and a key of them.

        The key is the first value with what is done to it, and the places of the barriers on the
        way. `([], None)` for what is made of a gathered weight.
        """
        path, steps, barriers = [var], [], []
        while (at := self.places.get(path[-1])) is not None:
            eqn = self.eqns[at]
            if is_gather(eqn):  # copies of a gathered weight
                return [], None
            inputs = variables(eqn.invars)
            if is_barrier(eqn):
                inputs = [eqn.invars[eqn.outvars.index(path[-1])]]
                barriers.append(at)
            elif len(inputs) != 1:
                break
            else:
                # `mul w 0.5` and `mul w 2.0` differ in a literal, both results of a split in which
                given = [None if is_variable(x) else str(x) for x in eqn.invars]
                steps.append((eqn.primitive, str(eqn.params), *given, eqn.outvars.index(path[-1])))
            path += inputs
        return path, ((path[-1], *steps), (*barriers,))

    def maker(self, var: Any, is_it: Callable[[Any], Any]) -> Any:
        """Return the last equation of a kind on the path to a value; None without one."""
        path, _ = self.path_to(var)
        eqns = (self.eqns[self.places[x]] for x in path if x in self.places)
        return next(filter(is_it, eqns), None)

    def run(self, args: Sequence[Any], eqns: Sequence[Any]) -> list[Any]:
        def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
            return eqn.run(values) if isinstance(eqn, Planted) else bind(eqn, values)

        return run_equations(eqns, inputs_of(self.program, args), self.jaxpr.outvars, step)


def is_gather(eqn: Any) -> bool:
    return makes_gathered(eqn.primitive.name, eqn.params)


def is_barrier(eqn: Any) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def is_named(eqn: Any, name: str) -> bool:
    """Whether an equation gives its result a name: `REDUCED`, a gradient that has been reduced."""
    return eqn.primitive.name == "name" and eqn.params["name"] == name


def bytes_of(found: Iterable[Any]) -> int:
    return sum(num_bytes(var.aval.shape, var.aval.dtype) for var in variables(found))
