"""The arithmetic of activations: what a transformer keeps for its backward pass, and moves.

Numbers in, numbers out; elements count numbers, bytes count bytes. b sequences of s tokens, width
h, a heads, L layers, t devices along the model axis. All of it is per device, where the model axis
cuts a layer as Megatron-LM does: attention by heads, the feed-forward part by its 4h.

Sources: "ZeRO" arXiv 1910.02054, "ZeRO-Infinity" arXiv 2104.07857, "Reducing Activation
Recomputation in Large Transformer Models" arXiv 2205.05198 (Megatron's formulas).
"""

from __future__ import annotations

from typing import Literal, get_args

from zerojax.planner._counts import as_amount, as_count

#: What is computed again in the backward pass: nothing, the scores and what they weigh, all.
Recompute = Literal["none", "attention", "full"]


def block_elements(*, batch: int, num_tokens: int, width: int) -> int:
    """Return b*s*h: the elements of one layer's input.

    Raises:
        ValueError: a count is not whole and positive.
    """
    return as_count("batch", batch) * as_count("num_tokens", num_tokens) * as_count("width", width)


def activation_elements(*, batch: int, num_tokens: int, width: int, num_layers: int) -> float:
    """Return 12*h*b*s*L: the elements that a GPT keeps without checkpoints, roughly.

    It counts elements; in fp16 each has two bytes. Source: ZeRO, section 3.2, footnote 3; see
    `layer_activation_bytes` for the exact count.
    """
    bsh = block_elements(batch=batch, num_tokens=num_tokens, width=width)
    return 12 * bsh * as_count("num_layers", num_layers)


def checkpoint_bytes(
    *,
    batch: int,
    num_tokens: int,
    width: int,
    num_layers: int,
    interval: int = 1,
    bytes_per_element: float = 2,
    model_axis: int = 1,
) -> float:
    """Return the bytes of activation checkpoints, one per `interval` layers: 2*b*s*h*L/interval.

    Args:
        batch: sequences in a device's microbatch.
        num_tokens: tokens in a sequence.
        width: h.
        num_layers: L.
        interval: layers from one checkpoint to the next.
        bytes_per_element: 2 in 16 bits; ZeRO's section 6.1 counts 1 where its section 3.2 counts 2.
        model_axis: devices over which checkpoints are partitioned (Pa); 1 where each keeps all.

    Sources: ZeRO, sections 3.2 and 6.1; ZeRO-Infinity, section 3.

    Raises:
        ValueError: a count is not whole and positive.
    """
    bsh = block_elements(batch=batch, num_tokens=num_tokens, width=width)
    elements = bsh * as_count("num_layers", num_layers) / as_count("interval", interval)
    return (
        elements
        * as_amount("bytes_per_element", bytes_per_element)
        / as_count("model_axis", model_axis)
    )


def working_activation_bytes(
    *, batch: int, num_tokens: int, width: int, num_heads: int, interval: int = 1
) -> float:
    """Return the bytes between two checkpoints while they are recomputed: b*s*ci*(16h + 2*a*s).

    Source: ZeRO-Infinity, section 3.

    Raises:
        ValueError: a count is not whole and positive.
    """
    rows = as_count("batch", batch) * as_count("num_tokens", num_tokens)
    row = 16 * as_count("width", width) + 2 * as_count("num_heads", num_heads) * num_tokens
    return rows * as_count("interval", interval) * row


def layer_activation_bytes(
    *,
    batch: int,
    num_tokens: int,
    width: int,
    num_heads: int,
    recompute: Recompute = "none",
    model_axis: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Return the bytes that one layer keeps for its backward pass, in 16 bits with dropout.

    s*b*h times: none 34 + 5as/h, of which the model axis leaves 10 whole (norms, dropouts and
    residuals) unless it cuts them along the sequence too; attention 34; full 2, the layer's input.

    Args:
        batch: sequences in a device's microbatch.
        num_tokens: tokens in a sequence.
        width: h.
        num_heads: a.
        recompute: what the backward pass computes again.
        model_axis: t.
        sequence_parallel: whether what lies between two cut parts is cut along the tokens.

    Source: arXiv 2205.05198, section 4, table 2. Full recomputation keeps 2*s*b*h whatever t is.

    Raises:
        ValueError: a count is not whole and positive, or no such `recompute`.
    """
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute must be one of {get_args(Recompute)}, got {recompute!r}")
    bsh = block_elements(batch=batch, num_tokens=num_tokens, width=width)
    heads, t = as_count("num_heads", num_heads), as_count("model_axis", model_axis)
    if recompute == "full":
        return 2.0 * bsh
    scores = 5 * heads * num_tokens / width if recompute == "none" else 0.0
    between = 10 / t if sequence_parallel else 10
    return bsh * (between + (24 + scores) / t)


def model_parallel_elements(*, batch: int, num_tokens: int, width: int) -> int:
    """Return the elements that model parallelism moves per layer and step: 12*b*s*h.

    Two all-reduces in the forward pass, two where it is recomputed and two in the backward pass,
    each of twice its message; times (t-1)/t on a ring. Source: ZeRO, section 8.
    """
    return 6 * 2 * block_elements(batch=batch, num_tokens=num_tokens, width=width)


def checkpoint_gather_elements(*, batch: int, num_tokens: int, width: int) -> int:
    """Return the elements that Pa adds per layer and step: b*s*h, one gather of a checkpoint.

    A twelfth of what model parallelism moves, hence below 10% of it. Source: ZeRO, section 8.
    """
    return block_elements(batch=batch, num_tokens=num_tokens, width=width)


def checkpoint_host_elements(
    *, batch: int, num_tokens: int, width: int, model_axis: int = 1
) -> float:
    """Return the elements that Pa+cpu moves between device and host per layer: 2*b*s*h/t.

    The partitioned checkpoint goes to the host and comes back. Source: ZeRO, section 8, "2x added
    data movement to and from CPU memory", read as once each way of what Pa keeps on a device.
    """
    bsh = block_elements(batch=batch, num_tokens=num_tokens, width=width)
    return 2 * bsh / as_count("model_axis", model_axis)
