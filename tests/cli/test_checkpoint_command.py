"""`zerojax checkpoint` looks into checkpoints, checks them and turns them into weights and back."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import zerojax
from tests.cli.running import COMMAND
from zerojax.checkpoint import IncompatibleCheckpointError, import_safetensors, read_manifest, save
from zerojax.checkpoint._manifest import write_manifest
from zerojax.cli import main

MIXED = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)


def no_loss(params, batch):
    return 0.0


def init(key):
    a, b = jax.random.split(key)
    return {"layers": {"prime": jax.random.normal(a, (1009, 7)), "even": jnp.ones((64, 32))},
            "head": jax.random.normal(b, (64, 40))}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Give a run's folder with the steps 3 and 6, and the state of the latter."""
    key, tx = jax.random.key(0), optax.adamw(1e-2)
    mesh = zerojax.make_mesh({"data": 8})
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=3)
    made = zerojax.make_train_step(no_loss, tx, layout, zerojax.Recipe(precision=MIXED))
    state = made.init(init, key)
    run = tmp_path_factory.mktemp("run")
    for step in (3, 6):
        path = run / "checkpoints" / str(step)
        save(path, state, layout, step=step, data={"next_index": step}, metadata={"by": "a test"})
    return run, state, layout


def test_inspect_needs_neither_devices_nor_the_model(saved):
    """No such platform could start; the command does not ask for any."""
    done = subprocess.run(
        [*COMMAND, "checkpoint", "inspect", str(saved[0])],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "step      6,",
        "stage 3 over data; mesh data=8",
        "bfloat16",
        "ScaleByAdamState > EmptyState > EmptyState",
        '{"next_index": 6}',
        "opt_state/0/mu ",
    ):
        assert said in done.stdout, said


def test_verify_names_what_is_damaged(saved, capsys):
    assert main(["checkpoint", "verify", str(saved[0])]) == 0
    out = capsys.readouterr().out
    assert out.count("whole") == 2
    files = (saved[0] / "checkpoints/6/arrays").rglob("*")
    largest = max(filter(os.path.isfile, files), key=lambda path: path.stat().st_size)
    kept = largest.read_bytes()
    try:
        largest.write_bytes(kept[:1000] + bytes([kept[1000] ^ 4]) + kept[1001:])
        assert main(["checkpoint", "verify", str(saved[0])]) == 1
        out, err = capsys.readouterr()
        assert "1 of 2 damaged" in err
        assert largest.name in out
        assert main(["checkpoint", "export", str(saved[0]), "out.safetensors"]) == 2
        assert largest.name in capsys.readouterr().err
        largest.write_bytes(kept[:1000])  # which is known without reading it
        assert main(["checkpoint", "verify", str(saved[0])]) == 1
        out, err = capsys.readouterr()
        assert "1 of 2 damaged" in err
        assert f"{largest.name} has 1000 bytes of" in " ".join(out.split())
    finally:
        largest.write_bytes(kept)


@pytest.mark.parametrize("how", ["cut array", "cut", "empty", "missing"])
def test_what_is_passed_over_is_told_with_why(saved, tmp_path, capsys, how):
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    newest, file = run / "checkpoints/6", run / "checkpoints/6/checkpoint.json"
    if how == "cut array":
        files = (newest / "arrays").rglob("*")
        file = max(filter(os.path.isfile, files), key=lambda path: path.stat().st_size)
    kept = file.read_bytes()
    file.unlink()
    if how != "missing":
        file.write_bytes(kept[: 0 if how == "empty" else 1000])
    for asked in (["inspect", str(run)], ["export", str(run), str(tmp_path / "w.safetensors")]):
        assert main(["checkpoint", *asked]) == 0
        out = " ".join(capsys.readouterr().out.split())
        told = f"is a save that was cut short: it has no {file.name}"
        told = told if how == "missing" else f"is damaged: {file.relative_to(newest)} "
        assert "passed over: " in out
        assert f"{newest} {told}" in out
        assert f"taking step 3, {run / 'checkpoints/3'}" in out


def test_inspect_shows_no_control_characters_of_a_manifest(saved, tmp_path, capsys):
    path = tmp_path / "one"
    shutil.copytree(saved[0] / "checkpoints/6", path)
    manifest, esc = read_manifest(path), "\x1b[2J"
    told = {"mesh": {esc: 8}, "optimizer": {"": esc}, "written": esc, "axis": (esc,)}
    leaves = {**manifest.leaves, esc: manifest.leaves["step"]}
    write_manifest(path, dataclasses.replace(manifest, **told, leaves=leaves))
    assert main(["checkpoint", "inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count(r"\x1b[2J") == 5


def test_weights_go_out_and_come_back(saved, tmp_path, capsys):
    run, state, layout = saved
    out = tmp_path / "weights.safetensors"
    assert main(["checkpoint", "export", str(run), str(out)]) == 0
    assert "wrote" in capsys.readouterr().out
    found = load_file(out)  # the library that others read these files with
    params = zerojax.unpad(state.params, layout)
    want = {"head": params["head"]} | {f"layers.{name}": x for name, x in params["layers"].items()}
    for name in ("head", "layers.even", "layers.prime"):
        assert found[name].tobytes() == np.asarray(want[name]).tobytes()
    assert found["layers.prime"].shape == (1009, 7)


def test_masters_are_placed_where_they_belong(saved, tmp_path, capsys):
    run, state, layout = saved
    out = tmp_path / "masters.safetensors"
    command = ["checkpoint", "export", str(run), str(out), "--part", "masters"]
    assert main(command) == 0
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                        state.masters)  # fmt: skip
    back = import_safetensors(out, layout, like)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(state.masters), strict=True):
        assert got.sharding == want.sharding
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    with pytest.raises(IncompatibleCheckpointError, match=r"'layers/odd' is not in it \(near"):
        import_safetensors(
            out,
            layout,
            {**like, "layers": {"odd": like["layers"]["even"], "prime": like["layers"]["prime"]}},
        )
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_names_with_dots_are_read(saved, tmp_path):
    held = {"a.b": np.ones(2, np.float32), "c.d": np.zeros(2, np.float32)}
    save_file(held, tmp_path / "w.safetensors", {"format": "pt"})
    like = {"a.b": held["a.b"], "c": {"d": held["c.d"]}}
    back = import_safetensors(tmp_path / "w.safetensors", saved[2], like)
    np.testing.assert_array_equal(back["a.b"], held["a.b"])
    np.testing.assert_array_equal(back["c"]["d"], held["c.d"])


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("inspect nothing", "there is no folder nothing"),
        ("inspect .", "no checkpoint in ."),
        ("verify nothing", "there is no folder nothing"),
        ("export nothing out.safetensors", "there is no folder nothing"),
        (
            "export {run} out.safetensors --part momentum",
            "has no part 'momentum'; it has step, params, masters, opt_state/0/count",
        ),
        ("inspect", "DIR"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    saved, tmp_path, monkeypatch, capfd, request_, said
):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *request_.format(run=saved[0]).split()]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1
