"""Evaluation on held-out text, and a sample of what the model writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._types import PyTree
from zerojax.cli.train._options import TrainOptions
from zerojax.data import decode, encode, make_batches
from zerojax.models import gpt
from zerojax.train import TrainState, TrainStep

#: Bytes of held-out text that a sample continues where the user gives none.
PROMPT_SIZE = 64
TEMPERATURE = 0.8


def held_out_batches(
    text: np.ndarray, context: int, num_windows: int, batch_size: int
) -> np.ndarray:  # [batches, B, T + 1]
    """Cut fixed stretches of held-out text into whole batches of a step.

    What is left over is not looked at; where they are too few for one batch some come again.
    """
    windows = make_batches(text, context=context, batch_size=1, num_epochs=1)
    rows = np.concatenate(list(itertools.islice(windows, num_windows)))
    num_batches = max(1, len(rows) // batch_size)
    return np.resize(rows, (num_batches, batch_size, context + 1))


def evaluate(step: TrainStep, state: TrainState, batches: Iterable[np.ndarray]) -> float:
    """Return the mean loss over batches in bits per byte."""
    placed = (jax.device_put(rows, step.layout.batch) for rows in batches)
    return bits(float(np.mean([step.evaluate(state, rows) for rows in placed])))


def bits(nats: float) -> float:
    """Convert a loss per byte from nats."""
    return nats / float(np.log(2))


def sample(
    config: gpt.Config, params: PyTree, text: np.ndarray, options: TrainOptions
) -> tuple[str, str]:
    """Return a prompt, by default the first bytes of the text, and how the model continues it."""
    prompt = options.prompt
    start = text[:PROMPT_SIZE].astype(np.int32) if prompt is None else encode(prompt)
    if all(x.is_fully_replicated for x in jax.tree.leaves(params)):
        params = jax.tree.map(lambda x: x.addressable_data(0), params)  # all would do the same
    tokens = gpt.generate(
        config,
        params,
        jnp.asarray(start)[None],
        jax.random.key(options.seed),
        num_tokens=options.sample_bytes,
        temperature=TEMPERATURE,
    )
    # A vocabulary larger than bytes can give tokens that are none; 255 is never UTF-8 either.
    return decode(start), decode(np.minimum(np.asarray(tokens[0]), 255))
