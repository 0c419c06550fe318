"""The files that `zerojax compile` writes: looked at before it compiles, written after it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from zerojax.cli import charts
from zerojax.cli.compile._options import CompileOptions
from zerojax.cli.compile._result import CompileResult
from zerojax.cli.shared._files import check_outputs
from zerojax.cli.shared._units import binary_unit, in_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where the plot, the report and the text of each stage go; None for nowhere."""

    plot: Path | None
    json: Path | None
    hlo: dict[int, Path]

    @classmethod
    def of(cls, options: CompileOptions) -> Outputs:
        """Name the files, and check that they can be written."""
        plot, hlo = options.plot, {}
        if plot is None and options.all_stages:
            plot = Path(f"{options.model}.{options.topology.replace(':', '-')}.png".lower())
        if options.hlo is not None:
            hlo = {stage: _of_stage(options.hlo, stage, options) for stage in options.stages}
        texts = {f"--hlo (stage {stage})": path for stage, path in hlo.items()}
        check_outputs({"--plot": plot, "--json": options.json, **texts})
        return cls(plot=plot, json=options.json, hlo=hlo)

    def write(self, results: Sequence[CompileResult]) -> list[Path]:
        """Write the files and list them."""
        written = []
        for result in results:
            if result.stage in self.hlo and result.compilation.program is not None:
                self.hlo[result.stage].write_text(result.compilation.program.text)
                written.append(self.hlo[result.stage])
        if self.json is not None:
            self.json.write_text(json.dumps(_plain(results), indent=2) + "\n")
            written.append(self.json)
        if self.plot is not None:
            charts.write(draw(results), self.plot)
            written.append(self.plot)
        return written


def _of_stage(path: Path, stage: int, options: CompileOptions) -> Path:
    return path.with_name(f"{path.stem}.stage{stage}{path.suffix}") if options.all_stages else path


def draw(results: Sequence[CompileResult]) -> charts.Figure:
    """Draw what one device holds and moves under each stage."""
    request = results[0].request
    layout, options = request.layout, request.options
    available = results[0].available
    memory = [_memory_bar(result) for result in results]
    return charts.stages_figure(
        f"{options.model}, {layout.num_params:,} parameters, {options.precision}, "
        f"{options.optimizer}, compiled for {options.topology} "
        f"({layout.devices.size} x {layout.devices.flat[0].device_kind})",
        memory=memory,
        volume=[_volume_bar(result) for result in results],
        available=available,
        unit=binary_unit(max(bar.height for bar in memory)),
    )


def _memory_bar(result: CompileResult) -> charts.Bar:
    parts: dict[str, float] = dict(result.parts)
    rest = (result.needed or 0) - sum(parts.values())
    if result.report is None and rest > 0:
        parts[charts.REFUSED] = rest
    label = in_words(result.needed or result.available)
    if not result.fits:
        label = f"needs {label}" if result.needed else f"needs more than\n{label}"
    return charts.Bar(
        name=f"stage {result.stage}",
        parts=parts,
        label=label,
        theory=result.request.description.theory["total"],
        fits=result.fits,
    )


def _volume_bar(result: CompileResult) -> charts.Bar:
    name, report = f"stage {result.stage}", result.report
    if report is None:
        return charts.Bar(name=name, parts={}, label="not\ncompiled", fits=False)
    return charts.Bar(
        name=name,
        parts={"volume": report.volume},
        label=f"{report.volume:.3f}",
        theory=report.theory_volume,
    )


def _plain(results: Sequence[CompileResult]) -> dict[str, object]:
    request = results[0].request
    asked = dataclasses.asdict(request.options)
    for name in ("given", "plot", "hlo", "json", "no_cache", "stage", "all_stages"):
        del asked[name]
    return asked | {
        "num_params": request.layout.num_params,
        "mesh": dict(request.layout.mesh.shape),
        "num_examples": request.num_examples,
        "context": request.config.context,
        "recipe": request.recipe.to_dict(),
        "stages": [result.to_dict() for result in results],
    }
