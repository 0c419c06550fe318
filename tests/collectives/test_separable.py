"""Under reduce="once" a loss is a mean over examples, or it is refused with the operation."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.collectives.losses import (
    BATCH,
    CLASSES,
    EXAMPLES,
    MEANS,
    OTHERS,
    PARAMS,
    TOKENS,
    WIDTH,
    entropy,
    logits,
)
from tests.collectives.rules import LINEAR_RULES, OTHER_RULES


def make(mesh, loss, reduce, accumulate=1):
    layout = zerojax.make_layout(PARAMS, mesh, stage=1, min_size=8)
    recipe = zerojax.Recipe(reduce=reduce, accumulate=accumulate)
    return zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe)


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_mean_over_examples_is_that_of_the_whole_batch(loss, mesh8):
    step = make(mesh8, loss, "once")
    state, metrics = step(step.init(PARAMS), BATCH)
    plain = {**BATCH, "weights": BATCH["weights"].value}
    want, grads = jax.jit(jax.value_and_grad(loss))(PARAMS, plain)
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-4, abs=1e-6)
    for name, g in grads.items():
        np.testing.assert_allclose(
            state.params[name], PARAMS[name] - 0.1 * g, atol=1e-5, err_msg=name
        )


def views(p, b):
    """Join two views of each example, as SimSiam and FixMatch do."""
    return jnp.tanh(jnp.concatenate([b["x"].mean(1), b["x"].max(1)]) @ p["out"])


def parted(z, parts=2):
    one, *_, last = jnp.split(z, parts)
    return jnp.mean((one - jax.lax.stop_gradient(last)) ** 2)


def sliced(z, size):
    return jnp.mean((z[:size] - jax.lax.stop_gradient(z[-size:, :3].sum(1, keepdims=True))) ** 2)


VIEWS = {
    "parted": lambda p, b: parted(views(p, b)),
    "sliced": lambda p, b: sliced(views(p, b), len(b["y"])),
    "in a dim of their own": lambda p, b: parted(views(p, b).reshape(2, -1, CLASSES)),
    "of views": lambda p, b: parted(jnp.split(jnp.concatenate([views(p, b)] * 2), 2)[1]),
    "with labels": lambda p, b: entropy(views(p, b), jnp.concatenate([b["y"]] * 2)).mean(),
}


@pytest.mark.parametrize("loss", VIEWS.values(), ids=VIEWS)
def test_views_of_each_example_may_be_joined_and_parted_again(loss, mesh8):
    test_a_mean_over_examples_is_that_of_the_whole_batch(loss, mesh8)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda p, b: parted(views(p, b), 4), "joins examples.*split"),
        (lambda p, b: parted(logits(p, b)), "joins examples.*split"),
        (lambda p, b: sliced(views(p, b), len(b["y"]) // 2), "joins examples.*slice"),
        (lambda p, b: sliced(views(p, b), EXAMPLES // 8), "number of examples that is fixed"),
        (lambda p, b: jnp.mean(jnp.split(views(p, b), [EXAMPLES // 8])[0] ** 2), "is fixed"),
        (lambda p, b: jnp.mean(jnp.concatenate([views(p, b), logits(p, b)])), "joins.*concatenate"),
        (lambda p, b: jnp.mean(views(p, b).reshape(-1, 2, CLASSES)[:, 0]), "parts of several"),
        (lambda p, b: jnp.mean(jnp.tanh(views(p, b) - views(p, b).mean(0))), "made of all"),
    ],
    ids=[
        "in four",
        "of one view",
        "half",
        "two",
        "first two",
        "of other sizes",
        "neighbours",
        "less their mean",
    ],
)
def test_other_parts_of_views_are_refused(loss, match, mesh8):
    with pytest.raises(ValueError, match=match):
        lowered(mesh8, loss, 1, "once")


def test_a_placement_along_the_batch_is_refused_with_its_line(mesh8):
    def placed(p, b):
        sharding = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("data"))
        return jnp.mean(jax.lax.with_sharding_constraint(logits(p, b), sharding) ** 2)

    match = r"places along \{'data'\} an array.*test_separable.py:.*placed\); write Recipe"
    with pytest.raises(ValueError, match=match):
        lowered(mesh8, placed, 2, "once")


@pytest.mark.parametrize(("loss", "match"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_mean_over_examples_is_refused_with_the_operation(loss, match, mesh8):
    step = make(mesh8, loss, "once")
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=match) as caught:
        step(state, BATCH)
    assert "Recipe(reduce='each')" in str(caught.value)
    if re.search(": [a-z]", match):
        assert "losses.py:" in str(caught.value), "it names the user's line"


def picked(table, b, dim=0):
    """Pick the last of as many as there are examples."""
    return jax.lax.slice_in_dim(table, len(b["y"]) - 1, len(b["y"]), axis=dim)


def turned(w):
    """Clip the gradient in what is a transpose."""
    clip = functools.partial(jnp.clip, min=-1e-3, max=1e-3)
    return jax.custom_derivatives.linear_call(lambda _, w: w, lambda _, g: clip(g), (), w)


#: What Python chooses by the number of examples, in shapes that are alike; and what else passed.
BY_NUMBER = {
    "a power": (lambda p, b: logits(p, b).mean() * p["out"][0, 0] ** len(b["y"]), "pow"),
    "a number": (lambda p, b: logits(p, b).mean() * picked(jnp.arange(64.0), b)[0], "slice"),
    "a column": (lambda p, b: jnp.mean(picked(b["x"] @ jnp.ones((8, 64)), b, dim=2)), "slice"),
    "half of the rows": (
        lambda p, b: jnp.mean((b["x"].reshape(-1, 8) @ p["out"])[count(b, "uint32")] ** 2),
        "gather",
    ),
    "a transpose": (lambda p, b: jnp.mean((b["x"] @ turned(p["out"])) ** 2), "linear_call"),
}


@pytest.mark.parametrize(("loss", "name"), BY_NUMBER.values(), ids=BY_NUMBER)
def test_what_is_chosen_by_the_number_of_examples_is_refused(loss, name, mesh8):
    with pytest.raises(ValueError, match=f": (integer_)?{name} at .*test_separable.py:"):
        lowered(mesh8, loss, 1, "once")


def column(p, b):
    return logits(p, b)[:, 0]


def count(b, dtype=jnp.int32):
    return jnp.arange(len(b["y"]), dtype=dtype)


#: What takes the place of an example in the batch, the order of the batch, or its size.
BY_PLACE = {
    "a mask of NumPy's": lambda p, b: jnp.mean(column(p, b) * (np.arange(len(b["y"])) < 3)),
    "a triangle": lambda p, b: jnp.mean(logits(p, b) * np.tri(len(b["y"]), 5, dtype=bool)),
    "places of places": lambda p, b: jnp.mean(column(p, b) * count(b)[count(b)]),
    "places written": lambda p, b: jnp.mean(
        column(p, b) * jnp.zeros(len(b["y"]), int).at[count(b)].set(count(b))
    ),
    "places added up": lambda p, b: jnp.mean(
        p["out"][0] * jax.ops.segment_sum(count(b), b["y"], 5) / len(b["y"])
    ),
    "a diagonal": lambda p, b: jnp.mean(
        (logits(p, b) @ jnp.ones((5, 64)))[count(b, "uint32"), count(b, "uint32")]
    ),
    "rolled by a half": lambda p, b: jnp.mean(
        column(p, b) * column(p, b)[count(b) + (-(len(b["y"]) // 2))]
    ),
    "windows": lambda p, b: jnp.mean(
        jnp.abs(
            jax.vmap(lambda i: jax.lax.dynamic_slice(logits(p, b), (i, 0), (2, 5)))(count(b))
        ).max(1)
    ),
    "by columns": lambda p, b: jnp.mean(jnp.ravel(logits(p, b), order="F").reshape(-1, 5).max(1)),
    "merged in any order": lambda p, b: jnp.mean(
        jnp.broadcast_to(p["out"][0], (2 * len(b["y"]), 5)).reshape(-1)
        * jnp.concatenate([logits(p, b), jnp.tanh(logits(p, b))]).T.reshape(-1)
    ),
    "applied": lambda p, b: (
        jnp.mean(column(p, b)) + jnp.sum(p["out"][0] * b["x"].mean((0, 1))[:5].at[:].apply(jnp.exp))
    ),
    "divided whole": lambda p, b: jnp.mean(
        column(p, b) * (b["y"].astype("uint32") // len(b["y"])).astype(jnp.float32)
    ),
    "a square of them": lambda p, b: (
        jnp.mean(column(p, b)) + jnp.sum(jnp.ones(len(b["y"]) ** 2)) / len(b["y"]) * p["out"][0, 0]
    ),
    "one less": lambda p, b: (
        jnp.mean(column(p, b)) + jnp.sum(jnp.ones(len(b["y"]) - 1)) / len(b["y"]) * p["out"][0, 0]
    ),
    "bytes": lambda p, b: (
        jnp.mean(column(p, b))
        + jnp.sum(b["y"].astype("uint8"), dtype="uint8").astype(jnp.float32) * p["out"][0, 0]
    ),
}


@pytest.mark.parametrize("loss", BY_PLACE.values(), ids=BY_PLACE)
def test_what_depends_on_the_place_of_examples_is_refused(loss, mesh8):
    with pytest.raises(ValueError, match="each device computes the loss of its own examples"):
        lowered(mesh8, loss, 1, "once")


def test_a_token_of_a_class_is_tiled_over_examples(mesh8):
    def loss(p, b):
        first = jnp.tile(p["embed"][:1, None], (len(b["y"]), 1, 1))
        return jnp.mean(jnp.tanh(jnp.concatenate([first, b["x"]], 1) @ p["out"]) ** 2)

    test_a_mean_over_examples_is_that_of_the_whole_batch(loss, mesh8)


@pytest.mark.parametrize("loss", LINEAR_RULES.values(), ids=LINEAR_RULES)
def test_rules_that_are_linear_in_the_gradient_of_each_example_are_accepted(loss, mesh8):
    test_a_mean_over_examples_is_that_of_the_whole_batch(loss, mesh8)
    lowered(mesh8, loss, 2)  # a warning would be an error


@pytest.mark.parametrize(("loss", "match"), OTHER_RULES.values(), ids=OTHER_RULES)
def test_other_rules_are_refused_and_warned_of_with_their_line(loss, match, mesh8):
    match = f"a backward rule has to be linear.*, and here .*{match}.* at .*/rules.py:"
    with pytest.raises(ValueError, match=match):
        lowered(mesh8, loss, 1, "once")
    with pytest.warns(UserWarning, match=match):
        lowered(mesh8, loss, 2)
    lowered(mesh8, loss, 1)  # without a warning, which would be an error


@pytest.mark.filterwarnings("ignore:the loss is .*, which has few digits")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "complex64"])
def test_constants_of_every_dtype_that_count_examples_are_read(dtype, mesh8):
    def narrow(params, batch):
        return entropy(logits(params, batch), batch["y"]).astype(dtype)

    def counted(params, batch):  # a sum
        values = narrow(params, batch)
        return (jnp.mean(values) * jnp.asarray(values.shape[0], dtype)).real

    def divided(params, batch):  # a mean
        values = narrow(params, batch)
        return (jnp.sum(values) / values.shape[0]).real

    with pytest.raises(ValueError, match="grows with the number of examples"):
        lowered(mesh8, counted, 1, "once")
    lowered(mesh8, divided, 1, "once")


def first_few(params, batch):
    """Add an expensive penalty of the first eight examples alone."""
    few = logits(params, batch)[:8]
    return entropy(logits(params, batch), batch["y"]).mean() + jnp.mean(few**2)


def by_size(params, batch):
    """Choose a temperature by the number of examples."""
    scale = 0.1 if len(batch["y"]) > 8 else 1.0
    return entropy(logits(params, batch) / scale, batch["y"]).mean()


@pytest.mark.parametrize("loss", [first_few, by_size])
def test_what_python_makes_of_the_size_of_the_whole_batch_is_seen(loss, mesh8):
    """No part has more than eight examples: only the batch of 16 is another program."""
    for accumulate in (1, 2):
        with pytest.raises(ValueError, match="number of examples"):
            lowered(mesh8, loss, accumulate, "once")


def squeezed(params, batch):
    x = batch["x"].squeeze()  # of one example [tokens, width]
    return jnp.mean(jax.nn.logsumexp(x.reshape(len(x), -1)[:, :WIDTH] @ params["out"], axis=-1))


def if_several(params, batch):
    z = logits(params, batch)
    return jnp.mean(jnp.tanh(z) if len(z) > 1 else z)


def by_another(params, batch):
    return jnp.mean(logits(params, batch) ** 2) * (2 if len(batch["y"]) == 1 else 1)


def to_another(params, batch):
    return jnp.mean(logits(params, batch) ** (2 if len(batch["y"]) == 1 else 3))


def over_classes(params, batch):
    z = (batch["x"].mean(1) @ params["out"][:, :2]).squeeze()  # of one example [classes]
    return jnp.sum(z.sum(0) * jnp.arange(z.shape[-1])) / len(batch["x"])


@pytest.mark.parametrize("loss", [squeezed, over_classes, if_several, by_another, to_another])
def test_what_python_makes_of_a_single_example_is_seen(loss, mesh8):
    lowered(mesh8, loss, 1, "once")
    with pytest.raises(ValueError, match=r"for a single example: .*test_separable\.py:"):
        lowered(mesh8, loss, 2, "once")


AMONG_DEVICES = {
    "axis_size": (lambda p: jax.lax.axis_size("data"), "grows with the number of examples"),
    "psum of a number": (lambda p: jax.lax.psum(1, "data"), "grows with the number of examples"),
    "psum": (lambda p: jax.lax.psum(p["out"].sum(), "data"), "along {'data'} .*: psum"),
    "all_gather": (lambda p: jax.lax.all_gather(p["out"], "data").sum(), "along {'data'} .*gather"),
}


@pytest.mark.parametrize("name", AMONG_DEVICES)
def test_what_is_left_of_a_pmap_is_refused(name, mesh8):
    """Of eight devices it made a loss eight times as large."""
    factor, match = AMONG_DEVICES[name]
    with pytest.raises(ValueError, match=match):
        lowered(mesh8, lambda p, b: jnp.mean(logits(p, b)) * factor(p), 2, "once")


def test_an_error_of_the_loss_tells_how_many_examples_it_had(mesh8):
    def grouped(params, batch):
        return entropy(logits(params, batch), batch["y"]).reshape(-1, 4).mean()

    with pytest.raises(TypeError, match="reshape") as caught:
        lowered(mesh8, grouped, 1, "once")
    (note,) = (note for note in caught.value.__notes__ if "reduce" in note)
    assert "with 2 examples" in note
    assert "Recipe(reduce='each')" in note


def lowered(mesh, loss, accumulate, reduce="each"):
    step = make(mesh, loss, reduce, accumulate)
    return step.lower(step.abstract_state(), BATCH)


@pytest.mark.parametrize("name", ["masked mean", "a constant key", "a sum", "contrastive"])
def test_microbatches_whose_average_is_another_loss_are_warned_of(name, mesh8):
    loss, match = OTHERS[name]
    with pytest.warns(UserWarning, match=match) as told:
        lowered(mesh8, loss, 2)
    assert "with accumulate=2 each microbatch" in str(told[0].message)
    assert "losses.py:" in str(told[0].message) or name == "a sum"
    lowered(mesh8, loss, 1)  # without a warning, which would be an error


@pytest.mark.parametrize("name", ["labels", "dropout", "class weights", "layers"])
def test_microbatches_of_a_mean_are_not_warned_of(name, mesh8):
    lowered(mesh8, MEANS[name], 2)  # a warning would be an error


def test_noise_of_a_key_that_is_marked_whole_is_refused(mesh8):
    """Each device would draw the same for its own examples."""
    _, match = OTHERS["a constant key"]

    def of_batch(p, b):
        return jnp.mean(jax.random.normal(b["noise"], b["x"].shape) * b["x"] @ p["out"])

    step = make(mesh8, of_batch, "once")
    batch = {**BATCH, "noise": zerojax.Whole(jax.random.key(0))}
    with pytest.raises(ValueError, match=match):
        step(step.init(PARAMS), batch)
    step(step.init(PARAMS), {**batch, "noise": jax.random.key(0)})


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_a_mask_divided_by_its_mean_gives_the_mean_over_the_mask(reduce, mesh8):
    mask = jnp.zeros((EXAMPLES, TOKENS)).at[:5, 2:].set(1.0).at[9].set(1.0)

    def losses(p, b):
        return entropy(b["x"] @ p["out"], b["tokens"])

    step = make(mesh8, lambda p, b: jnp.mean(losses(p, b) * b["mask"]), reduce, 2)
    state, metrics = step(step.init(PARAMS), {**BATCH, "mask": mask / mask.mean()})
    want, grads = jax.value_and_grad(lambda p: jnp.sum(losses(p, BATCH) * mask) / jnp.sum(mask))(
        PARAMS
    )
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_allclose(state.params["out"], PARAMS["out"] - 0.1 * grads["out"], atol=1e-6)
