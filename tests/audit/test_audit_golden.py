"""The audit on programs of hardware that you don't have: text that `scripts/golden` compiled.

A `Program` is plain data, so a kept text and a few facts are audited as a compiled step is. What
the programs are, and their sizes, is written in scripts/golden.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import zerojax
from tests.audit.audit_programs import kinds
from tests.hlo.programs import FILES, MLP, SCAN, text_of
from zerojax.audit import Argument, Program, audit

DIM, HIDDEN, LAYERS, MICROBATCHES, TOKENS = 1024, 4096, 6, 3, 16384  # of scripts/golden
PAIR = {"down": (HIDDEN, DIM), "up": (DIM, HIDDEN)}
AXES = {"v5p-3d": {"x": 2, "y": 2, "z": 2}, "v5p-whole": {"data": 64}, "v5e-wide": {"data": 16}}
PLATFORMS = {"v": "tpu", "h": "gpu", "c": "cpu"}
ALL_REDUCED = ("v5p", "v5p-whole", "v5e-wide")  # of the scans: libtpu makes no reduce-scatter there


@dataclasses.dataclass(frozen=True)
class Chip:
    """Stand in for a device that you don't have."""

    id: int
    platform: str
    process_index: int = 0
    device_kind: str = "chip"


def target_of(name):
    return name.rsplit(".", 1)[1]


def mesh_of(name):
    axes = AXES.get(target_of(name), {"data": 8})
    platform = PLATFORMS[target_of(name)[0]]
    chips = [Chip(i, platform) for i in range(math.prod(axes.values()))]
    return Mesh(np.array(chips).reshape(tuple(axes.values())), tuple(axes))


def layout_of(name, stage=None):
    mesh = mesh_of(name)
    stacked = "/scan." in name
    shapes = {
        k: jax.ShapeDtypeStruct((LAYERS,) * stacked + s, jnp.bfloat16) for k, s in PAIR.items()
    }
    return zerojax.make_layout(
        shapes, mesh, stage=stage if stage is not None else 3 if stacked else 2,
        axis=mesh.axis_names, rules=(zerojax.Rule(path=".", stacked=1),) if stacked else (),
    )  # fmt: skip


def leaf(path, shape, dtype, dim, parts, number):
    """Hold the facts of an argument that is cut along a dim, or whole."""
    shard = tuple(size // parts if at == dim else size for at, size in enumerate(shape))
    item = 2 if dtype == "bfloat16" else 4
    return Argument(
        path=path, shape=shape, dtype=dtype, shard_shape=shard, number=number, donated=True,
        shard_bytes=math.prod(shard) * item, spec="", placement=-1 if dim is None else dim,
    )  # fmt: skip


def program_of(name):
    layout = layout_of(name)
    n = layout.num_shards
    if "/mlp." in name:
        held = [
            leaf(f"{at}/{key}", shape, dtype, dim, n, 2 * at + i)
            for at, (dtype, dim) in enumerate((("bfloat16", None), ("float32", 0)))
            for i, (key, shape) in enumerate(PAIR.items())
        ]
        batch = leaf("2", (TOKENS, DIM), "bfloat16", 0, n, 4)
    else:
        held = [
            leaf(f"0/{key}", (LAYERS, *shape), "bfloat16", 1, n, i)
            for i, (key, shape) in enumerate(PAIR.items())
        ]
        batch = leaf("1", (MICROBATCHES, TOKENS, DIM), "bfloat16", 1, n, 2)
    held = [dataclasses.replace(one, placement=max(one.placement, 0)) for one in held]
    return Program(
        text=text_of(name),
        platform=layout.platform,
        device_ids=tuple(range(n)),
        statistics={},
        inputs=(*held, batch),
        outputs=tuple(dataclasses.replace(one, number=None) for one in held),
    )


def report_of(name, **changes):
    count = MICROBATCHES if "/scan." in name else 1
    program = dataclasses.replace(program_of(name), **changes)
    return audit(program, layout_of(name), zerojax.Recipe(accumulate=count))


@pytest.mark.parametrize("name", MLP)
def test_stage_2_is_clean_on_every_backend(name):
    """Permutes that a matmul overlaps count as the ring that they are."""
    report = report_of(name)
    assert report.problems == ()
    assert report.judged_volume == report.theory_volume == 2 * 7 / 8


@pytest.mark.parametrize("name", [n for n in SCAN if target_of(n) not in ALL_REDUCED])
def test_stage_3_over_microbatches_is_clean_where_the_backend_scatters(name):
    report = report_of(name)
    assert report.problems == ()
    assert report.judged_volume == report.theory_volume == MICROBATCHES * 3 * 7 / 8


@pytest.mark.parametrize("name", [n for n in SCAN if target_of(n) in ALL_REDUCED])
def test_an_all_reduce_in_the_place_of_a_scatter_is_caught_on_a_tpu(name):
    report = report_of(name)
    assert kinds(report) == {"reduce-scatter", "volume"}
    assert all("one mesh axis per torus dim" in problem.remedy for problem in report.problems)
    factor = 2.0 if target_of(name) == "v5p-whole" else 4 / 3  # gathers too, or reductions only
    assert report.judged_volume == pytest.approx(factor * report.theory_volume)


def test_between_slices_a_gradient_that_is_gathered_to_be_cut_again_is_caught():
    """libtpu reduces over two slices in three steps, whose last gathers what is cut again."""
    for name in (n for n in FILES if n.endswith("v5e-slices")):
        report = report_of(name)
        assert kinds(report) == {"volume"}
        (problem,) = report.problems
        assert "all-gather bf16[4096, 1024] along data[4/8]" in problem.where
        assert {s for move in report.moves for s in move.spans} == {
            "data",
            "data[4/8]",
            "data[2/8]",
        }


@pytest.mark.parametrize("name", [n for n in SCAN if target_of(n) in ("v6e", "h100")])
def test_fp32_gathers_of_bf16_parameters_are_caught(name):
    text = program_of(name).text
    program = dataclasses.replace(program_of(name), text=text.replace("bf16[", "f32["))

    def told(**dtypes):
        recipe = zerojax.Recipe(accumulate=MICROBATCHES, precision=zerojax.Precision(**dtypes))
        return audit(program, layout_of(name), recipe)

    wide = told()
    (problem,) = wide.problems
    assert problem.kind == "dtype"
    assert "f32 moved where 16 bits would do" in problem.seen
    narrow, reduced = told(params=jnp.bfloat16).problems
    assert "gathers of 16-bit" in str(narrow)
    assert "the precision says" in str(reduced)
    assert len(told(params=jnp.bfloat16, reduce=jnp.float32).problems) == 1


def test_one_microbatch_less_in_theory_is_volume_above_it():
    for name in (n for n in SCAN if target_of(n) in ("v6e", "h100")):
        report = audit(
            program_of(name), layout_of(name), zerojax.Recipe(accumulate=MICROBATCHES - 1)
        )
        assert kinds(report) == {"volume"}
        assert any("Recipe(accumulate=3, reduce='each')" in note for note in report.notes)
        assert "1.50 times the formula" in report.problems[0].seen


def test_microbatches_that_the_program_does_not_have_are_told():
    for name in (n for n in SCAN if target_of(n) in ("v6e", "h100")):
        report = audit(program_of(name), layout_of(name), zerojax.Recipe(accumulate=8))
        assert report.problems == ()
        assert any("no collective stands in a loop of 8 turns" in note for note in report.notes)
