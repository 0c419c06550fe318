"""`zerojax check` holds steps against their lock file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.cli.running import COMMAND
from zerojax.cli import main
from zerojax.lock import find_steps

STEPS = """
import jax, jax.numpy as jnp, numpy as np, optax, zerojax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WIDTH = 64

def step_of(devices, cut):
    mesh = Mesh(np.array(devices), ("data",))
    make = lambda spec, *shape: jax.ShapeDtypeStruct(
        shape, "float32", sharding=NamedSharding(mesh, spec)
    )
    w, x = make(cut, WIDTH, WIDTH), make(P("data"), 16, WIDTH)
    step = lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return jax.jit(step, donate_argnums=0, out_shardings=w.sharding).lower(w, x)

@zerojax.checked("cpu:8")
def plain(devices):
    return step_of(devices, P("data"))

@zerojax.checked("cpu:4")
def audited(devices):
    mesh = zerojax.make_mesh({"data": 4}, devices=devices)
    params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    layout = zerojax.make_layout(params, mesh, stage=2, min_size=8)
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout)
    return step, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)

"""
#: It takes a cut state and returns a whole one.
TWICE = """
import jax, numpy as np, zerojax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

@zerojax.checked("cpu:8")
def twice(devices):
    cut, whole = (NamedSharding(Mesh(np.array(devices), ("data",)), x) for x in (P("data"), P()))
    state = {"w": jax.ShapeDtypeStruct((64, 64), "float32", sharding=cut)}
    step = lambda state: {"w": state["w"] + 1}
    return jax.jit(step, out_shardings=whole).lower(state)
"""
#: It hands over a lowered step with the layout of another mesh.
OTHER = """
    other = zerojax.make_layout(params, zerojax.make_mesh({"data": 2}), stage=2)
    batch = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    return step.lower(step.abstract_state(), batch), other
    """
MARK = '@zerojax.checked("cpu:4")\ndef audited(devices):\n'


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path / "steps.py"


def test_a_step_is_accepted_then_checked_and_a_change_is_told(steps, capsys):
    assert main(["check", "steps.py"]) == 1
    err = capsys.readouterr().err
    assert "plain @ cpu:8 is not in the lock file" in err
    assert "zerojax check steps.py --accept" in err
    assert main(["check", "steps.py", "--accept"]) == 0
    assert main(["check", "steps.py"]) == 0
    lock = steps.parent / "zerojax.lock"
    assert list(json.loads(lock.read_text())["steps"]) == ["audited @ cpu:4", "plain @ cpu:8"]
    steps.write_text(STEPS.replace('step_of(devices, P("data"))', "step_of(devices, P())"))
    capsys.readouterr()
    assert main(["check", "steps.py"]) == 1
    out, err = capsys.readouterr()
    assert "argument: 0: expected spec P('data',), bytes 2,048, seen spec P(), bytes 16,384" in out
    assert "plain @ cpu:8 differs from the lock file" in err
    assert "audited" not in err
    assert "accepted with" not in out
    versions = {"jax": "0.1", "jaxlib": "0.2"}
    held = json.loads(lock.read_text())
    for one in held["steps"].values():
        one["versions"] = versions
    lock.write_text(json.dumps(held))
    assert main(["check", "steps.py"]) == 1
    out = capsys.readouterr().out
    told = f"accepted with jax 0.1 jaxlib 0.2, compiled now with jax {jax.__version__} jaxlib "
    assert out.count("accepted with") == out.count(told) == 1, "of the step that differs"
    assert main(["check", "steps.py", "--accept"]) == 0
    assert main(["check", "steps.py"]) == 0


def test_a_step_that_compiles_twice_is_told_at_once(steps, capsys):
    steps.write_text(TWICE)
    assert main(["check", "steps.py", "--accept"]) == 0
    assert "the second step compiles anew: 0/w comes back with another" in capsys.readouterr().out


def test_a_file_that_starts_jax_is_checked_on_all_its_devices(steps):
    """Modules make arrays and look at devices when they are imported."""
    steps.write_text("import jax\nTABLE = jax.numpy.arange(3)\n" + TWICE)
    command = [sys.executable, "-m", "zerojax", "check", "steps.py", "--accept"]
    root = str(Path(__file__).resolve().parents[2])
    kept = {key: x for key, x in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = subprocess.run(
        command,
        cwd=steps.parent,
        capture_output=True,
        text=True,
        env=kept | {"PYTHONPATH": root},
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.py"], "there is no file nothing.py"),
        (["steps.py", ("@zerojax.checked", "# ")], "steps.py marks no step"),
        (["steps.py", ("cpu:4", "cpu:16")], "cpu:16: jax was started with 8 CPU devices"),
        (["steps.py", ("cpu:4", "cpu")], "name the number of virtual devices, as in cpu:8"),
        (["steps.py", ("cpu:4", "h1000:1x8")], "'h1000:1x8' is not a topology"),
        (["steps.py", (MARK, f"{MARK}    return 4\n")], "gives a int; return jax.jit(step).lower("),
        (["steps.py", (MARK, f"{MARK}    devices.at\n")], "steps.py:22: AttributeError"),
        (["steps.py", (MARK, f"{MARK}    jax.ShapeDtypeStruct((1,), 0.5)\n")], " (at jax/_src/"),
        (["steps.py", (MARK, f"{MARK}    raise SystemExit(0)\n")], "steps.py:22: SystemExit: 0"),
        (["steps.py", (MARK, f"raise SystemExit\n{MARK}")], "SystemExit"),
        (
            ["steps.py", ("audited", "plain")],
            "'plain' is marked twice: give each step a name of its own",
        ),
        (
            ["steps.py", ("    return step, ", OTHER)],
            "audit it with the layout that",
        ),
        (["steps.py", ("devices), (", "devices[:1]), (")], "for 1 cpu device(s), not for the 8 of"),
    ],
)
def test_a_mistake_is_told_in_one_line(steps, capsys, arguments, told):
    file, *changes = arguments
    for old, new in changes:
        steps.write_text(STEPS.replace(old, new))
    assert main(["check", file]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_a_step_that_the_compiler_refuses_is_told(steps, capsys):
    call = "jax.ffi.ffi_call('nobody', jax.ShapeDtypeStruct((), 'float32'))()"
    steps.write_text(STEPS.replace("jnp.mean((x @ w) ** 2))(w)", f"x[0] @ w[0])(w) + {call}"))
    assert main(["check", "steps.py"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("zerojax: plain @ cpu:8: the compiler failed: NOT_FOUND: ")
    assert err.count("\n") == 1


def test_targets_of_several_marks_add_up(steps):
    steps.write_text(STEPS.replace(MARK, f'@zerojax.checked("cpu:4")\n{MARK}'.replace("4", "2", 1)))
    assert [one.name for one in find_steps(steps)] == [
        *("plain @ cpu:8", "audited @ cpu:2", "audited @ cpu:4")
    ]


def test_a_name_that_stdout_can_not_write_is_told_in_escapes(steps):
    steps.write_text(STEPS.replace("plain", "größe"))
    done = subprocess.run(
        [*COMMAND, "check", "steps.py", "--accept"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe @ cpu:8: peak" in done.stdout


@pytest.mark.parametrize("held", [b"\0\1\2", b"\xff\xfe def", "# ü cpu:4\nx = é".encode("latin-1")])
def test_what_is_no_text_is_told_by_name(steps, capsys, held):
    steps.write_bytes(held)
    assert main(["check", "steps.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("zerojax: ")
    assert "steps.py" in err
    assert err.count("\n") == 1


def test_a_lock_file_that_is_nested_without_end_is_told(steps, capsys):
    (steps.parent / "zerojax.lock").write_text("[" * 100_000)
    assert main(["check", "steps.py"]) == 2
    assert "is no lock file that can be read" in capsys.readouterr().err


def test_another_file_in_the_place_of_the_lock_is_told(steps, capsys):
    lock = steps.parent / "zerojax.lock"
    lock.write_text("{}")
    assert main(["check", "steps.py"]) == 2
    assert "is no lock file that can be read" in capsys.readouterr().err
    assert main(["check", "steps.py", "--accept"]) == 0  # as the message says
    lock.write_text(f"<<<<<<< HEAD\n{lock.read_text()}")
    assert main(["check", "steps.py", "--accept"]) == 0
    assert main(["check", "steps.py"]) == 0


def test_a_file_may_have_the_name_of_a_library(steps):
    steps.rename(steps.with_name("jax.py"))
    assert main(["check", "jax.py", "--accept"]) == 0
    assert sys.modules["jax"] is jax


def test_a_step_that_is_no_longer_marked_is_told(steps, capsys):
    assert main(["check", "steps.py", "--accept"]) == 0
    steps.write_text(STEPS.replace('@zerojax.checked("cpu:4")', ""))
    assert main(["check", "steps.py"]) == 1
    assert "audited @ cpu:4 is in the lock file, and steps.py does not" in capsys.readouterr().err
    assert main(["check", "steps.py", "--accept"]) == 0
    assert main(["check", "steps.py"]) == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("leaves", "*", "bytes"), "many"),
        (("leaves", "*", "settled"), "no"),
        (("moved", "*", "bytes"), float("inf")),
        (("moved", "*", "runs"), None),
        (("totals", "peak bytes"), "x"),
        (("totals",), []),
    ],
)
def test_a_lock_file_with_values_of_other_types_is_told(steps, capsys, path, value):
    assert main(["check", "steps.py", "--accept"]) == 0
    lock = steps.parent / "zerojax.lock"
    held = json.loads(lock.read_text())
    node = held["steps"]["plain @ cpu:8"]
    for key in path[:-1]:
        node = next(iter(node.values())) if key == "*" else node[key]
    node[path[-1]] = value
    lock.write_text(json.dumps(held))
    capsys.readouterr()
    assert main(["check", "steps.py"]) == 2
    err = capsys.readouterr().err
    assert "is no lock file that can be read" in err
    assert err.count("\n") == 1
