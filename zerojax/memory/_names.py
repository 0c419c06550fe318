"""Layers of a traced function, what is carried from one to the next, and the names inside."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from zerojax._jaxpr import (
    CALLS,
    LOOPS,
    OPAQUE,
    PLAIN_CALLS,
    REMATERIALISED,
    bodies,
    called,
    depending,
    opened,
    variables,
)
from zerojax.recipe import LAYER_INPUT


@dataclasses.dataclass(frozen=True)
class NamedValue:
    """A value that a rematerialisation policy can name.

    Attributes:
        name: as `jax.ad_checkpoint.checkpoint_name` was given it.
        shape: in one layer, in the sizes that the function was traced with.
        dtype: its dtype.
        count: how many there are: layers times occurrences.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    count: int

    @property
    def bytes(self) -> int:
        """Bytes of all of them, were they kept whole."""
        return math.prod(self.shape) * self.dtype.itemsize * self.count


def checkpoint_names(function: Callable[..., Any], *args: Any) -> tuple[NamedValue, ...]:
    """List the values of a function that `RematPolicy(keep=, offload=)` can name.

    Args:
        function: of arrays; nothing is run.
        *args: arrays or shapes.

    Returns:
        A row per name, shape and dtype, in the order of the program. A layer's input has the name
        "layer_input" besides.
    """
    found: Counter[tuple[str, tuple[int, ...], Any]] = Counter()
    for name, aval, count in _walk(jax.make_jaxpr(function)(*args), 1):
        found[name, tuple(aval.shape), aval.dtype] += count
    return tuple(NamedValue(*key, count) for key, count in found.items())


def check_names(jaxpr: Any, wanted: Sequence[str]) -> None:
    """Refuse names that a function does not have; the message lists those that it has."""
    there = {LAYER_INPUT, *(name for name, _, _ in _walk(jaxpr, 1))} if wanted else set()
    for name in wanted:
        if name not in there:
            known = difflib.get_close_matches(name, sorted(there), n=len(there), cutoff=0)
            raise ValueError(
                f"RematPolicy: no value of the function has the name {name!r}; names, nearest "
                f"first: {', '.join(known)}; jax.ad_checkpoint.checkpoint_name gives one its name"
            )


def has_layers(program: Any) -> bool:
    """Whether a function has layers that a policy can be applied to."""
    return any(
        eqn.primitive.name in (REMATERIALISED, "scan")
        or (eqn.primitive.name in PLAIN_CALLS and has_layers(called(eqn)))
        for eqn in opened(program)[0].eqns
    )


def works_outside(program: Any) -> bool:
    """Whether some product or loop lies in no rematerialised call."""
    return any(
        eqn.primitive.name in OPAQUE
        or eqn.primitive.name in LOOPS
        or (eqn.primitive.name in CALLS.keys() - {REMATERIALISED} and works_outside(called(eqn)))
        for eqn in opened(program)[0].eqns
    )


def carries(body: Any, moving: Sequence[bool], num_consts: int, num_carry: int) -> list[bool]:
    """Return which inputs of a scan's body are activations that it carries on.

    Of `{ lambda w h i s. h2 = dot_general h w; i2 = add i 1 in (h2, i2) }` with w constant, h and i
    carried and s sliced, where h comes from the batch: (False, True, False, False). `moving` says
    which inputs come from activations; constants are first among them, then what is carried.
    """
    jaxpr = opened(body)[0]
    flags, before = list(moving), -1
    while sum(flags) != before:
        before = sum(flags)
        moves = depending(jaxpr.eqns, itertools.compress(jaxpr.invars, flags))
        for number, var in enumerate(jaxpr.outvars[:num_carry]):
            if not moves.isdisjoint(variables([var])):
                flags[num_consts + number] = True
    last = num_consts + num_carry
    return [num_consts <= number < last and flag for number, flag in enumerate(flags)]


def _walk(jaxpr: Any, count: int) -> Iterator[tuple[str, Any, int]]:
    """Return each named value's name and shape, and how often it is computed."""
    for eqn in opened(jaxpr)[0].eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"], eqn.outvars[0].aval, count
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = called(eqn)
        for program in bodies(eqn) if inner is None else [inner]:
            yield from _walk(program, count * times)
