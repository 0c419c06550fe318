"""The ZeRO stages as a table: which kinds of tensor each of them partitions.

Source: arXiv 1910.02054, section 5 (Pos, Pos+g, Pos+g+p).
"""

from types import MappingProxyType

from zerojax._types import Kind

#: Kinds that are partitioned over the axis, per stage; every other kind is whole on each device.
STAGES: MappingProxyType[int, frozenset[Kind]] = MappingProxyType(
    {
        0: frozenset(),
        1: frozenset({"optimizer", "master"}),
        2: frozenset({"optimizer", "master", "gradient"}),
        3: frozenset({"optimizer", "master", "gradient", "parameter"}),
    }
)
#: What a leaf of an optimizer's state is cut for.
STATES: frozenset[Kind] = frozenset({"optimizer"})


def check_stage(stage: int) -> int:
    """Return the stage, or raise a ValueError that names the stages there are."""
    if isinstance(stage, bool) or stage not in list(STAGES):
        raise ValueError(
            f"stage must be one of {sorted(STAGES)}, got {stage!r}: "
            "0 replicates, 1 partitions optimizer states, 2 also gradients, 3 also parameters"
        )
    return int(stage)
