"""What a compiled program really moves and keeps."""

from zerojax.audit._arguments import returned_of
from zerojax.audit._audit import AuditError, AuditReport, audit
from zerojax.audit._evidence import Problem
from zerojax.audit._program import Argument, Program
from zerojax.audit._schedule import ScheduledCollective, schedule_of
from zerojax.audit._traffic import role_of
from zerojax.audit.checks import CHECKS
