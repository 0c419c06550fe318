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
        report = None
        if compilation.program is not None:
            report = audit(compilation.program, request.layout, request.step.recipe)
        return cls(request=request, compilation=compilation, report=report)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.request.stage

    @property
    def refusal(self) -> Shortage:
        """What the compiler said of a program that it refused."""
        assert self.compilation.shortage is not None
        return self.compilation.shortage

    @property
    def available(self) -> int:
        """Bytes that a device has."""
        shortage = self.compilation.shortage
        return (shortage and shortage.available) or self.request.memory

    @property
    def needed(self) -> int | None:
        """Bytes that the program takes at its peak; None where the compiler did not tell."""
        return self.refusal.needed if self.report is None else self.report.memory.peak

    @property
    def fits(self) -> bool:
        """Whether a device can hold the program."""
        return self.report is not None and self.report.memory.peak <= self.available

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
        if self.report is None:
            return describe_shortage(self.refusal)
        peak, available = self.report.memory.peak, self.available
        of_device = f"{binary(peak)} of a device's {binary(available)}"
        if not self.fits:
            return f"does not fit: it needs {of_device}, {binary(peak - available)} too much"
        left = f"{binary(available - peak)} ({1 - peak / available:.0%}) left"
        return f"fits: {of_device}, {left}"

    @property
    def advice(self) -> str:
        """What to set where JAX's default part of a GPU is too small; empty where it is not."""
        if self.request.topology.is_tpu or not self.fits or self.needed is None:
            return ""
        if self.needed <= GPU_FRACTION * self.available:
            return ""
        return (
            f"JAX takes {GPU_FRACTION:.0%} of a GPU's memory unless told otherwise: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 to run it"
        )

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is wrong, in a few words each; empty where the program is right and fits."""
        found = [] if self.fits else [self.verdict]
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
            "fits": self.fits,
            "needed_bytes": self.needed,
            "available_bytes": self.available,
            "from_cache": compilation.is_cached,
            "compiled_at": compilation.compiled_at,
            "compile_seconds": round(compilation.seconds, 1),
            "refused": compilation.shortage and compilation.shortage.message,
            "report": self.report and self.report.to_dict(),
        }
