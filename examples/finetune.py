"""Fine-tuning with the train step: weights from NumPy, a frozen embedding, a schedule.

python examples/finetune.py --stage 3 [--cpu]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)


def pretrained():
    """Return weights as NumPy arrays, as a file of another library holds them."""
    draw = np.random.default_rng(0).standard_normal
    shapes = {"embed": (256, 64), "layers": (4, 64, 64), "head": (64, 256)}
    return {k: (draw(s) / s[-2] ** 0.5).astype(np.float32) for k, s in shapes.items()}


def loss_fn(params, text):  # [B, T + 1]
    x = jax.lax.stop_gradient(params["embed"])[text[:, :-1]]  # no gradient: nothing to reduce

    def layer(x, w):  # the mean of the bytes so far goes through a layer
        mean = jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        return x + jax.nn.gelu(mean @ w), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


RATE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 5, 100)


def make_optimizer():
    adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=RATE)
    # Frozen leaves have no optimizer state.
    labels = {"embed": "frozen", "layers": "trained", "head": "trained"}
    return optax.multi_transform({"trained": adamw, "frozen": optax.set_to_zero()}, labels)


def batches(num_steps):
    starts = np.random.default_rng(0).integers(0, len(TEXT) - 33, (num_steps, 16, 1))
    return TEXT[starts + np.arange(33)].astype(np.int32)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=20):
    params, tx = pretrained(), make_optimizer()
    mesh = zerojax.make_mesh({"data": jax.device_count()})
    layout = zerojax.make_layout(params, mesh, stage=stage)
    step = zerojax.make_train_step(loss_fn, tx, layout, zerojax.Recipe(clip_norm=1.0))
    state = step.init(params)
    losses = []
    for number, text in enumerate(batches(num_steps)):
        state, metrics = step(state, jax.device_put(text, layout.batch))
        losses.append(float(metrics["loss"]))
        print(f"learning rate {RATE(number):.1e}, loss {losses[-1]:.3f}")
    assert (zerojax.unpad(state.params, layout)["embed"] == params["embed"]).all()
    kinds = {"parameters": state.params, "optimizer": state.opt_state}
    return losses, {kind: held(tree) for kind, tree in kinds.items()}, layout.bytes_per_device(tx)


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
