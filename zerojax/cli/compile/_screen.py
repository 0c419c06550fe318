"""What `zerojax compile` prints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerojax.aot import Compilation
from zerojax.audit import Problem
from zerojax.cli.compile._request import Question
from zerojax.cli.compile._result import PARTS, Answer, Unit, in_words, unit_of

#: The part of the peak from which on something has a row.
LEAST = 0.001


class CompileScreen:
    """Prints the question, the answers and their comparison to stdout."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def start(self, question: Question) -> None:
        """Show model, hardware, mesh and step."""
        options, layout, config = question.options, question.layout, question.config
        devices = layout.devices
        axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
        layers = f"{config.num_layers} layers " + ("scanned" if config.scan else "in a list")
        layers += ", rematerialised" if config.remat else ", activations kept"
        chosen = question.residual.in_words()
        precision = {"bf16": "bf16 with fp32 masters"}.get(options.precision, options.precision)
        batch = f"{question.num_examples} examples of {config.context} tokens"
        if options.accumulate > 1:
            batch += f" in {options.accumulate} microbatches"
        rows = {
            "model": f"{options.model}, {layout.num_params:,} parameters, {layers}",
            "hardware": f"{options.topology}: {devices.size} x {devices.flat[0].device_kind}, "
            f"{in_words(question.memory)} each",
            "mesh": axes + (f"; {chosen}" if chosen else ""),
            "step": f"{batch}, {options.optimizer}, {precision}",
        }
        for name, text in rows.items():
            self.console.print(Text.assemble((f"{name:<9}", "bold"), text), soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(Text(text, style="dim"), soft_wrap=True)

    def compiled(self, answers: Sequence[Answer]) -> None:
        """Tell which programs were not compiled now."""
        for number, answer in enumerate(answers):
            same = [a.stage for a in answers[:number] if _is_same(a, answer)]
            if same:
                self.say(f"stage {answer.stage}: the same program as stage {same[0]}'s")
            elif answer.compilation.is_cached:
                self.say(f"stage {answer.stage}: {_origin(answer.compilation)}")

    def show(self, answer: Answer) -> None:
        """Show one stage: the audit, and the memory beside the device's."""
        if answer.report is not None:
            self.console.print(answer.report)
        self._title(f"one device's memory, stage {answer.stage}")
        self.console.print(memory_table(answer))
        style = "bold green" if answer.fits else "bold red"
        self.console.print(Text(answer.verdict, style=style), soft_wrap=True)
        if answer.report is None:
            self.say(f"the compiler: {_words(answer)}")
        if answer.advice:
            self.say(answer.advice)

    def compare(self, answers: Sequence[Answer]) -> None:
        """Show all stages side by side, and what is wrong with each."""
        question = answers[0].question
        self._title(
            f"{question.options.model} on {question.options.topology}: {_unit(answers).name} of a "
            f"device's {in_words(answers[0].available)}; volume in elements per parameter"
        )
        self.console.print(comparison_table(answers))
        for answer in answers:
            style = "green" if answer.fits else "red"
            text = Text.assemble((f"stage {answer.stage} ", "bold"), (answer.verdict, style))
            self.console.print(text, soft_wrap=True)
            if answer.report is None:
                self.say(f"  the compiler: {_words(answer)}")
            if answer.advice:
                self.say(f"  {answer.advice}")
        for stages, problem in _distinct_problems(answers):
            self.console.print(Text(f"stage {stages}: {problem}", style="red"), soft_wrap=True)

    def _title(self, text: str) -> None:
        self.console.print(Text(f"\n{text}", style="bold"))

    def wrote(self, paths: Sequence[Path]) -> None:
        """Show which files were written."""
        if paths:
            self.say("wrote " + ", ".join(map(str, paths)))


def memory_table(answer: Answer) -> Table:
    """Lay out what one device holds, beside its memory; what is next to nothing is left out."""
    table = Table()
    table.add_column("what")
    available, needed = answer.available, answer.needed
    unit = unit_of(needed or available)
    table.add_column(unit.name, justify="right")
    table.add_column("of the device", justify="right")
    table.add_column("", width=24, no_wrap=True)
    held = 0
    for name, count in answer.parts.items():
        if count >= LEAST * (needed or available):
            table.add_row(name, *_share(count, available, unit), _bar(held, count, available))
        held += count
    table.add_section()
    if answer.report is None:
        table.add_row("model states alone", *_share(held, available, unit))
    if needed is not None:
        style = "bold green" if answer.fits else "bold red"
        bar = _bar(0, needed, available)
        table.add_row("peak", *_share(needed, available, unit), bar, style=style)
    table.add_row("the device", *_share(available, available, unit))
    if answer.report is not None and answer.report.memory.host:
        table.add_row("on the host", unit.text(answer.report.memory.host), "", "")
    return table


def comparison_table(answers: Sequence[Answer]) -> Table:
    """Lay out the stages side by side."""
    largest = max(answer.needed or answer.available for answer in answers)
    unit = unit_of(largest)
    table = Table()
    table.add_column("stage")
    for answer in answers:
        table.add_column(str(answer.stage), justify="right", style="" if answer.fits else "red")
    for name in PARTS:
        counts = [answer.parts.get(name) for answer in answers]
        if max(count or 0 for count in counts) >= LEAST * largest:
            table.add_row(name, *map(unit.text, counts))
    table.add_row("peak", *(unit.text(a.needed) for a in answers), style="bold")
    theory = [a.question.description.theory["total"] for a in answers]
    table.add_row("states by the formula", *map(unit.text, theory), style="dim")
    left = [None if a.needed is None else a.available - a.needed for a in answers]
    table.add_row("left of the device", *map(unit.text, left))
    table.add_section()
    reports = [answer.report for answer in answers]
    table.add_row("volume", *(f"{r.volume:.4f}" if r else "-" for r in reports), style="bold")
    table.add_row(
        "volume by the theory", *(f"{r.theory_volume:.4f}" if r else "-" for r in reports),
        style="dim",
    )  # fmt: skip
    table.add_row("collectives", *(str(len(r.collectives)) if r else "-" for r in reports))
    table.add_row("problems", *(str(len(r.problems)) if r else "-" for r in reports))
    return table


def _unit(answers: Sequence[Answer]) -> Unit:
    return unit_of(max(answer.needed or answer.available for answer in answers))


def _share(count: int, available: int, unit: Unit) -> tuple[str, str]:
    return unit.text(count), f"{count / available:.1%}"


def _bar(start: int, count: int, available: int) -> Bar:
    """Draw a stretch of the device's memory, up to its end."""
    end = min(start + count, available)
    return Bar(available, min(start, available), end)


def _words(answer: Answer) -> str:
    assert answer.compilation.shortage is not None
    return answer.compilation.shortage.message


def _is_same(one: Answer, other: Answer) -> bool:
    program = one.compilation.program
    return program is not None and program == other.compilation.program


def _distinct_problems(answers: Sequence[Answer]) -> list[tuple[str, Problem]]:
    """List problems that differ in more than the name of an operation, with their stages."""
    found: dict[tuple[str, ...], tuple[list[str], Problem]] = {}
    for answer in answers:
        for problem in answer.report.problems if answer.report is not None else ():
            key = (problem.kind, problem.expected, problem.seen, problem.remedy)
            stages = found.setdefault(key, ([], problem))[0]
            if str(answer.stage) not in stages:
                stages.append(str(answer.stage))
    return [(", ".join(stages), problem) for stages, problem in found.values()]


def _origin(compilation: Compilation) -> str:
    when = datetime.fromisoformat(compilation.compiled_at).astimezone()
    return (
        f"from the cache, compiled {when:%Y-%m-%d %H:%M} in {compilation.seconds:,.0f} s "
        "(--no-cache compiles anew)"
    )
