"""What a compiled program really moves and keeps."""

from __future__ import annotations

from zerojax.audit._compare import Comparison
from zerojax.audit._fragmentation import Fragmentation
from zerojax.audit._groups import mesh_axes
from zerojax.audit._hlo import Collective, Collectives, parse_collectives
from zerojax.audit._memory import MemoryReport
from zerojax.audit._problems import AuditError, Problem
from zerojax.audit._program import Leaf, Program
from zerojax.audit._report import AuditReport, AxisVolume
from zerojax.audit._verify import CHECKS, audit
from zerojax.audit._walk import Loop

__all__ = [
    "CHECKS",
    "AuditError",
    "AuditReport",
    "AxisVolume",
    "Collective",
    "Collectives",
    "Comparison",
    "Fragmentation",
    "Leaf",
    "Loop",
    "MemoryReport",
    "Problem",
    "Program",
    "audit",
    "mesh_axes",
    "parse_collectives",
]
