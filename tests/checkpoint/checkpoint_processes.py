"""One of several processes that save and restore together; run by test_checkpoint_processes.py.

Writes what it found to FOLDER/result.INDEX.json.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import shutil
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax._tree import flatten_with_names
from zerojax.checkpoint import Checkpoints, _restore, restore, save
from zerojax.checkpoint._leaves import logical_shapes

SHAPES = {"even": (512, 512), "padded": (1009, 67), "bias": (3,), "scalar": ()}
#: A leaf so large that replicas share the writing of it.
LARGE = (4096, 1024)
#: What memory is measured with: 512 MiB.
HEAVY = {f"leaf{number}": (2048, 2048) for number in range(32)}
#: What a process may use whatever it saves: blocks of files under digest, threads, descriptions.
ALLOWANCE = 16 << 20


def no_loss(params, batch):
    return 0.0


def place(shapes, stage, num_devices):
    """Give a layout and the shapes of a train state, with their places."""
    mesh = zerojax.make_mesh({"data": num_devices}, devices=jax.devices()[:num_devices])

    def init():
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    layout = zerojax.make_layout(jax.eval_shape(init), mesh, stage=stage, min_size=64)
    return layout, zerojax.make_train_step(no_loss, optax.adam(1e-3), layout).abstract_state()


def expected(like, layout, seed):
    """Give by path what a leaf holds: values by seed and path, and zeros where it is padded."""
    names, leaves, _ = flatten_with_names(like)
    logical = logical_shapes(like, layout)

    def values(name, x):
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())])
        stored = np.zeros(x.shape, x.dtype)
        stored[tuple(map(slice, logical[name]))] = 9 * drawn.standard_normal(logical[name])
        return stored

    return {name: values(name, x) for name, x in zip(names, leaves, strict=True)}


def filled(like, layout, seed):
    """Make the state that `expected` describes."""
    names, leaves, structure = flatten_with_names(like)
    values = expected(like, layout, seed)
    return structure.unflatten(
        jax.make_array_from_callback(x.shape, x.sharding, values[name].__getitem__)
        for name, x in zip(names, leaves, strict=True)
    )


def differences(state, like, layout, seed):
    """Name the leaves whose shards here are, to the bit, not what is expected there."""
    names, leaves, _ = flatten_with_names(state)
    places = flatten_with_names(like)[1]
    values = expected(like, layout, seed)
    return [
        name
        for name, x, place in zip(names, leaves, places, strict=True)
        if x.sharding != place.sharding
        or any(
            np.asarray(shard.data).tobytes() != values[name][shard.index].tobytes()
            for shard in x.addressable_shards
        )
    ]


def together(name):
    multihost_utils.sync_global_devices(name)


# What is shown with tiny states ------------------------------------------------------------------


def saves(folder):
    """Save at two stages, and a large leaf that is nowhere partitioned; restore the other's."""
    found = {}
    for stage in (1, 3):
        layout, like = place(SHAPES, stage, 4)
        save(folder / f"stage{stage}", filled(like, layout, stage), layout, step=stage)
    for stage in (1, 3):
        layout, like = place(SHAPES, 4 - stage, 4)
        back = restore(folder / f"stage{stage}", layout, like)
        found[f"stage {stage} at stage {4 - stage}"] = differences(back, like, layout, stage)
    layout, like = place(SHAPES, 2, 4)
    back = restore(folder / "single", layout, like)
    found["of one process"] = differences(back, like, layout, 5)
    whole = layout.sharding(P())
    large = jax.make_array_from_callback(LARGE, whole, lambda index: np.ones(LARGE, "f4")[index])
    save(folder / "large", {"large": large}, layout, step=0)
    return found


def saves_in_sequence(folder):
    """Save in the background after every step, each of which takes the buffers that are saved."""
    layout, like = place(SHAPES, 3, 4)
    double = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state), donate_argnums=0)
    state = filled(like, layout, 7)
    with Checkpoints(folder / "run", keep=2) as checkpoints:
        for step in range(1, 6):
            state = double(state)
            checkpoints.save(step, state, layout, data={"next_index": step})
        state = double(state)
        checkpoints.wait()
        restored = checkpoints.restore_latest(layout, like)
        assert restored is not None
        back = restored.state
        halved = jax.tree.map(lambda x: (x / 2**5).astype(x.dtype), back)
        return {
            "path": restored.path.name,
            "data": restored.manifest.data,
            "differences": differences(halved, like, layout, 7),
            "steps": list(checkpoints.steps()),
        }


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def largest(root):
    return max(root.rglob("d/*"), key=lambda path: path.stat().st_size)


def trees(root):
    """Damage every tree of the processes' own folders and what joins them."""
    for path in root.rglob("d/*"):
        if path.stat().st_size < 4096:
            flip(path, 0.5)


DAMAGES = {
    "data": lambda root: flip(largest(root), 0.5),
    "data of process 0": lambda root: flip(largest(root / "arrays/ocdbt.process_0"), 0.4),
    "data of process 1": lambda root: flip(largest(root / "arrays/ocdbt.process_1"), 0.4),
    "trees": trees,
    "description": lambda root: flip(root / "arrays/_METADATA", 0.5),
    "cut": lambda root: largest(root).write_bytes(b"short"),
    "missing": lambda root: (root / "arrays/manifest.ocdbt").unlink(),
    "manifest": lambda root: flip(root / "checkpoint.json", 0.5),
    "no manifest": lambda root: (root / "checkpoint.json").unlink(),
}


def told(folder, layout, like):
    """Give what restoring raises."""
    try:
        restore(folder, layout, like)
    except (ValueError, OSError) as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def meets_damage(folder):
    """Restore what is damaged, alone and beside what is older and whole."""
    layout, like = place(SHAPES, 3, 4)
    found = {}
    for way, damage in DAMAGES.items():
        root = folder / f"damaged {way}"
        if jax.process_index() == 0:
            shutil.copytree(folder / "stage1", root / "1")
            shutil.copytree(folder / "stage3", root / "3")
            damage(root / "3")
        together(way)
        restored = Checkpoints(root).restore_latest(layout, like)
        assert restored is not None
        wrong = differences(restored.state, like, layout, 1)
        passed_over = [path.name for path in restored.passed_over]
        found[way] = [*told(root / "3", layout, like), restored.path.name, passed_over, wrong]
    return found


def fails_alone(folder):
    """Have the last process alone fail to read: the manifest, the arrays, or see the folders."""
    layout, like = place(SHAPES, 3, 4)
    root = folder / "damaged no manifest"  # the newer one is cut short; 1 is whole
    if jax.process_index() == 0:
        shutil.copytree(folder / "stage3", root / "2")
    together("alone")
    is_last = jax.process_index() == jax.process_count() - 1

    def failing(function):
        def fails(path, *rest):
            if is_last and re.search(r"/2(/|$)", str(path)):
                raise OSError("no such luck")
            return function(path, *rest)

        return fails

    found = {}
    for module, name in ((_restore, "read_manifest"), (_restore, "read_arrays")):
        function = getattr(module, name)
        setattr(module, name, failing(function))
        restored = Checkpoints(root).restore_latest(layout, like)
        assert restored is not None
        found[name] = [
            restored.path.name,
            differences(restored.state, like, layout, 1),
            told(root / "2", layout, like)[0],
        ]
        setattr(module, name, function)
    return found


# What memory is measured with --------------------------------------------------------------------


def status(field):
    """Read a field of this process's memory, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{field}:\s+(\d+) kB", text)[0]) << 10


def grown(action):
    """Give what an action returns, and by how much it raised the peak of resident memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    result = action()
    return result, status("VmHWM") - before


def array_bytes_read():
    """Count what was read from files through tensorstore, which digests are not."""
    name = "/tensorstore/kvstore/file/bytes_read"
    found = tensorstore.experimental_collect_matching_metrics(name)
    return sum(value["value"] for one in found for value in one["values"])


def measures_memory(folder):
    """Save and restore a state of which this process holds half."""
    mesh = zerojax.make_mesh({"data": 4})
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in HEAVY.items()}
    layout = zerojax.make_layout(shapes, mesh, stage=3)
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.params[name])
        for name, x in shapes.items()
    }
    tiny, tiny_like = place(SHAPES, 3, 4)
    save(folder / "first", filled(tiny_like, tiny, 0), tiny)  # imports, threads
    restore(folder / "first", tiny, tiny_like)

    def shard(index):
        drawn = np.random.default_rng(index[0].start or 0)
        rows = index[0].indices(2048)
        return drawn.standard_normal((rows[1] - rows[0], 2048), dtype=np.float32)

    state = {
        name: jax.make_array_from_callback(x.shape, x.sharding, shard) for name, x in like.items()
    }
    held = sum(np.asarray(s.data).nbytes for x in state.values() for s in x.addressable_shards)
    _, saving = grown(lambda: save(folder / "heavy", state, layout))
    state.clear()
    before = array_bytes_read()
    back, restoring = grown(lambda: restore(folder / "heavy", layout, like))
    read = array_bytes_read() - before
    is_same = all(
        np.array_equal(np.asarray(s.data), shard(s.index))
        for x in back.values()
        for s in x.addressable_shards
    )
    return {
        "held": held, "saving": saving, "restoring": restoring, "read": read, "is_same": is_same
    }  # fmt: skip


def main(port, index, count, what, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    folder = Path(folder)
    actions = {
        "tiny": (saves, saves_in_sequence, meets_damage, fails_alone),
        "memory": (measures_memory,),
    }
    found = {action.__name__: action(folder) for action in actions[what]}
    (folder / f"result.{index}.json").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
