"""Paths are local or mounted; anything else is refused at once, before a folder is made."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax import checkpoint
from zerojax.cli import main

X = {"w": jnp.ones((64, 64))}
LAYOUT = zerojax.make_layout(X, zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]), stage=2)
CALLS = {
    "Checkpoints": zerojax.Checkpoints,
    "save": lambda path: zerojax.save(path, X, LAYOUT),
    "start_save": lambda path: checkpoint.start_save(path, X, LAYOUT),
    "restore": lambda path: zerojax.restore(path, LAYOUT, X),
    "find_checkpoints": checkpoint.find_checkpoints,
    "read_manifest": checkpoint.read_manifest,
    "verify": checkpoint.verify,
    "export from": lambda path: checkpoint.export_safetensors(path, "a.safetensors"),
    "import": lambda path: checkpoint.import_safetensors(path, LAYOUT, X),
    "is_safetensors": checkpoint.is_safetensors,
}


@pytest.mark.parametrize("path", ["gs://my-bucket/run", "s3://b/run", Path("gs://my-bucket/run")])
@pytest.mark.parametrize("name", CALLS)
def test_an_object_store_is_refused_and_no_folder_is_made_beside_the_program(
    tmp_path, monkeypatch, name, path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"^(gs|s3)://[a-z].* mount the bucket and pass the path of"
    ):
        CALLS[name](path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CALLS)
def test_an_empty_path_and_what_is_no_path_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path is empty"):
        CALLS[name]("")
    with pytest.raises(TypeError, match="a str or a Path, got bytes"):
        CALLS[name](b"run")
    with pytest.raises(TypeError, match="a str or a Path, got dict"):
        CALLS[name](X)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_is_not_utf8_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"run\\udcff' is not UTF-8.*; give another path"):
        CALLS[name]("run\udcff")
    Path("here\udcff").mkdir()
    monkeypatch.chdir("here\udcff")
    with pytest.raises(ValueError, match=r"here\\udcff/run' is not UTF-8"):
        CALLS[name]("run")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_path_with_a_backslash_is_refused(tmp_path, monkeypatch, name):
    """The arrays would lie in another folder, `runs/one`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="for which orbax takes a /; give another path"):
        CALLS[name]("runs\\one")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["layers=[64,64]", "run[1]", "a*", "a?", "[[]", "%7B#é 1"])
def test_a_path_is_no_pattern(tmp_path, name):
    """orbax lists by `glob` what it joins, and only logs that it found nothing."""
    for beside in ("run1", "ab", "a*b"):  # what the patterns would find
        zerojax.save(tmp_path / beside, {"w": X["w"] * 3}, LAYOUT)
    zerojax.save(tmp_path / name, X, LAYOUT)
    restored = zerojax.restore(tmp_path / name, LAYOUT, X)
    np.testing.assert_array_equal(restored["w"], X["w"])


def test_local_copies_are_refused_where_orbax_would_read_a_pattern(tmp_path):
    with pytest.raises(ValueError, match=r"host\[1\]' has a \[, \* or \?"):
        zerojax.Checkpoints(tmp_path / "run", local=tmp_path / "host[1]")
    assert list(tmp_path.iterdir()) == []


def test_an_export_to_an_object_store_is_refused(tmp_path, monkeypatch):
    zerojax.save(tmp_path / "saved", X, LAYOUT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="mount the bucket"):
        checkpoint.export_safetensors("saved", "gs://my-bucket/w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoint", "inspect", "gs://my-bucket/run"],
        ["checkpoint", "verify", "gs://my-bucket/run"],
        ["checkpoint", "export", "gs://my-bucket/run", "w.safetensors"],
        ["train", "--out", "gs://my-bucket/run"],
        ["train", "--out", "a\udcff"],
    ],
)
def test_the_command_refuses_it_too(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        "mount the bucket" in said and "gs://my-bucket/" in said
    ) or "a\\udcff/checkpoints' is" in said
    assert list(tmp_path.iterdir()) == []


def test_home_and_file_urls_are_local(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    zerojax.save("~/one", X, LAYOUT)
    zerojax.save((tmp_path / "two words").as_uri(), X, LAYOUT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two words"]
    for path in ("~/one", (tmp_path / "two words").as_uri()):
        np.testing.assert_array_equal(zerojax.restore(path, LAYOUT, X)["w"], X["w"])
