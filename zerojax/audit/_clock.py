"""What a program waits for, as scheduled: a clock that runs through its operations. Pure.

A device computes one instruction after the other; each group of links moves one collective after
the other; a device waits where a collective ends that is not through. Two gathers of 3 ms on the
same links, issued together before 4 ms of work:

    issue A, issue B      links: A until 3, B until 6
    work of 4 ms          the clock stands at 4
    end A                 it is through: nothing exposed
    end B                 the clock waits from 4 to 6: 2 ms exposed

and not 0, which comparing each with the work beside it would give. A collective is taken to move
from its issue on, also beside what libtpu did not fuse with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zerojax.hlo import Cost, Operation
from zerojax.planner import Transfer


@dataclass
class Tally:
    """Add up what was seen of one operation that issues collectives, over a step."""

    operation: Operation
    links: float = 0.0
    exposed: float = 0.0
    largest: Operation | None = None
    most: float = 0.0  # seconds of the largest operation beside it, or its bytes or cycles
    # when links begin, when they are through, and for how long the device waits: of each run, of a
    # loop's the first two turns
    runs: list[tuple[float, float, float]] = field(default_factory=list)


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
            self.now += (self.now - before) * (loop.times - 2)

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
        self.now += waits
        self.exposed += waits * times
        tally.exposed += waits * times
