"""What a step moves between a device and its host, beside what the host's update has to move."""

from __future__ import annotations

from dataclasses import dataclass

from zerojax.audit._arguments import item_bits
from zerojax.audit._evidence import Evidence
from zerojax.hlo import HostMove, find_host_moves


@dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """Count the bytes between one device and its host in a step.

    Attributes:
        to_host: from the device's memory to the host's.
        from_host: from the host's memory to the device's.
        updated: both ways for what the host itself computes: the optimizer's update.
        theory: bytes that this update has to move: gradients down and parameters up, 4 Psi / N
            with 16 bits (ZeRO-Offload); 0 where no state lives in the host's memory.
        moves: one by one.
    """

    to_host: int
    from_host: int
    updated: int
    theory: int
    moves: tuple[HostMove, ...]

    @property
    def total(self) -> int:
        """Add both ways."""
        return self.to_host + self.from_host

    def to_dict(self) -> dict[str, int]:
        """Return the counts as plain data."""
        names = ("to_host", "from_host", "total", "updated", "theory")
        return {name: getattr(self, name) for name in names}


def traffic_of(evidence: Evidence) -> HostTraffic:
    """Count what a program moves to and from the host; an unknown loop counts once."""
    moves = tuple(find_host_moves(evidence.module))
    down = [move.to_host * (move.trips or 1) for move in moves]
    up = [move.from_host * (move.trips or 1) for move in moves]
    both = zip(moves, down, up, strict=True)
    return HostTraffic(
        to_host=sum(down),
        from_host=sum(up),
        updated=sum(x + y for move, x, y in both if move.is_computed),
        theory=_theory(evidence),
        moves=moves,
    )


def _theory(evidence: Evidence) -> int:
    """Count what ZeRO-Offload's update moves: of each leaf a gradient down and a parameter up."""
    states = [one for one in evidence.states("master", "optimizer") if one.is_far]
    owners = {one.parameter for one in states if one.parameter is not None}
    has_masters = bool(evidence.states("master"))
    wide = evidence.recipe.accumulate > 1 or evidence.recipe.precision.reduce is not None
    bits = 0.0
    for index in owners:
        leaf = evidence.layout.leaves[index]
        own = evidence.parameter_bits.get(index, item_bits(str(leaf.dtype)))
        gradient = max(own, 32) if wide else own
        # Without masters the parameters themselves are updated, and go down as well.
        each = gradient + own if has_masters else gradient + 2 * own
        size = leaf.bytes_per_device("optimizer", dtype="uint8")
        bits += size * each
    return round(bits / 8)
