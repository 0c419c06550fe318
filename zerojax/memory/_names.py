"""Layers of a traced function, what is carried from one to the next, and the names inside."""

import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

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


def check_names(jaxpr: Any, wanted: Sequence[str]) -> None:
    """Refuse names that a function does not have; the message lists those that it has."""
    there = {LAYER_INPUT, *_names(jaxpr)} if wanted else set()
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


def _names(jaxpr: Any) -> Iterator[str]:
    """Yield the names that `jax.ad_checkpoint.checkpoint_name` gave to values."""
    for eqn in opened(jaxpr)[0].eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        inner = called(eqn)
        for program in bodies(eqn) if inner is None else [inner]:
            yield from _names(program)
