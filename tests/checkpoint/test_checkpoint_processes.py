"""Several processes save and restore one state: each its own part, and all of one mind."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import pytest

from tests.checkpoint import checkpoint_processes as child
from tests.processes.starting import COUNT, once, run
from zerojax._tree import flatten_with_names
from zerojax.checkpoint import read_manifest, restore, save, verify

#: Readers are many threads, and glibc keeps what was freed in an arena for each of a few.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Save in one process, then do all that is shown with tiny states in two; one worker does."""

    def make(folder):
        layout, like = child.place(child.SHAPES, 3, 8)
        save(folder / "single", child.filled(like, layout, 5), layout, step=5)
        return run(child.__file__, folder, "tiny", **ENVIRONMENT)

    return once(tmp_path_factory, "checkpoints", make)


def data_bytes(root):
    return sum(path.stat().st_size for path in root.rglob("d/*"))


@pytest.mark.parametrize("stage", [1, 3])
def test_every_byte_is_written_once(tiny, stage):
    """Descriptions and trees of a few hundred bytes a leaf come on top."""
    folder, _ = tiny
    root = folder / f"stage{stage}"
    manifest = read_manifest(root)
    stored = sum(4 * math.prod(leaf.stored_shape) for leaf in manifest.leaves.values())
    assert stored <= data_bytes(root / "arrays") <= 1.02 * stored
    own = [data_bytes(root / f"arrays/ocdbt.process_{index}") for index in range(COUNT)]
    names, places, _ = flatten_with_names(child.place(child.SHAPES, stage, 4)[1])
    whole = {n for n, x in zip(names, places, strict=True) if x.sharding.is_fully_replicated}
    assert ("params/even" in whole) == (stage == 1)
    once = sum(4 * math.prod(manifest.leaves[name].stored_shape) for name in whole)
    for one in own:  # half of what is partitioned, and at most all of what is not
        assert (stored - once) / 2 <= one <= (stored - once) / 2 + once + 0.01 * stored
    assert sum(own) <= 1.02 * stored


def test_replicas_share_the_writing_of_a_large_leaf(tiny):
    folder, _ = tiny
    size = 4 * math.prod(child.LARGE)
    for index in range(COUNT):
        one = data_bytes(folder / f"large/arrays/ocdbt.process_{index}")
        assert size / 2 <= one <= 1.01 * size / 2


@pytest.mark.parametrize("name", ["stage1", "stage3", "large", "run/5"])
def test_the_manifest_has_the_files_of_all_processes(tiny, name):
    root = tiny[0] / name
    files = verify(root).files
    on_disk = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert set(files) == on_disk - {"checkpoint.json"}
    for index in range(COUNT):
        assert any(file.startswith(f"arrays/ocdbt.process_{index}/d/") for file in files)


def test_each_process_gets_its_shards_to_the_bit(tiny):
    for found in tiny[1]:
        assert found["saves"] == {
            "stage 1 at stage 3": [], "stage 3 at stage 1": [], "of one process": []
        }  # fmt: skip


def test_saves_in_sequence_are_those_of_their_steps(tiny):
    for found in tiny[1]:
        assert found["saves_in_sequence"] == {
            "path": "5", "data": {"next_index": 5}, "differences": [], "steps": [4, 5]
        }  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
def test_one_process_restores_what_two_saved(tiny, stage):
    layout, like = child.place(child.SHAPES, 2, 8)
    back = restore(tiny[0] / f"stage{stage}", layout, like)
    assert child.differences(back, like, layout, stage) == []
    assert len(jax.tree.leaves(back)) == 3 * len(child.SHAPES) + 2


@pytest.mark.parametrize("way", child.DAMAGES)
def test_damage_is_raised_by_every_process_and_passed_over(tiny, way):
    found = [one["meets_damage"][way] for one in tiny[1]]
    error, text, path, passed_over, wrong = found[0]
    assert found == [found[0]] * COUNT, "they tell the same"
    assert error == ("FileNotFoundError" if way == "no manifest" else "DamagedCheckpointError")
    assert text
    assert "arrays/" in text or "checkpoint.json" in text
    assert (path, passed_over, wrong) == ("1", ["3"], [])


@pytest.mark.parametrize("reading", ["read_manifest", "read_arrays"])
def test_what_one_process_alone_cannot_read_none_restores(tiny, reading):
    first, last = (one["fails_alone"][reading] for one in tiny[1])
    assert first == ["1", [], "DamagedCheckpointError"]
    assert last == ["1", [], "OSError"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured on Linux")
def test_memory_is_bounded_by_the_shards_that_a_process_holds(tmp_path):
    """At most 1.2 x its shards: of copies where it saves, of arrays and all else where it restores.

    The arrays of a CPU are host memory themselves.
    """
    model = 4 * sum(math.prod(shape) for shape in child.HEAVY.values())
    for found in run(child.__file__, tmp_path, "memory", **ENVIRONMENT):
        one = found["measures_memory"]
        assert one["is_same"]
        assert one["held"] == model / COUNT
        limit = 1.2 * one["held"] + child.ALLOWANCE
        assert limit < model
        assert one["saving"] <= limit
        assert one["restoring"] <= limit
        assert one["held"] <= one["read"] <= 1.01 * one["held"]  # its shards, and trees of keys
