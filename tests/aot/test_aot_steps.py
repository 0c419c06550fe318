"""Steps compiled for TPUs and GPUs that you don't have: clean, and in phases where a torus asks."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests import llama
from zerojax.collectives import OPTIONS
from zerojax.models import gpt

CONFIG = gpt.Config(num_layers=4, width=512, num_heads=4, vocab_size=1024, context=128)
PRECISION = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
TX = optax.adamw(1e-3)


def lowered_step(target, num_devices, stage, config=CONFIG, axes=None, axis="data", **choices):
    mesh = zerojax.topology_mesh(target, axes or {"data": num_devices})
    init, key = functools.partial(gpt.init, config), jax.random.key(0)
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage, axis=axis)
    recipe = zerojax.Recipe(**{"precision": PRECISION, **choices})
    shape = (num_devices * recipe.accumulate, config.context + 1)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch)
    step = zerojax.make_train_step(functools.partial(gpt.loss, config), TX, layout, recipe)
    return step.lower(step.abstract_state(), batch), layout, recipe


def compiled(*args, **choices):
    lowered, layout, recipe = lowered_step(*args, **choices)
    return layout, recipe, lowered.compile()


def audited(*args, **choices):
    layout, recipe, program = compiled(*args, **choices)
    return layout, zerojax.audit(program, layout, recipe)


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(
    ("target", "num_devices", "dims"),
    [
        ("v5p:2x2x2", 8, (("x", "y"), ("z",))),
        ("v6e:4x4", 16, (("x",), ("y",))),
        ("v6e:2x4", 8, ()),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_torus_moves_what_zero_says(target, num_devices, dims, stage):
    layout, report = audited(target, num_devices, stage)
    report.raise_if_problems()
    assert layout.phases.dims == dims
    theory = (3 if stage == 3 else 2) * (num_devices - 1) / num_devices
    # In phases libtpu pads some scatters; done at once they would be all-reduces, 1.5 of theory.
    assert report.volume / theory < (1.2 if dims else 1.05 + 0.05 * (stage == 3))
    assert "reduce-scatter" in {c.op for c in report.collectives}


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("stage", [0, 3])
def test_states_are_not_copied_into_the_order_of_their_gradient(stage):
    """A table whose columns fill tiles better than its rows; one gradient is copied at most."""
    config = dataclasses.replace(CONFIG, num_layers=1, width=192, vocab_size=16024)
    *_, program = compiled("v5p:2x2x2", 8, stage, config)
    rows = 16024 if stage == 0 else 16024 // 8
    copies = re.findall(rf"= f32\[{rows},192\]\S* copy\(", program.as_text())
    assert len(copies) <= 1


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(
    ("target", "num_devices", "shape"),
    [
        ("v5p:2x2x2", 8, (1024, 167 * 128)),  # a prime number of tiles: padded
        ("v5p:4x4x4", 64, (1024, 43 * 128)),  # too large for the whole torus, not for its phases
        ("v5p:4x4x4", 64, (1001, 4096)),  # cut along the minor dim: it was gathered between phases
        ("v6e:4x4", 16, (1001, 1536)),
    ],
)
def test_gradients_of_any_shape_are_scattered(target, num_devices, shape):
    """libtpu scatters equal pieces of a minor dim, and all-reduces what has none."""
    mesh = zerojax.topology_mesh(target, {"data": num_devices})
    shapes = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    layout = zerojax.make_layout(shapes, mesh, stage=2)
    step = zerojax.make_train_step(lambda p, x: jnp.square(x @ p["w"]).mean(), TX, layout)
    rows = (num_devices * 8, shape[0])
    x = jax.ShapeDtypeStruct(rows, jnp.float32, sharding=layout.batch)
    report = zerojax.audit(step.lower(step.abstract_state(), x).compile(), layout)
    report.raise_if_problems()
    assert report.volume < 1.03 * 2 * (1 - 1 / num_devices)


@pytest.mark.aot("libtpu")
def test_a_part_of_a_torus_needs_no_phases():
    """Beside a model axis libtpu leaves gathers and scatters what they are (`scripts/phases`)."""
    axes = {"data": 16, "model": 2}
    layout, report = audited("v5e:4x8", 16, 3, axes=axes)
    report.raise_if_problems()
    assert layout.phases.axes == (("data",),)
    moved = {c.op for c in report.collectives if c.group_size == 16}
    assert {"all-gather", "reduce-scatter"} <= moved
    assert report.volume < 1.05 * 3 * 15 / 16


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(("target", "num_devices"), [("v5e:4x4", 16), ("v4:2x2x2", 8)])
def test_gathers_go_over_a_whole_torus_at_once(target, num_devices):
    """By all links, and beside products; their gradients are reduced in phases."""
    _, report = audited(target, num_devices, 3)
    report.raise_if_problems()
    large = [c for c in report.collectives if c.elements >= 512**2]
    sizes = {op: {c.group_size for c in large if c.op == op} for op in ("all-gather", "all-reduce")}
    assert sizes == {"all-gather": {num_devices}, "all-reduce": set()}
    assert report.schedule.blocking_share < 0.8, "it was all of them"


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(("stage", "scan"), [(0, True), (2, True), (2, False)])
def test_sparse_cores_move_beside_work(stage, scan):
    """By default each collective blocks; what waits for them takes little memory."""
    size = {"num_layers": 6, "width": 1024, "context": 512, "vocab_size": 4096}
    config = dataclasses.replace(CONFIG, scan=scan, **size)
    lowered, layout, recipe = lowered_step("v5p:2x2x2", 8, stage, config)
    names = (
        f"xla_tpu_enable_sparse_core_collective_offload_{op}"
        for op in (("all_gather", "reduce_scatter") if stage else ("all_reduce",))
    )
    beside, blocking = (
        zerojax.audit(lowered.compile(compiler_options=options), layout, recipe)
        for options in ({}, dict.fromkeys(names, "false"))
    )
    beside.raise_if_problems()
    assert beside.schedule.blocking_share < 0.2 < 0.9 < blocking.schedule.blocking_share
    assert beside.schedule.step_seconds < 0.95 * blocking.schedule.step_seconds
    a_layer = 2 * 12 * 1024**2
    assert beside.memory.peak < blocking.memory.peak + a_layer


@pytest.mark.aot("libtpu")
def test_products_on_tpu7x_are_not_cut_into_permutes():
    """By default libtpu has permutes between parts of a product: 2.85 elements a parameter."""
    size = {"num_layers": 2, "width": 1024, "context": 512, "vocab_size": 4096}
    config = dataclasses.replace(CONFIG, **size)
    _, report = audited("tpu7x:2x2x1", 8, 3, config)
    report.raise_if_problems()
    assert report.volume == pytest.approx(3 * 7 / 8, rel=0.05)
    assert report.schedule.blocking_share < 0.1


@pytest.mark.aot("libtpu")
def test_what_a_tpu_sets_aside_is_what_libtpu_plans(tmp_path):
    """Its plan of the memory, which it writes where `xla_dump_to` says, has the figure in words."""
    config = dataclasses.replace(CONFIG, num_layers=2)
    lowered, layout, recipe = lowered_step("v5p:2x2x2", 8, 3, config)
    program = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (report,) = tmp_path.glob("*memory-usage-report.txt")
    (planned,) = re.findall(r"color=0\)\nTotal bytes: (\d+)", report.read_text())
    memory = zerojax.audit(program, layout, recipe).memory
    assert memory.allocated == int(planned) >= memory.peak


@pytest.mark.aot("libtpu")
def test_temporaries_are_packed_by_size():
    """libtpu's own choice, a merge of their times, has holes where memory is left."""
    config = dataclasses.replace(CONFIG, num_layers=2)
    lowered, layout, recipe = lowered_step("v6e:2x4", 8, 3, config)
    (name,) = OPTIONS["tpu_packed"]["options"]
    packed, merged = (
        zerojax.audit(lowered.compile(compiler_options=options), layout, recipe).memory
        for options in ({}, {name: "true"})
    )
    assert packed.peak <= merged.peak
    assert packed.allocated < merged.allocated


@pytest.mark.aot("cuda")
@pytest.mark.parametrize(("stage", "accumulate", "reduce"), [(1, 8, "once"), (2, 2, "each")])
def test_gradients_are_reduced_as_often_as_asked(stage, accumulate, reduce):
    _, report = audited("h100:1x8", 8, stage, accumulate=accumulate, reduce=reduce)
    report.raise_if_problems()
    times = 1 if reduce == "once" else accumulate
    assert report.volume / ((times + 1) * 7 / 8) == pytest.approx(1, rel=0.05)


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("scan", [True, False])
def test_weights_that_are_kept_move_once(scan):
    """2 Psi, as stages 1 and 2; whole weights lie there once, beside their shards."""
    size = {"num_layers": 8, "width": 1024, "context": 512, "vocab_size": 8192}
    config = dataclasses.replace(CONFIG, scan=scan, **size)
    kept = {"reshard_after_forward": False}
    _, report = audited("h100:1x8", 8, 3, config, **kept)
    _, stage_2 = audited("h100:1x8", 8, 2, config)
    report.raise_if_problems()
    assert report.volume == pytest.approx(2 * 7 / 8, rel=0.001)
    assert report.memory.peak < stage_2.memory.peak + 1.1 * report.memory.parameters
    assert report.schedule.exposed_seconds < 0.75 * stage_2.schedule.exposed_seconds


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("prefetch", [0, None])
def test_layers_of_a_list_are_gathered_in_order(prefetch):
    """Left alone, XLA gathers most of the layers first; by default it may be one ahead."""
    config = dataclasses.replace(CONFIG, num_layers=8, scan=False)
    _, report = audited("h100:1x8", 8, 3, config, precision="fp32", prefetch=prefetch)
    assert [one.kind for one in report.problems] == ["peak"] * (prefetch == 0)


@pytest.mark.aot("libtpu")
def test_a_chip_without_sparse_cores_reduces_beside_products():
    """By default each blocks; merged with products they exceed libtpu's limit of vector memory."""
    config = gpt.Config(num_layers=2, width=2048, num_heads=16, vocab_size=1024, context=128)
    _, report = audited("v5e:2x4", 8, 3, config)
    report.raise_if_problems()
    reductions = [x for x in report.schedule.collectives if "reduce-scatter" in x.op]
    beside = [x for x in reductions if not x.is_blocking]
    assert len(beside) >= 7  # of 8 in both layers; the last one's too, or there were 6


@pytest.mark.aot("cuda")
def test_gradients_of_a_list_do_not_wait_whole():
    """Left alone, XLA computes on while the gradients of most layers wait for the links."""
    size = {"num_layers": 8, "width": 1024, "context": 256, "vocab_size": 8192}
    config = dataclasses.replace(CONFIG, scan=False, **size)
    _, report = audited("h100:1x8", 8, 2, config, precision="fp32")
    report.raise_if_problems()


@pytest.mark.aot("cuda")
def test_experts_are_not_turned_around_whole():
    """New parameters are gathered along the third dim of [layers, experts, width, hidden]."""
    config = llama.Config(num_layers=2, width=512, vocab_size=512, context=128, num_experts=8)
    shapes = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))
    layout = zerojax.make_layout(shapes, zerojax.topology_mesh("h100:1x8", {"data": 8}), stage=2)
    recipe = zerojax.Recipe(precision=PRECISION)
    step = zerojax.make_train_step(functools.partial(llama.loss, config), TX, layout, recipe)
    batch = jax.ShapeDtypeStruct((8, config.context + 1), jnp.int32)
    text = step.lower(step.abstract_state(), batch).compile().as_text()
    written = {tuple(map(int, x.split(","))) for x in re.findall(r"= bf16\[([\d,]+)\]", text)}
    stacks = {shapes["layers"][name].shape for name in ("gate", "down")}
    assert stacks <= written
    assert not [x for x in written - stacks if sorted(x) == sorted(min(stacks))]


@pytest.mark.aot("cuda")
def test_shards_alone_cross_the_links_between_nodes():
    """Psi / 8 is reduced across nodes, and Psi / 8 of new parameters is gathered."""
    wide = ("replica", "data")
    axis = {"parameter": "data", "gradient": wide, "optimizer": wide}
    axes = {"replica": 4, "data": 8}
    _, report = audited("h100:4x8", 32, 3, axes=axes, axis=axis)
    report.raise_if_problems()
    far = [one.seen for name, one in report.volume_by_axis.items() if "replica" in name]
    assert sum(far) / (2 / 8 * 3 / 4) == pytest.approx(1, rel=0.1)
    assert report.memory.optimizer == pytest.approx(report.memory.theory["optimizer"], rel=0.01)


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_recurrence_is_gathered_once_a_pass_and_reduced_once(stage):
    """Left to the partitioner, gradients of what all tokens use are reduced at each token."""
    table, wide = (1024, 64), (64, 256)

    def loss_fn(params, tokens):
        def turn(h, x):
            update, new = jnp.split(x @ params["x"] + h @ params["h"], 2, axis=-1)
            h = h + jax.nn.sigmoid(update) @ params["out"].T * jnp.tanh(new @ params["out"].T)
            return h, h

        x = params["table"][tokens.T]
        _, h = jax.lax.scan(turn, jnp.zeros(x.shape[1:]), x)
        return jnp.mean(jax.nn.logsumexp(h @ params["head"], -1))

    shapes = {"table": table, "head": table[::-1], "x": wide, "h": wide, "out": (64, 128)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    layout = zerojax.make_layout(params, mesh, stage=stage)
    step = zerojax.make_train_step(loss_fn, TX, layout)
    report = step.audit(jax.ShapeDtypeStruct((16, 12), jnp.int32))
    report.raise_if_problems()
    # Of the head, used last, one gather serves both passes.
    assert 0.85 * report.theory_volume < report.judged_volume <= 1.02 * report.theory_volume
