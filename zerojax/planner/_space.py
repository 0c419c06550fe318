"""What a search goes through, and what it was asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from zerojax._types import PyTree
from zerojax.layout import MIN_SIZE, Rule
from zerojax.planner._workload import Model
from zerojax.planner.hardware import Hardware
from zerojax.recipe import OffloadPolicy, Recipe, Remat, RematPolicy, as_remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """Choose what a search goes through.

    Attributes:
        stages: ZeRO stages.
        num_shards: sizes of the shard group; None is all devices, and those of a node or slice.
        model_axes: sizes of the model axis; None is 1, 2, 4, ... up to a node's devices.
        remats: what is computed again; None is all that the model knows.
        offloads: what the host keeps; None is nothing, optimizer and masters, and activations too.
        specs, rules, min_size: as for `Placement`.

    Raises:
        ValueError: a list that names nothing.
    """

    stages: Sequence[int] = (0, 1, 2, 3)
    num_shards: Sequence[int] | None = None
    model_axes: Sequence[int] | None = None
    remats: Sequence[RematPolicy | Remat | None] | None = None
    offloads: Sequence[OffloadPolicy | None] | None = None
    specs: PyTree = None
    rules: Sequence[Rule] = ()
    min_size: int = MIN_SIZE

    def __post_init__(self) -> None:
        for name in ("stages", "num_shards", "model_axes", "remats", "offloads"):
            given = getattr(self, name)
            if given is None and name != "stages":
                continue
            if isinstance(given, str) or not isinstance(given, Collection) or not len(given):
                raise ValueError(
                    f"Space.{name} lists what is tried, at least one, got {given!r}; leave it out "
                    "to try all"
                )

    def check_against(self, recipe: Recipe) -> None:
        """Refuse a space that leaves out what the recipe chooses."""
        remats = [as_remat(one) for one in self.remats or ()]
        for name, tried in (("remat", remats), ("offload", self.offloads or ())):
            chosen = getattr(recipe, name)
            if chosen is not None and tried and chosen not in tried:
                raise ValueError(
                    f"Recipe.{name} is {chosen!r}, and Space.{name}s leaves it out: "
                    f"{tuple(tried)}; leave one of the two out"
                )


@dataclasses.dataclass(frozen=True, eq=False)
class SearchRequest:
    """What a search was asked, as `search_plans` takes it; `memory_limit` is bytes per device."""

    model: Model
    num_devices: int
    hardware: Hardware
    memory_limit: float
    space: Space
