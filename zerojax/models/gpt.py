"""Define GPT-2: pre-LN blocks, learned positions, a tied head; parameters are a tree of arrays.

Shapes: B batch, T tokens, D width, H heads, V vocabulary, C context, L layers. With `scan=True`
every leaf of `params["blocks"]` is stacked on dim 0, [L, ...]; with `scan=False` it is a list of L
trees. The columns of `qkv` lie head by head, [H, 3, D/H]: equal parts of them are whole heads.

With a `model_axis`, `specs` says how parameters are cut over it, as Megatron-LM does. Constraints
place activations where a mesh is set that has the axis with type Auto, by `jax.set_mesh` or a step
of zerojax; elsewhere they say nothing, so that the same model runs on one device.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

Params = dict[str, Any]


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


_TABLE = tomllib.loads((resources.files("zerojax.models") / "presets.toml").read_text("utf-8"))
PRESETS: Mapping[str, Config] = {name: Config(**sizes) for name, sizes in _TABLE.items()}
_gpt2 = functools.partial(Config, vocab_size=50257, context=1024)


def preset(name: str) -> Config:
    """Return the configuration of that name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones, nearest first.
    """
    if name in PRESETS:
        return PRESETS[name]
    known = difflib.get_close_matches(name.lower(), PRESETS, n=len(PRESETS), cutoff=0)
    raise ValueError(f"no model named {name!r}; known, nearest first: {', '.join(known)}")


def of_size(count: int) -> Config:
    """Return a GPT of about so many parameters, from 1e7 on; within 0.5% from 1e9 on.

    Its width is about 64 times its layers, as GPT-2's is: of several depths the nearest counts.
    """
    depth = (count / (12 * 64**2)) ** (1 / 3)
    found: list[Config] = []
    for layers in range(max(1, round(0.6 * depth)), round(1.6 * depth) + 2):
        # 12 L h^2 + (V + C + 2 + 13 L) h is the count.
        linear = 50257 + 1024 + 2 + 13 * layers
        width = (math.sqrt(linear**2 + 48 * layers * count) - linear) / (24 * layers)
        heads = max(1, round(width / 64))
        found.append(_gpt2(num_layers=layers, width=64 * heads, num_heads=heads))
    return min(found, key=lambda one: abs(num_params(one) - count))


def num_params(config: Config) -> int:
    """Count the parameters: L*(12*D^2 + 13*D) + (V + C + 2)*D; the tied head counts once."""
    block = 12 * config.width**2 + 13 * config.width
    return config.num_layers * block + (config.vocab_rows + config.context + 2) * config.width


def init(config: Config, key: jax.Array) -> Params:
    """Draw fp32 parameters as GPT-2 does: normal, residual outputs by 1/sqrt(2L), biases zero."""
    embed_key, position_key, block_key = jax.random.split(key, 3)
    keys = jax.random.split(block_key, config.num_layers)
    init_block = functools.partial(_init_block, config)
    blocks = jax.vmap(init_block)(keys) if config.scan else [init_block(k) for k in keys]
    return {
        "embed": _normal(embed_key, config.vocab_rows, config.width, config.init_scale),
        "positions": _normal(position_key, config.context, config.width, config.init_scale),
        "blocks": blocks,
        "norm": _init_norm(config.width),
    }


def specs(config: Config) -> Params:
    """Return the PartitionSpecs of the parameters over `model_axis`, for `make_layout(specs=)`.

    `qkv` and `up` are cut by columns, `proj` and `down` by rows, `embed` by rows of the vocabulary;
    norms, positions and the biases of rows are whole. So what lies between the products of a pair,
    heads or hidden units, is a device's own, one sum over the axis ends the pair, and the residual
    stream between pairs is whole on every device.

    Source: arXiv 1909.08053, section 3.
    """
    axis = config.model_axis
    layers = (None,) if config.scan else ()
    by_columns = {"kernel": P(*layers, None, axis), "bias": P(*layers, axis)}
    by_rows = {"kernel": P(*layers, axis, None), "bias": P()}
    norm = {"scale": P(), "bias": P()}
    block = {
        "norm_1": norm, "norm_2": norm,
        "qkv": by_columns, "proj": by_rows, "up": by_columns, "down": by_rows,
    }  # fmt: skip
    return {
        "embed": P(axis, None),
        "positions": P(),
        "blocks": block if config.scan else [block] * config.num_layers,
        "norm": norm,
    }


def _init_block(config: Config, key: jax.Array) -> Params:
    width = config.width
    into, out = config.init_scale, config.init_scale / math.sqrt(2 * config.num_layers)
    sizes = {
        "qkv": (width, 3 * width, into),
        "proj": (width, width, out),
        "up": (width, 4 * width, into),
        "down": (4 * width, width, out),
    }
    block: Params = {"norm_1": _init_norm(width), "norm_2": _init_norm(width)}
    keys = jax.random.split(key, len(sizes))
    for k, (name, (rows, columns, scale)) in zip(keys, sizes.items(), strict=True):
        bias = jnp.zeros(columns, jnp.float32)
        block[name] = {"kernel": _normal(k, rows, columns, scale), "bias": bias}
    return block


def _init_norm(width: int) -> Params:
    return {"scale": jnp.ones(width, jnp.float32), "bias": jnp.zeros(width, jnp.float32)}


def _normal(key: jax.Array, rows: int, columns: int, scale: float) -> jax.Array:
    return scale * jax.random.normal(key, (rows, columns), jnp.float32)


def _num_parts(axis: str | None) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return mesh.shape[axis] if (axis, AxisType.Auto) in types else 1


def _cut(x: jax.Array, axis: str | None, dim: int | None = None) -> jax.Array:
    """Cut heads, hidden units or the vocabulary along an axis; without a dim [B, ...] is whole."""
    if _num_parts(axis) == 1:
        return x
    entries: list[Any] = [None] * x.ndim
    if dim is not None:
        entries[dim] = axis
    # Which device has which examples is not the model's to say.
    return jax.lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, *entries[1:]))


def apply(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Return fp32 logits [B, T, V] for tokens [B, T]; row t predicts the token at t + 1.

    Rows that `vocab_multiple` adds have logits of minus infinity.

    Raises:
        ValueError: T exceeds the context, or the model axis does not divide the heads.
    """
    return _logits(config, *_features(config, params, tokens))


def _features(config: Config, params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what the head multiplies: features [B, T, D] and the embedding [V, D]."""
    check_parts(config, _num_parts(config.model_axis))
    num_tokens = tokens.shape[1]
    if num_tokens > config.context:
        told = f"gpt: {num_tokens} tokens do not fit a context of {config.context};"
        raise ValueError(f"{told} give shorter rows or a larger Config.context")
    dtype = params["embed"].dtype if config.dtype is None else config.dtype
    embed = params["embed"].astype(dtype)
    # Each device looks among its own rows, and what it has not is summed up: asked for less than
    # the whole, the partitioner would gather the table.
    x = _cut(embed[tokens], config.model_axis)
    x = x + params["positions"][:num_tokens].astype(dtype)[None]
    x = _blocks(config, params["blocks"], x)  # [B, T, D]
    return _cut(_norm(params["norm"], x), config.model_axis), embed


def _logits(config: Config, x: jax.Array, embed: jax.Array) -> jax.Array:
    # The product in `dtype`, then the cast: asking the product itself for fp32 makes its transpose
    # multiply fp32 by `dtype`, for which compilers widen (and may gather) the embedding in fp32.
    logits = _cut(jnp.einsum("btd,vd->btv", x, embed), config.model_axis, -1).astype(jnp.float32)
    if config.vocab_rows == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(config.vocab_rows) < config.vocab_size, logits, -jnp.inf)


def _blocks(config: Config, blocks: Any, x: jax.Array) -> jax.Array:
    block = functools.partial(_block, config)
    if config.remat:
        # In a scan, forward and recomputation are apart; unrolled, the compiler could merge them.
        block = jax.checkpoint(block, prevent_cse=not config.scan)
    if config.scan:
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, blocks)
        return x
    for layer in blocks:
        x = block(layer, x)
    return x


def _attend(*qkv: jax.Array) -> jax.Array:
    """Attend over heads, [B, T, H, D/H] each; the softmax is in fp32."""
    dtype = qkv[0].dtype
    if dtype == jnp.float16:  # for which JAX asks of a product what only GPUs can
        qkv = tuple(x.astype(jnp.float32) for x in qkv)
    return jax.nn.dot_product_attention(*qkv, is_causal=True).astype(dtype)


def _block(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    axis = config.model_axis
    batch, num_tokens, width = x.shape
    heads = (batch, num_tokens, config.num_heads, 3 * width // config.num_heads)
    qkv = _dense(layer["qkv"], _cut(_norm(layer["norm_1"], x), axis))  # [B, T, 3D]
    qkv = _cut(qkv.reshape(heads), axis, 2)  # [B, T, H, 3D/H]
    # Recomputed for the layer's backward pass, the scores [B, H, T, T] would wait there until the
    # feed-forward part is done; they are computed once more instead.
    attend = jax.checkpoint(_attend) if config.remat else _attend
    attended = attend(*jnp.split(qkv, 3, axis=-1))  # [B, T, H, D/H]
    attended = checkpoint_name(_cut(attended.reshape(x.shape), axis, -1), "attention")
    x = x + _dense(layer["proj"], attended, axis)
    hidden = _dense(layer["up"], _cut(_norm(layer["norm_2"], x), axis))  # [B, T, 4D]
    hidden = checkpoint_name(_cut(hidden, axis, -1), "hidden")
    return x + _dense(layer["down"], jax.nn.gelu(hidden, approximate=True), axis)


def _dense(params: Params, x: jax.Array, axis: str | None = None) -> jax.Array:
    """Multiply; of a weight cut by rows, the devices' sums are added before the bias is, once."""
    out = _cut(x @ params["kernel"].astype(x.dtype), axis)
    return out + params["bias"].astype(x.dtype)[None, None]


def _norm(params: Params, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    scale, bias = params["scale"].astype(jnp.float32), params["bias"].astype(jnp.float32)
    return (normal * scale[None, None] + bias[None, None]).astype(x.dtype)


def loss(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean next-token cross-entropy of tokens [B, T + 1], fp32, in nats a token.

    Raises:
        ValueError: T exceeds the context, or the model axis does not divide the heads.
    """
    x, embed = _features(config, params, tokens[:, :-1])
    targets = tokens[:, 1:, None]  # [B, T, 1]
    logits = _logits(config, x, embed)  # [B, T, V]
    if _num_parts(config.model_axis) == 1:
        wanted = jnp.take_along_axis(logits, targets, axis=-1)[..., 0]
    else:  # each device looks among its own part of the vocabulary
        own = targets == jnp.arange(config.vocab_rows)[None, None]
        wanted = jnp.where(own, logits, 0.0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - wanted)
