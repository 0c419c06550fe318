"""A plan says what a step holds, moves and takes, and where it knows it from."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import zerojax
from tests.planner.plans import (
    PA,
    PA_CPU,
    PSI,
    TOKENS,
    TX,
    WIDTH,
    mix_params,
    nouns,
    plan_mix,
    plan_shapes,
    shape,
)
from zerojax import RematPolicy
from zerojax.hardware import HARDWARE
from zerojax.models import gpt
from zerojax.planner import plan, theory_of

CONFIG = gpt.Config(num_layers=4, width=128, num_heads=4, vocab_size=512, context=64)


@functools.cache
def model(**options):
    config = dataclasses.replace(CONFIG, **options)
    return jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0)), (
        functools.partial(gpt.loss, config)
    )


def plan_gpt(num_examples, *, config=(), **options):
    params, loss = model(**dict(config))
    given = {
        "stage": 2, "num_devices": 8, "hardware": "h100", "precision": "bf16",
        "loss_fn": loss, "batch": shape(num_examples, CONFIG.context + 1, dtype=jnp.int32),
    } | options  # fmt: skip
    return plan(params, TX, **nouns(**given))


# ------------------------------------------------------------------ where it knows it from


def test_a_traced_loss_is_named_with_examples():
    found = plan_mix()
    assert (found.count, found.remat) == (2, None)
    assert "remat='dots'" in plan_mix(remat="dots").title


def test_nothing_is_said_to_be_nothing():
    found = plan_shapes()
    assert "activations and products are not counted: give loss_fn and batch" in str(found)
    assert found.flops == found.count == 0
    # From stage 1 on a gradient is scattered as soon as it is there.
    whole_gradients = 2 * PSI
    assert found.bytes.total == found.bytes.states - whole_gradients * 7 / 8


@pytest.mark.parametrize("examples", [1, 4])
def test_products_are_those_of_megatron_s_formula(examples):
    """Between the two there are biases and norms alone (arXiv 2104.04473, appendix)."""
    layers, width, context = CONFIG.num_layers, CONFIG.width, CONFIG.context
    tokens = examples * context
    none, full = (
        plan_gpt(8 * examples, remat=remat, config=(("remat", False),))
        for remat in ("none", "full")
    )
    weights, scores = 24 * layers * width**2, 4 * layers * width * context
    head = 2 * CONFIG.vocab_size * width
    assert none.flops == pytest.approx(3 * (weights + scores + head) * tokens, rel=0.02)
    assert none.flops == pytest.approx((6 * none.num_params + 3 * scores) * tokens, rel=0.02)
    # A whole layer is computed again, but for its last product, whose result no gradient wants.
    last = 2 * 4 * width**2 * layers
    assert full.flops - none.flops == pytest.approx((weights + scores - last) * tokens, rel=0.02)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("hardware", ["h100", "v5p"])
def test_states_are_the_paper_s_where_everything_divides(stage, hardware):
    found = plan_shapes(stage=stage, num_devices=64, hardware=hardware)
    theory = zerojax.model_state_bytes(PSI, stage=stage, num_shards=64)
    assert found.bytes.states - theory == pytest.approx(4, abs=1), "Adam's count"
    assert found.bytes.masters == 4 * PSI / (64 if stage else 1)
    gradients = 2 * PSI / (64 if stage else 1)  # scattered as soon as they are there
    least = found.bytes.parameters + gradients + found.bytes.optimizer
    assert found.bytes.total == least
    assert found.bytes.activations == max(0, found.bytes.total - found.bytes.states)


def test_leaves_that_do_not_divide_are_padded_or_whole():
    params = {"odd": shape(1009, 3), "small": shape(5)}
    found = plan_shapes(params, stage=3, precision="fp32")
    assert found.bytes.parameters == 4 * (1016 * 3 // 8 + 5)
    assert found.bytes.optimizer == 2 * found.bytes.parameters + 4


def test_hybrid_shards_hold_what_a_group_of_their_size_would():
    small, hybrid = plan_shapes(num_devices=4), plan_shapes(num_devices=16, num_shards=4)
    assert hybrid.bytes == small.bytes
    shard = PSI / 4  # each device's sum over its group is summed over four groups
    moved = {
        ("data",): 2 * 3 / 4 * PSI,
        ("replica",): 2 * shard * 3 / 4,
    }
    assert hybrid.volume_by_axes == pytest.approx({k: v / PSI for k, v in moved.items()})
    assert "in each of 4 groups" in str(hybrid)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_wide_optimizers_hold_and_move_what_their_layout_says(stage):
    found = plan_shapes(stage=stage, num_devices=16, num_shards=4, wide_optimizer=True)
    narrow = plan_shapes(stage=stage, num_devices=16, num_shards=4)
    all_ = plan_shapes(stage=stage, num_devices=16)
    assert found.bytes.optimizer == all_.bytes.optimizer
    assert found.bytes.parameters == narrow.bytes.parameters
    assert found.bytes.gradients == (all_ if stage > 1 else narrow).bytes.gradients
    # Between groups a gradient's shard is reduce-scattered and its parameter's gathered: together
    # what the all-reduce of the shard moves.
    between = narrow.volume_by_axes["replica",]
    assert found.volume_by_axes["replica",] == pytest.approx(between)
    assert found.volume_by_axes["data",] == pytest.approx(narrow.volume_by_axes["data",])
    assert "N = 4 in each of 4 groups, optimizer states over all" in found.title


def test_wide_optimizers_need_groups():
    with pytest.raises(ValueError, match="over groups, and num_shards=16 leaves one; give fewer"):
        plan_shapes(num_devices=16, wide_optimizer=True)


def test_a_model_axis_cuts_matrices_and_leaves_vectors():
    found = plan_shapes(num_devices=16, model_axis=2)
    assert found.num_shards == 8
    assert found.bytes.parameters == 2 * (512 * 1024 / 2 + 1024)
    specs = {"w": P(), "b": P()}
    assert plan_shapes(num_devices=16, model_axis=2, specs=specs).bytes.parameters == 2 * PSI


def test_rematerialisation_trades_bytes_for_products():
    none, dots, full = (
        plan_gpt(64, remat=r, config=(("remat", False),)) for r in ("none", "dots", "full")
    )
    assert none.bytes.total > dots.bytes.total > full.bytes.total
    assert none.flops < dots.flops < full.flops
    assert none.bytes.states == full.bytes.states
    assert none.volume == full.volume


def test_an_optimizer_on_the_host_is_there_and_not_here():
    here, there = plan_mix(), plan_mix(offload=True)
    assert there.bytes.optimizer == there.bytes.masters == 0
    assert there.bytes.host == here.bytes.optimizer
    assert here.bytes.total - there.bytes.total == here.bytes.optimizer
    # Two bytes a parameter down and two up, of what a device holds (ZeRO-Offload's 4 Psi / N).
    assert (
        there.time.host
        == there.time.waiting
        == pytest.approx(4 * here.num_params / 8 / HARDWARE["h100"].host_bandwidth)
    )
    # It waits for them, and does not read the states from its own memory.
    assert there.step_time <= here.step_time + there.time.waiting
    assert there.step_time >= there.time.waiting


def test_values_that_a_policy_keeps_are_kept():
    def layer(h, w):
        return h + jnp.sin(checkpoint_name(h @ w, "product")), None

    def loss(params, x):
        return jax.lax.scan(layer, x, params["w"])[0].sum()

    params, x = {"w": shape(50, WIDTH, WIDTH)}, shape(64, TOKENS, WIDTH)
    given = {"num_devices": 8, "hardware": "h100", "stage": 0, "loss_fn": loss, "batch": x}
    full, kept = (
        plan(params, TX, **nouns(**given, remat=RematPolicy(keep=keep)))
        for keep in ((), ("product",))
    )
    value = 4 * 8 * TOKENS * WIDTH
    assert kept.bytes.total - full.bytes.total == pytest.approx(50 * value, rel=0.05)
    assert "remat='full' keeping product" in kept.title


def test_checkpoints_shrink_by_pa_and_leave_for_the_host():
    layers, examples = 50, 64 // 2  # of a device's microbatch: two groups of four
    options = {"model_axis": 4, "num_layers": layers}
    layer = 2 * examples * TOKENS * WIDTH
    whole = plan_mix(64, remat="full", **options)
    cut = plan_mix(64, remat=PA, **options)
    gone = plan_mix(64, remat=PA_CPU, **options)
    assert whole.bytes.total - cut.bytes.total == pytest.approx(layers * layer * 3 / 4, abs=2)
    # What goes is all but two layers.
    assert cut.bytes.total - gone.bytes.total == pytest.approx((layers - 2) * layer / 4, abs=2)
    assert gone.bytes.host == layers * layer / 4
    assert gone.time.host == 2 * gone.bytes.host / HARDWARE["h100"].host_bandwidth
    moved = {k: v for k, v in whole.volume_by_axes.items() if k == ("model",)}
    assert moved[("model",)] == pytest.approx(
        12 * layers * examples * TOKENS * WIDTH * 3 / 4 / whole.num_params
    )
    assert cut.volume_by_axes[("model",)] == pytest.approx(moved[("model",)] * 13 / 12)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_keeps_a_sum_and_the_whole_batch(stage):
    one, four = (plan_mix(16 * n, stage=stage, accumulate=n) for n in (1, 4))
    assert (four.count, four.recipe.accumulate) == (one.count, 4)
    assert four.flops == pytest.approx(4 * one.flops)
    masters = 4 * one.num_params
    sums = four.bytes.total - one.bytes.total
    batch = 3 * one.count * 2 * TOKENS * WIDTH
    # At stage 1 gradients are summed once a step, from a sum that is whole on each device. Weights
    # may no longer be freed, as they are for one microbatch, since the next one reads them.
    least = (masters if stage == 1 else masters / 8) + batch
    assert least * 0.999 <= sums <= least * 1.01 + four.bytes.parameters


@pytest.mark.parametrize("count", [2, 4])
def test_a_microbatchs_gradients_are_whole_where_devices_are_summed_once(count):
    each, once = (plan_mix(16 * count, accumulate=count, reduce=r) for r in ("each", "once"))
    cut = once.num_params * 7 / 8  # what a device has of each tensor beyond its shard
    more = once.bytes.total - each.bytes.total
    assert more == pytest.approx((4 + 2) * cut, rel=0.02)  # a sum in fp32, a gradient in bf16
    # The sum: zeros, read and written for each gradient, which is read, and for the mean.
    least = (4 * (1 + 2 * count + 2) + 2 * count) * cut / HARDWARE["h100"].hbm_bandwidth
    assert 1 <= (once.time.memory - each.time.memory) / least < 2


# ------------------------------------------------------------------ volume


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("stage", "reduce"), [(0, None), (1, None), (1, "each"), (2, None), (3, None)]
)
def test_volume_is_the_theory_s_and_the_paper_s(stage, reduce, accumulate):
    found = plan_mix(16 * 3, stage=stage, accumulate=accumulate, reduce=reduce)
    layout = zerojax.make_layout(mix_params(), AbstractMesh((8,), ("data",)), stage=stage)
    theory = theory_of(layout, zerojax.Recipe(accumulate=accumulate, reduce=reduce))
    assert found.volume == theory.elements / layout.num_params
    assert sum(found.volume_by_axes.values()) == found.volume
    times = theory.reductions
    paper = {0: 2 * times, 1: times + 1, 2: times + 1, 3: 3 * accumulate}[stage] * 7 / 8
    assert found.volume == pytest.approx(paper)


def test_a_wrapped_optimizer_is_the_one_that_it_wraps(mesh8):
    layout = zerojax.make_layout(mix_params(), mesh8, stage=2)
    given = {"stage": 2, "num_devices": 8, "hardware": "h100"}
    bare, wrapped = (plan(mix_params(), tx, **given) for tx in (TX, zerojax.sharded(TX, layout)))
    assert bare == wrapped
