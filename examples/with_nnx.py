"""flax nnx under ZeRO: `nnx.Optimizer` and `nnx.jit` as they are; lines that are new are marked.

python examples/with_nnx.py --stage 3 [--cpu]
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(64, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, tokens):  # [B, T] -> [B, T, 256]
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.embed.attend(x)


def loss_fn(model, text):  # [B, T + 1]
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def batches(num_steps):
    starts = np.random.default_rng(0).integers(0, len(TEXT) - 33, (num_steps, 16))
    return [np.stack([TEXT[s : s + 33] for s in row]).astype(np.int32) for row in starts]


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=20):
    model, tx = Model(nnx.Rngs(0)), optax.adamw(3e-3)
    params = nnx.state(model, nnx.Param)
    mesh = zerojax.make_mesh({"data": jax.device_count()})  # new
    layout = zerojax.make_layout(params, mesh, stage=stage)  # new
    nnx.update(model, jax.device_put(params, layout.params))  # new
    loss = zerojax.gather_where_used(loss_fn, layout)  # new, for stage 3
    optimizer = nnx.Optimizer(model, zerojax.sharded(tx, layout), wrt=nnx.Param)  # new

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, text):
        value, grads = nnx.value_and_grad(loss)(model, text)
        optimizer.update(model, grads)
        return value

    losses = [
        float(step(model, optimizer, jax.device_put(text, layout.batch)))  # new: device_put
        for text in batches(num_steps)
    ]
    states = nnx.state(model, nnx.Param), nnx.state(optimizer, nnx.optimizer.OptState)["opt_state"]
    bytes_held = dict(zip(("parameters", "optimizer"), map(held, states), strict=True))
    return losses, bytes_held, layout.bytes_per_device(tx, stored=False)


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
