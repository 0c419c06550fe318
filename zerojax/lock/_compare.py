"""What differs between two records of a step: what grew, what moved, what began to block."""

from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.lock._record import Moved, StepRecord

#: The part by which bytes may differ, and the difference of shares, that is no difference.
TOLERANCE = 0.01
_FIELDS = {"count": ",", "dtype": "", "shape": "", "spec": "", "bytes": ",", "donated": ""}


@dataclass(frozen=True)
class Difference:
    """One thing that a step does otherwise than its lock says."""

    kind: str  # "mesh", "argument", "recompiled", "collective", "bytes" or "exposed"
    where: str  # the leaf's path, the collective with its line, or the total
    expected: str  # what the lock says
    seen: str  # what the step does
    grows: bool | None = None  # whether it is more than it was; None where neither is more

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: expected {self.expected}, seen {self.seen}"


def compare(old: StepRecord, new: StepRecord) -> tuple[Difference, ...]:
    """List what differs from an accepted step; bytes within 1% are the same, shares within 0.01."""
    mesh = [Difference("mesh", "the mesh", str(old.mesh), str(new.mesh))]
    mesh = [] if old.mesh == new.mesh else mesh
    return (*mesh, *_leaves(old, new), *_moved(old, new), *_totals(old, new))


def _leaves(old: StepRecord, new: StepRecord) -> Iterator[Difference]:
    for path in dict.fromkeys([*old.leaves, *new.leaves]):
        was, now = old.leaves.get(path), new.leaves.get(path)
        if was is None or now is None:
            words = ["none" if x is None else f"{x.dtype}{[*x.shape]} {x.spec}" for x in (was, now)]
            yield Difference("argument", path, words[0], words[1], was is None)
            continue
        fields = [name for name in _FIELDS if getattr(was, name) != getattr(now, name)]
        if fields:
            told = ((f"{x} {getattr(leaf, x):{_FIELDS[x]}}" for x in fields) for leaf in (was, now))
            words = [*map(", ".join, told)]
            grows = None if now.bytes == was.bytes else now.bytes > was.bytes
            yield Difference("argument", path, words[0], words[1], grows)
        if was.settled and not now.settled:
            told = "returned with another placement or dtype, so that the second step compiles anew"
            seen = f"{told}: give jit the same out_shardings as in_shardings"
            yield Difference("recompiled", path, "returned as it is taken", seen, True)


def _moved(old: StepRecord, new: StepRecord) -> Iterator[Difference]:
    nothing = Moved(runs=0, bytes=0, leaf="")
    for key in dict.fromkeys([*old.moved, *new.moved]):
        was, now = old.moved.get(key, nothing), new.moved.get(key, nothing)
        if was.runs == now.runs and _is_close(was.bytes, now.bytes):
            continue
        leaf, source = now.leaf or was.leaf, now.source or was.source
        where = key + (f" of {leaf}" if leaf else "") + (f" at {source}" if source else "")
        words = [f"{x.runs} a step, {x.bytes:,} bytes" if x.runs else "none" for x in (was, now)]
        yield Difference("collective", where, words[0], words[1], now.bytes > was.bytes)


def _totals(old: StepRecord, new: StepRecord) -> Iterator[Difference]:
    for name in dict.fromkeys([*old.totals, *new.totals]):
        was, now = old.totals.get(name, 0), new.totals.get(name, 0)
        if name == "exposed share":
            if abs(now - was) > TOLERANCE:
                seen = f"{now:.1%} of the scheduled step"
                yield Difference("exposed", name, f"{was:.1%}", seen, now > was)
        elif not _is_close(was, now):
            yield Difference("bytes", name, f"{was:,}", f"{now:,}", now > was)


def _is_close(was: float, now: float) -> bool:
    return abs(now - was) <= TOLERANCE * max(was, 1)
