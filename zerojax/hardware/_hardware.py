"""Hardware as plain data: what a device computes, holds and moves in a second.

`hardware.toml` has peaks as makers print them, per device as JAX sees it (a TPU v7 chip is two).
What a program reaches of them is for a plan to say, not for this table.
"""

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from zerojax._arguments import as_amount, as_count
from zerojax._plain import read_table

Platform = Literal["gpu", "tpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Describe a device, its links and its host; bytes, bytes per second and FLOP per second.

    Entries of one's own serve wherever a name of `HARDWARE` does, and
    `dataclasses.replace(HARDWARE["v5p"], domain=64)` changes one: slices of 64 chips, here.

    Attributes:
        name: what plans call it.
        platform: "gpu", "tpu" or "cpu".
        flops: dense matrix FLOP/s in bf16 (V100: fp16).
        flops_fp32: FLOP/s of a matrix product of fp32 arrays as JAX does it by default: TF32 on
            NVIDIA GPUs from Ampere on, one bf16 pass on TPUs (JAX docs, "Matmul precision").
        memory: bytes of a device that a program may use.
        hbm_bandwidth: bytes/s between a device and its memory.
        link_bandwidth: bytes/s that a device receives over its fast links; on a torus along one
            dim, from both neighbours together.
        domain: devices that fast links join: a node's (GPU), the largest slice's (TPU).
        torus: dims of the torus that they form; 0 where a switch joins them.
        wrap: a torus dim of a multiple of so many chips is a ring, else a line of half the speed.
        slices: the slices that can be rented, in chips ("4x4x8"); others are taken as they come.
        devices_per_chip: devices that share a place on the torus.
        chip_bandwidth: bytes/s that a device receives from the others of its chip.
        span: torus dims along which one gather or reduce-scatter may go at once: along more of them
            libtpu makes it an all-reduce, but for the `spans`, devices along each dim ("2x4"). 0
            where all may.
        sparse_cores: whether SparseCores gather and scatter along any dims at once, where shards
            are whole tiles, by the options that a train step is compiled with.
        slow_bandwidth: bytes/s that a device receives from beyond its domain: its part of a node's
            network cards (GPU) or of the data-centre network (TPU).
        host_bandwidth: bytes/s one way between a device and its host's memory.
        host_memory: bytes of the host's memory per device.
        clock: cycles/s of a TPU's cores, in which its compiler estimates; 0 where none does.
        flops_share, hbm_share, launch_seconds: by which a planned step goes: what its compiler's
            own estimates come to, read off compiled programs, in shares of `flops` and of
            `hbm_bandwidth`, and the seconds that any operation takes.
        vector_memory: bytes of the largest value outside of loops that its compiler keeps in
            vector memory alone, where few operations pass until its last use; 0 where it does not.
        device_kinds: what JAX calls such a device.
        source: where the figures are from.

    Raises:
        ValueError: a figure that no hardware has: zero, negative, not finite, of another kind.
    """

    name: str
    platform: Platform
    flops: float
    flops_fp32: float
    memory: int
    hbm_bandwidth: float
    link_bandwidth: float
    domain: int
    slow_bandwidth: float
    host_bandwidth: float
    host_memory: int
    torus: int = 0
    wrap: int = 1
    slices: tuple[str, ...] = ()
    devices_per_chip: int = 1
    chip_bandwidth: float = 0.0
    span: int = 0
    spans: tuple[str, ...] = ()
    sparse_cores: bool = False
    clock: float = 0.0
    flops_share: float = 1.0
    hbm_share: float = 1.0
    launch_seconds: float = 0.0
    vector_memory: int = 0
    device_kinds: tuple[str, ...] = ()
    source: str = "the user"

    def __post_init__(self) -> None:
        who = f"Hardware {self.name!r}:"
        bandwidths = ("hbm_bandwidth", "link_bandwidth", "slow_bandwidth", "host_bandwidth")
        for field in ("flops", "flops_fp32", *bandwidths, "flops_share", "hbm_share"):
            as_amount(f"{who} {field}", getattr(self, field), above_zero=True)
        for field in ("clock", "launch_seconds", "vector_memory"):
            as_amount(f"{who} {field}", getattr(self, field))
        for field in ("memory", "host_memory", "domain", "wrap", "devices_per_chip"):
            as_count(f"{who} {field}", getattr(self, field))
        is_shared, bandwidth = self.devices_per_chip > 1, self.chip_bandwidth
        as_amount(f"{who} chip_bandwidth", bandwidth, above_zero=is_shared)
        if self.platform not in get_args(Platform):
            known = ", ".join(get_args(Platform))
            raise ValueError(f"{who} platform must be one of {known}, got {self.platform!r}")
        if self.torus not in range(4):
            raise ValueError(f"{who} torus must be 0 (a switch), 1, 2 or 3, got {self.torus!r}")

    def may_span(self, sizes: Iterable[int]) -> bool:
        """Return whether one collective may go along torus dims with so many devices at once."""
        held = sorted(size for size in sizes if size > 1)
        return not self.span or len(held) <= self.span or "x".join(map(str, held)) in self.spans


def _read_table() -> dict[str, Hardware]:
    table = read_table("zerojax.hardware", "hardware.toml")
    for name, figures in table.items():
        lists = {key: tuple(value) for key, value in figures.items() if isinstance(value, list)}
        table[name] = Hardware(name=name, **(figures | lists))
    return table


#: By name: TPU v4, v5e, v5p, v6e, v7; NVIDIA V100, A100, H100, H200, B200.
HARDWARE: Mapping[str, Hardware] = MappingProxyType(_read_table())


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Return hardware by its name, by what JAX calls its devices, or as it was given.

    `hardware` is a key of `HARDWARE` ("h100"), or a device's `device_kind` ("TPU7x" is "v7"). A
    ValueError lists what is known, nearest first.
    """
    if isinstance(hardware, Hardware):
        return hardware
    names, wanted = _names(), str(hardware).strip().lower()
    if wanted in names:
        return HARDWARE[names[wanted]]
    near = difflib.get_close_matches(wanted.split(" ")[-1], names, n=len(names), cutoff=0)
    known = ", ".join(dict.fromkeys(names[name] for name in near))
    told = f"{hardware!r} is no hardware that is known; those are, nearest first: {known}; for"
    own = f"dataclasses.replace(zerojax.hardware.HARDWARE[{names[near[0]]!r}], memory=...)"
    raise ValueError(f"{told} another write a program of zerojax.plan(hardware={own})")


def hardware_of(device_kind: str) -> Hardware | None:
    """Return the hardware that JAX calls so; None where it is not known."""
    return HARDWARE.get(_names().get(device_kind.lower(), ""))


@functools.cache
def _names() -> dict[str, str]:
    kinds = {kind.lower(): key for key, one in HARDWARE.items() for kind in one.device_kinds}
    return {**kinds, **{key: key for key in HARDWARE}}
