"""equinox under ZeRO: filtered transformations as they are; lines that are new are marked.

python examples/with_equinox.py --stage 3 [--cpu]
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
WINDOW = 8


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.embed = eqx.nn.Embedding(256, 32, key=keys[0])
        self.mlp = eqx.nn.MLP(WINDOW * 32, 256, 128, depth=2, key=keys[1])

    def __call__(self, window):  # [WINDOW] -> [256]
        return self.mlp(jax.vmap(self.embed)(window).reshape(-1))


def loss_fn(model, text):  # [B, WINDOW + 1]
    logits = jax.vmap(model)(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, -1]).mean()


def batches(num_steps):
    starts = np.random.default_rng(0).integers(0, len(TEXT) - WINDOW - 1, (num_steps, 64, 1))
    return TEXT[starts + np.arange(WINDOW + 1)].astype(np.int32)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=20):
    model, tx = Model(jax.random.key(0)), optax.adamw(3e-3)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    mesh = zerojax.make_mesh({"data": jax.device_count()})  # new
    layout = zerojax.make_layout(params, mesh, stage=stage)  # new
    model = eqx.combine(jax.device_put(params, layout.params), static)  # new
    loss = zerojax.gather_where_used(loss_fn, layout)  # new, for stage 3
    optim = zerojax.sharded(tx, layout)  # new
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all")
    def step(model, opt_state, text):
        value, grads = eqx.filter_value_and_grad(loss)(model, text)
        updates, opt_state = optim.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value

    losses = []
    for text in batches(num_steps):
        text = jax.device_put(text, layout.batch)  # new
        model, opt_state, value = step(model, opt_state, text)
        losses.append(float(value))
    params = eqx.filter(model, eqx.is_inexact_array)
    bytes_held = {"parameters": held(params), "optimizer": held(opt_state)}
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
