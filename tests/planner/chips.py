"""Stand-ins for the devices of a TPU slice."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """What functions that place devices, and `find_phases`, ask of one."""

    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "tpu"
