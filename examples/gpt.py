"""A GPT from scratch, in plain JAX: layers in a scan, mixed precision, the train step of zerojax.

The model knows nothing of ZeRO. At stage 3 each layer's weights are gathered where the scan uses
them, and again for the backward pass, which computes the layer again.

python examples/gpt.py --stage 3 [--cpu]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
LAYERS, WIDTH, HEADS, TOKENS = 4, 128, 4, 64


def init(key):
    keys = iter(jax.random.split(key, 6))
    draw = lambda *shape: 0.05 * jax.random.normal(next(keys), shape)
    return {
        "embed": draw(256, WIDTH),
        "places": draw(TOKENS, WIDTH),
        "layers": {
            "norms": jnp.ones((LAYERS, 2, WIDTH)),
            "qkv": draw(LAYERS, WIDTH, 3, WIDTH),
            "out": draw(LAYERS, WIDTH, WIDTH),
            "up": draw(LAYERS, WIDTH, 4 * WIDTH),
            "down": draw(LAYERS, 4 * WIDTH, WIDTH),
        },
    }


def norm(x, scale):
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)).astype(scale.dtype) * scale


def attention(x, w):  # [B, T, D]
    heads = lambda x: x.reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (heads(x) for x in jnp.moveaxis(jnp.einsum("btd,dce->btce", x, w["qkv"]), 2, 0))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(x.shape) @ w["out"]


@jax.checkpoint
def layer(x, w):
    x = x + attention(norm(x, w["norms"][0]), w)
    return x + jax.nn.gelu(norm(x, w["norms"][1]) @ w["up"]) @ w["down"], None


def loss_fn(params, text):  # [B, T + 1]
    x = params["embed"][text[:, :-1]] + params["places"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def batches(num_steps):
    starts = np.random.default_rng(0).integers(0, len(TEXT) - TOKENS - 1, (num_steps, 16, 1))
    return TEXT[starts + np.arange(TOKENS + 1)].astype(np.int32)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=40, precision="bf16"):
    key, tx = jax.random.key(0), optax.adamw(1e-3)
    mesh = zerojax.make_mesh({"data": jax.device_count()})
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage)
    recipe = zerojax.Recipe(precision=precision, clip_norm=1.0)
    step = zerojax.make_train_step(loss_fn, tx, layout, recipe)
    state = step.init(init, key)
    losses = []
    for text in batches(num_steps):
        state, metrics = step(state, jax.device_put(text, layout.batch))
        losses.append(float(metrics["loss"]))
    kinds = {"parameters": state.params, "optimizer": state.opt_state}
    promised = layout.bytes_per_device(tx, recipe)
    return losses, {kind: held(tree) for kind, tree in kinds.items()}, promised


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--cpu", type=int, nargs="?", const=8, help="virtual CPU devices (8)")
    args = parser.parse_args()
    if args.cpu:  # in place of the devices that jax finds
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu)
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    losses, bytes_held, _ = train(args.stage)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; bytes per device: {bytes_held}")
