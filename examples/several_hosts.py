"""One run on several hosts: each process reads its own rows, saves are shared, a restart goes on.

Under Slurm, Open MPI, on Kubernetes and on TPU pods processes find each other. Elsewhere say it:

    python examples/several_hosts.py --coordinator host0:8476 --num-processes 2 --process-id 0

It takes the devices that jax finds; with `--cpu 4` four virtual CPU devices in each process.
docs/deploy.md has the scripts. FOLDER has to be on a file system that all see.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

import zerojax

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
WINDOW, WIDTH, BATCH, SAVE_EVERY = 16, 128, 64, 10


def init(key):
    shapes = {"embed": (256, WIDTH), "up": (WINDOW * WIDTH, WIDTH), "out": (WIDTH, 256)}
    keys = jax.random.split(key, len(shapes))
    drawn = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(k, shape) / shape[0] ** 0.5 for (name, shape), k in drawn}


def loss_fn(params, text):  # [B, WINDOW + 1]
    x = params["embed"][text[:, :-1]].reshape(len(text), -1)
    logits = jax.nn.gelu(x @ params["up"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, -1]).mean()


def batch_of(number, part):
    """Return this process's rows of a batch; the number of the step says which."""
    index, count = part
    starts = np.random.default_rng(number).integers(0, len(TEXT) - WINDOW - 1, (BATCH, 1))
    return TEXT[starts[index::count] + np.arange(WINDOW + 1)].astype(np.int32)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(stage, num_steps=30, folder=None):
    if folder is None:  # for one process; several share a folder
        with tempfile.TemporaryDirectory() as folder:
            return train(stage, num_steps, folder)
    key, tx = jax.random.key(0), optax.adamw(3e-3)
    mesh = zerojax.make_mesh({"data": jax.device_count()})  # the devices of all processes
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage)
    step = zerojax.make_train_step(loss_fn, tx, layout)
    losses = []
    with zerojax.Checkpoints(folder, keep=2) as checkpoints:
        restored = checkpoints.restore_latest(layout, step.abstract_state())
        state = restored.state if restored else step.init(init, key)
        for number in range(int(state.step), num_steps):
            state, metrics = step(state, step.place(batch_of(number, step.batch_part)))
            losses.append(float(metrics["loss"]))
            if (number + 1) % SAVE_EVERY == 0:
                checkpoints.save(number + 1, state, layout)
    kinds = {"parameters": state.params, "optimizer": state.opt_state}
    return losses, {kind: held(tree) for kind, tree in kinds.items()}, layout.bytes_per_device(tx)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--cpu", type=int, nargs="?", const=8, help="virtual CPU devices (8)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", metavar="FOLDER", help="of the checkpoints")
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()
    if args.cpu:  # in place of the devices that jax finds
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu)
    zerojax.processes.initialize(args.coordinator, args.num_processes, args.process_id)
    if jax.process_index() == 0:
        print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    losses, bytes_held, _ = train(args.stage, args.steps, args.out)
    if jax.process_index() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; bytes per device: {bytes_held}")
