"""Compiler options: what each backend is asked for, what a user's own do, and what is unknown."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.collectives import OPTIONS, _options, compiler_options
from zerojax.hardware import HARDWARE

GPU = [
    f"xla_gpu_{op}_combine_threshold_bytes" for op in ("all_gather", "reduce_scatter", "all_reduce")
]
#: From which stage on a kind of tensor is partitioned.
STAGES = {"optimizer": 1, "gradient": 2, "parameter": 3}
TPU = [f"xla_{op}_combiner_threshold_in_bytes" for op in ("jf_crs", "tpu_ars")]


@pytest.fixture
def everything_known(monkeypatch):
    """No environment, and a compiler that refuses nothing."""
    monkeypatch.setattr(_options, "_known", lambda mesh, options: options)
    for name in _options._VARIABLES:
        monkeypatch.delenv(name, raising=False)


def layout_on(platform, stage):
    return SimpleNamespace(
        platform=platform,
        mesh=None,
        hardware=HARDWARE["v5p"] if platform == "tpu" else None,
        kinds={kind for kind, first in STAGES.items() if stage >= first},
    )


def options_of(platform, stage, chip="v5p"):
    rows = [
        row
        for row in OPTIONS.values()
        if row["platform"] == platform and chip in row.get("chips", [chip])
        if HARDWARE[chip].sparse_cores or not row.get("sparse_cores")
    ]
    kinds = {None, *(kind for kind, first in STAGES.items() if stage >= first)}
    kinds |= set() if stage else {"nothing"}
    kept = [row["options"] for row in rows if row.get("partitions") in kinds]
    return dict(pair for options in kept for pair in options.items())


@pytest.mark.parametrize(
    ("platform", "stage", "bucket_bytes", "buckets"),
    [
        ("gpu", 0, None, ()),
        ("gpu", 2, None, ()),
        ("gpu", 3, None, ()),
        ("gpu", 1, 5000, GPU),
        ("gpu", 3, 5000, GPU),
        ("tpu", 0, None, ()),
        ("tpu", 3, None, ()),
        ("tpu", 2, 5000, TPU),
        ("cpu", 3, 5000, ()),
    ],
)
@pytest.mark.usefixtures("everything_known")
def test_each_backend_is_asked_in_its_own_words(platform, stage, bucket_bytes, buckets):
    wanted = options_of(platform, stage) | dict.fromkeys(buckets, str(bucket_bytes))
    assert compiler_options(layout_on(platform, stage), bucket_bytes) == wanted


def test_every_set_says_for_whom_whence_and_what_it_changes():
    asked = {"platform", "source", "seen", "changes", "options"}
    for row in OPTIONS.values():
        assert asked <= set(row) <= asked | {"chips", "partitions", "sparse_cores"}
        assert set(row.get("chips", ())) <= set(HARDWARE)
        assert all(isinstance(value, str | bool) for value in row["options"].values())


@pytest.mark.parametrize("variable", _options._VARIABLES)
@pytest.mark.usefixtures("everything_known")
def test_what_the_user_set_holds_but_not_over_the_recipe(monkeypatch, variable):
    monkeypatch.setenv(variable, f"--xla_other=1 --{GPU[0]}=7")
    layout = layout_on("gpu", 3)
    assert GPU[0] not in compiler_options(layout)
    assert compiler_options(layout)[GPU[1]] == OPTIONS["gpu_reductions"]["options"][GPU[1]]
    assert compiler_options(layout, 5000)[GPU[0]] == "5000"


def test_an_unknown_option_is_left_out_with_a_warning(mesh8):
    options = (("xla_no_such_option", "true"), ("xla_cpu_enable_fast_math", True))
    with pytest.warns(UserWarning, match="does not take xla_no_such_option"):
        assert _options._known(mesh8, options) == options[1:]


def test_an_option_that_a_compiler_refuses_is_left_out_with_a_warning(mesh8, monkeypatch):
    """As libtpu refuses merged gathers on v4."""
    lower = jax.stages.Lowered.compile

    def compiled(self, compiler_options):
        if "xla_cpu_enable_fast_math" in compiler_options:
            told = "FAILED_PRECONDITION: Please disable it with xla_cpu_enable_fast_math=false"
            raise jax.errors.JaxRuntimeError(told)
        return lower(self, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    options = (("xla_cpu_enable_fast_math", True), ("xla_cpu_enable_fast_min_max", False))
    with pytest.warns(UserWarning, match="does not take xla_cpu_enable_fast_math"):
        assert _options._known(mesh8, options) == options[1:]


@pytest.mark.parametrize(
    ("target", "chip"),
    [
        pytest.param("h100:1x8", "h100", marks=pytest.mark.aot("cuda")),
        pytest.param("v4:2x2x2", "v4", marks=pytest.mark.aot("libtpu")),
        pytest.param("v5e:2x4", "v5e", marks=pytest.mark.aot("libtpu")),
        pytest.param("v5p:2x2x2", "v5p", marks=pytest.mark.aot("libtpu")),
        pytest.param("v6e:2x4", "v6e", marks=pytest.mark.aot("libtpu")),
        pytest.param("tpu7x:2x2x1", "v7", marks=pytest.mark.aot("libtpu")),
    ],
)
def test_compilers_take_every_option(target, chip):
    mesh = zerojax.topology_mesh(target, {"data": 8})
    shapes = {"kernel": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)}
    layout = zerojax.make_layout(shapes, mesh, stage=3)
    assert compiler_options(layout) == options_of(layout.platform, 3, chip)
