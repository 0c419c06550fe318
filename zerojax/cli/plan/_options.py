"""The options of `zerojax plan`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from zerojax.cli.shared._command import option
from zerojax.cli.shared._options import HARDWARE, MODEL, OUTPUT, ZERO, StepOptions, stage_option
from zerojax.planner import HARDWARE as KNOWN

SEARCH = "Other questions"
#: Options that a search finds the best of, and those that the largest models leave no room for.
SEARCHED = ("config", "reduce", "accumulate")
NOT_OF_LARGEST = (
    *("params", "model", "stage", "shards", "search", "plot", "remat", "offload"),
    *SEARCHED,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(StepOptions):
    """What `zerojax plan` was asked for; None leaves a choice to it.

    Raises:
        ValueError: options that contradict each other.
    """

    params: str | None = option(
        None,
        help="A number of parameters, 7.5e9 or 7.5B, in the place of a model: a plausible GPT of "
        "that size is planned by formulas.",
        metavar="COUNT",
        panel=MODEL,
    )
    stage: int | None = stage_option("all, or the configuration's")
    hardware: str = option("h100", help=f"{', '.join(KNOWN)}.", metavar="NAME", panel=HARDWARE)
    devices: int = option(8, help="All devices together.", least=1, panel=HARDWARE)
    memory_limit: str | None = option(
        None,
        help="What a step may take of a device: 20e9, 20GB or 18GiB.",
        metavar="BYTES",
        shown="all of its memory",
        panel=HARDWARE,
    )
    shards: int | None = option(
        None,
        help="N, the devices that share one copy of the model states; fewer than all is hybrid "
        "sharding: copies of the group split the batch between them.",
        least=1,
        shown="all that the model axis leaves; --search tries nodes as well",
        panel=ZERO,
    )
    search: bool = option(
        False,
        help="Search for the fastest way to train under the memory limit: stage, shard group, "
        "model axis, recomputation, what the host keeps, microbatches. Options that are given "
        "hold, and --shards holds the model axis as well.",
        panel=SEARCH,
    )
    verify: bool = option(
        False,
        help="Compile the winners of --search for the hardware, and put their peaks beside the "
        "planned ones. Takes minutes; searched without model parallelism and with nothing on the "
        "host, for which `zerojax compile` has options.",
        panel=SEARCH,
    )
    largest: bool = option(
        False,
        help="The largest model that each stage holds, by the number of devices, and the largest "
        "GPT under the paper's configurations C1 to C5.",
        panel=SEARCH,
    )
    plot: Path | None = option(
        None,
        help="Draw what a device holds under each stage, the time of a step by the number of "
        "devices, and the same on slower networks.",
        metavar="FILE.png",
        panel=OUTPUT,
    )
    json: Path | None = option(
        None,
        help="Keep the figures as JSON; - prints them in the place of tables.",
        metavar="FILE",
        panel=OUTPUT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify:
            self._check_verify()
        if self.search:
            self._check_search()
        elif self.config is not None and self.plot is not None:
            raise ValueError(
                f"--config {self.config} is of one stage, and --plot draws all of them: give one "
                "of the two options"
            )
        if self.largest:
            if wrong := [name for name in NOT_OF_LARGEST if name in self.given]:
                raise ValueError(
                    f"--largest looks for the model, by stage and configuration: leave --{wrong[0]}"
                    " out"
                )
        elif (self.params is None) == (self.model is None):
            raise ValueError(
                "say what to plan: --model gpt2-xl, or --params 7.5e9 (one of the two)"
            )

    def _check_verify(self) -> None:
        if not self.search:
            raise ValueError("--verify compiles the winners of --search: give both")
        if self.model is None:
            raise ValueError("--verify compiles a model: give --model in the place of --params")
        if self.offload or self.model_parts > 1:
            raise ValueError(
                "--verify compiles without model parallelism and with everything on the device: "
                "leave --offload and --model-axis out, or ask `zerojax compile`, which has both"
            )

    def _check_search(self) -> None:
        if wrong := [name for name in SEARCHED if name in self.given]:
            raise ValueError(f"--search takes what suits each choice best: leave --{wrong[0]} out")
        if self.remat in ("none", "dots") and "activations" in self.offload:
            raise ValueError(
                "--search moves activations to the host where layers are recomputed from their "
                f"inputs: leave --remat {self.remat} out, or --offload activations"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to plan."""
        if self.stage is None and self.config is None:
            return (0, 1, 2, 3)
        return (self.chosen_stage,)

    @property
    def num_groups(self) -> int:
        """Groups of devices with examples of their own; a search cuts no layer before it starts."""
        return max(1, self.devices // (1 if self.search else self.model_parts))

    @property
    def num_examples(self) -> int:
        """Examples of a step.

        Raises:
            ValueError: they can't be split evenly.
        """
        return self.examples(self.num_groups)

    @property
    def prints_json(self) -> bool:
        """Whether stdout gets the figures as JSON, and nothing else."""
        return self.json == Path("-")
