"""What a search goes through, what it was asked, and what it found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, make_table
from zerojax._types import PyTree
from zerojax.layout import MIN_SIZE, Rule
from zerojax.planner._report import Plan
from zerojax.planner._workload import Model
from zerojax.planner.hardware import Hardware
from zerojax.recipe import OffloadPolicy, Recipe, Remat, RematPolicy, as_remat

#: Rows that a table shows.
_ROWS = 12


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


@dataclasses.dataclass(frozen=True)
class Verified:
    """What a compiler said of a choice."""

    peak: int | None  # bytes of a device that the compiled step takes; None if it was not compiled
    note: str  # the audit's verdict, or why there is none


@dataclasses.dataclass(frozen=True, repr=False)
class Choices(Shown):
    """Plans that fit, fastest first: one for each family, with its fastest microbatch."""

    plans: tuple[Plan, ...]  # the choices
    tried: tuple[Plan, ...]  # all that was planned, microbatches that were not chosen included
    #: of each family that no microbatch makes fit its smallest plan, the nearest first
    rejected: tuple[Plan, ...]
    asked: SearchRequest  # what was searched for
    #: what the compiler said, by the index of the choice
    verified: dict[int, Verified] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, rank: int) -> Plan:
        """Return a choice by its rank."""
        return self.plans[rank]

    def __iter__(self) -> Iterator[Plan]:
        """Go through the choices, fastest first."""
        return iter(self.plans)

    @property
    def limit(self) -> float:
        """Bytes per device that a step may take."""
        return self.asked.memory_limit

    @property
    def pareto(self) -> tuple[Plan, ...]:
        """Plans than which none is both faster and smaller, fastest first; all fit the limit."""
        front: list[Plan] = []
        fitting = [plan for plan in self.tried if plan.bytes.total <= self.limit]
        for plan in sorted(fitting, key=lambda plan: (plan.step_time, plan.bytes.total)):
            if not front or plan.bytes.total < front[-1].bytes.total:
                front.append(plan)
        return tuple(front)

    @property
    def refusals(self) -> list[str]:
        """What each rejected family would have needed, in a line."""
        limit = gigabytes(self.limit)
        return [
            f"stage {one.stage}, {one.ways}: needs {gigabytes(one.bytes.total)} of {limit}"
            for one in self.rejected
        ]

    def to_json(self) -> str:
        """Write choices, front and rejected families as JSON."""
        data = {
            "limit": self.limit,
            "choices": [plan.to_dict() for plan in self.plans],
            "pareto": [plan.to_dict() for plan in self.pareto],
            "rejected": self.refusals,
            "verified": {number: dataclasses.asdict(one) for number, one in self.verified.items()},
        }
        return json.dumps(data, indent=2)

    @property
    def _summary(self) -> str:
        return f"{len(self)} plans fit {gigabytes(self.limit)}, the fastest: {self[0]._summary}"

    def _parts(self) -> Iterator[Text | Table]:
        yield self._table(f"fastest of {len(self)} that fit {gigabytes(self.limit)}", self.plans)
        yield self._table("none is both faster and smaller", self.pareto, verified=False)
        for number, one in self.verified.items():
            if one.peak is not None:
                yield Text(f"choice {number + 1}: {gigabytes(one.peak)} compiled: {one.note}")
            elif number < _ROWS:
                yield Text(f"choice {number + 1}: {one.note}")
        for refusal in self.refusals[:_ROWS]:
            yield Text(f"rejected: {refusal}")
        if len(self.rejected) > _ROWS:
            yield Text(f"and {len(self.rejected) - _ROWS} more")

    def _compiled(self, number: int) -> str:
        """Write a compiled peak beside the planned one."""
        one = self.verified.get(number)
        if one is None or one.peak is None:
            return "-"
        return f"{one.peak / 1e9:,.3f} ({one.peak / self.plans[number].bytes.total:.3f})"

    def _table(self, title: str, plans: Sequence[Plan], *, verified: bool = True) -> Table:
        """Make a table; what all rows share stands below it, once."""
        rows = [_row(plan) for plan in plans[:_ROWS]]
        if verified and self.verified:
            rows = [row | {">compiled GB": self._compiled(n)} for n, row in enumerate(rows)]
        shared = dict(set.intersection(*(set(row.items()) for row in rows))) if rows[1:] else {}
        names = [name for row in rows[:1] for name in row if name not in shared]
        table = make_table(*names, title=title)
        for row in rows:
            table.add_row(*(row[name] for name in names))
        if shared:
            said = [f"{name} {value}" for name, value in rows[0].items() if name in shared]
            table.caption = f"all: {', '.join(said)}".replace(">", "")
        return table


def _row(plan: Plan) -> dict[str, str]:
    """Write a plan as a row, by the names of columns."""
    return {
        "stage": f"{plan.stage}",
        ">N": f"{plan.num_shards:,}",
        ">groups": f"{plan.num_groups:,}",
        ">model": f"{plan.model_axis}",
        "remat": (plan.remat or "-") + (" Pa" if plan.partitions_activations else ""),
        "on the host": ", ".join(plan.offload) or "-",
        ">microbatch": f"{plan.accumulate} x {plan.count:g}",
        ">GB": f"{plan.bytes.total / 1e9:,.3f}",
        ">ms": f"{1e3 * plan.step_time:,.3f}",
        "bound by": plan.bound_by,
        ">volume": f"{plan.volume:.3f}",
    }


def gigabytes(size: float) -> str:
    """Write bytes in GB (1e9), and to the byte, so that they can be asked for."""
    return f"{size / 1e9:,.3f} GB ({size:,.0f} B)"
