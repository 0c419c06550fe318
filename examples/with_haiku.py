"""haiku under ZeRO, with an average of the weights (EMA): lines that are new are marked.

python examples/with_haiku.py --stage 3 [--cpu]
"""

import argparse
import functools
from pathlib import Path

import haiku as hk
import jax
import numpy as np
import optax

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)


@hk.transform
def model(tokens):  # [B, T] -> [B, T, 256]
    x = hk.Embed(256, 64)(tokens)
    for _ in range(2):
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.Linear(64)(jax.nn.gelu(hk.Conv1D(256, 3, padding=hk.pad.causal)(y)))
    return hk.Linear(256)(x)


def loss_fn(params, text):  # [B, T + 1]
    logits = model.apply(params, None, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def batches(num_steps):
    starts = np.random.default_rng(0).integers(0, len(TEXT) - 33, (num_steps, 16, 1))
    return TEXT[starts + np.arange(33)].astype(np.int32)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=20):
    key, tx, averaging = jax.random.key(0), optax.lamb(1e-2), optax.ema(0.9)
    init = lambda key: model.init(key, np.zeros((1, 32), np.int32))
    mesh = zerojax.make_mesh({"data": jax.device_count()})  # new
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage)  # new
    optimizer = zerojax.sharded(tx, layout)  # new
    ema = zerojax.sharded(averaging, layout)  # new: the average is partitioned from stage 1 on
    loss = zerojax.gather_where_used(loss_fn, layout)  # new, for stage 3
    params = jax.jit(init, out_shardings=layout.params)(key)  # new: out_shardings
    opt_state, average = optimizer.init(params), ema.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, opt_state, average, text):
        value, grads = jax.value_and_grad(loss)(params, text)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)  # new: keeps their placement
        _, average = ema.update(params, average)
        return params, opt_state, average, value

    losses = []
    for text in batches(num_steps):
        text = jax.device_put(text, layout.batch)  # new
        params, opt_state, average, value = step(params, opt_state, average, text)
        losses.append(float(value))
    averaged = jax.jit(lambda p, a: ema.update(p, a)[0])(params, average)
    print(f"loss of the average {float(jax.jit(loss)(averaged, batches(1)[0])):.3f}")
    kinds = {"parameters": params, "optimizer": opt_state, "average": average}
    want = layout.bytes_per_device(tx, stored=False)
    want["average"] = layout.bytes_per_device(averaging)["optimizer"]
    return losses, {kind: held(tree) for kind, tree in kinds.items()}, want


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
