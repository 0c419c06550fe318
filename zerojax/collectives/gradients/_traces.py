"""Traces of a loss for numbers of examples, and what differs between them."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src.core import extend_axis_env_nd
from jax.extend import core, source_info_util

from zerojax import _examples
from zerojax._jaxpr import has_inside, is_real, is_variable, used, with_inner
from zerojax._primitives import primitives
from zerojax._types import PyTree

#: Parameters that give the shape of a result, and that say where one is cut out.
_SHAPES = {"new_sizes", "reps", "shape", "sizes", "slice_sizes"}
_ENDS = {"limit_indices", "start_indices"}
DIFFERS = "it is another program for another number of examples"


class Refused(Exception):
    """Why a value is not separable; the operation and the user's line once they are known."""

    name = where = ""

    def at(self, eqn: Any) -> "Refused":
        """Keep the equation that it was, if none is known yet."""
        self.name = self.name or eqn.primitive.name
        self.where = self.where or source_info_util.summarize(eqn.source_info)
        return self

    def __str__(self) -> str:
        operation = (self.name and f": {self.name}") + (self.where and f" at {self.where}")
        return super().__str__() + operation


def trace_loss(
    loss_fn: Any, params: PyTree, batch: PyTree, size: int, parts: int
) -> core.ClosedJaxpr:
    """Trace a loss for a number of examples; the batch has one of `parts` of the whole.

    It is traced for as many more devices: `axis_size` and `psum(1)` are plain numbers in a trace.
    """
    mesh, times = jax.sharding.get_abstract_mesh(), size / (_examples.num_examples(batch) or size)
    sizes = [(axis, int(mesh.shape[axis] * times)) for axis in mesh.manual_axes]
    try:
        with extend_axis_env_nd(sizes):
            traced = jax.make_jaxpr(loss_fn)(params, _examples.resized(batch, size), None)
    except Exception as error:
        if size == _examples.num_examples(batch):
            if parts > 1:
                error.add_note(
                    f"Under reduce='once' the loss is called with {size} examples, what a device "
                    "has of a microbatch. Recipe(reduce='each') calls it with the whole one; or "
                    "leave out a shard_map along the batch, if there is one."
                )
            raise
        raise Refused(f"it can't be traced for {size} examples: {error}") from error
    return used(traced, 1)


def varying(one: Any, two: Any) -> int | None:
    """Return the dim that counts examples: of f32[4,8] and f32[8,8] it is 0."""
    if one.aval.ndim != two.aval.ndim:
        raise Refused(DIFFERS)
    pairs = enumerate(zip(one.aval.shape, two.aval.shape, strict=True))
    found = [dim for dim, (a, b) in pairs if a != b]
    if len(found) > 1:
        raise Refused("it joins examples with each other")
    return found[0] if found else None


def check_params(eqn: Any, other: Any, dim: int | None = None, *, grows: bool = False) -> None:
    """Refuse parameters that Python chose by the number of examples, as in `w ** len(x)`.

    Of examples shapes grow, and so do the ends of a slice along `dim`, which counts them.
    """
    for name, one in eqn.params.items():
        two = other.params[name]
        if not (_is_plain(one) and _is_plain(two)) or repr(one) == repr(two):  # nan is not nan
            continue
        if grows and name in _ENDS:
            is_size = {n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a != b} == {dim}
        else:
            is_size = grows and name in _SHAPES
        if not is_size:
            raise Refused("it computes with the number of examples")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | complex | str | np.dtype | None)


def differs_alone(*traces: core.ClosedJaxpr) -> Refused | None:
    """Return where the trace for one example computes something else than those for 2 and 4."""
    skipped = primitives("same", "places", "moves")  # which differ for one example

    def computed(traced: core.ClosedJaxpr) -> Iterator[tuple[Any, int, list[Any]]]:
        for eqn in itertools.chain.from_iterable(map(with_inner, traced.eqns)):
            if not has_inside(eqn) and eqn.primitive.name not in skipped:
                numbers = [complex(x.val) for x in eqn.invars if not is_variable(x)]
                numbers.append(eqn.params.get("y", 0))  # of integer_pow
                yield from ((eqn, x.aval.size, numbers) for x in eqn.outvars if is_real(x))

    turns = itertools.zip_longest(*map(computed, traces), fillvalue=(None, 0, []))
    for (eqn, size, few), (other, double, some), (_, four, many) in turns:
        names = {x and x.primitive.name for x in (eqn, other)}
        numbers = zip(few, some, many, strict=False)  # powers of how many examples there are
        grows = all(np.isclose(x * z, y * y, rtol=1e-3, equal_nan=True) for x, y, z in numbers)
        sizes = (double, four)  # of one example in `x.squeeze().sum(0)` that is a sum over classes
        is_like = sizes in ((size, size), (2 * size, 4 * size))
        if len(names) > 1 or not (is_like and grows):
            return Refused("it is another program for a single example").at(eqn or other)
    return None
