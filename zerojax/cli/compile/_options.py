"""The options of `zerojax compile`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from zerojax.cli.shared._built_step import BuiltStepOptions
from zerojax.cli.shared._command import option
from zerojax.cli.shared._options import HARDWARE, MODEL, OUTPUT, ZERO
from zerojax.layout import STAGES


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions(BuiltStepOptions):
    """What `zerojax compile` was asked for; None leaves a choice to it."""

    model: str = option("gpt2-small", metavar="NAME", panel=MODEL)
    topology: str = option(..., metavar="NAME", panel=HARDWARE)
    """Nodes x GPUs (h100:1x8, a100:4x8; also h200, b200), TPU chips along each dim of the torus
    (v5e:2x4, v6e:16x16, v4:2x2x4, v5p:8x8x16, tpu7x:2x2x1), or several TPU slices
    (v5e:4x4x2slices)."""
    scan: bool = option(True, "--scan/--no-scan", panel=MODEL)
    """Layers stacked and scanned, or a Python list of them, which compiles far longer."""
    all_stages: bool = option(False, panel=ZERO)
    """Compile stages 0 to 3 and compare them."""
    plot: Path | None = option(None, metavar="FILE.png", panel=OUTPUT)
    """Draw what a device holds and moves."""
    hlo: Path | None = option(None, metavar="FILE", panel=OUTPUT)
    """Keep the text of the compiled program; with --all-stages, a file for each stage."""
    json: Path | None = option(None, metavar="FILE", panel=OUTPUT)
    """Keep the report as JSON."""
    no_cache: bool = option(False, panel=OUTPUT)
    """Compile even what was compiled before, and keep nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.all_stages and {"config", "stage"} & self.given:
            raise ValueError(
                "--config and --stage are of one stage: leave them out, or --all-stages"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to compile."""
        return tuple(STAGES) if self.all_stages else (self.chosen_stage,)

    def hlo_file(self, stage: int) -> Path | None:
        """The file of a stage's text; None for none."""
        if self.hlo is None or not self.all_stages:
            return self.hlo
        return self.hlo.with_name(f"{self.hlo.stem}.stage{stage}{self.hlo.suffix}")
