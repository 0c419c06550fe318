"""What a step moves between a device and its host, beside what the host's update has to move."""

from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.audit._arguments import item_bits
from zerojax.audit._evidence import Evidence, Problem, some
from zerojax.hlo import find_host_moves

#: More than this share above what the update has to move is a problem.
TOLERANCE = 0.05


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
        """Add both ways."""
        return self.to_host + self.from_host


def traffic_of(evidence: Evidence) -> HostTraffic:
    """Count what a program moves to and from the host; an unknown loop counts once."""
    moves = list(find_host_moves(evidence.module))
    down = [move.to_host * move.runs for move in moves]
    up = [move.from_host * move.runs for move in moves]
    both = zip(moves, down, up, strict=True)
    return HostTraffic(
        to_host=sum(down),
        from_host=sum(up),
        updated=sum(x + y for move, x, y in both if move.is_computed),
        theory=_theory(evidence),
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


def check_host_traffic(evidence: Evidence) -> Iterator[Problem]:
    """Check that the host's update takes gradients and gives parameters, and no more."""
    traffic = traffic_of(evidence)
    if not traffic.theory or traffic.updated <= traffic.theory * (1 + TOLERANCE):
        return
    computed = (m for m in find_host_moves(evidence.module) if m.is_computed)
    worst = sorted(computed, key=lambda m: -(m.to_host + m.from_host))
    yield Problem(
        where=some([m.name for m in worst], 2),
        expected=f"{traffic.theory:,} bytes per device: gradients to the host and parameters back",
        seen=f"the update moves {traffic.updated:,} bytes between the device and the host, "
        f"{traffic.updated / traffic.theory:.2f} times that",
        remedy="send gradients and parameters in the parameters' dtype and keep masters and "
        "optimizer states in the host's memory: Recipe(offload=True)",
    )
