"""Define a multilayer perceptron for regression or classification; parameters are plain dicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Describe the model; `dtype` is what it computes in, None for its parameters' dtype.

    `num_layers` counts weight matrices; the outputs of all but the last are `width` wide.

    Raises:
        ValueError: a size is not positive, or the task is unknown.
    """

    num_layers: int
    width: int
    input_size: int
    output_size: int
    task: Literal["regression", "classification"] = "regression"
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "input_size", "output_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"mlp.Config: {name} is {getattr(self, name)}; give at least 1")
        if self.task not in ("regression", "classification"):
            raise ValueError(
                f"mlp.Config: task is {self.task!r}; give 'regression' or 'classification'"
            )


def _sizes(config: Config) -> list[tuple[int, int]]:
    widths = [config.input_size, *[config.width] * (config.num_layers - 1), config.output_size]
    return list(itertools.pairwise(widths))


def num_params(config: Config) -> int:
    """Count the parameters: (rows + 1) * columns of each layer."""
    return sum((rows + 1) * columns for rows, columns in _sizes(config))


def init(config: Config, key: jax.Array) -> Params:
    """Draw fp32 parameters: kernels [rows, columns] normal(sqrt(2 / rows)), biases zero.

    Source: He et al., arXiv 1502.01852, equation 10.
    """
    sizes = _sizes(config)
    return {
        "layers": [
            {
                "kernel": math.sqrt(2 / rows) * jax.random.normal(k, (rows, columns), jnp.float32),
                "bias": jnp.zeros(columns, jnp.float32),
            }
            for (rows, columns), k in zip(sizes, jax.random.split(key, len(sizes)), strict=True)
        ]
    }


def apply(config: Config, params: Params, inputs: jax.Array) -> jax.Array:
    """Return fp32 outputs [B, output_size] for inputs [B, input_size]."""
    *hidden, last = params["layers"]
    x = inputs.astype(last["kernel"].dtype if config.dtype is None else config.dtype)
    for layer in hidden:
        x = jax.nn.relu(_dense(layer, x))
    return _dense(last, x).astype(jnp.float32)


def _dense(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["kernel"].astype(x.dtype) + params["bias"].astype(x.dtype)


def loss(config: Config, params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the fp32 mean loss of batch (inputs [B, input_size], targets).

    Regression: squared error to targets [B, output_size]. Classification: cross-entropy, in nats,
    of integer labels [B].
    """
    inputs, targets = batch
    outputs = apply(config, params, inputs)
    if config.task == "regression":
        return jnp.mean((outputs - targets.astype(jnp.float32)) ** 2)
    wanted = jnp.take_along_axis(outputs, targets[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(outputs, axis=-1) - wanted)
