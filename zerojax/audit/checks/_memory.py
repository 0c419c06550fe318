"""Checks of what loops carry whole: sums and stacks of gradients."""

from collections import Counter
from collections.abc import Iterator

from zerojax._types import Shape
from zerojax.audit._arguments import shard_of
from zerojax.audit._evidence import SHARE, Evidence, Problem, hint
from zerojax.audit._match import Key, key_of
from zerojax.hlo import Carry


def check_accumulator(evidence: Evidence) -> Iterator[Problem]:
    """Check that no loop carries whole gradients where the stage partitions them.

    A loop over microbatches carries the sum of their gradients, one over layers the stack of
    theirs. Of a gradient [512, 64] that 8 devices cut by rows, both should hold [64, 64]. The
    sums of a backward pass are of weights that all turns use: whole as long as those of any layer.
    """
    if not evidence.layout.partitions("gradient"):
        return
    found = [
        (index, carry)
        for index, carry in whole_carries(evidence)
        if carry.is_sum != ("transpose(" in carry.op_name) and carry.written != "all-gather"
    ]
    elements = sum(carry.tensor.elements for _, carry in found)
    if not found or elements < SHARE * evidence.partitioned_elements:
        return
    largest = max((carry for _, carry in found), key=lambda carry: carry.tensor.bytes)
    sums = [carry for _, carry in found if carry.is_sum]
    what = "a sum over microbatches" if sums else "a stack over layers"
    yield Problem(
        where=f"{evidence.paths(i for i, _ in found)}: {largest.loop} ({largest.op_name})",
        expected=f"shards of gradients, 1 / {evidence.layout.num_shards} of each on a device, as "
        f"stage {evidence.layout.stage} has them",
        seen=f"{what} holds whole gradients on every device: "
        f"{sum(carry.tensor.bytes for _, carry in found):,} B in {len(found)} tensor(s)",
        remedy=_accumulator_remedy(evidence),
    )


def whole_carries(evidence: Evidence) -> list[tuple[int, Carry]]:
    """List what loops carry that looks like a partitioned leaf made whole, with the leaf's index.

    A shard of one leaf can look like another leaf: so many of them are left out.
    """
    layout = evidence.layout
    leaves: dict[Key, int] = {}
    shards: Counter[Key] = Counter()
    for index, leaf in enumerate(layout.leaves):
        shards[key_of(shard_of(leaf, leaf.stored_shape, layout, "gradient"))] += 1
        for shape in (leaf.shape, leaf.stored_shape) if leaf.dim is not None else ():
            leaves[key_of(layout.local_shape(leaf, shape))] = index
    found: dict[tuple[str, Key], list[Carry]] = {}
    for carry in evidence.carries:
        key: Shape = key_of(carry.tensor.dims)
        is_float = carry.tensor.dtype.startswith(("f", "bf"))
        if is_float and key in leaves and carry.tensor.elements >= evidence.floor:
            found.setdefault((carry.loop, key), []).append(carry)
    return [
        (leaves[key], carry)
        for (_, key), carries in found.items()
        for carry in carries[: max(len(carries) - shards[key], 0)]
    ]


def _accumulator_remedy(evidence: Evidence) -> str:
    layout, recipe = evidence.layout, evidence.recipe
    if recipe.reduction(layout.kinds) == "once":
        return "Recipe(reduce='each') sums into shards; a whole sum is the memory of stage 1"
    return (
        "constrain the gradients to layout.grads within the loop, where they are made, and start "
        f"the sum from shards{hint(evidence, 'make_train_step', 'gather_where_used')}"
    )
