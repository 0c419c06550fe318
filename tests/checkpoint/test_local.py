"""Copies on the hosts; tests/processes/test_four.py has them on several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.checkpoint._local import LocalCopies, copied_axis

MESH = zerojax.make_mesh({"host": 2, "data": 4})


def save_local(folder, **options):
    layout = zerojax.make_layout({"w": jnp.ones((8, 8))}, MESH, stage=3, axis="data")
    with zerojax.Checkpoints(folder / "run", **options) as checkpoints:
        checkpoints.save_local(1, {"w": jnp.ones((8, 8), device=layout.sharding(P()))}, layout)


def array(spec, kind=None):
    return jax.ShapeDtypeStruct(
        (8, 8), "float32", sharding=NamedSharding(MESH, spec, memory_kind=kind)
    )


def test_what_asks_for_copies_says_where_they_are(tmp_path):
    with pytest.raises(ValueError, match=r"save_local needs Checkpoints.*local="):
        save_local(tmp_path)
    with pytest.raises(ValueError, match="give local=, where they are"):
        save_local(tmp_path, replicator=True)
    with pytest.raises(ValueError, match="of several processes; this is one"):
        save_local(tmp_path, local=tmp_path / "own")


@pytest.mark.parametrize("replicator", [False, True])
def test_a_leaf_that_is_not_on_the_devices_of_the_mesh_is_named(tmp_path, replicator):
    arrays = {"a": array(P("data")), "b": array(P(), "pinned_host")}
    with pytest.raises(ValueError, match=r"leaf 'b' lies on .*pinned_host"):
        LocalCopies(tmp_path, tmp_path, MESH, arrays, replicator=replicator)


class Copies:
    """Hold copies as several hosts do."""

    held: ClassVar[dict] = {}

    def __init__(self, *_, **__):
        self.steps, self.passed_over, self.manager = sorted(self.held), {}, self

    def save(self, step, arrays):
        self.held[step] = dict(arrays)
        self.steps.append(step)

    def restore(self, step, _):
        return self.held[step]

    def close(self):
        pass

    wait_until_finished = close


@pytest.mark.parametrize("wrong", ["cut short", "damaged"])
def test_a_save_that_is_not_whole_hides_no_newer_copy(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr("zerojax.checkpoint._folder.LocalCopies", Copies)
    monkeypatch.setattr(Copies, "held", {})
    axes = {"axis": "data", "batch_axes": ("host", "data")}
    layout = zerojax.make_layout({"w": jnp.ones((8, 8))}, MESH, stage=3, **axes)

    def state(step):
        return {"w": jnp.full((8, 8), float(step), device=layout.sharding(P("data")))}

    asked = {"local": tmp_path / "own"}
    with zerojax.Checkpoints(tmp_path / "run", **asked) as checkpoints:
        checkpoints.save(100, state(100), layout)
        checkpoints.save_local(190, state(190), layout)
        checkpoints.save(200, state(200), layout)
    if wrong == "cut short":
        (tmp_path / "run" / "200" / "checkpoint.json").unlink()
    else:
        for held in (tmp_path / "run" / "200" / "arrays" / "d").iterdir():
            held.write_bytes(bytes(held.stat().st_size))
    with zerojax.Checkpoints(tmp_path / "run", **asked) as checkpoints:
        found = checkpoints.restore_latest(layout, state(0))
    assert found.path == tmp_path / "own" / "190"
    assert [path.name for path in found.passed_over] == ["200"]
    assert (found.state["w"] == 190).all()


class Device:
    def __init__(self, process_index):
        self.process_index = process_index


def fake_mesh(*processes):
    """Give what is read of a mesh, with the process of each device."""

    devices = np.vectorize(Device)(np.array(processes))
    return SimpleNamespace(axis_names=MESH.axis_names, devices=devices, shape=MESH.shape)


def test_the_axis_of_copies_parts_processes_and_cuts_no_leaf():
    apart, mixed = fake_mesh([0, 0, 1, 1], [2, 2, 3, 3]), fake_mesh([0, 0, 1, 1], [0, 0, 1, 1])
    arrays = {"a": array(P("data")), "b": array(P(None, "data"))}
    assert copied_axis(apart, arrays) == 0
    assert copied_axis(fake_mesh([0, 1, 2, 3], [0, 1, 2, 3]), {"a": array(P("host"))}) == 1
    for mesh, wrong in ((mixed, arrays), (apart, {**arrays, "c": array(P(("host", "data")))})):
        with pytest.raises(ValueError, match=r"no axis of the mesh .* holds copies"):
            copied_axis(mesh, wrong)
