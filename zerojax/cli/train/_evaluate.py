"""Evaluation on held-out text, and a sample of what the model writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._types import PyTree
from zerojax.cli.train._options import TrainOptions
from zerojax.collectives import gather_where_used, to_stored
from zerojax.data import decode, encode, make_batches
from zerojax.layout import Layout
from zerojax.models import gpt

#: Bytes of held-out text that a sample continues where the user gives none.
PROMPT_SIZE = 64
TEMPERATURE = 0.8


class Evaluation:
    """The mean loss over fixed stretches of held-out text, in bits per byte.

    Runs under the train step's placement; parameters are gathered where they are used.
    """

    def __init__(
        self,
        loss: Callable[[PyTree, jax.Array], jax.Array],
        layout: Layout,
        text: np.ndarray,
        context: int,
        num_windows: int,
        batch_size: int,
    ) -> None:
        windows = make_batches(text, context=context, batch_size=1, num_epochs=1)
        rows = np.concatenate(list(itertools.islice(windows, num_windows)))
        self.num_windows = len(rows)
        self._layout = layout
        # Rows of zeros fill the last batch and count for nothing.
        filler = -len(rows) % batch_size
        rows = np.pad(rows, ((0, filler), (0, 0))).reshape(-1, batch_size, context + 1)
        counts = np.pad(np.ones(self.num_windows, np.float32), (0, filler)).reshape(-1, batch_size)
        self._batches = list(zip(rows, counts, strict=True))

        def total(params: PyTree, rows: jax.Array, counts: jax.Array) -> jax.Array:
            return jnp.sum(jax.vmap(lambda row: loss(params, row[None]))(rows) * counts)

        gathered = gather_where_used(total, layout)

        def stored_total(params: PyTree, rows: jax.Array, counts: jax.Array) -> jax.Array:
            if not layout.partitions("parameter"):
                params = layout.map_leaves(lambda leaf, x: to_stored(x, leaf), params)
            return gathered(params, rows, counts)

        self._total = jax.jit(stored_total)

    def __call__(self, params: PyTree) -> float:
        """Evaluate the parameters of a train state."""
        nats = 0.0
        for batch in self._batches:
            rows, counts = jax.device_put(batch, self._layout.batch)
            nats += float(self._total(params, rows, counts))
        return bits(nats / self.num_windows)


def bits(nats: float) -> float:
    """Convert a loss per byte from nats."""
    return nats / float(np.log(2))


def sample(
    config: gpt.Config, params: PyTree, text: np.ndarray, options: TrainOptions
) -> tuple[str, str]:
    """Let the model continue the prompt, or the first bytes of the text where none is given.

    Returns:
        The prompt and its continuation, both safe to print.
    """
    prompt = options.prompt
    start = text[:PROMPT_SIZE].astype(np.int32) if prompt is None else encode(prompt)
    tokens = gpt.generate(
        config,
        _on_one_device(params),
        jnp.asarray(start)[None],
        jax.random.key(options.seed),
        num_tokens=options.sample_bytes,
        temperature=TEMPERATURE,
    )
    # A vocabulary larger than bytes can give tokens that are none; 255 is never UTF-8 either.
    return decode(start), decode(np.minimum(np.asarray(tokens[0]), 255))


def _on_one_device(params: PyTree) -> PyTree:
    """Take one device's copy of parameters that are whole on each: all would do the same."""
    if all(x.is_fully_replicated for x in jax.tree.leaves(params)):
        return jax.tree.map(lambda x: x.addressable_data(0), params)
    return params
