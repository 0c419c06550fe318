"""What a TPU's compiler adds to scatters, and which small or tied tensors raise no alarm.

The programs are a few lines of text: one weight, its gradient scattered and its update gathered.
"""

from __future__ import annotations

import dataclasses
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console

import zerojax
from zerojax.audit import Argument, Program, audit

ROWS, COLS, BIAS, N = 1600, 640, 2048, 8
GROUPS = "{{" + ",".join(map(str, range(N))) + "}}"
PAIRS = "{" + ",".join(f"{{{i},{i + 1}}}" for i in range(N - 1)) + "}"
MIXED = zerojax.Precision(params=jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Chip:
    """Stand in for a device that you don't have."""

    id: int
    platform: str = "tpu"
    process_index: int = 0
    device_kind: str = "chip"


def layout_of(rows=ROWS):
    mesh = Mesh(np.array([Chip(i) for i in range(N)]), ("data",))
    shapes = {
        "bias": jax.ShapeDtypeStruct((BIAS,), jnp.bfloat16),
        "w": jax.ShapeDtypeStruct((rows, COLS), jnp.bfloat16),
    }
    return zerojax.make_layout(shapes, mesh, stage=2, min_size=1024)


def program_of(rows=ROWS, *, padded=None, cols=COLS, back=0, dtype="bf16", bias="f32", times=1):
    """Write a step: `padded` rows of `cols` are scattered, `back` rows come by a permute."""
    padded = padded or rows
    part = padded // N
    scatters = "\n".join(
        f"  %scatter.{i} = {dtype}[{part},{cols}] fusion(%g), kind=kCustom, "
        f"calls=%all-reduce-scatter.{i}"
        for i in range(times)
    )
    computations = "\n".join(
        f"""%all-reduce-scatter.{i} (x.{i}: {dtype}[{padded},{cols}]) -> {dtype}[{part},{cols}] {{
  %x.{i} = {dtype}[{padded},{cols}] parameter(0)
  %all-reduce.{i} = {dtype}[{padded},{cols}] all-reduce(%x.{i}), replica_groups={GROUPS}, to_apply=%add
  %zero.{i} = s32[] constant(0)
  ROOT %cut.{i} = {dtype}[{part},{cols}] dynamic-slice(%all-reduce.{i}, %zero.{i}, %zero.{i}), dynamic_slice_sizes={{{part},{cols}}}
}}
"""  # noqa: E501
        for i in range(times)
    )
    permute = f"""  %rest = {dtype}[{back},{COLS}] slice(%scatter.0), slice={{[0:{back}], [0:{COLS}]}}
  %moved = {dtype}[{back},{COLS}] collective-permute(%rest), source_target_pairs={PAIRS}
"""  # noqa: E501
    text = f"""HloModule step, input_output_alias={{ {{0}}: (0, {{}}, may-alias), {{1}}: (1, {{}}, may-alias) }}, num_partitions={N}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

{computations}
ENTRY %main (p0: bf16[{BIAS}], p1: bf16[{rows},{COLS}]) -> (bf16[{BIAS}], bf16[{rows},{COLS}]) {{
  %p0 = bf16[{BIAS}] parameter(0)
  %p1 = bf16[{rows},{COLS}] parameter(1)
  %b = {bias}[{BIAS}] convert(%p0)
  %summed = {bias}[{BIAS}] all-reduce(%b), replica_groups={GROUPS}, to_apply=%add
  %new.0 = bf16[{BIAS}] convert(%summed)
  %g = {dtype}[{padded},{COLS}] pad(%p1), padding=0_0x0_0
{scatters}
{permute if back else ""}  %shard = bf16[{rows // N},{COLS}] slice(%scatter.0), slice={{[0:{rows // N}], [0:{COLS}]}}
  %new.1 = bf16[{rows},{COLS}] all-gather(%shard), replica_groups={GROUPS}, dimensions={{0}}
  ROOT %out = (bf16[{BIAS}], bf16[{rows},{COLS}]) tuple(%new.0, %new.1)
}}
"""  # noqa: E501 - as the compiler writes it
    shapes = {"bias": (BIAS,), "w": (rows, COLS)}
    held = [
        Argument(
            path=f"0/{name}", shape=shape, dtype="bfloat16", shard_shape=shape, spec="",
            shard_bytes=2 * math.prod(shape), placement=0, number=number, donated=True,
        )
        for number, (name, shape) in enumerate(shapes.items())
    ]  # fmt: skip
    return Program(
        text=text, platform="tpu", device_ids=tuple(range(N)), statistics={},
        inputs=tuple(held), outputs=tuple(dataclasses.replace(one, number=None) for one in held),
    )  # fmt: skip


def report_of(rows=ROWS, recipe=None, **options):
    return audit(program_of(rows, **options), layout_of(rows), recipe)


def kinds(report):
    return [problem.kind for problem in report.problems]


def elements(rows):
    return rows * COLS * (N - 1) / N


PSI = ROWS * COLS + BIAS


def test_without_padding_the_volume_is_theorys():
    report = report_of()
    assert report.problems == ()
    assert report.padding_volume == 0
    assert report.volume == pytest.approx(report.theory_volume)


@pytest.mark.parametrize(("padded", "back"), [(1728, 112), (1792, 168), (1728, 0)])
def test_padding_of_a_scatter_is_told_and_not_judged(padded, back):
    """1600 rows become 8 x 216, and shards lie up to 7 x 16 rows from their place."""
    report = report_of(padded=padded, back=back)
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(report.theory_volume)
    extra = elements(padded - ROWS) + back * COLS
    assert report.padding_volume == pytest.approx(extra / PSI)
    assert report.volume == pytest.approx(report.theory_volume + extra / PSI)
    assert "of which padding" in str(report)


@pytest.mark.parametrize("cols", [COLS, COLS + 16])
@pytest.mark.parametrize(("rows", "padded"), [(20, 24), (5, 8), (100, 128)])
def test_shards_that_are_rounded_up_to_tiles_are_padded(rows, padded, cols):
    """Of 160 rows 8 devices have 20 each, which become 24, with no permute in sight."""
    report = report_of(rows * N, padded=padded * N, cols=cols)
    assert {*kinds(report)} <= {"volume"}  # too much padding, in so small a program
    assert report.judged_volume == pytest.approx(report.theory_volume)


def test_padding_of_half_a_tensor_and_its_permute_are_too_much():
    """400 rows over 8 devices become 8 x 64: known by the permute of 7 x 14 rows."""
    report = report_of(400, padded=512, back=98)
    (problem,) = report.problems
    assert problem.kind == "volume"
    assert "pads what it moves" in problem.seen
    assert "probably w" in problem.where
    assert "multiples of 1024" in problem.remedy


def test_a_scatter_that_is_longer_by_more_than_tiles_is_no_padding():
    report = report_of(400, padded=800)
    assert report.padding_volume == 0
    assert set(kinds(report)) >= {"volume"}


def test_a_permute_without_a_padded_scatter_is_caught():
    report = report_of(back=112)
    assert kinds(report) == ["shuffle"]


def test_a_second_reduction_of_a_leaf_is_named():
    report = report_of(times=2)
    (problem,) = report.problems
    assert problem.kind == "volume"
    assert f"bf16[{ROWS}, {COLS}]" in problem.where
    assert "probably w" in problem.where
    assert "all-reduce f32" not in problem.where  # the bias moves a little more too


@pytest.mark.parametrize("width", [100, 160])
def test_no_table_is_wrapped(width):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(report_of(padded=1728, back=112))
    assert "all-reduce-scatter fusion  data " in out.getvalue()
    assert "…" not in out.getvalue()


# ------------------------------------------------------------------ dtypes


def test_small_tensors_reduced_in_fp32_are_no_problem():
    assert report_of(recipe=zerojax.Recipe(precision=MIXED)).problems == ()


def test_large_ones_are_a_problem():
    assert kinds(report_of(recipe=zerojax.Recipe(precision=MIXED), dtype="f32")) == ["dtype"]
    asked = dataclasses.replace(MIXED, reduce=jnp.float32)
    assert report_of(recipe=zerojax.Recipe(precision=asked), dtype="f32").problems == ()
