"""What `zerojax compile` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from zerojax.audit import AuditReport, Problem
from zerojax.cli.compile._request import CompileRequest
from zerojax.cli.compile._result import PARTS, CompileResult
from zerojax.cli.shared._screen import Screen, table
from zerojax.cli.shared._units import BINARY, binary, unit_for

#: The part of the peak from which on something has a row.
LEAST = 0.001


class CompileScreen(Screen):
    """Prints the request and the results."""

    def start(self, request: CompileRequest) -> None:
        """Show model, hardware, mesh and step."""
        options, layout, config = request.options, request.layout, request.config
        devices = layout.devices
        axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
        layers = f"{config.num_layers} layers " + ("scanned" if config.scan else "in a list")
        layers += ", activations kept" if options.remat == "none" else ", rematerialised"
        chosen = options.in_words()
        self.facts(
            {
                "model": f"{options.model}, {layout.num_params:,} parameters, {layers}",
                "hardware": f"{options.topology}: {devices.size} x {devices.flat[0].device_kind}, "
                f"{binary(request.memory)} each",
                "mesh": axes + (f"; {chosen}" if chosen else ""),
                "step": options.step_in_words(request.num_examples, config.context),
            }
        )

    def compiled(self, results: Sequence[CompileResult]) -> None:
        """Show which programs were not compiled now."""
        for number, result in enumerate(results):
            program = result.compilation.program
            others = [one for one in results[:number] if program is not None]
            same = [one.stage for one in others if one.compilation.program == program]
            if same:
                self.say(f"stage {result.stage}: the same program as stage {same[0]}'s")
            elif result.compilation.is_cached:
                took = f"{result.compilation.compiled_at} in {result.compilation.seconds:,.0f} s"
                self.say(f"stage {result.stage}: from the cache, compiled {took} (see --no-cache)")

    def results(self, results: Sequence[CompileResult]) -> None:
        """Show one stage's audit, or all stages side by side; then what fits and what is wrong."""
        first, is_one = results[0], len(results) == 1
        if is_one and first.report is not None:
            self.console.print(first.report)
        else:
            there = binary(first.available)
            self.title(f"bytes of a device's {there}; volume in elements per parameter")
            self.show(comparison_table(results))
        for result in results:
            short = result.shortage
            style = "green" if short is None else "red"
            text = Text.assemble((f"stage {result.stage} ", "bold"), result.verdict, style=style)
            self.show(text)
            if short is not None and short.message:
                self.say(f"  the compiler: {short.message}")
            if result.advice:
                self.say(f"  {result.advice}")
        for stages, problem in [] if is_one else _distinct_problems(results):
            self.show(Text(f"stage {stages}: {problem}", style="red"))


def comparison_table(results: Sequence[CompileResult]) -> Table:
    """Make the table of stages side by side; what is next to nothing is left out."""
    largest = max(result.needed or result.available for result in results)
    unit = unit_for(largest, BINARY)
    made = table(unit.name, *(f">stage {one.stage}" for one in results))
    for result, column in zip(results, made.columns[1:], strict=True):
        column.style = "" if result.shortage is None else "red"

    def bytes_row(name: str, counts: Sequence[float | None], style: str = "") -> None:
        made.add_row(name, *map(unit.number, counts), style=style)

    def report_row(name: str, write: Callable[[AuditReport], str], style: str = "") -> None:
        cells = ("-" if one.report is None else write(one.report) for one in results)
        made.add_row(name, *cells, style=style)

    for name in PARTS:
        counts = [result.parts.get(name) for result in results]
        if max(count or 0 for count in counts) >= LEAST * largest:
            bytes_row(name, counts)
    bytes_row("peak", [one.needed for one in results], "bold")
    bytes_row("states by the formula", [one.request.theory for one in results], "dim")
    left = [None if one.needed is None else one.available - one.needed for one in results]
    bytes_row("left of the device", left)
    made.add_section()
    report_row("volume", lambda report: f"{report.volume:.4f}", "bold")
    report_row("volume by the theory", lambda report: f"{report.theory_volume:.4f}", "dim")
    report_row("collectives", lambda report: str(len(report.collectives)))
    report_row("waits, as scheduled", _waits)
    report_row("problems", lambda report: str(len(report.problems)))
    return made


def _waits(report: AuditReport) -> str:
    share = report.schedule and report.schedule.exposed_share
    return "-" if share is None else f"{share:.1%}"


def _distinct_problems(results: Sequence[CompileResult]) -> list[tuple[str, Problem]]:
    """List problems that differ in more than the name of an operation, with their stages."""
    found: dict[tuple[str, ...], tuple[dict[str, None], Problem]] = {}
    for result in results:
        for problem in result.report.problems if result.report is not None else ():
            key = (problem.kind, problem.expected, problem.seen, problem.remedy)
            found.setdefault(key, ({}, problem))[0][str(result.stage)] = None
    return [(", ".join(stages), problem) for stages, problem in found.values()]
