"""What a step waits for, as its compiler scheduled it: nothing is measured. Pure.

Work is libtpu's own estimate, and on a GPU a roofline of each kernel; how long links are busy is
the planner's. Both leave latency out and take every rate at its peak: they are lower bounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerojax.audit._clock import Clock, Tally
from zerojax.audit._program import Program
from zerojax.hlo import Collective, Cost, Module, Operation, parse_schedule
from zerojax.planner import Hardware, Places, Transfer, find_hardware


@dataclass(frozen=True, kw_only=True)
class ScheduledCollective:
    """Hold what was scheduled for one instruction that communicates; seconds are of a step."""

    op: str  # as `Collective.spelling`
    name: str  # of the instruction that begins it
    leaves: tuple[str, ...]  # paths that it may move; none for an activation
    trips: tuple[int | None, ...]  # lengths of the loops around it
    moved_bytes: float  # that a device sends in a step
    is_blocking: bool  # whether nothing was scheduled between its beginning and its end
    beside: str  # the largest operation beside it; empty for none
    beside_source: str  # its line or its scope
    link_seconds: float  # for which it keeps links busy
    exposed_seconds: float  # for which the device waits for it
    # when its links begin, when they are through, and for how long the device waits, of each run in
    # seconds from the step's beginning; of a loop's the first two turns
    runs: tuple[tuple[float, float, float], ...] = field(repr=False)
    remedy: str  # what may hide it; empty where nothing is exposed


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """What a step waits for, as scheduled by the compiler and never measured."""

    hardware: str  # the chip whose figures were used
    collectives: tuple[ScheduledCollective, ...] = field(repr=False)  # the most exposed first
    work_seconds: float  # for which it computes, by the compiler's estimates or a roofline
    exposed_seconds: float  # for which it waits for collectives
    bound_by: str  # "work", or the links that are busy for longer: "fast links", "x+ links"
    rematerialised: tuple[str, ...]  # instructions that the compiler itself runs again

    @property
    def step_seconds(self) -> float:
        """Add what is computed and what is waited for."""
        return self.work_seconds + self.exposed_seconds

    @property
    def exposed_share(self) -> float:
        """Return the part of the step for which the device waits."""
        return self.exposed_seconds / (self.step_seconds or 1)

    @property
    def blocking_bytes(self) -> float:
        """Count the moved bytes that nothing was scheduled beside."""
        return sum(one.moved_bytes for one in self.collectives if one.is_blocking)

    @property
    def blocking_share(self) -> float:
        """Return the part of the moved bytes that nothing was scheduled beside."""
        total = sum(one.moved_bytes for one in self.collectives)
        return self.blocking_bytes / total if total else 0.0

    @property
    def summary(self) -> str:
        """Return the totals in words."""
        again = len(self.rematerialised)
        kept = f"; the compiler rematerialised {again} instructions" if again else ""
        return (
            f"{self.blocking_share:.1%} of moved bytes block; a step of "
            f"{self.step_seconds * 1e3:.2f} ms waits for {self.exposed_seconds * 1e3:.2f} ms "
            f"({self.exposed_share:.1%}); bound by {self.bound_by}{kept}"
        )


def schedule_of(
    program: Program,
    module: Module,
    records: Sequence[Collective],
    devices: Sequence[Any],
    leaves_of: Callable[[Collective], Sequence[str]] = lambda _: (),
) -> ScheduleReport | None:
    """Run the clock over a program; None on a CPU, whose collectives always wait, or another chip.

    Another chip is one whose figures `HARDWARE` does not have.

    Args:
        program: what was compiled.
        module: its text.
        records: its collectives.
        devices: of the mesh; the program's own order of them counts, where it tells it.
        leaves_of: paths of the leaves that a collective may move.
    """
    hardware = _hardware_of(devices[0])
    found = None if program.platform == "cpu" else parse_schedule(module)
    if found is None or hardware is None:
        return None
    own = {device.id: device for device in devices}
    if own.keys() == set(program.device_ids):
        devices = [own[number] for number in program.device_ids]
    places = Places(hardware, devices)
    issued: dict[object, list[Collective]] = {}
    for record in records:
        if record.moved_elements:
            issued.setdefault((record.computation, record.name, record.loops), []).append(record)

    def begun(one: Operation) -> list[Collective]:
        return [record for key in one.begins for record in issued.get(key, ())]

    def transfer_of(one: Operation) -> Transfer:
        moving = [_transfer(x, places, hardware) for x in begun(one)]
        links = dict.fromkeys(link for each in moving for link in each.links)
        return Transfer(sum(each.seconds for each in moving), tuple(links))

    clock = Clock(lambda cost: _seconds(cost, hardware), transfer_of)
    clock.run(found.operations)
    collectives = [
        _collective(group, tally, tuple(dict.fromkeys(x for one in group for x in leaves_of(one))))
        for tally in clock.tallies.values()
        if (group := begun(tally.operation))
    ]
    links, busiest = max(clock.busy.items(), key=lambda item: item[1], default=("", 0.0))
    return ScheduleReport(
        hardware=hardware.name,
        collectives=tuple(
            sorted(collectives, key=lambda one: (-one.exposed_seconds, -one.moved_bytes))
        ),
        work_seconds=clock.work,
        exposed_seconds=clock.exposed,
        bound_by="work" if clock.work >= busiest else f"{links} links",
        rematerialised=found.rematerialised,
    )


def _hardware_of(device: Any) -> Hardware | None:
    try:
        return find_hardware(str(device.device_kind))
    except ValueError:
        return None


def _seconds(cost: Cost, hardware: Hardware) -> float:
    """Return the time of an instruction: the compiler's cycles, or a roofline."""
    if cost.cycles and hardware.clock:
        return cost.cycles / hardware.clock
    products = cost.flops / hardware.flops + cost.flops_fp32 / hardware.flops_fp32
    return max(products, cost.bytes / hardware.hbm_bandwidth)


def _transfer(record: Collective, places: Places, hardware: Hardware) -> Transfer:
    """Return for how long one run of a collective keeps links busy."""
    if record.groups:
        return places.transfer(record.op, record.groups, record.elements * record.item_bits / 8)
    seconds = record.moved_bytes / record.runs / hardware.slow_bandwidth  # between slices
    return Transfer(seconds, ("slow",))


def _collective(
    records: Sequence[Collective], tally: Tally, leaves: tuple[str, ...]
) -> ScheduledCollective:
    first, beside = records[0], tally.largest
    if not tally.exposed:
        remedy = ""
    elif beside is not None:
        remedy = "put more work beside it (prefetch, or a larger batch)"
    elif first.trips and leaves:
        remedy = "move it while another layer computes (prefetch)"
    else:
        remedy = "let the compiler make it asynchronous (compiler options)"
    return ScheduledCollective(
        op=first.spelling,
        name=tally.operation.name,
        leaves=leaves,
        trips=first.trips,
        moved_bytes=sum(record.moved_bytes for record in records),
        is_blocking=beside is None,
        beside=beside.name if beside else "",
        beside_source=(beside.source or beside.op_name) if beside else "",
        link_seconds=tally.links,
        exposed_seconds=tally.exposed,
        runs=tuple(tally.runs),
        remedy=remedy,
    )
