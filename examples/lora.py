"""LoRA under ZeRO, in a loop of one's own: adapters are trained, the base is frozen.

The base comes from a safetensors file. At stage 3 it is partitioned too and gathered where it is
used; it has no gradients and no optimizer states at any stage.

    python examples/lora.py --stage 3 [--cpu]
"""

import argparse
import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
WIDTH, RANK, WINDOW = 128, 8, 8


def write_base(file):
    """Write what a download would bring: weights by name."""
    draw = np.random.default_rng(0).standard_normal
    shapes = {"embed": (256, WIDTH), "out": (WIDTH, 256)}
    shapes |= {f"layer_{n}": (WIDTH, WIDTH) for n in range(4)}
    save_file(
        {k: (draw(s) / s[0] ** 0.5).astype(np.float32) for k, s in sorted(shapes.items())}, file
    )


def make_adapters(key):
    names = ["out", *(f"layer_{n}" for n in range(4))]
    down = jax.random.normal(key, (len(names), WIDTH, RANK)) / WIDTH**0.5
    up = {"out": jnp.zeros((RANK, 256))}
    return {
        name: {"down": down[n], "up": up.get(name, jnp.zeros((RANK, WIDTH)))}
        for n, name in enumerate(names)
    }


def loss_fn(params, text):  # [B, WINDOW + 1]
    base, adapters = params["base"], params["adapters"]
    x = base["embed"][text[:, :-1]].mean(1)

    def layer(name, x):
        return x @ base[name] + x @ adapters[name]["down"] @ adapters[name]["up"]

    for n in range(4):
        x = x + jax.nn.gelu(layer(f"layer_{n}", x))
    logits = layer("out", x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, -1]).mean()


def batches(num_steps):
    starts = np.random.default_rng(0).integers(0, len(TEXT) - WINDOW - 1, (num_steps, 64, 1))
    return TEXT[starts + np.arange(WINDOW + 1)].astype(np.int32)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=20):
    with tempfile.TemporaryDirectory() as folder:
        write_base(f"{folder}/base.safetensors")
        base = load_file(f"{folder}/base.safetensors")
    params = {"base": base, "adapters": make_adapters(jax.random.key(0))}
    mesh, tx = zerojax.make_mesh({"data": jax.device_count()}), optax.adam(1e-2)
    layout = zerojax.make_layout(params, mesh, stage=stage)
    trained = zerojax.make_layout(params["adapters"], mesh, stage=stage)
    params = jax.device_put(params, layout.params)
    base, adapters = params["base"], params["adapters"]
    optimizer = zerojax.sharded(tx, trained)
    opt_state = optimizer.init(adapters)
    loss = zerojax.gather_where_used(loss_fn, layout)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(adapters, opt_state, base, text):
        of_adapters = lambda adapters: loss({"base": base, "adapters": adapters}, text)
        value, grads = jax.value_and_grad(of_adapters)(adapters)
        updates, opt_state = optimizer.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, value

    losses = []
    for text in batches(num_steps):
        text = jax.device_put(text, layout.batch)
        adapters, opt_state, value = step(adapters, opt_state, base, text)
        losses.append(float(value))
    kinds = {"parameters": (base, adapters), "optimizer": opt_state}
    want = layout.bytes_per_device(optax.identity(), stored=False)
    want |= {"optimizer": trained.bytes_per_device(tx)["optimizer"]}
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
