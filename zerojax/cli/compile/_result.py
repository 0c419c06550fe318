"""What `zerojax compile` found out about each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import charts
from zerojax._display import binary
from zerojax.aot import Shortage
from zerojax.audit import AuditReport, Program, audit
from zerojax.cli.compile._request import CompileRequest


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """The answer for one stage.

    Attributes:
        report: the audit of the program; None where the compiler refused it for its memory.
        shortage: what the program lacks, by the compiler or by its peak; None where it fits.
        needed: bytes that it takes at its peak; None where the compiler did not tell.
        available: bytes that a device has.
    """

    request: CompileRequest
    report: AuditReport | None
    shortage: Shortage | None
    needed: int | None
    available: int

    @classmethod
    def of(cls, request: CompileRequest, program: Program) -> CompileResult:
        """Audit a compiled program and hold it against the memory of a device."""
        step, memory = request.step, request.memory
        report = audit(program, step.layout, step.recipe)
        needed = report.memory.peak
        shortage = Shortage(needed=needed, available=memory) if needed > memory else None
        return cls(request, report, shortage, needed, memory)

    @classmethod
    def refused(cls, request: CompileRequest, shortage: Shortage) -> CompileResult:
        """Keep what a compiler said of a program that does not fit."""
        available = shortage.available or request.memory
        return cls(request, None, shortage, shortage.needed, available)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.request.stage

    @property
    def parts(self) -> Mapping[str, float]:
        """Bytes per device by kind; nothing of a refused program."""
        return {} if self.report is None else charts.bytes_of(self.report).parts

    @property
    def verdict(self) -> str:
        """Whether the program fits, and by how much, in a line."""
        if self.shortage is not None:
            return str(self.shortage)
        peak, there = self.needed or 0, self.available
        left = f"{binary(there - peak)} ({1 - peak / there:.0%}) left"
        return f"fits: {binary(peak)} of a device's {binary(there)}, {left}"

    @property
    def complaint(self) -> str:
        """What is wrong, in a few words; empty where the program is right and fits."""
        found = [] if self.shortage is None else [self.verdict]
        if self.report is not None and self.report.problems:
            count = len(self.report.problems)
            kinds = ", ".join(dict.fromkeys(problem.kind for problem in self.report.problems))
            found.append(f"{count} problem{'s' if count > 1 else ''} ({kinds})")
        return ", and ".join(found)


def draw(results: Sequence[CompileResult]) -> Any:
    """Draw what one device holds and moves under each stage that the compiler did not refuse."""
    layout, options = results[0].request.layout, results[0].request.options
    return charts.compare(
        {f"stage {one.stage}": one.report for one in results if one.report is not None},
        title=f"{options.model}, {layout.num_params:,} parameters, {options.precision}, "
        f"{options.optimizer}, compiled for {options.topology}",
        available=results[0].available,
    )
