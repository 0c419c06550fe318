"""Damage of every kind is found, named, never read, and passed over for an older checkpoint."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import zerojax
from tests.checkpoint.damages import MANIFEST, NONE, WAYS, data, flipped
from zerojax.checkpoint import (
    Checkpoints,
    DamagedCheckpointError,
    _folder,
    _restore,
    read_manifest,
    restore,
    save,
    verify,
)
from zerojax.checkpoint._files import digest_text
from zerojax.checkpoint._manifest import NO_DIGEST, write_manifest

# Where a read fails, orbax leaves others behind, which report to a loop that is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHAPES = {"even": (768, 512), "padded": (1009, 7), "bias": (3,), "scalar": ()}


ZERO = {"num_bytes": 0, "digest": "0" * 32}


def place():
    mesh = zerojax.make_mesh({"data": 4}, devices=jax.devices()[:4])
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    layout = zerojax.make_layout(shapes, mesh, stage=3, min_size=64)
    leaves = {leaf.path: leaf for leaf in layout.leaves}
    like = {
        name: jax.ShapeDtypeStruct(leaves[name].stored_shape, np.float32, sharding=sharding)
        for name, sharding in layout.params.items()
    }
    return layout, like


def values(seed, like):
    drawn = np.random.default_rng(seed)
    filled = {}
    for name, x in like.items():
        array = np.zeros(x.shape, np.float32)
        array[tuple(map(slice, SHAPES[name]))] = drawn.standard_normal(SHAPES[name])
        filled[name] = array
    return filled


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind():
    """Have what orbax left behind told in this file, and not in another's test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save steps 1 and 2, of the same shapes and other values."""
    folder = tmp_path_factory.mktemp("saved")
    layout, like = place()
    for step in (1, 2):
        state = jax.device_put(values(step, like), jax.tree.map(lambda x: x.sharding, like))
        save(folder / str(step), state, layout, step=step, data={"next_index": step})
    return folder, layout, like


@pytest.mark.parametrize("way", WAYS)
def test_damage_is_found_named_and_passed_over(tmp_path, saved, way):
    source, layout, like = saved
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    newest, older = tmp_path / "2", tmp_path / "1"
    damaged = WAYS[way](newest, older).relative_to(newest).as_posix()
    error = FileNotFoundError if way in NONE else DamagedCheckpointError
    with pytest.raises(error, match=re.escape(damaged)):
        verify(newest)
    with pytest.raises(error, match=re.escape(damaged)):
        restore(newest, layout, like)
    found = Checkpoints(tmp_path).restore_latest(layout, like)
    assert found is not None
    assert found.path == older
    assert found.manifest.data == {"next_index": 1}
    assert list(found.passed_over) == [newest]
    assert damaged in found.passed_over[newest]
    wanted = values(1, like)
    for name, x in found.state.items():
        assert np.asarray(x).tobytes() == wanted[name].tobytes()


def test_a_whole_checkpoint_is_found_whole(saved):
    """Nothing of what the table calls damage is there without it."""
    folder, layout, like = saved
    assert verify(folder / "2").step == 2
    found = Checkpoints(folder).restore_latest(layout, like)
    assert found is not None
    assert (found.path, found.passed_over) == (folder / "2", {})
    for name, x in found.state.items():
        assert np.asarray(x).tobytes() == values(2, like)[name].tobytes()


@pytest.mark.parametrize("name", ["7", "02"])
def test_a_folder_that_was_renamed_is_no_checkpoint(tmp_path, saved, name):
    """Later saves would be taken for older ones, and `02` would stand for 2."""
    source, layout, like = saved
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (tmp_path / "2").rename(tmp_path / name)
    checkpoints = Checkpoints(tmp_path)
    assert list(checkpoints.steps()) == [1]
    found = checkpoints.restore_latest(layout, like)
    assert found is not None
    assert found.path == tmp_path / "1"
    told = "".join(found.passed_over.values())
    assert ("it holds step 2; rename the folder" in told) == (name == "7")


def test_a_checkpoint_that_goes_while_it_is_read_is_no_fresh_start(tmp_path, saved, monkeypatch):
    source, layout, like = saved
    shutil.copytree(source / "2", tmp_path / "2")

    def gone(path, *_):
        shutil.rmtree(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(_folder, "read_state", gone)
    with pytest.raises(DamagedCheckpointError, match=re.escape(str(tmp_path / "2"))):
        Checkpoints(tmp_path).restore_latest(layout, like)


def test_every_file_is_held_against_a_digest(saved):
    folder, _, _ = saved
    root = Path(folder / "2")
    listed_files = json.loads((root / MANIFEST).read_text())["files"]
    on_disk = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert set(listed_files) == on_disk - {MANIFEST}


def test_processes_compare_whole_manifests(tmp_path, saved, monkeypatch):
    """Two of one step and size, whose leaves and files differ."""
    shutil.copytree(saved[0] / "2", tmp_path / "2")
    manifest, told = read_manifest(tmp_path / "2"), []

    def noted(_, text):
        told.append(text)
        return [text]

    monkeypatch.setattr(_restore, "gather_texts", noted)
    _restore.read_agreed(tmp_path / "2")
    leaves = dict.fromkeys(manifest.leaves, manifest.leaves["even"])
    for changed in ({"leaves": leaves}, {"files": {}}, {"optimizer": {"": "other"}}):
        write_manifest(tmp_path / "2", dataclasses.replace(manifest, **changed))
        _restore.read_agreed(tmp_path / "2")
    digests = [*filter(None, told)]
    assert len({*digests}) == len(digests) == 4


FULL = """
import resource, sys, jax.numpy as jnp, numpy as np, zerojax
w = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((600, 1024), np.float32))}
layout = zerojax.make_layout(w, zerojax.make_mesh({"data": 1}), stage=2)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # Python ignores SIGXFSZ
try:
    with zerojax.Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, w, layout)
        raise KeyError("the loop's own")
except KeyError as error:
    print(*error.__notes__)
try:
    zerojax.save(sys.argv[1] + "/2", w, layout)
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
zerojax.save(sys.argv[1] + "/3", w, layout)
"""


def test_a_disk_that_is_full_is_an_error_of_the_disk_told_once(tmp_path):
    """And no other error is lost for it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    told = [f"[Errno 27] File too large: '{tmp_path}/{step}'" for step in (1, 2)]
    assert done.stdout == f"zerojax: a save failed too: {told[0]}\n{told[1]}\n"
    assert verify(tmp_path / "3").step is None


def test_copies_are_closed_though_a_save_failed(tmp_path, monkeypatch):
    checkpoints, closed = Checkpoints(tmp_path), []
    manager = types.SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(checkpoints, "_copies", types.SimpleNamespace(manager=manager))
    monkeypatch.setattr(checkpoints, "wait", lambda: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"), checkpoints:
        pass
    assert closed


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("leaves"),
        lambda m: m.update(leaves=[]),
        lambda m: m.update(files=None),
        lambda m: m.update(mesh=None),
        lambda m: m.update(axis="data"),
        lambda m: m.update(step="two"),
        lambda m: m.update(metadata=None),
        lambda m: m.update(more=1),
        lambda m: m["leaves"]["even"].update(more=1),
        lambda m: m["leaves"]["even"].pop("dtype"),
        lambda m: m["leaves"]["even"].update(dtype="zzz"),
        lambda m: m["leaves"]["even"].update(shape="ab"),
        lambda m: next(iter(m["files"].values())).update(num_bytes="x"),
        lambda m: next(iter(m["files"].values())).update(num_bytes=10**400),
        lambda m: next(iter(m["files"].values())).update(num_bytes=-1),
        lambda m: m["files"].update({"/etc/passwd": next(iter(m["files"].values()))}),
        lambda m: m["files"].update({"arrays/../../1/checkpoint.json": {**ZERO}}),
        lambda m: m["files"].update({"arrays/\x1b[2J": {**ZERO}}),
        lambda m: m["leaves"]["even"].update(shape=[-1, 512]),
        lambda m: m["leaves"]["even"].update(shape=[768]),
        lambda m: m["leaves"]["even"].update(shape=[2**62, 2**62], stored_shape=[2**62, 2**62]),
        lambda m: m["leaves"]["even"].update(num_bytes=10**400),
    ],
)
def test_a_manifest_of_another_structure_is_damage_though_its_digest_is_right(
    tmp_path, saved, change
):
    source, layout, like = saved
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    held = json.loads((tmp_path / "2" / MANIFEST).read_text())
    change(held)
    text = json.dumps(held | {"digest": NO_DIGEST})
    (tmp_path / "2" / MANIFEST).write_text(text.replace(NO_DIGEST, digest_text(text)))
    with pytest.raises(DamagedCheckpointError, match=MANIFEST):
        verify(tmp_path / "2")
    found = Checkpoints(tmp_path).restore_latest(layout, like)
    assert found is not None
    assert (found.path, list(found.passed_over)) == (tmp_path / "1", [tmp_path / "2"])


def test_where_all_are_damaged_every_one_is_named(tmp_path, saved):
    source, layout, like = saved
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    for step in ("1", "2"):
        flipped(data, 0.5)(tmp_path / step, None)
    with pytest.raises(DamagedCheckpointError) as caught:
        Checkpoints(tmp_path).restore_latest(layout, like)
    for step in ("1", "2"):
        assert str(tmp_path / step) in str(caught.value)


def test_a_checkpoint_that_lost_its_manifest_is_named_before_a_save_replaces_it(tmp_path, saved):
    source, layout, like = saved
    shutil.copytree(source / "2", tmp_path / "2")
    (tmp_path / "2" / MANIFEST).unlink()
    told = f"{tmp_path / '2'} is a save that was cut short: it has no {MANIFEST}; the next save"
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert Checkpoints(tmp_path).restore_latest(layout, like) is None


def test_a_folder_of_runs_is_told_from_a_run_without_checkpoints(tmp_path, saved):
    source, layout, like = saved
    shutil.copytree(source, tmp_path / "runs" / "books")
    told = f"nothing is restored: checkpoints are in {tmp_path / 'runs' / 'books'}"
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert Checkpoints(tmp_path / "runs").restore_latest(layout, like) is None
    assert Checkpoints(tmp_path / "new").restore_latest(layout, like) is None


def test_a_manifest_of_other_arrays_is_damage_though_every_digest_is_right(tmp_path):
    layout, _ = place()
    save(tmp_path / "1", {"v": np.array([1, 2, 3], np.float32)}, layout)
    save(tmp_path / "2", {"w": np.array([4, 5, 6], np.float32)}, layout)
    manifest = read_manifest(tmp_path / "2")
    other = dataclasses.replace(manifest, leaves={"v": manifest.leaves["w"]})
    write_manifest(tmp_path / "2", other)
    like = {"v": np.zeros(3, np.float32)}
    with pytest.raises(DamagedCheckpointError, match="2 is damaged: its arrays are not those of"):
        restore(tmp_path / "2", layout, like)
    found = Checkpoints(tmp_path).restore_latest(layout, like)
    assert found is not None
    assert (found.path, list(found.passed_over)) == (tmp_path / "1", [tmp_path / "2"])
    assert np.asarray(found.state["v"]).tolist() == [1, 2, 3]
