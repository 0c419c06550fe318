"""What differs between two records of a step: what grew, what moved, what began to block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.lock._record import Leaf, Moved, StepRecord

#: The part by which bytes may differ, and the difference of shares, that is no difference.
TOLERANCE = 0.01
_LEAF_FIELDS = ("count", "dtype", "shape", "spec", "bytes", "donated")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that a step does otherwise than its lock says.

    Attributes:
        kind: "argument", "recompiled", "collective", "bytes" or "exposed".
        where: the leaf's path, the collective with its line, or the total.
        expected: what the lock says.
        seen: what the step does.
        grows: whether it is more than it was; None where neither is more.
    """

    kind: str
    where: str
    expected: str
    seen: str
    grows: bool | None = None

    def __str__(self) -> str:
        """Write it in one line."""
        return f"{self.kind}: {self.where}: expected {self.expected}, seen {self.seen}"


def compare(old: StepRecord, new: StepRecord) -> tuple[Difference, ...]:
    """List what differs; bytes within 1%, and shares within 0.01, are the same.

    Args:
        old: what was accepted.
        new: what there is now.
    """
    return (*_mesh(old, new), *_leaves(old, new), *_moved(old, new), *_totals(old, new))


def _mesh(old: StepRecord, new: StepRecord) -> Iterator[Difference]:
    if dict(old.mesh) != dict(new.mesh):
        yield Difference(
            kind="mesh", where="the mesh", expected=str(dict(old.mesh)), seen=str(dict(new.mesh))
        )


def _leaves(old: StepRecord, new: StepRecord) -> Iterator[Difference]:
    for path in dict.fromkeys([*old.leaves, *new.leaves]):
        was, now = old.leaves.get(path), new.leaves.get(path)
        if was is None or now is None:
            words = [_leaf_words(leaf, path) for leaf in (was, now)]
            grows = was is None
            yield Difference(
                kind="argument", where=path, expected=words[0], seen=words[1], grows=grows
            )
            continue
        fields = [name for name in _LEAF_FIELDS if getattr(was, name) != getattr(now, name)]
        if fields:
            expected, seen = (
                ", ".join(f"{name} {_value(leaf, name)}" for name in fields) for leaf in (was, now)
            )
            grows = None if now.bytes == was.bytes else now.bytes > was.bytes
            yield Difference(kind="argument", where=path, expected=expected, seen=seen, grows=grows)
        if was.settled and not now.settled:
            yield Difference(
                kind="recompiled",
                where=path,
                expected="returned as it is taken",
                seen="returned with another placement or dtype, so that the second step compiles "
                "anew: give jit the same out_shardings as in_shardings",
                grows=True,
            )


def _leaf_words(leaf: Leaf | None, path: str) -> str:
    return f"{leaf.dtype}{list(leaf.shape)} {leaf.spec}" if leaf else f"no {path}"


def _value(leaf: Leaf, name: str) -> str:
    value = getattr(leaf, name)
    return f"{value:,}" if name in ("bytes", "count") else str(value)


def _moved(old: StepRecord, new: StepRecord) -> Iterator[Difference]:
    for key in dict.fromkeys([*old.moved, *new.moved]):
        was, now = old.moved.get(key), new.moved.get(key)
        if was and now and was.runs == now.runs and _is_close(was.bytes, now.bytes):
            continue
        one = now or was
        assert one is not None
        of = f" of {one.leaf}" if one.leaf else ""
        at = f" at {one.source}" if one.source else ""
        yield Difference(
            kind="collective",
            where=f"{key}{of}{at}",
            expected=_moved_words(was),
            seen=_moved_words(now),
            grows=(now.bytes if now else 0) > (was.bytes if was else 0),
        )


def _moved_words(one: Moved | None) -> str:
    return f"{one.runs} a step, {one.bytes:,.0f} bytes" if one else "none"


def _totals(old: StepRecord, new: StepRecord) -> Iterator[Difference]:
    for name in dict.fromkeys([*old.totals, *new.totals]):
        was, now = old.totals.get(name, 0), new.totals.get(name, 0)
        if name == "exposed share":
            if abs(now - was) > TOLERANCE:
                words = f"{was:.1%} of the scheduled step", f"{now:.1%}"
                yield Difference(
                    kind="exposed",
                    where=name,
                    expected=words[0],
                    seen=words[1],
                    grows=now > was,
                )
        elif not _is_close(was, now):
            yield Difference(
                kind="bytes", where=name, expected=f"{was:,}", seen=f"{now:,}", grows=now > was
            )


def _is_close(was: float, now: float) -> bool:
    return abs(now - was) <= TOLERANCE * max(was, 1)
