"""One of several processes of two devices each; run by test_together.py and test_faults.py.

What it found is written to FOLDER/result.INDEX.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

import zerojax
from zerojax import processes
from zerojax._tree import leaves_by_path
from zerojax.checkpoint import _orbax, _save, export_safetensors, import_safetensors
from zerojax.processes import _texts

SIZE, ROWS, STEPS = 64, 16, 3
#: 66 rows are divided by no number of devices here, and so are padded.
SHAPES = {"w": (SIZE, SIZE), "odd": (66, SIZE), "b": (SIZE,)}
TABLE = np.linspace(0.5, 1.5, SIZE, dtype=np.float32)


def init(key):
    keys = jax.random.split(key, len(SHAPES))
    shapes = zip(SHAPES.items(), keys, strict=True)
    return {name: 0.1 * jax.random.normal(one, shape) for (name, shape), one in shapes}


def loss(params, batch):
    hidden = batch["x"] @ params["w"] + params["b"]
    out = hidden @ params["odd"].T[:, :SIZE]
    return jnp.mean((out - batch["x"]) ** 2 * batch["table"]) * batch.get("scale", 1.0)


def batch(step, rows=ROWS):
    x = np.random.default_rng(step).standard_normal((rows, SIZE), dtype=np.float32)
    return {"x": x, "table": zerojax.Whole(TABLE)}


def make_step(stage=2, *, tx=None, recipe=None, loss_fn=loss, axes=None, order=1):
    """Make a step over four devices; an axis `host` has copies of what `data` partitions."""
    devices = jax.devices()[:4][::order]
    mesh = zerojax.make_mesh(axes or {"data": 4}, devices=devices)
    layout = zerojax.make_layout(
        jax.eval_shape(init, jax.random.key(0)),
        mesh,
        stage=stage,
        min_size=64,
        batch_axes=[name for name in mesh.axis_names if name != "model"],
    )
    return zerojax.make_train_step(loss_fn, tx or optax.adamw(1e-2), layout, recipe)


def rows_of(step, number, rows=ROWS):
    """Give the rows of a batch that this process has, as numpy arrays."""
    index, count = step.batch_part
    whole = batch(number, rows)
    return whole | {"x": whole["x"][index * rows // count : (index + 1) * rows // count]}


def learn(stage, *, axes=None, recipe=None):
    """Give the losses of a few steps, and the bytes that the devices here hold."""
    step = make_step(stage, axes=axes, recipe=recipe)
    state = step.init(init, jax.random.key(0))
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, step.place(rows_of(step, number)))
        losses.append(float(metrics["loss"]))
    losses.append(float(step.evaluate(state, step.place(rows_of(step, STEPS)))))
    parts = {"params": state.params, "opt_state": state.opt_state}
    held = {
        name: sum(s.data.nbytes for x in jax.tree.leaves(part) for s in x.addressable_shards)
        for name, part in parts.items()
    }
    return {"losses": losses, "held": held}


#: No gather is joined with others.
APART = zerojax.Recipe(bucket_bytes=1)
ONCE = zerojax.Recipe(accumulate=2, reduce="once")


def program(stage, *, recipe):
    """Give the text of a compiled step."""
    step = make_step(stage, recipe=recipe)
    rows = jax.eval_shape(lambda: {"x": jnp.zeros((ROWS, SIZE)), "table": zerojax.Whole(TABLE)})
    return step.lower(step.abstract_state(), rows).compile().as_text()


# Ways to differ ----------------------------------------------------------------------------------


def go(*, key=0, rows=ROWS, table=TABLE, start=None, scale=1.0, **options):
    """Make a state and do one step."""
    step = make_step(**options)
    if start is None:
        state = step.init(init, jax.random.key(key))
    else:
        state = step.init(jax.tree.map(lambda x: x + start, init(jax.random.key(0))))
    given = rows_of(step, 0, rows) | {"table": zerojax.Whole(table)}
    step(state, {"scale": scale, **step.place(given)})


def drifted(*, other):
    """Change the copies of one leaf on one process, between two steps."""
    step = make_step(1)
    state = step.init(init, jax.random.key(0))
    b = state.params["b"]
    copies = [s.data + (0.5 if other else 0) for s in b.addressable_shards]
    b = jax.make_array_from_single_device_arrays(b.shape, b.sharding, copies)
    state = dataclasses.replace(state, params={**state.params, "b": b})
    step(state, step.place(rows_of(step, 0)))


def versions(*, other):
    from zerojax.train import _processes

    before = _processes.importlib.metadata.version
    _processes.importlib.metadata.version = lambda name: "0.9.9" if other else before(name)
    try:
        go()
    finally:
        _processes.importlib.metadata.version = before


def chained(rate):
    return optax.chain(optax.scale_by_adam(), optax.scale(-rate))


WAYS = {
    "optimizer": lambda other: go(tx=optax.sgd(1e-2, momentum=0.9) if other else None),
    "rate": lambda other: go(tx=chained(0.1 if other else 0.01)),
    "seed": lambda other: go(key=7 if other else 0),
    "initial parameters": lambda other: go(start=1.0 if other else 0.0),
    "batch": lambda other: go(rows=2 * ROWS if other else ROWS),
    "table": lambda other: go(table=2 * TABLE if other else TABLE),
    "scalar": lambda other: go(scale=2.0 if other else 1.0),
    "accumulate": lambda other: go(recipe=zerojax.Recipe(accumulate=2 if other else 1)),
    "precision": lambda other: go(recipe=zerojax.Recipe(precision="bf16" if other else "fp32")),
    "stage": lambda other: go(stage=3 if other else 2),
    "mesh": lambda other: go(axes={"model": 2, "data": 2} if other else {"data": 2, "model": 2}),
    "order": lambda other: go(order=-1 if other else 1),
    "loss": lambda other: go(loss_fn=(lambda p, x: 2 * loss(p, x)) if other else loss),
    "code": lambda other: go(loss_fn=(lambda p, x: jnp.abs(loss(p, x))) if other else loss),
    "copies": lambda other: drifted(other=other),
    "jax": lambda other: versions(other=other),
}


def caught(action):
    """Give the error of an action, and its seconds."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, str(error), time.monotonic() - start]
    return ["nothing", "", time.monotonic() - start]


# Saves that fail ---------------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(28, "No space left on device")


def denied(*_, **__):
    raise PermissionError(13, "Permission denied")


#: Where a save fails, how, and on which process.
FAILURES = {
    "arrays": (_orbax.Writing, "wait", full, 1),
    "arrays of the first": (_orbax.Writing, "wait", full, 0),
    "digests": (_save, "digest_files", full, 1),
    "joining": (_orbax.Writing, "join", full, 0),
    "manifest": (_save, "write_manifest", full, 0),
    "folder": (_save, "_clear", denied, 0),
    "start": (_save, "Writing", denied, 1),
}


def saves(folder):
    """Save with a failure on one process each time, and then well."""
    step = make_step(1)
    state = step.init(init, jax.random.key(0))
    checkpoints = zerojax.Checkpoints(folder / "run")

    def save(number, **more):
        checkpoints.save(number, state, step.layout, **more)
        checkpoints.wait()

    save(1)
    found = {}
    for number, (name, (owner, called, failing, index)) in enumerate(FAILURES.items(), start=2):
        before = getattr(owner, called)
        if jax.process_index() == index:
            setattr(owner, called, failing)
        found[name] = caught(lambda n=number: save(n))
        setattr(owner, called, before)
    found["steps"] = list(checkpoints.steps())
    data = {"next": jax.process_index()}
    found["data"] = caught(lambda: save(50, data=data))
    save(99)
    found["latest"] = max(checkpoints.steps())
    back = checkpoints.restore_latest(step.layout, step.abstract_state())
    same = zip(leaves_by_path(back.state).values(), leaves_by_path(state).values(), strict=True)
    found["is_same"] = all(
        np.array_equal(np.asarray(a.data), np.asarray(b.data))
        for x, y in same
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
    )
    return found


def together(folder):
    other = jax.process_index() == 1
    return {
        "learn": [learn(stage) for stage in range(4)],
        "model axis": learn(2, axes={"model": 2, "data": 2}),
        "hybrid": learn(3, axes={"host": 2, "data": 2}),
        "parts": [
            make_step(axes=axes).batch_part
            for axes in ({"data": 4}, {"data": 2, "model": 2}, {"model": 2, "data": 2})
        ],
        "accumulated": learn(3, recipe=zerojax.Recipe(accumulate=2)),
        "once": learn(1, recipe=ONCE),
        "program of once": program(1, recipe=ONCE),
        "apart": learn(3, recipe=APART),
        "programs of stage 3": [program(3, recipe=one) for one in (None, APART)],
        "ways": {name: caught(lambda way=way: way(other)) for name, way in WAYS.items()},
        "alone": alone(other),
        "elsewhere": caught(lambda: goes_elsewhere(folder, other)),
        "uneven": caught(lambda: make_step().place({"x": np.ones((3, SIZE), np.float32)})),
        "not placed": caught(unplaced),
        "own rows and the whole batch": [told_of_rows(rows_of), told_of_rows(whole_of)],
        "saves": saves(folder),
        "placed twice": caught(placed_twice),
        "left out": [caught(left_out), caught(lambda: left_out(folder / "run/99"))],
        "files": files(folder),
        "unshared": unshared(folder / f"own.{jax.process_index()}"),
    }


def placed_twice():
    step = make_step()
    step.place(step.place(rows_of(step, 0)))


def left_out(saved=None):
    """Train, or restore, on the devices of process 0 alone."""
    mesh = zerojax.make_mesh({"data": 2}, devices=jax.devices()[:2])
    layout = zerojax.make_layout(jax.eval_shape(init, jax.random.key(0)), mesh, stage=2)
    step = zerojax.make_train_step(loss, optax.adamw(1e-2), layout)
    if saved is None:
        step(step.init(init, jax.random.key(0)), step.place(batch(0)))
    else:
        zerojax.restore(saved, layout, step.abstract_state())


def files(folder):
    """Write weights on process 0, and again on the other; read what is another file on each."""
    index, layout = jax.process_index(), make_step(3).layout
    path = folder / "weights.safetensors"
    if index == 0:
        export_safetensors(folder / "run/99", path)
    processes.gather_texts("exported", "")
    again = caught(lambda: export_safetensors(folder / "run/99", path))
    weights = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    weights["w"][0, :2] = index
    (own := folder / f"weights.{index}").mkdir()
    save_file(weights, own / "weights.safetensors")
    like = layout.shapes
    differ = caught(lambda: import_safetensors(own / "weights.safetensors", layout, like))
    read = import_safetensors(path, layout, like)
    return {"again": again, "differ": differ, "read": sorted(leaves_by_path(read))}


def unshared(own):
    """Save to a folder that has one name, and is another one on each process."""
    own.mkdir()
    here, _save.LAG = Path.cwd(), 1.0
    os.chdir(own)
    step = make_step(3)
    state = step.init(init, jax.random.key(0))
    found = caught(lambda: zerojax.save("/proc/self/cwd/saved", state, step.layout))
    os.chdir(here)
    return found


def whole_of(_, number):
    return batch(number)


def told_of_rows(rows):
    """Do two steps with the rows that this process has by some function; give what is warned of."""
    step = make_step()
    state = step.init(init, jax.random.key(0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            state, _ = step(state, step.place(rows(step, number)))
    return [str(one.message) for one in told]


def goes_elsewhere(folder, other):
    """Save on one process, make a state on the other."""
    step = make_step()
    state = step.init(init, jax.random.key(0))
    if other:
        step.init(init, jax.random.key(0))
    else:
        zerojax.save(folder / "elsewhere", state, step.layout)


def alone(other):
    """Train on the devices of this process, and save nothing: the other may do anything else."""
    mesh = zerojax.make_mesh({"data": jax.local_device_count()}, devices=jax.local_devices())
    layout = zerojax.make_layout(jax.eval_shape(init, jax.random.key(0)), mesh, stage=2)
    step = zerojax.make_train_step(loss, optax.sgd(0.1), layout)
    state = step.init(init, jax.random.key(int(other)))
    for _ in range(1 + other):
        state, metrics = step(state, step.place(batch(0)))
    return float(metrics["loss"])


def unplaced():
    step = make_step()
    step(step.init(init, jax.random.key(0)), rows_of(step, 0))


# Faults ------------------------------------------------------------------------------------------


def waits(folder):
    """Wait in a collective that the other process does not come to."""
    from jax.experimental import multihost_utils

    index = jax.process_index()
    multihost_utils.sync_global_devices("start")
    (folder / f"ready.{index}").touch()
    what, victim = (folder / "fault").read_text().split()
    if index == int(victim):
        if what == "raise":
            raise RuntimeError("the corpus is gone")
        if what == "leave":
            return
        if what == "fork":
            if not (forked := os.fork()):
                sys.exit()
            assert os.waitpid(forked, 0)[1] == 0
        else:
            time.sleep(10 if what == "slow" else 600)
    if what == "slow":
        _texts.NOTED = 1.0
        processes.gather_texts("a note", "")
    multihost_utils.sync_global_devices("a step")


def main(port, index, count, what, patience, folder):
    folder = Path(folder)
    given = () if port == "found" else (f"127.0.0.1:{port}", int(count), int(index))
    assert processes.initialize(*given, patience=float(patience)) == int(count)
    if what == "meets":
        assert len(jax.devices()) == 2 * int(count)
        return
    if what == "waits":
        waits(folder)
        return
    found = together(folder)
    (folder / f"result.{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    signal.alarm(290)  # whatever happens, nothing is left over
    main(*sys.argv[1:])
