"""What a step waits for, as its compiler scheduled it: nothing is measured. Pure.

Work is libtpu's own estimate, and on a GPU a roofline of each kernel; how long links are busy is
the planner's. Both leave latency out and take every rate at its peak: they are lower bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerojax.audit._clock import Clock, Tally
from zerojax.audit._program import Program
from zerojax.audit._traffic import Move, device_order
from zerojax.hlo import Cost, Module, Operation, parse_schedule
from zerojax.layout import Layout
from zerojax.planner import Hardware, Place, Transfer, find_hardware, permute_of, transfer_of


@dataclass(frozen=True, kw_only=True)
class ScheduledCollective:
    """Hold what was scheduled for one instruction that communicates; seconds are of a whole step.

    Seconds are None where the chip is not known.
    """

    op: str  # as `Collective.spelling`
    name: str  # of the instruction that begins it
    leaves: tuple[str, ...]  # paths that it may move; none for an activation
    axes: tuple[str, ...]  # of the mesh
    trips: tuple[int | None, ...]  # lengths of the loops around it
    moved_bytes: float  # that a device sends in a step
    is_blocking: bool  # whether nothing was scheduled between its beginning and its end
    beside: str  # the largest operation beside it; empty for none
    beside_source: str  # its line or its scope
    beside_seconds: float | None  # all work beside it
    link_seconds: float | None  # for which it keeps links busy
    exposed_seconds: float | None  # for which the device waits for it
    remedy: str = ""  # what may hide it; empty where nothing is exposed


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """What a step waits for, as scheduled by the compiler and never measured.

    Attributes:
        hardware: the chip whose figures were used; empty where it is not known, and then all
            seconds are None.
        collectives: what communicates, the most exposed first.
        work_seconds: what the device computes, by the compiler's estimates or a roofline.
        exposed_seconds: for which it waits for collectives.
        busiest_seconds: for which the busiest links are busy.
        bound_by: "work", or the links that are busy for longer: "fast links", "x+ links".
        rematerialised: instructions that the compiler itself runs again to save memory.
    """

    hardware: str
    collectives: tuple[ScheduledCollective, ...] = field(repr=False)
    work_seconds: float | None
    exposed_seconds: float | None
    busiest_seconds: float | None
    bound_by: str
    rematerialised: tuple[str, ...]

    @property
    def step_seconds(self) -> float | None:
        """Add what is computed and what is waited for."""
        if self.work_seconds is None or self.exposed_seconds is None:
            return None
        return self.work_seconds + self.exposed_seconds

    @property
    def exposed_share(self) -> float | None:
        """Return the part of the step for which the device waits."""
        return self.exposed_seconds and self.exposed_seconds / (self.step_seconds or 1)

    @property
    def blocking_share(self) -> float:
        """Return the part of the moved bytes that nothing was scheduled beside."""
        total = sum(one.moved_bytes for one in self.collectives)
        blocking = sum(one.moved_bytes for one in self.collectives if one.is_blocking)
        return blocking / total if total else 0.0

    @property
    def summary(self) -> str:
        """Return the totals in words."""
        blocking = f"{self.blocking_share:.1%} of moved bytes block"
        again = len(self.rematerialised)
        kept = f"; the compiler rematerialised {again} instructions" if again else ""
        if self.step_seconds is None or self.exposed_seconds is None:
            return f"{blocking}; no seconds, for the chip is not known{kept}"
        return (
            f"{blocking}; a step of {self.step_seconds * 1e3:.2f} ms waits for "
            f"{self.exposed_seconds * 1e3:.2f} ms ({self.exposed_share:.1%}); bound by "
            f"{self.bound_by}{kept}"
        )

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data."""
        totals = ("step_seconds", "exposed_share", "blocking_share")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}


def schedule_of(
    program: Program, layout: Layout, module: Module, moves: Sequence[Move]
) -> ScheduleReport | None:
    """Run the clock over a program; None on a CPU, whose collectives always wait."""
    found = None if program.platform == "cpu" else parse_schedule(module)
    if found is None:
        return None
    hardware = _hardware_of(layout)
    issued: dict[object, list[Move]] = {}
    for move in moves:
        record = move.record
        issued.setdefault((record.computation, record.name, record.loops), []).append(move)
    transfers = _Transfers(hardware, program, layout)

    def moves_of(one: Operation) -> list[Move]:
        return [move for key in one.begins for move in issued.get(key, ())]

    clock = Clock(
        lambda cost: _seconds(cost, hardware), lambda one: transfers.all_of(moves_of(one))
    )
    clock.run(found.operations)
    collectives = [
        _collective(moves_of(tally.operation), tally, layout, hardware is not None)
        for tally in clock.tallies.values()
        if moves_of(tally.operation)
    ]
    links, busiest = max(clock.busy.items(), key=lambda item: item[1], default=("", 0.0))
    return ScheduleReport(
        hardware=hardware.name if hardware else "",
        collectives=tuple(
            sorted(collectives, key=lambda one: (-(one.exposed_seconds or 0), -one.moved_bytes))
        ),
        work_seconds=clock.work if hardware else None,
        exposed_seconds=clock.exposed if hardware else None,
        busiest_seconds=busiest if hardware else None,
        bound_by="" if hardware is None else "work" if clock.work >= busiest else f"{links} links",
        rematerialised=found.rematerialised,
    )


def _seconds(cost: Cost, hardware: Hardware | None) -> float:
    """Return the time of an instruction: the compiler's cycles, or a roofline."""
    if hardware is None:
        return 0.0
    if cost.cycles and hardware.clock:
        return cost.cycles / hardware.clock
    products = cost.flops / hardware.flops + cost.flops_fp32 / hardware.flops_fp32
    return max(products, cost.bytes / hardware.hbm_bandwidth)


# ------------------------------------------------------------------ links


def _hardware_of(layout: Layout) -> Hardware | None:
    """Return the chip of the layout's devices; None for one that is not known."""
    try:
        return find_hardware(str(layout.devices.flat[0].device_kind))
    except ValueError:
        return None


class _Transfers:
    """Finds how long collectives keep links busy, by the places of their devices."""

    def __init__(self, hardware: Hardware | None, program: Program, layout: Layout) -> None:
        self._hardware, self._order = hardware, device_order(program, layout)
        self._places = [_place(hardware, device) for device in layout.devices.flat]
        self._sizes = tuple(len(set(held)) for held in zip(*self._places, strict=True))

    def all_of(self, moves: Sequence[Move]) -> Transfer:
        """Add up what one instruction moves."""
        if self._hardware is None or not moves:
            return Transfer()
        found = [self._one(self._hardware, move) for move in moves]
        links = dict.fromkeys(link for one in found for link in one.links)
        return Transfer(sum(one.seconds for one in found), tuple(links))

    def _one(self, hardware: Hardware, move: Move) -> Transfer:
        record = move.record
        whole = record.elements * record.item_bits / 8
        if not record.groups:  # between slices
            moved = record.moved_bytes / max(math.prod(x or 1 for x in record.trips), 1)
            return Transfer(moved / hardware.slow_bandwidth, ("slow",))
        if record.op == "collective-permute":
            moving = [(s, t) for s, t in record.groups if s != t]
            pairs = [(self._place(s), self._place(t)) for s, t in moving]
            ups = sum(s < t for s, t in moving)  # but one pair of a ring goes the same way
            ways = "+-" if 2 * ups == len(moving) else "+" if 2 * ups > len(moving) else "-"
            return permute_of(hardware, pairs, self._sizes, whole, ways)
        group = [self._place(i) for i in record.groups[0]]
        return transfer_of(hardware, group, self._sizes, whole, record.op)

    def _place(self, number: int) -> Place:
        return self._places[self._order.get(number, number)]


def _place(hardware: Hardware | None, device: object) -> Place:
    """Return where a device stands: its slice or node, and its place there."""
    if hardware is not None and hardware.torus and hasattr(device, "coords"):
        slice_index = getattr(device, "slice_index", 0) or 0
        return (slice_index, *device.coords, device.core_on_chip)  # type: ignore[attr-defined]
    return divmod(int(device.id), hardware.domain if hardware else 1)  # type: ignore[attr-defined]


# ------------------------------------------------------------------ what is told


def _collective(
    moves: Sequence[Move], tally: Tally, layout: Layout, is_timed: bool
) -> ScheduledCollective:
    first, beside = moves[0], tally.largest
    leaves = dict.fromkeys(index for move in moves for index in _likeliest(move, layout))
    found = ScheduledCollective(
        op=first.record.spelling,
        name=tally.operation.name,
        leaves=tuple(layout.leaves[index].path for index in leaves),
        axes=first.spans,
        trips=first.record.trips,
        moved_bytes=sum(move.record.moved_bytes for move in moves),
        is_blocking=beside is None,
        beside=beside.name if beside else "",
        beside_source=(beside.source or beside.op_name) if beside else "",
        beside_seconds=tally.beside if is_timed else None,
        link_seconds=tally.links if is_timed else None,
        exposed_seconds=tally.exposed if is_timed else None,
    )
    return dataclasses.replace(found, remedy=_remedy(found))


def _likeliest(move: Move, layout: Layout) -> list[int]:
    """List the leaves that a collective may move: those whose last dims are in its order, if any.

    Of [8, 2048, 8192] and [8, 8192, 2048], a gather of [1, 2048, 8192] is the first's.
    """
    dims = [size for size in move.record.shape if size > 1]
    shapes = {index: layout.leaves[index].stored_shape for index in move.match.leaves}
    same = [index for index, shape in shapes.items() if list(shape[-len(dims) :]) == dims]
    return same or list(shapes)


def _remedy(one: ScheduledCollective) -> str:
    """Say what may hide a collective."""
    if not one.exposed_seconds:
        return ""
    if not one.is_blocking:
        return "put more work beside it (prefetch, or a larger batch)"
    if one.trips and one.leaves:
        return "move it while another layer computes (prefetch)"
    return "let the compiler make it asynchronous (compiler options)"
