"""A multilayer perceptron for regression, beside the GPT; parameters are plain dicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Describe the model, which computes in its parameters' dtype.

    `num_layers` counts weight matrices; the outputs of all but the last are `width` wide.
    """

    num_layers: int
    width: int
    input_size: int
    output_size: int


def _sizes(config: Config) -> list[tuple[int, int]]:
    widths = [config.input_size, *[config.width] * (config.num_layers - 1), config.output_size]
    return list(itertools.pairwise(widths))


def init(config: Config, key: jax.Array) -> Params:
    """Draw fp32 parameters: kernels [rows, columns] normal(sqrt(2 / rows)), biases zero.

    Source: He et al., arXiv 1502.01852, equation 10.
    """
    sizes, layers = _sizes(config), []
    for (rows, columns), k in zip(sizes, jax.random.split(key, len(sizes)), strict=True):
        kernel = math.sqrt(2 / rows) * jax.random.normal(k, (rows, columns), jnp.float32)
        layers.append({"kernel": kernel, "bias": jnp.zeros(columns, jnp.float32)})
    return {"layers": layers}


def apply(config: Config, params: Params, inputs: jax.Array) -> jax.Array:
    """Return fp32 outputs [B, output_size] for inputs [B, input_size]."""
    *hidden, last = params["layers"]
    x = inputs.astype(last["kernel"].dtype)
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return (x @ last["kernel"] + last["bias"]).astype(jnp.float32)


def loss(config: Config, params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the fp32 mean squared error of batch (inputs [B, input_size], targets)."""
    inputs, targets = batch
    return jnp.mean((apply(config, params, inputs) - targets.astype(jnp.float32)) ** 2)
