"""What a search goes through, and what it found."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, make_table
from zerojax.planner._report import Plan

#: Rows that a table shows.
_ROWS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """Choose what a search goes through.

    Attributes:
        stages: ZeRO stages.
        num_shards: sizes of the shard group; None is all devices, and those of a node or slice.
        model_axes: sizes of the model axis; None is 1, 2, 4, ... up to a node's devices.
        microbatches: numbers of microbatches; None is the recipe's if it has several, else all.
        offload: whether the host may keep states, or activations too, if the recipe leaves it open.

    Raises:
        ValueError: a list that names nothing.
    """

    stages: Sequence[int] = (0, 1, 2, 3)
    num_shards: Sequence[int] | None = None
    model_axes: Sequence[int] | None = None
    microbatches: Sequence[int] | None = None
    offload: bool = True

    def __post_init__(self) -> None:
        for name in ("stages", "num_shards", "model_axes", "microbatches"):
            given = getattr(self, name)
            is_open = given is None and name != "stages"
            if not is_open and (not isinstance(given, Collection) or not len(given)):
                raise ValueError(
                    f"Space.{name} lists what is tried, at least one, got {given!r}; leave it out "
                    "to try all"
                )


@dataclasses.dataclass(frozen=True, repr=False)
class Choices(Shown):
    """Plans that fit, fastest first: one for each family, with its fastest microbatch."""

    plans: tuple[Plan, ...]  # the choices
    tried: tuple[Plan, ...]  # all that was planned, microbatches that were not chosen included
    limit: float  # bytes per device that a step may take

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, rank: int) -> Plan:
        return self.plans[rank]

    @property
    def pareto(self) -> tuple[Plan, ...]:
        """Plans than which none is both faster and smaller, fastest first; all fit the limit."""
        front: list[Plan] = []
        fitting = [plan for plan in self.tried if plan.fits_within(self.limit)]
        for plan in sorted(fitting, key=lambda plan: (plan.step_time, plan.bytes.total)):
            if not front or plan.bytes.total < front[-1].bytes.total:
                front.append(plan)
        return tuple(front)

    @property
    def _summary(self) -> str:
        fit = f"plan{'s' if self.plans[1:] else ''} within {gigabytes(self.limit)}"
        return f"{len(self)} {fit}, the fastest: {self[0]._summary}"

    def _parts(self) -> Iterator[Table | Text]:
        yield self._table(f"fastest of {len(self)} that fit {gigabytes(self.limit)}", self.plans)
        yield self._table("Pareto front: none is both faster and smaller", self.pareto)
        yield Text("microbatch: how many x examples on a device; groups: copies of the N shards")
        yield Text("on the host: opt(imizer), act(ivations); Pa: cut over the model axis")
        yield Text("kept: weights stay gathered until the backward pass has used them")

    def _table(self, title: str, plans: Sequence[Plan]) -> Table:
        rows = [_row(plan) for plan in plans[:_ROWS]]
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
    return {
        "stage": f"{plan.stage}{'' if plan.recipe.reshard_after_forward else ' kept'}",
        ">N": f"{plan.num_shards:,}",
        ">groups": f"{plan.num_groups:,}",
        ">model": f"{plan.model_axis}",
        "remat": (plan.remat or "-") + (" Pa" if plan.partitions_activations else ""),
        "on the host": ", ".join(x[:3] for x in plan.offload) or "-",
        ">microbatch": f"{plan.recipe.accumulate} x {plan.count}",
        ">GB": f"{plan.bytes.total / 1e9:,.3f}",
        ">ms": f"{1e3 * plan.step_time:,.3f}",
        "bound by": plan.time.bound_by,
        ">volume": f"{plan.volume:.3f}",
    }


def gigabytes(size: float) -> str:
    """Write bytes in GB (1e9), and to the byte, so that they can be asked for."""
    return f"{size / 1e9:,.3f} GB ({size:,.0f} B)"
