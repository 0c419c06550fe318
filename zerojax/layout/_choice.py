"""Which dim of a leaf is partitioned, how far it is padded, and which dims count layers."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from zerojax._tree import num_elements
from zerojax._types import Shape
from zerojax.layout._leaf import Cut

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
) -> tuple[Cut | None, str]:
    """Choose the dim of a leaf that is cut into `num_shards`.

    Layer dims never are: cutting them turns a layer's reduce-scatter into a reduce to one owner.
    The minor dim is the last choice: a gather along it makes a GPU transpose. Of the others the
    longest that divides is cut. A leading dim that counts layers or experts is seldom the longest,
    so that stacks are cut within a layer even where nobody names them: of `[24, 1024, 4096]`
    dim 1. Where no dim divides, the one that wastes least is padded: `[1009, 3]` over 8 becomes
    `[1016, 3]` (+0.7%), and `[5, 3]` over 8 stays whole.

    Args:
        shape: logical shape.
        dim_parts: parts that the user's own axes cut each dim into.
        num_shards: the parts that the leaf is cut into.
        min_size: leaves with fewer elements stay whole.
        stacked: number of leading layer dims.
        wanted: the dim that a rule asks for.

    Returns:
        The cut, None where the leaf stays whole, and the reason.
    """
    if num_shards == 1:
        return None, "whole: there is one shard"
    if wanted is None and num_elements(shape) < min_size:
        return None, f"whole: {num_elements(shape)} elements, min_size {min_size}"
    layers = f", after {stacked} layer dim{'s' if stacked > 1 else ''}" if stacked else ""
    most = max(num_shards / 2, MOST_OF_TWO)
    minor = len(shape) - 1
    dims = sorted(range(stacked, len(shape)), key=lambda dim: (dim == minor, -shape[dim]))
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

    A model that scans over its layers stacks their weights along a leading dim. Cutting that dim
    would give whole layers to single devices: a layer's gradient would be reduced to one owner
    instead of being reduce-scattered, and its weights broadcast from one.

    A subtree counts as stacked when all of its leaves share their leading size and vectors as well
    as matrices are among them, as in a stack of layers with norms or biases: `[L, D]` beside
    `[L, D, F]`. An unstacked layer does not look so, because its own vectors have one dim.
    """
    below: dict[str, list[Shape]] = {}
    for path, shape in shapes.items():
        for subtree in _subtrees(path):
            below.setdefault(subtree, []).append(shape)
    stacks = {subtree for subtree, found in below.items() if _is_stack(found)}
    return [int(not stacks.isdisjoint(_subtrees(path))) for path in shapes]


def _subtrees(path: str) -> list[str]:
    """Name the subtrees that a leaf is in: `a` and `a/b` of `a/b/c`."""
    names = path.split("/")
    return ["/".join(names[:count]) for count in range(1, len(names))]


def _is_stack(shapes: Sequence[Shape]) -> bool:
    ndims = [len(shape) for shape in shapes]
    if min(ndims) != 2 or max(ndims) == 2:
        return False
    sizes = {shape[0] for shape in shapes}
    return len(sizes) == 1 and max(sizes) > 1
