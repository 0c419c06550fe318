"""What `zerojax compile` found out about one stage, held against the memory of a device."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerojax.aot import Compilation, Shortage, describe_shortage
from zerojax.audit import AuditReport, audit
from zerojax.cli.compile._request import CompileRequest
from zerojax.cli.shared._units import binary

#: What a device holds, in the order in which it is shown: the name, and the kinds of the audit.
PARTS = {
    "parameters": ("parameters",),
    "masters": ("masters",),
    "optimizer": ("optimizer",),
    "gradients kept": ("gradients",),
    "batch and the rest": ("batch", "other", "outputs"),
    "gradients, activations": ("temporaries",),
}
#: The part of a GPU that JAX takes by default; a program that needs more needs a variable.
GPU_FRACTION = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileResult:
    """The answer for one stage.

    Attributes:
        report: the audit; None where the compiler refused the program for its memory.
    """

    request: CompileRequest
    compilation: Compilation
    report: AuditReport | None

    @classmethod
    def of(cls, request: CompileRequest, compilation: Compilation) -> CompileResult:
        """Audit a compiled program."""
        program, step = compilation.program, request.step
        report = None if program is None else audit(program, step.layout, step.recipe)
        return cls(request=request, compilation=compilation, report=report)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.request.stage

    @property
    def shortage(self) -> Shortage | None:
        """What the program lacks, by the compiler or by its peak; None where it fits."""
        if self.report is None:
            return self.compilation.shortage
        peak, there = self.report.memory.peak, self.request.memory
        return Shortage(needed=peak, available=there, message="") if peak > there else None

    @property
    def available(self) -> int:
        """Bytes that a device has."""
        return (self.shortage and self.shortage.available) or self.request.memory

    @property
    def needed(self) -> int | None:
        """Bytes that the program takes at its peak; None where the compiler did not tell."""
        if self.report is not None:
            return self.report.memory.peak
        return self.shortage and self.shortage.needed

    @property
    def parts(self) -> dict[str, int]:
        """Bytes per device, named as in `PARTS`; nothing of a refused program."""
        if self.report is None:
            return {}
        memory = self.report.memory
        return {name: sum(getattr(memory, k) for k in kinds) for name, kinds in PARTS.items()}

    @property
    def verdict(self) -> str:
        """Whether the program fits, and by how much, in a line."""
        if self.shortage is not None:
            return describe_shortage(self.shortage)
        peak, there = self.needed or 0, self.available
        left = f"{binary(there - peak)} ({1 - peak / there:.0%}) left"
        return f"fits: {binary(peak)} of a device's {binary(there)}, {left}"

    @property
    def advice(self) -> str:
        """What to set where JAX's default part of a GPU is too small; empty where it is not."""
        is_tight = GPU_FRACTION * self.available < (self.needed or 0) <= self.available
        if self.request.topology.is_tpu or not is_tight:
            return ""
        return (
            f"JAX takes {GPU_FRACTION:.0%} of a GPU's memory unless told otherwise: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 to run it"
        )

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is wrong, in a few words each; empty where the program is right and fits."""
        found = [] if self.shortage is None else [self.verdict]
        if self.report is not None and self.report.problems:
            count = len(self.report.problems)
            kinds = ", ".join(dict.fromkeys(problem.kind for problem in self.report.problems))
            found.append(f"{count} problem{'s' if count > 1 else ''} ({kinds})")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        compilation = self.compilation
        return {
            "stage": self.stage,
            "fits": self.shortage is None,
            "needed_bytes": self.needed,
            "available_bytes": self.available,
            "from_cache": compilation.is_cached,
            "compiled_at": compilation.compiled_at,
            "compile_seconds": round(compilation.seconds, 1),
            "refused": compilation.shortage and compilation.shortage.message,
            "report": self.report and self.report.to_dict(),
        }
