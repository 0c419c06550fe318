"""What a compiled program really moves and keeps."""

from zerojax.audit._audit import AuditError, AuditReport, AxisVolume, audit
from zerojax.audit._evidence import Problem
from zerojax.audit._memory import MemoryReport
from zerojax.audit._program import Argument, Program
from zerojax.audit._schedule import ScheduledCollective, ScheduleReport, schedule_of
from zerojax.audit._traffic import role_of
from zerojax.audit.checks import CHECKS

__all__ = [
    "CHECKS",
    "Argument",
    "AuditError",
    "AuditReport",
    "AxisVolume",
    "MemoryReport",
    "Problem",
    "Program",
    "ScheduleReport",
    "ScheduledCollective",
    "audit",
    "role_of",
    "schedule_of",
]
