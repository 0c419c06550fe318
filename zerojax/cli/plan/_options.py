"""The options of `zerojax plan`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from zerojax.cli.shared._command import option
from zerojax.cli.shared._options import HARDWARE, MODEL, OUTPUT, SEARCH, ZERO, StepOptions
from zerojax.layout import STAGES
from zerojax.planner import HARDWARE as KNOWN

#: Up to so many devices are drawn at least, and up to four times as many as were asked for.
AT_LEAST = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(StepOptions):
    """What `zerojax plan` was asked for; None leaves a choice to it."""

    params: str | None = option(None, metavar="COUNT", panel=MODEL)
    """A number of parameters, 7.5e9 or 7.5B, in the place of a model: a plausible GPT of that size
    is planned by formulas."""
    stage: int | None = option(
        None,
        min=0,
        max=3,
        metavar="0|1|2|3",
        show_default="all, or that of --config",
        panel=ZERO,
    )
    hardware: str = option("h100", help=f"{', '.join(KNOWN)}.", metavar="NAME", panel=HARDWARE)
    devices: int = option(8, min=1, panel=HARDWARE)
    """All devices together."""
    memory_limit: str | None = option(
        None, metavar="BYTES", show_default="all of its memory", panel=HARDWARE
    )
    """What a step may take of a device: 20e9, 20GB or 18GiB."""
    shards: int | None = option(
        None, min=1, show_default="what the model axis leaves; --search tries nodes too", panel=ZERO
    )
    """N, the devices that share one copy of the model states; fewer than all is hybrid sharding:
    copies of the group split the batch between them."""
    search: bool = option(False, panel=SEARCH)
    """Search for the fastest way to train under the memory limit: stage, shard group, model axis,
    recomputation, what the host keeps, microbatches. Options that are given hold, and --shards
    holds the model axis as well."""
    verify: bool = option(False, panel=SEARCH)
    """Compile the winners of --search for the hardware, and put their peaks beside the planned
    ones. Takes minutes; searched without model parallelism and with nothing on the host, for which
    `zerojax compile` has options."""
    plot: Path | None = option(None, metavar="FILE.png", panel=OUTPUT)
    """Draw what a device holds under each stage, and the time of a step by the number of
    devices."""
    json: Path | None = option(None, metavar="FILE", panel=OUTPUT)
    """Keep the figures as JSON; - prints them in the place of tables."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.params is None) == (self.model is None):
            raise ValueError(
                "say what to plan: --model gpt2-xl, or --params 7.5e9 (one of the two)"
            )
        if self.verify and (not self.search or self.model is None):
            raise ValueError("--verify compiles what --search finds for a --model: give all three")
        if self.verify and (self.offload or self.model_parts > 1):
            raise ValueError(
                "--verify compiles without model parallelism and with everything on the device: "
                "leave --offload and --model-axis out, or ask `zerojax compile`, which has both"
            )
        if self.config and (self.search or self.plot):
            other = "--search goes through several" if self.search else "--plot draws all stages"
            raise ValueError(
                f"--config {self.config} is one way to train, and {other}: leave --config out"
            )
        if self.search and self.remat == "dots" and "activations" in self.offload:
            raise ValueError(
                "--search moves activations to the host where layers are recomputed from their "
                "inputs: leave --remat dots out, or --offload activations"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to plan."""
        is_open = self.stage is None and self.config is None
        return tuple(STAGES) if is_open else (self.chosen_stage,)

    @property
    def device_counts(self) -> list[int]:
        """Numbers of devices to draw: powers of two times what has to divide them."""
        counts = [self.model_parts * (self.shards or 1)]
        while counts[-1] < max(AT_LEAST, 4 * self.devices):
            counts.append(2 * counts[-1])
        return counts

    @property
    def prints_json(self) -> bool:
        """Whether stdout gets the figures as JSON, and nothing else."""
        return self.json == Path("-")
