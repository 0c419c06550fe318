"""One leaf's placement: which dim is cut, how far it is padded, and which count layers; rules."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jax.sharding import PartitionSpec as P

from zerojax._arguments import is_whole_number
from zerojax._tree import grouped, num_bytes
from zerojax._types import Axes, Kind, Shape

#: Axis names per dim; the form in which specs are compared and extended.
Entries = tuple[Axes, ...]


class Placed(Protocol):
    """What says how an array is cut: a `LeafLayout`, or a parameter on its way to its use."""

    @property
    def entries(self) -> Entries: ...  # the user's own mesh axes per dim

    @property
    def dim(self) -> int | None: ...  # that ZeRO cuts; None where there is none


class Cut(NamedTuple):
    """The dim of a leaf that is cut, and its size, padded where the parts do not divide it."""

    dim: int
    stored_size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LeafLayout:
    """Where one leaf lives.

    Example: `[1009, 64]` over eight devices along "data" is stored as `[1016, 64]`, in shards of
    `[127, 64]`: `dim=0, axes={"optimizer": ("data",), ...}, parts={"optimizer": 8, ...}`.
    """

    path: str  # the leaf's path, slash separated
    shape: Shape  # logical shape
    dtype: Any  # dtype of the logical leaf
    entries: Entries  # the user's own mesh axes per dim
    reason: str  # why the leaf is placed so, for people
    own_parts: int = 1  # the parts that the user's own axes cut the leaf into
    # the dim that ZeRO cuts; None where the leaf stays whole for every kind of tensor
    dim: int | None = None
    # the mesh axes that ZeRO adds to `dim`, major first, by the kinds of tensor that are cut; the
    # others have the user's axes alone
    axes: Mapping[Kind, Axes] = dataclasses.field(default_factory=dict, hash=False)
    # the parts that they cut it into, by the same kinds
    parts: Mapping[Kind, int] = dataclasses.field(default_factory=dict, hash=False)
    # the size of `dim`, padded to a multiple of all parts where that is needed
    stored_size: int = 0
    stacked: int = 0  # number of leading layer dims
    # for a leaf of an optimizer state, the index of the parameter it belongs to
    parameter: int | None = None

    def __repr__(self) -> str:
        return f"<LeafLayout: {self.path} {self.placed(self.dtype)}, {self.reason}>"

    def placed(self, dtype: Any) -> str:
        """Write dtype, dims and the axes that cut them: "bfloat16[1009+7/data, 64]" is padded."""
        name = np.dtype(dtype).name if isinstance(dtype, type) else str(dtype)
        cuts = as_entries(self.shard_spec, len(self.shape))
        dims = [
            f"{size}{f'+{stored - size}' * (stored > size)}{''.join(f'/{axis}' for axis in axes)}"
            for size, stored, axes in zip(self.shape, self.stored_shape, cuts, strict=True)
        ]
        return f"{name}[{', '.join(dims)}]"

    def spec(self, kind: Kind) -> P:
        """Return the PartitionSpec that the stored leaf of a kind of tensor has."""
        return as_spec(self.entries, self.dim, self.axes.get(kind, ()))

    @property
    def whole_spec(self) -> P:
        """The user's own spec: where the leaf lives when ZeRO does not cut it."""
        return as_spec(self.entries)

    @property
    def shard_spec(self) -> P:
        """The spec of the smallest shards, on which the optimizer computes."""
        return self.spec("optimizer")

    @property
    def num_shards(self) -> int:
        """The number of the smallest shards."""
        return self.parts.get("optimizer", 1)

    @property
    def num_sliced(self) -> int:
        """The leading dims that a loop may slice off: layer dims, or else those before `dim`.

        Of a stack `[24, 1024, 4096]` that nobody named, cut along dim 1, it is 1: a slice is cut as
        the stack is. A slice has two dims at least.
        """
        return max(self.stacked, min(self.dim or 0, len(self.shape) - 2))

    @property
    def stored_shape(self) -> Shape:
        """The logical shape, padded along `dim` where that does not divide."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.stored_size, *self.shape[self.dim + 1 :])

    @property
    def is_padded(self) -> bool:
        """Whether the stored leaf is larger than the logical one."""
        return self.stored_shape != self.shape

    def bytes_per_device(self, kind: Kind, *, stored: bool = True, dtype: Any = None) -> int:
        """Count the bytes that one device holds of the leaf, as a kind of tensor.

        A leaf that no dim divides is padded where it is `stored`, or else stays whole.
        """
        if kind in self.axes and (stored or not self.is_padded):
            held = num_bytes(self.stored_shape, self.dtype if dtype is None else dtype)
            return held // (self.own_parts * self.parts[kind])
        return self.whole_bytes(dtype)

    def whole_bytes(self, dtype: Any = None) -> int:
        """Count the bytes that one device holds of the logical leaf where ZeRO does not cut it."""
        return num_bytes(self.shape, self.dtype if dtype is None else dtype) // self.own_parts


def as_entries(spec: P | None, ndim: int) -> Entries:
    """Return one tuple of axis names per dim for a PartitionSpec: `P("a")` is `(("a",), ())`."""
    given = [] if spec is None else list(spec)
    if len(given) > ndim:
        raise ValueError(f"{spec} has {len(given)} entries for {ndim} dims")
    if any(entry is P.UNCONSTRAINED for entry in given):
        raise ValueError(f"{spec} leaves a dim unconstrained; name its axes or None")
    as_axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in given]
    return tuple(as_axes) + ((),) * (ndim - len(given))


def as_spec(entries: Entries, dim: int | None = None, axes: Iterable[str] = ()) -> P:
    """Return the PartitionSpec of axis names per dim, `axes` added to one as the minor ones."""
    full = [(*names, *axes) if d == dim else names for d, names in enumerate(entries)]
    given: list[Any] = [None if not e else e[0] if len(e) == 1 else e for e in full]
    while given and given[-1] is None:
        given.pop()
    return P(*given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Override the placement of the leaves whose path matches.

    Attributes:
        path: regular expression, searched in the leaf's path ("blocks/.*/kernel"); rules are
            tried in order. Of those that match a leaf, the first that names layer dims decides on
            them, and the first with `dim` or `whole` decides how the leaf is cut.
        kind: what the path is of: a "parameter", whose gradient, master and optimizer leaves follow
            it, or a leaf of the "optimizer"'s state ("0/mu/blocks/kernel").
        stacked: number of leading layer dims, as a model that scans over layers has them; these
            dims are never partitioned.
        dim: the dim to partition; it is padded where it does not divide.
        whole: keep the leaf whole on every device.

    Raises:
        ValueError: a field that can't be meant, or a rule that says nothing.
    """

    path: str
    kind: Literal["parameter", "optimizer"] = "parameter"
    stacked: int | None = None
    dim: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.path)
        except (re.error, TypeError) as error:
            self._refuse("path is a regular expression such as 'blocks/.*/kernel'", str(error))
        if self.kind not in ("parameter", "optimizer"):
            self._refuse("kind is 'parameter' or 'optimizer'", repr(self.kind))
        for name in ("stacked", "dim"):
            number = getattr(self, name)
            if number is not None and not is_whole_number(number):
                self._refuse(f"{name} is a whole number", repr(number))
        if self.stacked is not None and self.stacked < 0:
            self._refuse("stacked counts leading layer dims", repr(self.stacked))
        if not isinstance(self.whole, bool):
            self._refuse("whole is True or False", repr(self.whole))
        if self.whole and self.dim is not None:
            self._refuse("one of dim and whole is meant", f"dim={self.dim} and whole=True")
        if self.stacked is None and self.dim is None and not self.whole:
            self._refuse("one of stacked, dim and whole is needed", "none")

    def _refuse(self, expected: str, found: str) -> None:
        raise ValueError(f"Rule(path={self.path!r}): {expected}, got {found}")

    def matches(self, path: str) -> bool:
        """Return whether the rule is for the leaf with this path."""
        return re.search(self.path, path) is not None

    def dim_of(self, path: str, shape: Shape, stacked: int = 0) -> int | None:
        """Return the dim that the rule asks for, from the front.

        A ValueError where the leaf has none, or where it is one of the layer dims of a rule.
        """
        if self.dim is None:
            return None
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"{self} asks for a dim that leaf {path!r} {shape} does not have")
        if (dim := self.dim % len(shape)) < stacked:
            told = f"that of leaf {path!r} {shape} is among the {stacked} that rules stack"
            self._refuse("dim stands behind the stacked ones", f"{self.dim}: {told}")
        return dim

    def stacked_of(self, path: str, shape: Shape) -> int:
        """Return the number of a leaf's layer dims; raises as `dim_of` does."""
        if (found := self.stacked or 0) > len(shape):
            raise ValueError(f"{self} asks for a dim that leaf {path!r} {shape} does not have")
        return found


#: Padding is worth it where a shard is at most half of the leaf; with two shards, three quarters.
MOST_OF_TWO = 1.5


@lru_cache(maxsize=4096)
def choose_cut(
    shape: Shape,
    dim_parts: Shape,
    num_shards: int,
    *,
    min_size: int,
    stacked: int = 0,
    wanted: int | None = None,
    in_steps: bool = False,
) -> tuple[Cut | None, str]:
    """Choose the dim of a leaf that is cut into `num_shards`.

    Layer dims never are: cutting them turns a layer's reduce-scatter into a reduce to one owner.
    The minor dim is the last choice: a gather along it makes a GPU transpose. Of the others the
    longest that divides is cut. A leading dim that counts layers or experts is seldom the longest,
    so that stacks are cut within a layer even where nobody names them: of `[24, 1024, 4096]`
    dim 1. Where no dim divides, the one that wastes least is padded: `[1009, 3]` over 8 becomes
    `[1016, 3]` (+0.7%), and `[5, 3]` over 8 stays whole.

    The user's own axes cut dims into `dim_parts`. Where gradients are reduced `in_steps`, along
    one axis and then another, dims that the user cuts come last: the partitioner would sum whole
    gradients over both axes. Leaves of fewer elements than `min_size` stay whole, and a rule may
    ask for the dim `wanted`. Returns the cut, None for a whole leaf, and why.
    """
    if num_shards == 1:
        return None, "whole: there is one shard"
    if wanted is None and math.prod(shape) < min_size:
        size = math.prod(shape)
        return None, f"whole: {size} element{'' if size == 1 else 's'}, min_size {min_size}"
    layers = f", after {stacked} layer dim{'s' if stacked > 1 else ''}" if stacked else ""
    most = max(num_shards / 2, MOST_OF_TWO)
    minor = len(shape) - 1
    order = {d: (in_steps and dim_parts[d] > 1, d == minor, -shape[d]) for d in range(len(shape))}
    dims = sorted(range(stacked, len(shape)), key=order.__getitem__)
    stored = {}
    for dim in dims if wanted is None else (wanted,):
        unit = num_shards * dim_parts[dim]
        size = -(-shape[dim] // unit) * unit
        if 0 < size <= most * shape[dim]:
            stored[dim] = size
    if not stored:
        return None, f"whole: no dim is long enough for {num_shards} shards{layers}"
    dim = min(stored, key=lambda d: stored[d] / shape[d])  # of equals the first
    cut = Cut(dim, stored[dim])
    if cut.stored_size == shape[dim]:
        return cut, f"dim {dim}: {'divides' if wanted is None else 'as a rule says'}{layers}"
    more = cut.stored_size / shape[dim] - 1
    return cut, f"dim {dim}: padded {shape[dim]} to {cut.stored_size} (+{more:.2%}){layers}"


def stacked_from_shapes(shapes: Mapping[str, Shape]) -> list[int]:
    """Count the leading layer dims of each leaf, 0 or 1, from shapes by path alone.

    A model that scans over its layers stacks their weights along a leading dim.

    A subtree counts as stacked when all of its leaves share their leading size and vectors as well
    as matrices are among them, as in a stack of layers with norms or biases: `[L, D]` beside
    `[L, D, F]`. An unstacked layer does not look so, because its own vectors have one dim.
    """
    # Of `a/b/c` the subtrees `a` and `a/b`.
    names = {path: [*accumulate(path.split("/")[:-1], "{}/{}".format)] for path in shapes}
    pairs = [(subtree, shapes[path]) for path in shapes for subtree in names[path]]
    below = grouped(pairs, lambda pair: pair[0])
    stacks = {subtree for subtree, held in below.items() if _is_stack([x for _, x in held])}
    return [int(not stacks.isdisjoint(names[path])) for path in shapes]


def _is_stack(shapes: Sequence[Shape]) -> bool:
    ndims = [len(shape) for shape in shapes]
    return min(ndims) == 2 < max(ndims) and len({shape[0] for shape in shapes}) == 1 < shapes[0][0]
