"""What a GPT is made of: sizes and choices, presets by name."""

import dataclasses
import difflib
import functools
import math
import numbers
import tomllib
from collections.abc import Mapping
from importlib import resources

from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Describe the model; `dtype` is what it computes in, None for its parameters' dtype.

    `init_scale` is the standard deviation of the first weights: 0.02 suits GPT-2's widths, narrow
    models learn sooner from more. `remat` recomputes each layer in the backward pass. Norms,
    softmax and loss compute in fp32 whatever `dtype` is.

    `model_axis` names the mesh axis of model parallelism. It must divide the heads, and the rows of
    the embedding: `vocab_multiple` adds rows up to a multiple, for no token and no logit.

    A layer's values carry the names `attention` [B, T, D] and `hidden` [B, T, 4D], by which
    rematerialisation policies can keep them.

    Raises:
        ValueError: a size is not positive, or the heads do not divide the width.
    """

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int
    context: int
    init_scale: float = 0.02
    dtype: DTypeLike | None = None
    scan: bool = True
    remat: bool = True
    model_axis: str | None = None
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if field.type is int and (not isinstance(size, numbers.Integral) or size < 1):
                raise ValueError(f"gpt.Config: {field.name} is {size!r}; give at least 1")
        if self.width % self.num_heads:
            told = f"gpt.Config: num_heads={self.num_heads} does not divide width={self.width};"
            raise ValueError(f"{told} each head takes an equal part of the width")

    @property
    def vocab_rows(self) -> int:
        """The rows of the embedding: the vocabulary, up to `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def check_parts(config: Config, num_parts: int) -> None:
    """Refuse a model axis of that many devices if it does not cut this model into equal parts."""
    if config.num_heads % num_parts:
        fits = [str(n) for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise ValueError(
            f"gpt: {num_parts} devices along the model axis do not divide num_heads="
            f"{config.num_heads}, and each takes whole heads; axes that fit: {', '.join(fits)}"
        )
    if config.vocab_rows % num_parts:
        raise ValueError(
            f"gpt: {num_parts} devices along the model axis do not divide the embedding's "
            f"{config.vocab_rows} rows; give Config(vocab_multiple={num_parts}) or a multiple of it"
        )


_FILE = resources.files("zerojax.models").joinpath("presets.toml")
_TABLE = tomllib.loads(_FILE.read_text("utf-8"))
PRESETS: Mapping[str, Config] = {name: Config(**sizes) for name, sizes in _TABLE.items()}
_gpt2 = functools.partial(Config, vocab_size=50257, context=1024)


def of_size(num_params: int) -> Config:
    """Return a GPT of about so many parameters, from 1e7 on; within 0.5% from 1e9 on.

    Its width is about 64 times its layers, as GPT-2's is: of several depths the nearest counts.
    """
    depth = (num_params / (12 * 64**2)) ** (1 / 3)
    found: list[tuple[float, Config]] = []
    for layers in range(max(1, round(0.6 * depth)), round(1.6 * depth) + 2):
        # 12 L h^2 + (V + C + 2 + 13 L) h is the count.
        linear = 50257 + 1024 + 2 + 13 * layers
        width = (math.sqrt(linear**2 + 48 * layers * num_params) - linear) / (24 * layers)
        heads = max(1, round(width / 64))
        count = 12 * layers * (64 * heads) ** 2 + linear * 64 * heads
        found.append(
            (abs(count - num_params), _gpt2(num_layers=layers, width=64 * heads, num_heads=heads))
        )
    return min(found, key=lambda one: one[0])[1]


def preset(name: str) -> Config:
    """Return the configuration of that name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones, nearest first.
    """
    if name in PRESETS:
        return PRESETS[name]
    known = difflib.get_close_matches(name.lower(), PRESETS, n=len(PRESETS), cutoff=0)
    raise ValueError(f"no model named {name!r}; known, nearest first: {', '.join(known)}")
