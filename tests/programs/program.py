"""What a whole training program is: parameters, a loss, data, an optimizer and a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

TOKENS, EXAMPLES = 16, 16


class Size(NamedTuple):
    """How large a model is; its context is always `TOKENS`, or the patches of an image."""

    width: int
    depth: int
    vocabulary: int  # or the number of classes

    @property
    def heads(self):
        return self.width // 32


#: The one trains on virtual CPU devices in a test, the other is compiled for accelerators: its
#: weights are wider than they are many, so that a gather is worth more than a norm's sum.
SMALL, LARGE = Size(64, 2, 128), Size(256, 4, 512)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program that knows nothing of ZeRO.

    Attributes:
        init: `init(key)` returns the parameters.
        loss: what `make_train_step` takes; it may ask for a key and for the state of the model.
        batch: examples, as NumPy arrays.
        tx: the optimizer, without clipping, which the recipe has.
        recipe: how a step is computed.
        model_state: `model_state(key)` returns its first value.
    """

    init: Callable[..., Any]
    loss: Callable[..., Any]
    batch: Any
    tx: Any
    recipe: zerojax.Recipe = dataclasses.field(default_factory=zerojax.Recipe)
    model_state: Callable[..., Any] | None = None

    def step(self, mesh, stage, key):
        """Return the train step on a mesh, of devices that are here or not."""
        layout = zerojax.make_layout(jax.eval_shape(self.init, key), mesh, stage=stage)
        state = None if self.model_state is None else self.model_state(key)
        return zerojax.make_train_step(self.loss, self.tx, layout, self.recipe, model_state=state)


def text(size, tokens=TOKENS + 1):
    """Return examples of a text that repeats itself, [B, T]."""
    rows = np.random.default_rng(0).integers(0, size.vocabulary, (EXAMPLES, 1))
    return ((rows + 7 * np.arange(tokens) ** 2) % size.vocabulary).astype(np.int32)


def images(size):
    """Return images [B, H, W, 3] and their labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, size.vocabulary, EXAMPLES).astype(np.int32)
    return {"image": rng.normal(size=(EXAMPLES, 16, 16, 3)).astype(np.float32), "label": labels}


def cross_entropy(logits, labels):
    """Return the loss of each position in fp32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
