"""Programs are compiled once, kept whole or not at all, and told apart by all that decides them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import aot
from zerojax.aot import DoesNotFit, compile_step
from zerojax.aot import _compile as compile_module
from zerojax.aot._topology import TPU_CHIPS
from zerojax.audit import Program
from zerojax.hardware import find_hardware

GIB = 2**30
REFUSED_AT_ONCE = (
    "Ran out of memory on HBM, the total memory required for HLO temporaries (124.22G) exceeds "
    "available HBM (15.75G)."
)
REFUSED_AFTER_ALL = (
    "Ran out of memory in memory space hbm. Used 33.00G of 31.25G hbm. Exceeded hbm capacity by "
    "1.75G."
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch):
    """Count the programs that are really compiled."""
    calls = []
    compile_ = jax.stages.Lowered.compile

    def watched(self, *args, **kwargs):
        calls.append(self)
        return compile_(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", watched)
    return calls


def lower(mesh, name="x", size=64, function=jnp.tanh, **options):
    sharding = NamedSharding(mesh, P("data"))
    arguments = {name: jax.ShapeDtypeStruct((size, 8), jnp.float32, sharding=sharding)}
    jitted = jax.jit(
        lambda given: [function(x) for x in given.values()],
        out_shardings=NamedSharding(mesh, P()), **options,
    )  # fmt: skip
    return jitted.lower(arguments)


def program(text="HloModule empty"):
    return Program(
        text=text, platform="cpu", device_ids=tuple(range(8)), statistics={},
        inputs=(), outputs=(),
    )  # fmt: skip


# ------------------------------------------------------------------ compiling


def test_a_step_is_compiled_once_and_its_facts_are_the_programs(mesh8, folder, compiled):
    takes = (compile_step, compile_step, lambda step: Program.of(step.compile()))
    first, second, own = (take(lower(mesh8)) for take in takes)
    assert len(compiled) == 2, "the second came from the cache"
    assert len(list(folder.iterdir())) == 1
    assert first == second
    # The texts differ in the lines of this file that called the compiler, and in nothing else.
    assert dataclasses.replace(first, text="") == dataclasses.replace(own, text="")
    assert first.text.count("\n") > 10


def test_all_that_decides_a_program_is_in_its_key(mesh8, monkeypatch):
    turned = Mesh(mesh8.devices[::-1], ("data",), axis_types=mesh8.axis_types)
    steps = [
        lower(mesh8),
        lower(mesh8, size=128),
        lower(mesh8, function=jnp.sin),
        lower(mesh8, name="y"),  # the same text; the audit tells leaves by their names
        lower(turned),
        lower(mesh8, keep_unused=True, function=lambda x: x + 0),
        lower(mesh8, compiler_options={"xla_cpu_enable_fast_math": True}),
    ]
    keys = [compile_module._key(step) for step in steps]
    assert keys[0] == compile_module._key(lower(mesh8))
    for name, value in (("XLA_FLAGS", "--xla_x"), ("JAX_ENABLE_X64", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            keys.append(compile_module._key(steps[0]))
    with monkeypatch.context() as patch:
        patch.setattr(compile_module, "version_of", lambda package: "0")
        keys.append(compile_module._key(steps[0]))
    with monkeypatch.context() as patch:
        patch.setattr(compile_module, "_SOURCES", ("aot/_plugin.py",))
        keys.append(compile_module._key(steps[0]))
    assert len(set(keys)) == len(keys), keys
    with monkeypatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")  # decides no program
        assert compile_module._key(steps[0]) == keys[0]


def test_where_a_function_lies_in_memory_decides_nothing(folder, compiled):
    """Modules of flax and equinox hold functions, which another run writes with other addresses."""

    def lowered():
        apply = jax.tree_util.Partial(lambda x: x + 1)
        return jax.jit(lambda f, x: f(x)).lower(apply, jnp.ones(8))

    first, second = lowered(), lowered()
    assert str(first.args_info) != str(second.args_info)
    assert compile_step(first) == compile_step(second)
    assert len(compiled) == 1


def test_a_jax_that_does_not_tell_its_options_is_not_cached(mesh8, folder, compiled, monkeypatch):
    monkeypatch.setattr(compile_module, "_DECIDING", ("_options_of_another_jax", "_device_list"))
    compile_step(lower(mesh8))
    assert len(compiled) == 1
    assert not folder.exists()


# ------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (REFUSED_AT_ONCE, 124.22 * GIB, 15.75 * GIB),
        (REFUSED_AFTER_ALL, 33 * GIB, 31.25 * GIB),
        (REFUSED_AT_ONCE.replace("15.75G", "512.00M"), 124.22 * GIB, 512 * 2**20),
    ],
)
def test_a_refusal_says_what_is_needed_and_what_there_is(
    mesh8, folder, monkeypatch, message, needed, available
):
    def refuse(self):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    for _ in range(2):  # afterwards from the cache
        with pytest.raises(DoesNotFit, match=r"does not fit: it needs .* too much") as caught:
            compile_step(lower(mesh8))
        shortage = caught.value
        assert (shortage.needed, shortage.available) == (int(needed), int(available))
        assert message.split()[0] in shortage.message


def test_a_refusal_without_figures_keeps_the_compilers_words(mesh8, folder, monkeypatch):
    def refuse(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of\nsomething")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(DoesNotFit, match="out of something"):
        compile_step(lower(mesh8))


def test_another_error_of_the_compiler_is_raised_and_not_kept(mesh8, folder, monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_step(lower(mesh8))
    assert not folder.exists()


@pytest.mark.aot("libtpu")
@pytest.mark.usefixtures("folder")
def test_libtpu_refuses_with_the_memory_that_the_chips_say():
    for chip, shape, devices in (("v5e", "2x4", 8), ("v5p", "2x2x1", 4), ("v6e", "2x4", 8)):
        mesh = aot.topology_mesh(f"{chip}:{shape}", {"data": devices})
        with pytest.raises(DoesNotFit) as caught:
            compile_step(lower(mesh, size=devices * 2**33))
        # to 10 MiB: 95.74 GiB of a v5p by libtpu 0.0.42, 95.73 by 0.0.50
        assert caught.value.available == pytest.approx(find_hardware(chip).memory, rel=5e-4)
        assert caught.value.needed > 2**38


def test_every_chip_has_its_memory():
    printed = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}  # GiB of a device
    for chip in TPU_CHIPS:
        assert 0.95 * printed[chip] * GIB < find_hardware(chip).memory < 1.01 * printed[chip] * GIB


# ------------------------------------------------------------------ the folder


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ZEROJAX_CACHE": "/kept/here", "XDG_CACHE_HOME": "/xdg"}, "/kept/here"),
        ({"ZEROJAX_CACHE": "~/here"}, "/home/someone/here"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/zerojax/programs"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/zerojax/programs"),
        ({}, "/home/someone/.cache/zerojax/programs"),
    ],
)
def test_the_folder_is_the_users_unless_a_variable_says_otherwise(monkeypatch, variables, expected):
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("ZEROJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert compile_module._path("key") == Path(expected) / "key.json.gz"


def test_what_is_kept_comes_back(folder):
    refusal = aot.DoesNotFit(needed=2, available=1, message="no")
    compile_module._keep("program", program())
    compile_module._keep("refusal", refusal)
    assert compile_module._find("program") == program()
    assert compile_module._find("refusal") == refusal
    assert compile_module._find("nothing") is None


def spoil_torn(path):
    path.write_bytes(path.read_bytes()[:-20])


def spoil_empty(path):
    path.write_bytes(b"")


def spoil_other(path):
    path.write_bytes(b"not gzip")


def spoil_middle(path):
    data = path.read_bytes()
    path.write_bytes(data[:30] + b"\xff" * 30 + data[60:])


def spoil_fields(path):
    path.write_bytes(gzip.compress(json.dumps({}).encode()))


def spoil_program(path):
    path.write_bytes(gzip.compress(json.dumps("{}").encode()))


@pytest.mark.parametrize(
    "spoil",
    [spoil_torn, spoil_empty, spoil_middle, spoil_other, spoil_fields, spoil_program],
)
def test_an_entry_that_cannot_be_read_is_told_and_compiled_again(mesh8, folder, compiled, spoil):
    compile_step(lower(mesh8))
    (path,) = folder.iterdir()
    spoil(path)
    with pytest.warns(UserWarning, match="can't be read") as caught:
        compile_step(lower(mesh8))
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert len(compiled) == 2
    compile_step(lower(mesh8))  # mended
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_written_to_is_told_and_no_failure(mesh8, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"can't be kept in .*file/cache: Not a directory"):
        assert compile_step(lower(mesh8)).text


def test_an_entry_appears_whole_or_not_at_all(folder, monkeypatch):
    def interrupt(self, target):
        assert not list(folder.glob("*.json.gz"))
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_module._keep("program", program())
    assert list(folder.iterdir()) == []


def test_a_quiet_cache_warns_of_nothing(mesh8, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            compile_step(lower(mesh8))
