"""Small programs whose peaks and products one adds up by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zerojax.planner import Workload
from zerojax.planner._demand import Trace
from zerojax.planner.traced import HeldLeaf, Sharing, lifetimes_of, peak_of
from zerojax.planner.traced._reader import read_operations

N = 4  # shards
LOSS = 4  # bytes of a loss: it is there from the forward pass on
WIDE = 128  # a matrix of this width is large enough that its gather counts


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def leaves_of(params, stage=0, parts=1):
    """Give fp32 leaves as a layout would: all dims divide."""

    def leaf(x):
        whole = 4 * x.size / parts
        held = whole / N if stage == 3 else whole
        gradient = whole / N if stage else whole
        return HeldLeaf(
            held=held, gathered=whole, gradient=gradient, is_gathered=stage == 3, parts=parts
        )

    return [leaf(x) for x in jax.tree.leaves(params)]


def handmade(function, params, *batch):
    """Flatten `loss, *gradients = function(params, *batch)`, batch shapes without examples."""

    def trace(count):
        given = [shape(count, *x.shape, dtype=x.dtype) for x in batch]
        return jax.make_jaxpr(function)(params, *given)

    return read_operations(trace(2), trace(4), (2, 4))


def trace_of(loss, params, batch, *, remat=None, **options):
    return Trace(Workload(loss_fn=loss, batch=batch, **options), params, remat=remat)


def peak(loss, params, batch, examples, platform="cpu", stage=0, *, frees=False, **options):
    """Give the bytes of the peak; `loss` is a loss, or a program that was made by hand."""
    program = trace_of(loss, params, batch).operations if callable(loss) else loss
    leaves = leaves_of(params, stage, options.pop("parts", 1))
    given = {"frees": frees, "accumulate": options.pop("accumulate", 1)}
    lifetimes = lifetimes_of(program, len(leaves), platform)
    return peak_of(lifetimes, leaves, examples, **given, sharing=Sharing(**options))


def stacked_bytes(lifetimes, examples):
    """Count all that scans stack for the backward pass."""
    values = lifetimes.program.values
    return sum(values[v].bytes.at(examples) for v in lifetimes.stacked)
