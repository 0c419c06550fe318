"""Gradients of microbatches, when they are summed, and whether a loss is a mean over examples."""

from zerojax.collectives.gradients._reduce import accumulate, reduce_once, warn_unless_mean, wide
