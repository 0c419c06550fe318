"""Which leading dims of a leaf count layers, as its shape and its neighbours' tell.

A model that scans over its layers stacks their weights along a leading dim. Cutting that dim would
give whole layers to single devices: a layer's gradient would be reduced to one owner instead of
being reduce-scattered, and its weights broadcast from one instead of gathered from all.
"""

from collections.abc import Mapping, Sequence

from zerojax._types import Shape


def stacked_from_shapes(shapes: Mapping[str, Shape]) -> list[int]:
    """Count the leading layer dims of each leaf, 0 or 1, from shapes by path alone.

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
