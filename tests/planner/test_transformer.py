"""The GPT of five numbers counts as the package's GPT does, and as JAX keeps and computes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.planner import paper
from zerojax.models import gpt
from zerojax.planner import Transformer

GPT2 = Transformer(num_layers=12, width=768, num_heads=12)
GPT_100B = Transformer(num_layers=125, width=8192, num_heads=64)
REMATS = ("none", "dots", "full")
UNKNOWN: Any = "some"
COUNTS = ("num_layers", "width", "num_heads", "context", "vocab_size")


def described(config: gpt.Config) -> Transformer:
    return Transformer(**{name: getattr(config, name) for name in COUNTS})


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_parameters_are_those_of_the_packages_gpt(name):
    config = gpt.PRESETS[name]
    assert described(config).num_params == gpt.num_params(config)


@pytest.mark.parametrize("row", paper.MODELS, ids=lambda row: f"{row[3]}B")
def test_sizes_of_the_paper(row):
    layers, width, heads, size = row
    model = Transformer(num_layers=layers, width=width, num_heads=heads)
    assert model.num_params == pytest.approx(size * 1e9, rel=0.05)


@pytest.mark.parametrize("name", COUNTS)
def test_bad_counts_are_refused_by_name(name):
    counts = {"num_layers": 2, "width": 64, "num_heads": 2, name: 0}
    with pytest.raises(ValueError, match=f"Transformer: {name} must be a whole number"):
        Transformer(**counts)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="num_heads=5 does not divide width=64"):
        Transformer(num_layers=2, width=64, num_heads=5)


def kept_per_element(policy) -> float:
    """Trace one layer of the package's GPT and sum what its backward pass keeps, over b*s*h."""
    batch, tokens, width = 4, 512, 512
    config = gpt.Config(
        num_layers=1, width=width, num_heads=8, vocab_size=256, context=tokens,
        scan=False, remat=False, dtype=jnp.bfloat16,
    )  # fmt: skip
    params = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))["blocks"][0]
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    block = functools.partial(gpt._block, config)
    if policy is not None:
        block = jax.checkpoint(block, policy=policy)
    x = jax.ShapeDtypeStruct((batch, tokens, width), jnp.bfloat16)
    kept = jax.eval_shape(lambda params, x: jax.vjp(block, params, x)[1], params, x)
    weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    activations = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape not in weights]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in activations) / (batch * tokens * width)


def kept_by_formula(remat: Any) -> float:
    model = Transformer(num_layers=1, width=512, num_heads=8, context=512)
    return model.activation_bytes(4, remat=remat).kept / (4 * 512 * 512)


def test_rematerialised_layers_keep_what_jax_keeps():
    policies = jax.checkpoint_policies
    full, dots = policies.nothing_saveable, policies.dots_with_no_batch_dims_saveable
    assert kept_by_formula("full") == kept_per_element(full) == 2
    assert kept_by_formula("dots") == kept_per_element(dots) == 18


def test_without_remat_jax_keeps_about_twice_what_the_formula_says():
    assert kept_by_formula("none") == 34 + 5 * 8
    assert 1.5 < kept_per_element(None) / kept_by_formula("none") < 2.5


def test_more_remat_keeps_less_and_computes_more():
    kept = [GPT2.activation_bytes(8, remat=remat).kept for remat in REMATS]
    assert kept == sorted(kept, reverse=True)
    flops = [GPT2.flops_per_token(remat=remat) for remat in REMATS]
    assert flops == sorted(flops)


def test_partitioned_checkpoints_take_a_part_and_offloaded_ones_none():
    choices: dict[str, Any] = {"remat": "full", "model_axis": 16}
    whole, cut, gone = (
        GPT_100B.activation_bytes(32, **choices, partitioned=pa, offloaded=cpu)
        for pa, cpu in ((False, False), (True, False), (True, True))
    )
    assert whole.kept == 2 * 125 * 32 * 1024 * 8192 == 16 * cut.kept
    assert (gone.kept, gone.host) == (0, cut.kept)
    assert whole.working == cut.working == gone.working
    assert whole.kept > cut.kept > gone.kept >= 0


def test_the_logits_outweigh_a_layer_where_there_are_many_words():
    few_words = Transformer(num_layers=12, width=768, num_heads=12, vocab_size=256)
    one = few_words.activation_bytes(8)
    assert one.working > one.logits
    many = GPT2.activation_bytes(8)
    assert many.logits == 6 * 8 * 1024 * 50257
    assert many.logits > many.working


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_model_axis_cuts_what_lies_within_a_layer(remat):
    """Norms, dropouts and residuals stay whole, 10 b*s*h of a layer, and so does its input."""
    bsh = 3 * 2048 * 12288
    model = Transformer(num_layers=1, width=12288, num_heads=96, context=2048)
    one, cut = (model.activation_bytes(3, remat=remat, model_axis=axis) for axis in (1, 8))
    whole = {"none": 10, "dots": 2 + 2}[remat] * bsh  # arXiv 2205.05198, table 2
    assert cut.kept == pytest.approx(whole + (one.kept - whole) / 8)
    assert model.activation_bytes(3).kept == model.activation_bytes(3, model_axis=8).kept == 2 * bsh


@pytest.mark.parametrize(
    ("heads", "width", "scores"), [(96, 12288, 80), (128, 20480, 64)], ids=["GPT-3", "MT-NLG"]
)
def test_megatrons_bytes_per_layer(heads, width, scores):
    model = Transformer(num_layers=1, width=width, num_heads=heads, context=2048)
    assert model.activation_bytes(1, remat="none").kept == (34 + scores) * 2048 * width


def test_checkpoints_of_100b_as_each_section_counts_them():
    whole = GPT_100B.activation_bytes(32).kept / 1e9
    assert whole == pytest.approx(67.1, abs=0.01)
    assert whole > paper.CHECKPOINTS_GB_SECTION_3
    assert int(whole / 2) == paper.CHECKPOINTS_GB_SECTION_6, "one byte an element"
    cut = GPT_100B.activation_bytes(32, model_axis=16, partitioned=True).kept / 1e9
    assert round(cut / 2) == paper.PARTITIONED_GB_SECTION_6


@pytest.mark.parametrize("row", paper.INFINITY, ids=lambda row: f"{row[0]}x{row[1]}")
def test_checkpoints_of_infinity(row):
    layers, width, heads, _, checkpoints = row
    model = Transformer(num_layers=layers, width=width, num_heads=heads)
    assert model.activation_bytes(32).kept / 2**40 == pytest.approx(checkpoints, abs=0.0051)


@pytest.mark.parametrize("choice", ["partitioned", "offloaded"])
def test_checkpoints_that_are_not_there_cannot_be_moved(choice):
    with pytest.raises(ValueError, match="remat='none' keeps no checkpoints"):
        GPT2.activation_bytes(8, remat="none", **{choice: True})


def test_an_unknown_remat_is_refused():
    for ask in (GPT2.activation_bytes, lambda batch, remat: GPT2.flops_per_token(remat=remat)):
        with pytest.raises(ValueError, match=r"remat must be one of .*dots.*, got 'some'"):
            ask(8, remat=UNKNOWN)


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_flops_are_megatrons(name):
    model = described(gpt.PRESETS[name])
    L, h, s, V = model.num_layers, model.width, model.context, model.vocab_size
    megatron = 96 * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert model.flops_per_token(remat="full") == pytest.approx(megatron)


def test_flops_are_six_per_parameter_and_attention():
    for row in paper.MODELS:
        model = Transformer(**dict(zip(COUNTS, row[:3], strict=False)))
        attention = 12 * model.num_layers * model.width * model.context
        assert model.flops_per_token() == pytest.approx(6 * model.num_params + attention, rel=0.01)


def test_flops_are_those_of_the_lowered_step():
    """XLA counts additions and exponentials too, which weigh less the wider the model is."""
    config = gpt.Config(
        num_layers=2, width=512, num_heads=4, vocab_size=2048, context=128,
        scan=False, remat=False,
    )  # fmt: skip
    params = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 129), jnp.int32)
    step = jax.jit(jax.grad(functools.partial(gpt.loss, config)))
    counted = (step.lower(params, tokens).cost_analysis() or {})["flops"] / (2 * 128)
    assert math.isfinite(counted)
    assert described(config).flops_per_token() == pytest.approx(counted, rel=0.05)
