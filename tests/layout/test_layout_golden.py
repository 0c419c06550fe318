"""Where the leaves of known models are cut over eight shards: a layout that changes is seen here.

Another dim moves states and every figure of docs/benchmarks.md, so that it is changed on purpose.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, AxisType

import zerojax
from zerojax.models import gpt

EIGHT = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

#: Shape, the dim that is cut (None: none), what that dim is padded to (0: nothing), layer dims.
MODELS = {
    "attention of flax, with heads": {
        "query/kernel": ((512, 16, 64), 0, 0, 0),
        "query/bias": ((16, 64), 0, 0, 0),
        "out/kernel": ((16, 64, 512), 1, 0, 0),
        "out/bias": ((512,), None, 0, 0),
    },
    "gemma": {
        "embedder/input_embedding": ((256128, 2048), 0, 0, 0),
        "layer_0/attn/q_einsum/w": ((8, 2048, 256), 1, 0, 0),
        "layer_0/attn/kv_einsum/w": ((2, 1, 2048, 256), 2, 0, 0),
        "layer_0/attn/attn_vec_einsum/w": ((8, 256, 2048), 1, 0, 0),
        "layer_0/mlp/gating_einsum": ((2, 2048, 16384), 1, 0, 0),
        "layer_0/mlp/linear": ((16384, 2048), 0, 0, 0),
        "layer_0/pre_norm/scale": ((2048,), 0, 0, 0),
    },
    "a convolutional net": {
        "stem/kernel": ((7, 7, 3, 64), 3, 0, 0),
        "block/kernel": ((3, 3, 256, 128), 2, 0, 0),
        "head/kernel": ((2048, 1000), 0, 0, 0),
        "head/bias": ((1000,), None, 0, 0),
    },
    "experts": {
        "moe/router": ((512, 8), 0, 0, 0),
        "moe/up": ((8, 512, 2048), 1, 0, 0),
        "moe/down": ((8, 2048, 512), 1, 0, 0),
    },
    "a scanned model, with norms": {
        "layers/norm/scale": ((24, 512), 1, 0, 1),
        "layers/query/kernel": ((24, 512, 16, 64), 1, 0, 1),
        "layers/out/kernel": ((24, 16, 64, 512), 2, 0, 1),
        "embed": ((50257, 512), 1, 0, 0),
    },
    "a scanned model that nobody named": {
        "up": ((24, 512, 2048), 1, 0, 0),
        "down": ((24, 2048, 512), 1, 0, 0),
    },
    "sizes that nothing divides": {
        "vocabulary": ((50257, 33), 0, 50264, 0),
        "stack": ((12, 1009, 641), 1, 1016, 0),
    },
}


@pytest.mark.parametrize("leaves", MODELS.values(), ids=MODELS)
def test_models_are_cut_as_they_were(leaves):
    shapes = {path: jax.ShapeDtypeStruct(x[0], jnp.float32) for path, x in leaves.items()}
    layout = zerojax.make_layout(unflatten_dict(shapes, sep="/"), EIGHT, stage=3)
    for leaf in layout.leaves:
        padded_to = leaf.stored_shape[leaf.dim or 0] if leaf.is_padded else 0
        assert (leaf.shape, leaf.dim, padded_to, leaf.stacked) == leaves[leaf.path], leaf.reason


@pytest.mark.parametrize("scan", [True, False])
def test_the_gpt_is_cut_along_rows(scan):
    config = gpt.Config(num_layers=3, width=64, num_heads=4, vocab_size=1000, context=16, scan=scan)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    for leaf in zerojax.make_layout(params, EIGHT, stage=3).leaves:
        in_layer = scan and leaf.path.startswith("blocks")
        assert leaf.stacked == int(in_layer)
        if leaf.path.endswith(("kernel", "embed", "positions")):
            assert leaf.dim == int(in_layer), leaf
