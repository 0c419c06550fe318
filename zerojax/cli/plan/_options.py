"""The options of `zerojax plan` alone: their names, limits and help."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from zerojax.cli.shared._residual_options import Residual, find_remat
from zerojax.cli.shared._step_options import MODEL, OUTPUT, TRAINING, ZERO
from zerojax.planner import HARDWARE as KNOWN
from zerojax.planner import as_amount, as_count

HARDWARE, SEARCH = "Hardware", "Other questions"
MOST_PARAMS = 10**18
_POWERS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_NUMBER = r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*"

Params = Annotated[
    str | None,
    typer.Option(
        "--params",
        metavar="COUNT",
        help="A number of parameters, 7.5e9 or 7.5B, in the place of a model: a plausible GPT of "
        "that size is planned by formulas.",
        rich_help_panel=MODEL,
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        "--hardware", metavar="NAME", help=f"{', '.join(KNOWN)}.", rich_help_panel=HARDWARE
    ),
]
Devices = Annotated[
    int, typer.Option(min=1, help="All devices together.", rich_help_panel=HARDWARE)
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="What a step may take of a device: 20e9, 20GB or 18GiB.",
        show_default="all of its memory",
        rich_help_panel=HARDWARE,
    ),
]
Shards = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="N, the devices that share one copy of the model states; fewer than all is hybrid "
        "sharding: copies of the group split the batch between them.",
        show_default="all that the model axis leaves; --search tries nodes as well",
        rich_help_panel=ZERO,
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        min=1,
        help="Examples that each device takes in a microbatch. --search splits the step's as it "
        "sees fit: devices x --batch x --accumulate.",
        rich_help_panel=TRAINING,
    ),
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Search for the fastest way to train under the memory limit: stage, shard group, "
        "model axis, recomputation, what the host keeps, microbatches. Options that are given "
        "hold, and --shards holds the model axis as well.",
        rich_help_panel=SEARCH,
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Compile the winners of --search for the hardware, and put their peaks beside the "
        "planned ones. Takes minutes; searched without model parallelism and with nothing on the "
        "host, for which `zerojax compile` has options.",
        rich_help_panel=SEARCH,
    ),
]
Largest = Annotated[
    bool,
    typer.Option(
        "--largest",
        help="The largest model that each stage holds, by the number of devices, and the largest "
        "GPT under the paper's configurations C1 to C5.",
        rich_help_panel=SEARCH,
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep the figures as JSON; - prints them in the place of tables.",
        rich_help_panel=OUTPUT,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Draw what a device holds under each stage, the time of a step by the number of "
        "devices, and the same on slower networks.",
        rich_help_panel=OUTPUT,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `zerojax plan` was asked for; None leaves a choice to it."""

    params: str | None
    model: str | None
    context: int | None
    remat: bool | None
    remat_policy: str | None
    hardware: str
    devices: int
    memory_limit: str | None
    stage: int | None
    config: str | None
    shards: int | None
    model_axis: int | None
    offload: tuple[str, ...]
    precision: str
    reduce: str | None
    batch: int
    accumulate: int
    optimizer: str
    search: bool
    verify: bool
    largest: bool
    json: Path | None
    plot: Path | None

    @property
    def residual(self) -> Residual:
        """What was asked for beside the model states; a ValueError where it can't be meant."""
        return Residual(
            config=self.config, model_axis=self.model_axis, offload=self.offload,
            remat_policy=find_remat(self.remat, self.remat_policy),
        )  # fmt: skip

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to plan; a ValueError where two options name different ones."""
        if self.stage is None and self.config is None:
            return (0, 1, 2, 3)
        return (self.residual.stage(self.stage),)

    @property
    def prints_json(self) -> bool:
        """Whether stdout gets the figures as JSON, and nothing else."""
        return self.json == Path("-")


def read_count(option: str, text: str) -> int:
    """Read a number of parameters: "7.5e9", "7.5B".

    Raises:
        ValueError: it is none, or it is fractional or below 1.
    """
    match = re.fullmatch(_NUMBER, text)
    if match is None or match[2].upper() not in _POWERS:
        raise ValueError(f"{option} {text}: give a number such as 7.5e9 or 7.5B")
    value = Decimal(match[1]).scaleb(_POWERS[match[2].upper()])
    if value > MOST_PARAMS:
        raise ValueError(f"{option} {text}: plans go up to {MOST_PARAMS:.0e} parameters")
    whole = value == value.to_integral_value()
    return as_count(option, int(value) if whole else float(value))


def read_bytes(option: str, text: str) -> float:
    """Read bytes: "20e9", "20GB" (1e9), "18GiB" (2**30).

    Raises:
        ValueError: it is no number of bytes above 0.
    """
    match = re.fullmatch(_NUMBER, text)
    units = _DECIMAL | _BINARY
    if match is None or match[2].upper() not in units:
        raise ValueError(f"{option} {text}: give bytes such as 20e9, 20GB or 18GiB")
    return as_amount(option, float(match[1]) * units[match[2].upper()], above_zero=True)
