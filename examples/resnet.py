"""A ResNet with BatchNorm on the digits of scikit-learn: batch statistics as `model_state`.

BatchNorm takes its statistics over the whole batch, of all devices, as one device would.

python examples/resnet.py --stage 3 [--cpu]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import zerojax

BATCH, HELD_OUT = 64, 256


class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        norm = lambda: nn.BatchNorm(use_running_average=not train, momentum=0.9)
        y = nn.Conv(self.width, (3, 3), self.stride, use_bias=False)(x)
        y = nn.Conv(self.width, (3, 3), use_bias=False)(nn.relu(norm()(y)))
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1, 1), self.stride, use_bias=False)(x)
        return nn.relu(x + norm()(y))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, images, train):  # [B, 8, 8, 1] -> [B, 10]
        x = nn.Conv(32, (3, 3))(images)
        for width, stride in ((32, 1), (64, 2), (128, 2)):
            x = Block(width, stride)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


def loss_fn(params, batch, model_state, key=None):
    """Return the loss, the accuracy, and the new statistics; without a key, it evaluates."""
    logits, changed = ResNet().apply(
        {"params": params, "batch_stats": model_state},
        batch["image"],
        train=key is not None,
        mutable=["batch_stats"],
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    right = logits.argmax(-1) == batch["label"]
    return loss, (right, changed["batch_stats"])


def load():
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    return {"image": images[order], "label": digits.target[order]}


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=60):
    data = load()
    variables = ResNet().init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)
    tx = optax.sgd(0.1, momentum=0.9)
    mesh = zerojax.make_mesh({"data": jax.device_count()})
    layout = zerojax.make_layout(variables["params"], mesh, stage=stage)
    step = zerojax.make_train_step(
        loss_fn, tx, layout, has_aux=True, model_state=variables["batch_stats"]
    )
    state = step.init(variables["params"], key=jax.random.key(1))
    rng, losses = np.random.default_rng(1), []
    for _ in range(num_steps):
        rows = rng.integers(HELD_OUT, len(data["label"]), BATCH)
        batch = jax.tree.map(lambda x, rows=rows: x[rows], data)
        state, metrics = step(state, jax.device_put(batch, layout.batch))
        losses.append(float(metrics["loss"]))
    rest = jax.tree.map(lambda x: x[:HELD_OUT], data)
    loss, right = step.evaluate(state, jax.device_put(rest, layout.batch))
    print(f"held out: loss {float(loss):.3f}, accuracy {float(right.mean()):.1%}")
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
