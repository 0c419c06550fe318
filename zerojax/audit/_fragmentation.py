"""What a compiler's memory plan loses between temporaries, and what it saves by donation. Pure.

XLA places every temporary of a step before the step runs: one arena, each buffer at an offset of
its own. Bytes of the arena that are not in use at the worst moment are what fragmentation costs.
How many are in use comes from the compiler: from its record of the simulated heap, where it hands
the record over, or on a GPU from the peak that it computed from that record.

Source: arXiv 1910.02054, section 6.3 (MD).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Under this name a program keeps what its heap record says; not one of `memory_analysis`.
LIVE = "live_temp_size_in_bytes"


@dataclass(frozen=True, kw_only=True)
class Fragmentation:
    """Compare the arena of a program's temporaries with what is in use of it; bytes.

    Attributes:
        allocated: size of the arena.
        live: most bytes in use at one time.
    """

    allocated: int
    live: int

    @property
    def fraction(self) -> float:
        """Return the part of the arena that no temporary uses at the worst moment."""
        return 1 - self.live / self.allocated if self.allocated else 0.0


def fragmentation_of(platform: str, statistics: Mapping[str, int]) -> Fragmentation | None:
    """Return what fragmentation costs a program, or None where its compiler does not tell.

    Args:
        platform: "cpu", "gpu" or "tpu".
        statistics: those of a `Program`.
    """
    allocated = statistics.get("temp_size_in_bytes")
    live = statistics.get(LIVE)
    if live is None and platform == "gpu":
        live = _live_by_peak(statistics)
    # A TPU's peak counts vector memory too, and a CPU's no temporaries.
    if allocated is None or live is None:
        return None
    return Fragmentation(allocated=allocated, live=min(live, allocated))


def _live_by_peak(statistics: Mapping[str, int]) -> int | None:
    """Take from a peak what is there all the time: arguments, and results of their own."""
    peak = statistics.get("peak_memory_in_bytes", 0)
    fixed = statistics.get("argument_size_in_bytes", 0) + results_apart(statistics)
    return peak - fixed if peak >= fixed > 0 else None


def results_apart(statistics: Mapping[str, int]) -> int:
    """Count the bytes of results that take no argument's buffer."""
    names = ("output_size_in_bytes", "alias_size_in_bytes")
    whole, donated = (statistics.get(name, 0) for name in names)
    return max(whole - donated, 0)
