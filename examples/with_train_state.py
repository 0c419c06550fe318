"""flax's `TrainState` under ZeRO, with a schedule: lines that are new are marked.

python examples/with_train_state.py --stage 3 [--cpu]
"""

import argparse
import functools
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):  # [B, T] -> [B, T, 256]
        x = nn.Embed(256, 64)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=mask)
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(256)(x)


def batches(num_steps):
    starts = np.random.default_rng(0).integers(0, len(TEXT) - 33, (num_steps, 16, 1))
    return TEXT[starts + np.arange(33)].astype(np.int32)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=20):
    model, key = Model(), jax.random.key(0)
    rate = optax.warmup_cosine_decay_schedule(1e-3, 5e-3, 5, 100)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=rate)
    )
    init = lambda key: model.init(key, np.zeros((1, 32), np.int32))
    mesh = zerojax.make_mesh({"data": jax.device_count()})  # new
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage)  # new
    params = jax.jit(init, out_shardings=layout.params)(key)  # new: out_shardings
    optimizer = zerojax.sharded(tx, layout)  # new
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)  # new: tx

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, text):  # [B, T + 1]
        def loss_fn(params, text):
            logits = state.apply_fn(params, text[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        loss_fn = zerojax.gather_where_used(loss_fn, layout)  # new, for stage 3
        loss, grads = jax.value_and_grad(loss_fn)(state.params, text)
        state = state.apply_gradients(grads=grads)
        return state, loss, state.opt_state[1].hyperparams["learning_rate"]

    losses = []
    for text in batches(num_steps):
        state, loss, rate = step(state, jax.device_put(text, layout.batch))  # new: device_put
        losses.append(float(loss))
    bytes_held = {"parameters": held(state.params), "optimizer": held(state.opt_state)}
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
