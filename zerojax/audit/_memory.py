"""What a program takes on one device, by kind, beside the stage's formula. Pure."""

import math
from dataclasses import dataclass

from zerojax.audit._arguments import STATES, Held
from zerojax.audit._evidence import Evidence
from zerojax.hlo import Result, largest_results

#: How kinds of argument are called in a report.
NAMES = {
    "parameter": "parameters",
    "master": "masters",
    "optimizer": "optimizer",
    "gradient": "gradients",
    "batch": "batch",
    "other": "other",
}
_HOST_ARGUMENTS = "host_argument_size_in_bytes"


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Count bytes on one device."""

    # arguments by kind; gradients where they persist from step to step
    parameters: int
    masters: int
    optimizer: int
    gradients: int
    batch: int
    other: int
    outputs: int  # results that take no argument's buffer
    reused: int  # results that take the buffer of an argument, which donation saves
    temporaries: int  # what the step needs beside arguments and results at its peak
    peak: int  # all of it at the worst moment, as the compiler says where it does
    host: int  # what lies in the host's memory
    # the same kinds by the stage's formula, whole / N for what the stage partitions, without what
    # lives in the host's memory; "gradients" are those of one step, which live while it runs
    theory: dict[str, int]
    # the largest results of instructions; which of them share a buffer the text does not tell
    largest: tuple[Result, ...]


def memory_of(evidence: Evidence) -> MemoryReport:
    """Count what a program takes."""
    program, stats = evidence.program, evidence.program.statistics
    held = dict.fromkeys(NAMES.values(), 0)
    for one in evidence.held:
        held[NAMES[one.kind]] += 0 if one.is_far else one.argument.shard_bytes
    on_host = sum(one.argument.shard_bytes for one in evidence.held if one.is_far)
    arguments, outputs, peak = program.argument_bytes, program.output_bytes, program.peak
    return MemoryReport(
        **held,
        outputs=outputs,
        reused=stats.get("alias_size_in_bytes", 0),
        temporaries=max(peak - arguments - outputs, 0),
        peak=peak,
        host=max(on_host, stats.get(_HOST_ARGUMENTS, 0)) + stats.get("host_temp_size_in_bytes", 0),
        theory=_theory(evidence),
        largest=tuple(largest_results(evidence.module, 8)),
    )


def _theory(evidence: Evidence) -> dict[str, int]:
    layout = evidence.layout
    theory = {}
    for kind in STATES[:3]:
        whole = sum(_whole_bytes(x, evidence) for x in evidence.states(kind) if not x.is_far)
        theory[NAMES[kind]] = round(whole / layout.parts(kind))  # type: ignore[arg-type]
    whole = sum(_whole_bytes(one, evidence) for one in evidence.states("parameter"))
    theory["gradients"] = round(whole / layout.parts("gradient"))
    theory["total"] = sum(theory.values())
    return theory


def _whole_bytes(one: Held, evidence: Evidence) -> float:
    """Count the bytes of a logical leaf, without padding, over the user's own axes."""
    item = one.argument.shard_bytes / max(math.prod(one.argument.shard_shape), 1)
    if one.parameter is None:
        return math.prod(one.argument.shape) * item
    own = evidence.layout.leaves[one.parameter]
    shape = own.shape if one.argument.shape == own.stored_shape else one.argument.shape
    parts = math.prod(evidence.layout.num_parts(names) for names in own.entries)
    return math.prod(shape) * item / parts
