"""What a step waits for, as its compiler scheduled it: nothing is measured. Pure.

Work is libtpu's own estimate, and on a GPU a roofline of each kernel; how long links are busy is
the planner's. Both leave latency out and take every rate at its peak: they are lower bounds.

A clock runs through the operations. A device computes one instruction after the other; each group
of links moves one collective after the other; a device waits where a collective ends that is not
through. Two gathers of 3 ms on the same links, issued together before 4 ms of work:

    issue A, issue B      links: A until 3, B until 6
    work of 4 ms          the clock stands at 4
    end A                 it is through: nothing exposed
    end B                 the clock waits from 4 to 6: 2 ms exposed

and not 0, which comparing each with the work beside it would give. A collective is taken to move
from its issue on, also beside what libtpu did not fuse with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerojax._tree import grouped
from zerojax.audit._program import Program
from zerojax.audit._traffic import role_of
from zerojax.hardware import Hardware, hardware_of
from zerojax.hlo import Collective, Cost, Module, Operation, parse_schedule
from zerojax.planner import Interconnect, Transfer


@dataclass
class Tally:
    """Add up what was seen of one operation that issues collectives, over a step."""

    operation: Operation
    links: float = 0.0
    exposed: float = 0.0
    largest: Operation | None = None
    most: float = 0.0  # seconds of the largest operation beside it, or its bytes or cycles
    # when links begin and are through, and how long the device waits: each run, two turns of a loop
    runs: list[tuple[float, float, float]] = field(default_factory=list)
    until: float = 0.0  # when the last of all its runs is through


@dataclass
class Clock:
    """Goes through a schedule with one stream of work and one queue for each group of links."""

    seconds: Callable[[Cost], float]
    transfer: Callable[[Operation], Transfer]
    now: float = 0.0
    work: float = 0.0
    exposed: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)  # by link: for how long
    free: dict[str, float] = field(default_factory=dict)  # by link: when its queue is through
    #: by name, with when its links begin and are through
    flying: dict[str, tuple[Tally, float, float]] = field(default_factory=dict)
    tallies: dict[tuple[object, ...], Tally] = field(default_factory=dict)

    def run(self, operations: Sequence[Operation], times: int = 1) -> None:
        """Do some operations, of which a step does so many turns alike."""
        for one in operations:
            if one.bodies:
                self._turn(one, times)
            if one.begins:
                self._begin(one, times)
            if one.cost:
                self._compute(one, times)
            if one.ends in self.flying:
                self._end(one.ends, times)

    def _turn(self, loop: Operation, times: int) -> None:
        """Do the first turn of a loop, and the second for all others; a branch that takes longest.

        All that a turn issues ends in it, so that later turns are alike.
        """
        body = max(loop.bodies, key=self._length)
        if loop.times:
            self.run(body, times)
        if loop.times > 1:
            before = self.now
            self.run(body, times * (loop.times - 1))
            later = (self.now - before) * (loop.times - 2)
            self.now += later
            for tally in self.tallies.values():
                tally.until += later * (tally.until > before)

    def _length(self, operations: Sequence[Operation]) -> float:
        return sum(
            self.seconds(one.cost)
            + (self.transfer(one).seconds if one.begins else 0.0)
            + one.times * max(map(self._length, one.bodies), default=0.0)
            for one in operations
        )

    def _begin(self, one: Operation, times: int) -> None:
        moving = self.transfer(one)
        start = max([self.now, *(self.free.get(link, 0.0) for link in moving.links)])
        arrives = start + moving.seconds
        self.free |= dict.fromkeys(moving.links, arrives)
        for link in moving.links:
            self.busy[link] = self.busy.get(link, 0.0) + moving.seconds * times
        tally = self.tallies.setdefault(one.begins, Tally(one))
        tally.links += moving.seconds * times
        self.flying[one.name] = tally, start, arrives

    def _compute(self, one: Operation, times: int) -> None:
        seconds = self.seconds(one.cost)
        self.now += seconds
        self.work += seconds * times
        size = seconds or one.cost.cycles or one.cost.bytes
        for tally, *_ in self.flying.values():
            if size > tally.most:
                tally.largest, tally.most = one, size

    def _end(self, name: str, times: int) -> None:
        tally, start, arrives = self.flying.pop(name)
        waits = max(arrives - self.now, 0.0)
        tally.runs.append((start, arrives, waits))
        tally.until = arrives
        self.now += waits
        self.exposed += waits * times
        tally.exposed += waits * times


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
    until: float = field(repr=False)  # when the last of all its runs is through
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
        return self.blocking_bytes / (sum(one.moved_bytes for one in self.collectives) or 1)

    @property
    def summary(self) -> str:
        """Return the totals in words."""
        again = len(self.rematerialised)
        kept = f"; the compiler rematerialised {again} instructions" if again else ""
        return (
            f"a step of {self.step_seconds * 1e3:.2f} ms waits for its links for "
            f"{self.exposed_seconds * 1e3:.2f} ms ({self.exposed_share:.1%}); "
            f"bound by {self.bound_by}{kept}"
        )


def schedule_of(
    program: Program,
    module: Module,
    records: Sequence[Collective],
    devices: Sequence[Any],
    leaves_of: Callable[[Collective], Sequence[str]] = lambda _: (),
    gather_remedy: str = "",
) -> ScheduleReport | None:
    """Run the clock over a program; None on a CPU, whose collectives wait, or an unknown chip.

    `gather_remedy` is what to do about a leaf's gather that is exposed, where there is something.
    """
    hardware = hardware_of(str(devices[0].device_kind))
    found = None if program.platform == "cpu" else parse_schedule(module)
    if found is None or hardware is None:
        return None
    own = {device.id: device for device in devices}
    if own.keys() == set(program.device_ids):
        devices = [own[number] for number in program.device_ids]
    interconnect = Interconnect(hardware, devices)
    moving = (record for record in records if record.moved_elements)
    issued = grouped(moving, lambda record: (record.computation, record.name, record.loops))

    def begun(one: Operation) -> list[Collective]:
        return [record for key in one.begins for record in issued.get(key, ())]

    def transfer_of(one: Operation) -> Transfer:
        moving = [_transfer(x, interconnect, hardware) for x in begun(one)]
        links = dict.fromkeys(link for each in moving for link in each.links)
        return Transfer(sum(each.seconds for each in moving), tuple(links))

    clock = Clock(lambda cost: _seconds(cost, hardware), transfer_of)
    clock.run(found.operations)
    collectives = [
        _collective(group, tally, [x for one in group for x in leaves_of(one)], gather_remedy)
        for tally in clock.tallies.values()
        if (group := begun(tally.operation))
    ]
    collectives.sort(key=lambda one: (-one.exposed_seconds, -one.moved_bytes))
    links, busiest = max(clock.busy.items(), key=lambda item: item[1], default=("", 0.0))
    return ScheduleReport(
        hardware=hardware.name,
        collectives=tuple(collectives),
        work_seconds=clock.work,
        exposed_seconds=clock.exposed,
        bound_by="work" if clock.work >= busiest else f"{links} links",
        rematerialised=found.rematerialised,
    )


def _seconds(cost: Cost, hardware: Hardware) -> float:
    if cost.cycles and hardware.clock:
        return cost.cycles / hardware.clock
    products = cost.flops / hardware.flops + cost.flops_fp32 / hardware.flops_fp32
    return max(products, cost.bytes / hardware.hbm_bandwidth)


def _transfer(record: Collective, interconnect: Interconnect, hardware: Hardware) -> Transfer:
    if record.groups:
        size = record.elements * record.item_bits / 8
        return interconnect.transfer(record.op, record.groups, size)
    return Transfer(record.moved_bytes / record.runs / hardware.slow_bandwidth, ("slow",))


def _collective(
    records: Sequence[Collective], tally: Tally, leaves: Sequence[str], gather_remedy: str
) -> ScheduledCollective:
    first, beside, remedy = records[0], tally.largest, ""
    if tally.exposed:
        own = gather_remedy if leaves and role_of(first) == "gather" else ""
        remedy = own or "put more work beside it (a larger batch)"
    return ScheduledCollective(
        op=first.spelling,
        name=tally.operation.name,
        leaves=tuple(dict.fromkeys(leaves)),
        trips=first.trips,
        moved_bytes=sum(record.moved_bytes for record in records),
        is_blocking=beside is None,
        beside=beside.name if beside else "",
        beside_source=(beside.source or beside.op_name) if beside else "",
        link_seconds=tally.links,
        exposed_seconds=tally.exposed,
        runs=tuple(tally.runs),
        until=tally.until,
        remedy=remedy,
    )
