"""One of four processes of a device each, run by test_four.py; or one process with the same mesh.

What it found is written to FOLDER/result.INDEX.json.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import zerojax
from tests.processes.child import ROWS, STEPS, batch, init, loss, rows_of
from zerojax import processes

WIDE = ("host", "data")
TX = optax.adamw(1e-2)
#: What a layout is made with: the mesh, and the options of `make_layout`.
LAYOUTS = {
    **{f"stage {stage}": ({"data": 4}, {"stage": stage}) for stage in range(4)},
    "hybrid": ({"host": 2, "data": 2}, {"stage": 3, "batch_axes": WIDE}),
    "wide": (
        {"host": 2, "data": 2},
        {"stage": 3, "axis": {"parameter": "data", "gradient": WIDE, "optimizer": WIDE}},
    ),
}
RECIPES = {
    "bf16": zerojax.Recipe(precision="bf16"),
    "fp16": zerojax.Recipe(precision="fp16", accumulate=2),
    "clipped": zerojax.Recipe(clip_norm=0.1),
}


def make_layout(name):
    sizes, options = LAYOUTS[name]
    mesh = zerojax.make_mesh(sizes, devices=jax.devices()[:4])
    shapes = jax.eval_shape(init, jax.random.key(0))
    return zerojax.make_layout(shapes, mesh, min_size=64, **({"axis": "data"} | options))


def make_step(name, recipe=None):
    return zerojax.make_train_step(loss, TX, make_layout(name), recipe)


def held(tree):
    """Give the bytes of one device here."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(name, recipe=None):
    """Story 2: give the losses of a few steps, the bytes held, and the state."""
    step = make_step(name, recipe)
    state, losses = step.init(init, jax.random.key(0)), []
    for number in range(STEPS):
        state, metrics = step(state, step.place(rows_of(step, number)))
        losses.append(float(metrics["loss"]))
    losses.append(float(step.evaluate(state, step.place(rows_of(step, STEPS)))))
    return {"losses": losses, "held": [held(state.params), held(state.opt_state)]}, step, state


def own_loop(name):
    """Story 1: a loop that the user wrote; give the losses and the bytes held."""
    layout = make_layout(name)
    tx = zerojax.sharded(optax.chain(optax.clip_by_global_norm(1.0), TX), layout)
    params = jax.jit(init, out_shardings=layout.params)(jax.random.key(0))
    opt_state = tx.init(params)
    of_loss = jax.value_and_grad(zerojax.gather_where_used(loss, layout))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, rows):
        value, grads = of_loss(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state, value

    losses = []
    for number in range(STEPS):
        whole = batch(number)
        x = jax.make_array_from_callback((ROWS, *whole["x"].shape[1:]), layout.batch,
                                         lambda index, x=whole["x"]: x[index])  # fmt: skip
        params, opt_state, value = step(params, opt_state, {"x": x, "table": whole["table"].value})
        losses.append(float(value))
    return {"losses": losses, "held": [held(params), held(opt_state)]}


def kept_programs():
    """Name the programs that comparing the copies of a state leaves in memory."""
    _, _, state = train("stage 0")
    client = jax.devices()[0].client
    before = client.live_executables()
    processes.check_copies("a test", {"state": state})
    kept = [one for one in client.live_executables() if one not in before]
    return [one.hlo_modules()[0].name for one in kept]


def go_on(step, state):
    """Do the step after those of `train`, and give its loss."""
    _, metrics = step(state, step.place(rows_of(step, STEPS)))
    return float(metrics["loss"])


def save_and_move(folder):
    """Story 6: go on from a checkpoint, and from a state that is moved, at another stage."""
    _, step, state = train("stage 3")
    zerojax.save(folder / "saved", state, step.layout)
    other = make_step("stage 1")
    back = zerojax.restore(folder / "saved", other.layout, other.abstract_state())
    found = {"restored": go_on(other, back)}
    found["moved"] = go_on(other, zerojax.move(state, step.layout, other.layout))
    return found


def save_near(folder):
    """Save with orbax's emergency manager, as docs/deploy.md says, and go on from a local copy."""
    from absl import flags
    from orbax.checkpoint import args
    from orbax.checkpoint._src.multihost import multihost
    from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

    flags.FLAGS.mark_as_parsed()
    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
    _, step, state = train("hybrid")
    near, far = folder / f"near.{jax.process_index()}", folder / "far"
    near.mkdir()
    far.mkdir(exist_ok=True)
    with emergency.CheckpointManager(
        near,
        far,
        step.layout.mesh,
        step.abstract_state(),
        options=emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(save_interval_steps=1),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=100),
            replica_axis_index=0,
        ),
    ) as manager:
        for number in (1, 2):  # the first is saved in both places
            manager.save(number, args.Composite(state=args.PyTreeSave(state)))
        manager.wait_until_finished()
        back = manager.restore(2).state
    copies = sorted(path.name for path in (*near.iterdir(), *far.iterdir()))
    same = zip(*map(jax.tree.leaves, (back, state)), strict=True)
    is_same = all(
        x.sharding == y.sharding and np.array_equal(x.addressable_data(0), y.addressable_data(0))
        for x, y in same
    )
    return {"copies": copies, "is_same": is_same, "loss": go_on(step, back)}


def find(folder):
    return {
        "trained": {name: train(name)[0] for name in LAYOUTS},
        "recipes": {name: train("stage 3", recipe)[0] for name, recipe in RECIPES.items()},
        "own loop": {name: own_loop(name) for name in ("stage 2", "stage 3", "hybrid")},
        "going on": save_and_move(folder),
        "near": save_near(folder),
        "kept": kept_programs(),
    }


def main(port, index, count, folder):
    processes.initialize(f"127.0.0.1:{port}", int(count), int(index))
    assert (jax.device_count(), jax.local_device_count()) == (4, 1)
    found = find(Path(folder))
    Path(folder, f"result.{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    signal.alarm(290)  # whatever happens, nothing is left over
    main(*sys.argv[1:])
