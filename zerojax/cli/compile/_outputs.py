"""The files that `zerojax compile` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from zerojax.cli import charts
from zerojax.cli.compile._result import CompileResult
from zerojax.cli.shared._units import BINARY, binary, unit_for

#: Options that say where an answer goes, or which stages are asked for.
NOT_OF_A_STEP = ("plot", "hlo", "json", "no_cache", "stage", "all_stages")


def write(results: Sequence[CompileResult]) -> list[Path | None]:
    """Write the files that were asked for and list them."""
    options = results[0].request.options
    written = []
    for result in results:
        path, program = options.hlo_file(result.stage), result.compilation.program
        if path is not None and program is not None:
            path.write_text(program.text)
            written.append(path)
    if options.json is not None:
        options.json.write_text(json.dumps(_plain(results), indent=2) + "\n")
    if options.plot is not None:
        charts.write(draw(results), options.plot)
    return [*written, options.json, options.plot]


def draw(results: Sequence[CompileResult]) -> charts.Figure:
    """Draw what one device holds and moves under each stage."""
    layout, options = results[0].request.layout, results[0].request.options
    memory = [_memory_bar(result) for result in results]
    return charts.stages_figure(
        f"{options.model}, {layout.num_params:,} parameters, {options.precision}, "
        f"{options.optimizer}, compiled for {options.topology}",
        memory=memory,
        volume=[_volume_bar(result) for result in results],
        available=results[0].available,
        unit=unit_for(max(bar.top for bar in memory), BINARY),
    )


def _memory_bar(result: CompileResult) -> charts.Bar:
    refused = {charts.REFUSED: result.needed or 0} if result.report is None else {}
    label = binary(result.needed or result.available)
    if result.shortage is not None:
        label = f"needs {label}" if result.needed else f"needs more than\n{label}"
    return charts.Bar(
        name=f"stage {result.stage}",
        parts=result.parts | refused,
        label=label,
        theory=result.request.theory,
        fits=result.shortage is None,
    )


def _volume_bar(result: CompileResult) -> charts.Bar:
    name, report = f"stage {result.stage}", result.report
    if report is None:
        return charts.Bar(name=name, parts={}, label="not\ncompiled", fits=False)
    parts, theory = {"volume": report.volume}, report.theory_volume
    return charts.Bar(name=name, parts=parts, label=f"{report.volume:.3f}", theory=theory)


def _plain(results: Sequence[CompileResult]) -> dict[str, object]:
    request = results[0].request
    return request.options.to_dict(*NOT_OF_A_STEP) | {
        "num_params": request.layout.num_params,
        "mesh": dict(request.layout.mesh.shape),
        "num_examples": request.num_examples,
        "context": request.config.context,
        "recipe": request.step.recipe.to_dict(),
        "stages": [result.to_dict() for result in results],
    }
