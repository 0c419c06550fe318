"""What `zerojax compile` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from zerojax.aot import Compilation
from zerojax.audit import Problem
from zerojax.cli.compile._request import CompileRequest
from zerojax.cli.compile._result import PARTS, CompileResult
from zerojax.cli.shared._screen import PRECISIONS, Screen
from zerojax.cli.shared._units import Unit, binary, binary_unit, in_words

#: The part of the peak from which on something has a row.
LEAST = 0.001


class CompileScreen(Screen):
    """Prints the request, the results and their comparison."""

    def start(self, request: CompileRequest) -> None:
        """Show model, hardware, mesh and step."""
        options, layout, config = request.options, request.layout, request.config
        devices = layout.devices
        axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
        layers = f"{config.num_layers} layers " + ("scanned" if config.scan else "in a list")
        layers += ", activations kept" if options.remat == "none" else ", rematerialised"
        chosen = options.in_words()
        batch = f"{request.num_examples} examples of {config.context} tokens"
        if options.accumulate > 1:
            batch += f" in {options.accumulate} microbatches"
        self.facts(
            {
                "model": f"{options.model}, {layout.num_params:,} parameters, {layers}",
                "hardware": f"{options.topology}: {devices.size} x {devices.flat[0].device_kind}, "
                f"{in_words(request.memory)} each",
                "mesh": axes + (f"; {chosen}" if chosen else ""),
                "step": f"{batch}, {options.optimizer}, {PRECISIONS[options.precision]}",
            }
        )

    def compiled(self, results: Sequence[CompileResult]) -> None:
        """Show which programs were not compiled now."""
        for number, result in enumerate(results):
            same = [one.stage for one in results[:number] if _is_same(one, result)]
            if same:
                self.say(f"stage {result.stage}: the same program as stage {same[0]}'s")
            elif result.compilation.is_cached:
                self.say(f"stage {result.stage}: {_origin(result.compilation)}")

    def one_stage(self, result: CompileResult) -> None:
        """Show one stage: the audit, and the memory beside the device's."""
        if result.report is not None:
            self.console.print(result.report)
        self.title(f"one device's memory, stage {result.stage}")
        self.show(memory_table(result))
        self._verdict(result, Text(result.verdict, style="bold"), indent="")

    def compare(self, results: Sequence[CompileResult]) -> None:
        """Show all stages side by side, and what is wrong with each."""
        options = results[0].request.options
        self.title(
            f"{options.model} on {options.topology}: {_unit(results).name} of a device's "
            f"{in_words(results[0].available)}; volume in elements per parameter"
        )
        self.show(comparison_table(results))
        for result in results:
            self._verdict(result, Text.assemble((f"stage {result.stage} ", "bold"), result.verdict))
        for stages, problem in _distinct_problems(results):
            self.show(Text(f"stage {stages}: {problem}", style="red"))

    def _verdict(self, result: CompileResult, text: Text, indent: str = "  ") -> None:
        text.stylize("green" if result.fits else "red")
        self.show(text)
        if result.report is None:
            self.say(f"{indent}the compiler: {result.refusal.message}")
        if result.advice:
            self.say(f"{indent}{result.advice}")


def memory_table(result: CompileResult) -> Table:
    """Make the table of what one device holds; what is next to nothing is left out."""
    table = Table()
    table.add_column("what")
    available, needed = result.available, result.needed
    unit = binary_unit(needed or available)
    table.add_column(unit.name, justify="right")
    table.add_column("of the device", justify="right")
    table.add_column("", width=24, no_wrap=True)
    held = 0
    for name, count in result.parts.items():
        if count >= LEAST * (needed or available):
            table.add_row(name, *_share(count, available, unit), _bar(held, count, available))
        held += count
    table.add_section()
    if result.report is None:
        table.add_row("model states alone", *_share(held, available, unit))
    if needed is not None:
        style = "bold green" if result.fits else "bold red"
        bar = _bar(0, needed, available)
        table.add_row("peak", *_share(needed, available, unit), bar, style=style)
    table.add_row("the device", *_share(available, available, unit))
    if result.report is not None and result.report.memory.host:
        table.add_row("on the host", binary(result.report.memory.host, unit), "", "")
    return table


def comparison_table(results: Sequence[CompileResult]) -> Table:
    """Make the table of stages side by side."""
    largest = max(result.needed or result.available for result in results)
    unit = binary_unit(largest)

    def cells(counts: Iterable[float | None]) -> Iterable[str]:
        return (binary(count, unit) for count in counts)

    table = Table()
    table.add_column("stage")
    for result in results:
        table.add_column(str(result.stage), justify="right", style="" if result.fits else "red")
    for name in PARTS:
        counts = [result.parts.get(name) for result in results]
        if max(count or 0 for count in counts) >= LEAST * largest:
            table.add_row(name, *cells(counts))
    table.add_row("peak", *cells(a.needed for a in results), style="bold")
    theory = [a.request.description.theory["total"] for a in results]
    table.add_row("states by the formula", *cells(theory), style="dim")
    left = [None if a.needed is None else a.available - a.needed for a in results]
    table.add_row("left of the device", *cells(left))
    table.add_section()
    reports = [result.report for result in results]
    table.add_row("volume", *(f"{r.volume:.4f}" if r else "-" for r in reports), style="bold")
    theories = (f"{r.theory_volume:.4f}" if r else "-" for r in reports)
    table.add_row("volume by the theory", *theories, style="dim")
    table.add_row("collectives", *(str(len(r.collectives)) if r else "-" for r in reports))
    table.add_row("problems", *(str(len(r.problems)) if r else "-" for r in reports))
    return table


def _unit(results: Sequence[CompileResult]) -> Unit:
    return binary_unit(max(result.needed or result.available for result in results))


def _share(count: int, available: int, unit: Unit) -> tuple[str, str]:
    return binary(count, unit), f"{count / available:.1%}"


def _bar(start: int, count: int, available: int) -> Bar:
    """Draw a stretch of the device's memory, up to its end."""
    end = min(start + count, available)
    return Bar(available, min(start, available), end)


def _is_same(one: CompileResult, other: CompileResult) -> bool:
    program = one.compilation.program
    return program is not None and program == other.compilation.program


def _distinct_problems(results: Sequence[CompileResult]) -> list[tuple[str, Problem]]:
    """List problems that differ in more than the name of an operation, with their stages."""
    found: dict[tuple[str, ...], tuple[list[str], Problem]] = {}
    for result in results:
        for problem in result.report.problems if result.report is not None else ():
            key = (problem.kind, problem.expected, problem.seen, problem.remedy)
            stages = found.setdefault(key, ([], problem))[0]
            if str(result.stage) not in stages:
                stages.append(str(result.stage))
    return [(", ".join(stages), problem) for stages, problem in found.values()]


def _origin(compilation: Compilation) -> str:
    when = datetime.fromisoformat(compilation.compiled_at).astimezone()
    return (
        f"from the cache, compiled {when:%Y-%m-%d %H:%M} in {compilation.seconds:,.0f} s "
        "(--no-cache compiles anew)"
    )
