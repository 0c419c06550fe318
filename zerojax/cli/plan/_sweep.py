"""What the drawing of `zerojax plan` goes through: numbers of devices, and slower networks."""

from __future__ import annotations

import dataclasses

from zerojax.cli.plan._options import PlanOptions
from zerojax.planner import Hardware

#: The largest number of devices is the first power of two from here on that is four times as many
#: as were asked for.
AT_LEAST = 1024


def device_counts(options: PlanOptions) -> list[int]:
    """List numbers of devices: powers of two times what has to divide them."""
    counts = [options.model_parts * (options.shards or 1)]
    while counts[-1] < max(AT_LEAST, 4 * options.devices):
        counts.append(2 * counts[-1])
    return counts


def slower(hardware: Hardware, factor: float) -> Hardware:
    """Return hardware whose links, fast and slow, bring so many times less."""
    return dataclasses.replace(
        hardware,
        link_bandwidth=hardware.link_bandwidth / factor,
        chip_bandwidth=hardware.chip_bandwidth / factor,
        slow_bandwidth=hardware.slow_bandwidth / factor,
    )
