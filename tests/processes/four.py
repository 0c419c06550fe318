"""One of four processes of a device each, run by test_four.py; or one process with the same mesh.

What it found is written to FOLDER/result.INDEX.json.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import sys
from pathlib import Path

import jax
import optax
from jax.experimental.multihost_utils import sync_global_devices

import zerojax
from tests.processes.child import ROWS, STEPS, batch, caught, init, loss, rows_of
from zerojax import processes

WIDE = ("host", "data")
TX = optax.adamw(1e-2)
#: What a layout is made with: the mesh, and the options of `make_layout`.
LAYOUTS = {
    **{f"stage {stage}": ({"data": 4}, {"stage": stage}) for stage in range(4)},
    "hybrid": ({"host": 2, "data": 2}, {"stage": 3, "batch_axes": WIDE}),
    "hybrid 2": ({"host": 2, "data": 2}, {"stage": 2, "batch_axes": WIDE}),
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


def save_and_go_on(folder):
    """Story 6: go on from a checkpoint at another stage."""
    _, step, state = train("stage 3")
    zerojax.save(folder / "saved", state, step.layout)
    other = make_step("stage 1")
    back = zerojax.restore(folder / "saved", other.layout, other.abstract_state())
    return go_on(other, back)


def checkpoints(folder, name, **options):
    """Give checkpoints with a folder of each process's own."""
    return zerojax.Checkpoints(
        folder / name, local=folder / f"{name}.{jax.process_index()}", **options
    )


def restored(folder, name, step, **options):
    """Start again: give what is gone on from, what is passed over, and the loss of a step."""
    with checkpoints(folder, name, **options) as saved:
        back = saved.restore_latest(step.layout, step.abstract_state())
    told = [back.manifest.step, back.manifest.data, back.manifest.metadata, back.path.parent.name]
    return [told, list(back.passed_over.values()), go_on(step, back.state)]


def lose(folder, name, *hosts):
    """Remove the folders of some processes."""
    sync_global_devices("losing")
    if jax.process_index() in hosts:
        shutil.rmtree(folder / f"{name}.{jax.process_index()}")
    sync_global_devices("lost")


def start(name, recipe=None):
    step = make_step(name, recipe)
    return step, step.init(init, jax.random.key(0))


def save_near(folder):
    """Save copies on the hosts; start again with them, without some, with another layout."""
    step, state = start("hybrid")
    with checkpoints(folder, "near") as saved:
        saved.save(1, state, step.layout)
        saved.save_local(2, state, step.layout, data={"next": 2}, metadata={"by": "me"})
        go_on(step, state)  # donates it
        late = caught(lambda: saved.save_local(2, start("hybrid")[1], step.layout))
    other, wide = start("wide")
    with checkpoints(folder, "wide") as saved:
        found = {"late": late, "wide": caught(lambda: saved.save_local(1, wide, other.layout))}
    found["hosts"] = sorted(path.name for path in folder.glob("near.*/*"))
    found["whole"] = restored(folder, "near", step)
    found["other"] = restored(folder, "near", make_step("hybrid 2"))
    lose(folder, "near", 2, 3)
    found["lost"] = restored(folder, "near", step)
    return found


def save_replicated(folder):
    """Save what a service would copy; start again with it, with a peer's folder, without one."""
    service, found = {"replicator": True}, {}
    step, state = start("hybrid")
    with checkpoints(folder, "tiers", **service) as saved:
        for number in (1, 2):
            saved.save_local(number, state, step.layout)
    found["whole"] = restored(folder, "tiers", step, **service)
    lose(folder, "tiers", 3)
    if jax.process_index() == 3:  # as the service does: process 1 holds the same
        shutil.copytree(folder / "tiers.1", folder / "tiers.3")
    sync_global_devices("copied")
    found["copied"] = restored(folder, "tiers", step, **service)
    lose(folder, "tiers", 3)
    with checkpoints(folder, "tiers", **service) as saved:
        saved.save(1, state, step.layout)
    found["lost"] = restored(folder, "tiers", step, **service)
    return found


def find(folder):
    return {
        "trained": {name: train(name)[0] for name in LAYOUTS},
        "recipes": {name: train("stage 3", recipe)[0] for name, recipe in RECIPES.items()},
        "own loop": {name: own_loop(name) for name in ("stage 2", "stage 3", "hybrid")},
        "going on": save_and_go_on(folder),
        "kept": kept_programs(),
    }


def main(port, index, count, what, folder):
    processes.initialize(f"127.0.0.1:{port}", int(count), int(index))
    assert (jax.device_count(), jax.local_device_count()) == (4, 1)
    folder = Path(folder)
    if what == "copies":
        found = {"near": save_near(folder), "tiers": save_replicated(folder)}
    else:
        found = find(folder)
    Path(folder, f"result.{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    signal.alarm(290)  # whatever happens, nothing is left over
    main(*sys.argv[1:])
