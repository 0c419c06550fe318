"""The slice of a torus: its shape, and how mesh axes lie along its dims."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from zerojax.layout import DIMS, Digit
from zerojax.planner.hardware._hardware import Hardware


@functools.lru_cache(maxsize=4096)
def torus_shape(hardware: Hardware, num_devices: int) -> tuple[int, ...]:
    """Return the slice of a torus that one would rent for so many devices, at most a domain's.

    It is the one on the hardware's list; where none has so many chips, the one whose dims together
    are widest (a line counts half a ring) and, of these, nearest to a cube. An odd number of
    devices takes one of each chip.

    Returns:
        Chips along each dim; empty for hardware without a torus.
    """
    if not hardware.torus:
        return ()
    num_chips = num_devices // math.gcd(num_devices, hardware.devices_per_chip)
    for name in hardware.slices:
        listed = tuple(int(dim) for dim in name.split("x"))
        if math.prod(listed) == num_chips:
            return listed

    def rank(shape: tuple[int, ...]) -> tuple[float, int]:
        width = sum(0.5 if dim % hardware.wrap else 1.0 for dim in shape if dim > 1)
        return -width, sum(shape)

    return min(_factorizations(num_chips, hardware.torus), key=rank)


def lay_axes(shape: Sequence[int], axes: Mapping[str, int]) -> dict[str, tuple[Digit, ...]]:
    """Place mesh axes along the dims of a torus: on whole dims where that works, else on parts.

    `zerojax.make_mesh` and `jax.experimental.mesh_utils.create_device_mesh` do nearly the same.

    Example: on 4 x 4 x 4 chips, {"data": 16, "model": 4} takes whole dims: data x and y, model z.
    On 4 x 4 chips, {"data": 8, "model": 2} takes parts: model pairs of neighbours along x, data
    every second chip along x, and y.

    `shape` is chips along each dim, and devices of a chip; the product of `axes`, major first, is
    that of `shape`. Digits come back major first.
    """
    found = _lay_whole(shape, axes)
    return found if found is not None else _lay_parts(shape, axes)


def _factorizations(number: int, num_factors: int) -> list[tuple[int, ...]]:
    """List the ways to write a number as a product, factors in rising order."""
    if num_factors == 1:
        return [(number,)]
    return [
        (factor, *rest)
        for factor in range(1, math.isqrt(number) + 1)
        if number % factor == 0
        for rest in _factorizations(number // factor, num_factors - 1)
        if rest[0] >= factor
    ]


def _lay_whole(
    shape: Sequence[int], axes: Mapping[str, int]
) -> dict[str, tuple[Digit, ...]] | None:
    """Assign each axis whole dims, minor axes first and as many dims as possible."""
    free = [dim for dim in reversed(range(len(shape))) if shape[dim] > 1]
    found: dict[str, tuple[Digit, ...]] = {}
    for axis, size in reversed(list(axes.items())):
        choices = (
            dims
            for count in range(len(free), -1, -1)
            for dims in itertools.combinations(free, count)
            if math.prod(shape[dim] for dim in dims) == size
        )
        dims = next(choices, None)
        if dims is None:
            return None
        free = [dim for dim in free if dim not in dims]
        names = _names(shape)
        found[axis] = tuple(Digit(axis, names[dim], shape[dim], 1) for dim in sorted(dims))
    return {axis: found[axis] for axis in axes}


def _names(shape: Sequence[int]) -> tuple[str, ...]:
    return (*DIMS[: len(shape) - 1], DIMS[-1])


def _lay_parts(shape: Sequence[int], axes: Mapping[str, int]) -> dict[str, tuple[Digit, ...]]:
    """Assign each axis what divides it of what is left of each dim, minor axes first.

    The devices of a chip (the last dim) go first, then dims from the first on, as jax has it.
    """
    taken = [1] * len(shape)
    found: dict[str, tuple[Digit, ...]] = {}
    for axis, size in reversed(list(axes.items())):
        pieces, left = [], size
        for dim in (len(shape) - 1, *range(len(shape) - 1)):
            part = math.gcd(left, shape[dim] // taken[dim])
            if part > 1:
                pieces.append(Digit(axis, _names(shape)[dim], part, taken[dim]))
                taken[dim] *= part
                left //= part
        found[axis] = tuple(sorted(pieces, key=lambda piece: DIMS.index(piece.dim)))
    return {axis: found[axis] for axis in axes}
