"""What a step takes of a device's memory and of its host, beside the stage's formula."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, decimal, make_bar, make_table
from zerojax.audit._arguments import STATES, Held, item_bits
from zerojax.audit._evidence import Evidence
from zerojax.hlo import Result, find_host_moves, largest_results
from zerojax.layout import PLURALS
from zerojax.planner import host_theory

#: How kinds of argument are called in a report.
NAMES: dict[str, str] = {**PLURALS, "batch": "batch", "copy": "other", "other": "other"}
#: Columns of figures that have a theory.
BESIDE = (">seen", ">theory", ">seen / theory")
_HOST_ARGUMENTS = "host_argument_size_in_bytes"


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryReport(Shown):
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
    # what the device sets aside, by which it fits: the peak, on a TPU with the holes of its arena
    allocated: int
    host: int  # what lies in the host's memory
    # the same kinds by the stage's formula, whole / N for what the stage partitions, without what
    # lives in the host's memory; "gradients" are those of one step, which live while it runs, as
    # does "gathered", the parameters where the recipe keeps them for the backward pass
    theory: dict[str, int]
    # the largest results of instructions; which of them share a buffer the text does not tell
    largest: tuple[Result, ...]

    @property
    def _summary(self) -> str:
        theory = decimal(self.theory["total"])
        return f"peak {decimal(self.peak)} on a device, model states by the formula {theory}"

    def _parts(self) -> Iterator[Table]:
        table = make_table("what", *BESIDE, "of the peak", title="memory (B per device)")

        def add(name: str, seen: int, theory: int = 0) -> None:
            figures = (f"{seen:,}", f"{theory:,}" if theory else "", ratio(seen, theory))
            table.add_row(name, *figures, make_bar(seen, self.peak))

        names = ("parameters", "masters", "optimizer", "gradients", "batch", "other", "outputs")
        for name in names:
            theory = self.theory.get(name, 0) if name in names[:3] else 0
            if getattr(self, name) or theory:
                add(name, getattr(self, name), theory)
        table.add_row("gradients of a step", "", f"{self.theory['gradients']:,}")
        if gathered := self.theory["gathered"]:
            table.add_row("gathered, until the backward pass", "", f"{gathered:,}")
        add("temporaries, with gradients", self.temporaries)
        table.add_row("peak (theory: states)", f"{self.peak:,}", f"{self.theory['total']:,}")
        holes = self.allocated * (self.allocated > self.peak)
        more = {"allocated, with unused holes": holes, "reused by donation": self.reused}
        for name, count in (more | {"host": self.host}).items():
            if count:
                table.add_row(name, f"{count:,}")
        yield table
        table = make_table("what", "of", ">B", title="largest results (some share a buffer)")
        for one in self.largest[:3]:
            words = (Text(x, no_wrap=True, overflow="ellipsis") for x in (one.shape, one.name))
            table.add_row(*words, f"{one.bytes:,}")
        yield table


def beside(seen: float, theory: float, style: str = ",") -> tuple[str, str, str]:
    return f"{seen:{style}}", f"{theory:{style}}", ratio(seen, theory)


def ratio(seen: float, theory: float) -> str:
    return f"{seen / theory:.3f}" if theory and seen else ""


def memory_of(evidence: Evidence) -> MemoryReport:
    program, stats = evidence.program, evidence.program.statistics
    held = dict.fromkeys(NAMES.values(), 0)
    for one in evidence.held:
        held[NAMES[one.kind]] += 0 if one.on_host else one.argument.shard_bytes
    on_host = sum(one.argument.shard_bytes for one in evidence.held if one.on_host)
    arguments, outputs, peak = program.argument_bytes, program.output_bytes, program.peak
    return MemoryReport(
        **held,
        outputs=outputs,
        reused=stats.get("alias_size_in_bytes", 0),
        temporaries=max(peak - arguments - outputs, 0),
        peak=peak,
        allocated=program.allocated,
        host=max(on_host, stats.get(_HOST_ARGUMENTS, 0)) + stats.get("host_temp_size_in_bytes", 0),
        theory=_theory(evidence),
        largest=tuple(largest_results(evidence.module, 8)),
    )


def _theory(evidence: Evidence) -> dict[str, int]:
    layout = evidence.layout
    theory = {}
    for kind in STATES[:3]:
        whole = sum(_whole_bytes(x, evidence) for x in evidence.states(kind) if not x.on_host)
        theory[NAMES[kind]] = layout.by_formula(kind, whole)  # type: ignore[arg-type]
    whole = sum(_whole_bytes(one, evidence) for one in evidence.states("parameter"))
    theory["gradients"] = layout.by_formula("gradient", whole)
    theory["gathered"] = round(whole) if evidence.recipe.keeps_gathered(layout.kinds) else 0
    theory["total"] = sum(theory.values())
    return theory


def _whole_bytes(one: Held, evidence: Evidence) -> float:
    item = one.argument.shard_bytes / max(math.prod(one.argument.shard_shape), 1)
    if one.parameter is None:
        return math.prod(one.argument.shape) * item
    own = evidence.layout.leaves[one.parameter]
    shape = own.shape if one.argument.shape == own.stored_shape else one.argument.shape
    return math.prod(shape) * item / own.own_parts


@dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """Count the bytes between one device and its host in a step."""

    to_host: int  # from the device's memory to the host's
    from_host: int  # from the host's memory to the device's
    updated: int  # both ways for what the host itself computes: the optimizer's update
    # bytes that this update has to move: gradients down and parameters up, 4 Psi / N with 16 bits
    # (ZeRO-Offload); 0 where no state lives in the host's memory
    theory: int

    @property
    def total(self) -> int:
        return self.to_host + self.from_host


def traffic_of(evidence: Evidence) -> HostTraffic:
    """Count what a program moves to and from the host; an unknown loop counts once."""
    moves = list(find_host_moves(evidence.module))
    states = [one for one in evidence.states("master", "optimizer") if one.on_host]
    owners = {one.parameter for one in states if one.parameter is not None}
    has_masters = bool(evidence.states("master"))
    leaves, bits = evidence.layout.leaves, evidence.parameter_bits
    held = {n: bits.get(n, item_bits(str(leaves[n].dtype))) / 8 for n in owners}
    return HostTraffic(
        to_host=sum(m.to_host * m.runs for m in moves),
        from_host=sum(m.from_host * m.runs for m in moves),
        updated=sum((m.to_host + m.from_host) * m.runs for m in moves if m.is_computed),
        theory=round(host_theory(evidence.layout, evidence.recipe, held, has_masters=has_masters)),
    )
