"""The arithmetic of ZeRO and of what followed it: model states, volumes, traffic with the host.

Numbers in, numbers out. Psi is the number of parameters, N the number of shards. Where the formulas
meet a real model (leaves that no shard divides, optimizers other than Adam) a layout counts.

Sources: "ZeRO" arXiv 1910.02054, "ZeRO-Offload" arXiv 2101.06840, "ZeRO-Infinity" arXiv 2104.07857,
"ZeRO++" arXiv 2306.10209.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerojax._types import Kind
from zerojax.layout import STAGES
from zerojax.layout._stages import check_stage
from zerojax.planner._counts import as_amount, as_count

#: Bytes per parameter of the optimizer in mixed precision with Adam: fp32 master and two moments.
ADAM_BYTES = 12

#: Elements that a device moves per step, in Psi (N-1)/N. Gradients are reduced once; parameters are
#: gathered once, or, where they are partitioned, once for the forward and once for the backward
#: pass. At stage 0 both together are an all-reduce. Source: ZeRO, section 7.
VOLUMES: Mapping[int, int] = MappingProxyType(
    {stage: 1 + (2 if "parameter" in kinds else 1) for stage, kinds in STAGES.items()}
)


def ring_share(num_shards: int) -> float:
    """Return (N-1)/N: what a device moves of a tensor that a ring gathers or reduce-scatters.

    Raises:
        ValueError: N is no count.
    """
    num_shards = as_count("num_shards", num_shards)
    return (num_shards - 1) / num_shards


def model_state_bytes_by_kind(
    num_params: float,
    *,
    stage: int,
    num_shards: int,
    optimizer_bytes_per_param: float = ADAM_BYTES,
    param_bytes: float = 2,
    grad_bytes: float = 2,
) -> dict[Kind, float]:
    """Return the bytes of model states per device by kind; the optimizer's include the master.

    Args and errors: as `model_state_bytes`. Source: ZeRO, section 5.
    """
    num_params = as_count("num_params", num_params)
    num_shards = as_count("num_shards", num_shards)
    partitioned = STAGES[check_stage(stage)]
    widths: dict[Kind, float] = {
        "parameter": as_amount("param_bytes", param_bytes, above_zero=True),
        "gradient": as_amount("grad_bytes", grad_bytes),
        "optimizer": as_amount("optimizer_bytes_per_param", optimizer_bytes_per_param),
    }
    return {
        kind: width * num_params / (num_shards if kind in partitioned else 1)
        for kind, width in widths.items()
    }


def model_state_bytes(
    num_params: float,
    *,
    stage: int,
    num_shards: int,
    optimizer_bytes_per_param: float = ADAM_BYTES,
    param_bytes: float = 2,
    grad_bytes: float = 2,
) -> float:
    """Return the bytes of model states per device: parameters, gradients, optimizer and master.

    With two bytes each for parameters and gradients: (4+K) Psi at stage 0, 4 Psi + K Psi/N at 1,
    2 Psi + (2+K) Psi/N at 2, (4+K) Psi/N at 3. Source: ZeRO, section 5, figure 1 and table 1.

    Args:
        num_params: Psi, a whole number; a float such as 7.5e9 too.
        stage: 0 to 3.
        num_shards: N, the devices over which a stage partitions.
        optimizer_bytes_per_param: K; the default is Adam in mixed precision: an fp32 master and two
            fp32 moments.
        param_bytes: bytes of a parameter that the loss reads.
        grad_bytes: bytes of a gradient; 0 where none is kept.

    Raises:
        ValueError: a count is not whole and positive, a width is negative, or no such stage.
    """
    kinds = model_state_bytes_by_kind(
        num_params,
        stage=stage,
        num_shards=num_shards,
        optimizer_bytes_per_param=optimizer_bytes_per_param,
        param_bytes=param_bytes,
        grad_bytes=grad_bytes,
    )
    return sum(kinds.values())


def step_volume(num_params: float, *, stage: int, num_shards: int) -> float:
    """Return the elements that a device moves per step: 2, 2, 2 and 3 Psi, times (N-1)/N.

    Source: ZeRO, section 7, for one microbatch.

    Raises:
        ValueError: a count is not whole and positive, or no such stage.
    """
    psi = as_count("num_params", num_params)
    return VOLUMES[check_stage(stage)] * psi * ring_share(num_shards)


def offload_traffic_bytes(num_params: float, *, num_shards: int = 1) -> float:
    """Return the bytes between a device and its host per step, optimizer on the host: 4 Psi / N.

    Two bytes a parameter for gradients on their way down and two for updated parameters on their
    way up: the least of all ways to cut Adam between the two. Source: ZeRO-Offload, section 3.

    Raises:
        ValueError: a count is not whole and positive.
    """
    return 4 * as_count("num_params", num_params) / as_count("num_shards", num_shards)


def infinity_state_bytes(num_params: float) -> float:
    """Return the bytes of all model states with fp32 gradients kept beside fp16 ones: 20 Psi.

    Source: ZeRO-Infinity, section 3.
    """
    return model_state_bytes(num_params, stage=0, num_shards=1, grad_bytes=2 + 4)


def largest_linear_bytes(width: int) -> float:
    """Return the bytes of a transformer's largest linear and its gradient: 16 h^2.

    [h, 4h], two bytes each: what stage 3 holds gathered at least, unless it is cut in tiles.
    Source: ZeRO-Infinity, section 3.
    """
    return (2 + 2) * 4 * as_count("width", width) ** 2


def transfer_efficiency(*, intensity: float, bandwidth: float, flops: float) -> float:
    """Return the share of peak compute that is left where moved data waits: a b / (a b + peak).

    Args:
        intensity: FLOPs computed per byte moved: batch * tokens for parameters and gradients, a
            quarter of it for optimizer states, 24 * width * interval for checkpoints.
        bandwidth: bytes/s of a device.
        flops: FLOP/s that a device reaches when nothing waits.

    Source: ZeRO-Infinity, section 4, nothing overlapped.

    Raises:
        ValueError: an argument is not above 0.
    """
    intensity = as_amount("intensity", intensity, above_zero=True)
    fed = intensity * as_amount("bandwidth", bandwidth, above_zero=True)
    return fed / (fed + as_amount("flops", flops, above_zero=True))


@dataclass(frozen=True, kw_only=True)
class CrossNodeVolume:
    """Hold what stage 3 moves across nodes per step, in Psi elements of 16 bits."""

    forward_gather: float
    backward_gather: float
    reduction: float

    @property
    def total(self) -> float:
        """Add it all up."""
        return self.forward_gather + self.backward_gather + self.reduction


def cross_node_volume(
    *, weight_bits: int = 16, gradient_bits: int = 16, node_copy: bool = False
) -> CrossNodeVolume:
    """Return what stage 3 moves across nodes: 3 Psi, and 0.75 Psi with all of ZeRO++.

    Args:
        weight_bits: bits of a weight on the wire; 8 is qwZ. Scales per block are not counted.
        gradient_bits: bits of a gradient on the wire; 4 is qgZ.
        node_copy: each node keeps a whole copy, partitioned within it, for the backward pass: hpZ.

    Source: ZeRO++, sections 3 and 4, for many nodes: (N-1)/N is taken as 1.

    Raises:
        ValueError: bits are not whole and positive.
    """
    gather = as_count("weight_bits", weight_bits) / 16
    return CrossNodeVolume(
        forward_gather=gather,
        backward_gather=0.0 if node_copy else gather,
        reduction=as_count("gradient_bits", gradient_bits) / 16,
    )


def node_copy_bytes(num_params: float, *, devices_per_node: int, param_bytes: float = 2) -> float:
    """Return the bytes that hpZ adds per device: a node's copy of the parameters, cut within it.

    Source: ZeRO++, section 3.

    Raises:
        ValueError: a count is not whole and positive.
    """
    psi = as_count("num_params", num_params)
    width = as_amount("param_bytes", param_bytes, above_zero=True)
    return width * psi / as_count("devices_per_node", devices_per_node)
