"""Copies on the hosts; tests/processes/test_four.py has them on several."""

from __future__ import annotations

from types import SimpleNamespace

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
