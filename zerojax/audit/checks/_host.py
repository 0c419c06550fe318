"""The check of what moves between a device and its host."""

from __future__ import annotations

from collections.abc import Iterator

from zerojax.audit._evidence import Evidence, some
from zerojax.audit._host import traffic_of
from zerojax.audit._problems import Problem

#: More than this share above what the update has to move is a problem.
TOLERANCE = 0.05


def check_host_traffic(evidence: Evidence) -> Iterator[Problem]:
    """Check that the host's update takes gradients and gives parameters, and no more."""
    traffic = traffic_of(evidence)
    if not traffic.theory or traffic.updated <= traffic.theory * (1 + TOLERANCE):
        return
    computed = (m for m in traffic.moves if m.is_computed)
    worst = sorted(computed, key=lambda m: -(m.to_host + m.from_host))
    yield Problem(
        kind="host traffic",
        where=some([m.name for m in worst], 2),
        expected=f"{traffic.theory:,} bytes per device: gradients to the host and parameters back",
        seen=f"the update moves {traffic.updated:,} bytes between the device and the host, "
        f"{traffic.updated / traffic.theory:.2f} times that",
        remedy="send gradients and parameters in the parameters' dtype and keep masters and "
        "optimizer states in the host's memory: OffloadPolicy(kinds=('optimizer', 'master'))",
    )
