"""What an optimizer that needs whole matrices asks of a device beside its states' traffic.

Its update is traced on the mesh of the plan, where matrices go to devices that own them
(`optim/whole/`), and the equations of one device are counted.

Example: an all-to-all of fp32 [8, 1000] over 8 devices moves 7,000 elements, 28,000 bytes. Of a
cond that gives owners different matrices the branch with the most products counts: the busiest.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from zerojax._jaxpr import num_products, opened
from zerojax._traced import run_update
from zerojax._tree import as_shapes
from zerojax._types import Axes
from zerojax.layout import Layout
from zerojax.optim import sharded
from zerojax.optim.whole import has_matrices
from zerojax.recipe import Recipe


class Matrices(NamedTuple):
    elements: Mapping[Axes, float] = {}  # by mesh axes
    num_bytes: Mapping[Axes, float] = {}  # the same in bytes
    flops: float = 0.0  # of products
    is_wide: bool = False  # whether these are in fp32 or wider


def multiplies(tx: optax.GradientTransformation, params: Any) -> bool:
    try:
        return has_matrices(jax.make_jaxpr(_update(tx))(params).eqns)
    except (TypeError, ValueError):  # it asks for functions of the loss, which a plan does not have
        return False


def matrices_of(tx: optax.GradientTransformation, layout: Layout, recipe: Recipe) -> Matrices:
    """Count what an update that `multiplies` moves and multiplies on a device."""
    params = as_shapes(layout.shapes, recipe.precision.updated)
    elements: dict[Axes, float] = {}
    num_bytes: dict[Axes, float] = {}
    flops, is_wide = 0.0, False
    for times, eqn in _equations(jax.make_jaxpr(_update(sharded(tx, layout)))(params).jaxpr):
        if count := num_products(eqn):
            flops += 2 * times * count
            is_wide |= eqn.invars[0].aval.dtype.itemsize >= 4
        if eqn.primitive.name == "all_to_all":
            axes, sent = eqn.params["axis_name"], eqn.invars[0].aval
            moved = times * sent.size * (1 - 1 / layout.num_parts(axes))
            elements[axes] = elements.get(axes, 0.0) + moved
            num_bytes[axes] = num_bytes.get(axes, 0.0) + moved * sent.dtype.itemsize
    return Matrices(elements, num_bytes, flops, is_wide)


def _update(tx: optax.GradientTransformation) -> Any:
    given = optax.with_extra_args_support(tx)
    return lambda params: run_update(given, params, tx.init(params), params, jnp.zeros(()))


def _equations(jaxpr: Any, times: float = 1.0) -> Iterator[tuple[float, Any]]:
    for eqn in jaxpr.eqns:
        yield times, eqn
        inside = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        held = (opened(program)[0] for program in core.jaxprs_in_params(eqn.params))
        programs = [list(_equations(program, inside)) for program in held]
        if eqn.primitive.name == "cond":
            programs = [max(programs, key=lambda p: sum(n * num_products(eqn) for n, eqn in p))]
        for program in programs:
            yield from program
