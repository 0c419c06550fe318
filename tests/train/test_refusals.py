"""Misuse of a train step ends in one sentence: what, where, expected, remedy."""

from __future__ import annotations

import dataclasses
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax

TX = optax.adamw(1e-3)
NO_LAYOUT: Any = TX
NO_FLAG: Any = 1
X = np.ones((32, 64), np.float32)
SHAPES = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}


def init():
    return {"w": jnp.ones((64, 64))}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def lay(stage=2, num_devices=8, shapes=SHAPES):
    mesh = zerojax.make_mesh({"data": num_devices}, devices=jax.devices()[:num_devices])
    return zerojax.make_layout(shapes, mesh, stage=stage)


def make(loss=loss_fn, stage=2, recipe=None, **options):
    return zerojax.make_train_step(loss, TX, lay(stage), recipe, **options)


def use(step=None, state=None, batch: Any = X, method="__call__"):
    step = step or make()
    state = make().init(init) if state is None else state
    return getattr(step, method)(state, batch)


def donated(method):
    step = make()
    state = step.init(init)
    step(state, X)
    return use(step, state, method=method)


def shared(method, part):
    """Use a state that has a part of one that was donated."""
    step = make()
    best = step.init(init)
    state, _ = step(best, X)
    return use(step, dataclasses.replace(state, **{part: getattr(best, part)}), method=method)


def start_from_donated():
    """Start from weights whose buffers went with what `device_put` made of them."""
    params = jax.tree.map(jnp.asarray, init())
    placed = jax.device_put(params, lay(2).params)
    jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)(placed)
    return make().init(params)


def twice(method, *, in_batch):
    """Use a state with an array that is in it twice, or in the batch too."""
    averaged = make(lambda p, x, model_state: (loss_fn(p, x), model_state), model_state=init())
    state = averaged.init(init)
    if not in_batch:
        return use(averaged, dataclasses.replace(state, model_state=state.params), method=method)
    step = make(lambda p, b: loss_fn(p, b["x"]) + jnp.mean((p["w"] - b["old"]["w"]) ** 2))
    state = step.init(init)
    return use(step, state, {"x": X, "old": zerojax.Whole(state.params)}, method)


def untrained(leaf):
    shapes = {**SHAPES, "steps": leaf}
    with pytest.warns(UserWarning, match="no gradient trains: steps; hand over what is trained"):
        layout = lay(shapes=shapes)
    return zerojax.make_train_step(loss_fn, TX, layout)


def widening(dtype=jnp.bfloat16):
    """An optimizer whose moments begin in another dtype and are fp32 after an update."""

    def update(grads, state, params=None):
        moments = jax.tree.map(lambda m, g: 0.9 * m.astype(g.dtype) + g, state["m"], grads)
        return moments, {"m": moments}

    def begin(params):
        return {"m": jax.tree.map(lambda x: jnp.zeros_like(x, dtype), params)}

    step = zerojax.make_train_step(loss_fn, optax.GradientTransformation(begin, update), lay())
    return step(step.init(init), X)


def with_a_number():
    """A rate set by hand, as a whole number."""
    step = zerojax.make_train_step(loss_fn, optax.inject_hyperparams(optax.adam)(1e-3), lay())
    state = step.init(init)
    state.opt_state.hyperparams["learning_rate"] = 1
    return step(state, X)


def turned(state):
    mesh = zerojax.make_mesh({"data": 8}, devices=jax.devices()[::-1])
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), state)


def make_on(num_devices):
    return zerojax.make_train_step(loss_fn, TX, lay(2, num_devices))


def within(mesh, call, **given):
    with jax.set_mesh(mesh):
        return call(**given)


def without_jit():
    with jax.disable_jit():
        make().init(init)


MISUSES = {
    "a step within jit": (lambda: jax.jit(make())(make().init(init), X), "outside of jax.jit"),
    "a whole number in the state": (with_a_number, r"learning_rate is int32\[\] where float32"),
    "an optimizer that changes dtypes": (
        widening,
        "leaf 'm/w' of the optimizer's state is bfloat16 from tx.init and float32 from tx.update",
    ),
    "an optimizer that counts in floats": (
        lambda: widening(jnp.int32),
        "leaf 'm/w' of the optimizer's state is int32 from tx.init and float32 from tx.update",
    ),
    "arguments swapped": (
        lambda: use(state=X, batch=make().init(init)),
        "TrainState first, got nd",
    ),
    "the result of a step as state": (
        lambda: use(state=use()),
        "got tuple: write state, metrics =",
    ),
    "what was restored as state": (
        lambda: use(state=types.SimpleNamespace(state=make().init(init))),
        "got SimpleNamespace: hand over its .state",
    ),
    "labels in a list": (
        lambda: use(batch={"x": X, "y": [1.0] * 16}),
        r"a list of 16 numbers, of which each .*np.asarray\(numbers\)",
    ),
    "a dict as state": (
        lambda: use(state={"params": init()}),
        r"got dict: make one with step.init\(params\)",
    ),
    "parameters to evaluate": (
        lambda: use(state=init(), method="evaluate"),
        "evaluate take a TrainState first, got dict.*hand over all of it",
    ),
    "a key instead of parameters": (
        lambda: make().init(jax.random.key(0)),
        r"missing \['w'\].*function with what it takes: \(init, key\)",
    ),
    "a state to unpad": (
        lambda: zerojax.unpad(make().init(init), lay()),
        "hand over the parameters of this state, its `params`",
    ),
    "devices in another order": (
        lambda: use(state=turned(make().init(init))),
        r"on the step.s 8 devices in another order.*jax.device_put\(state, step.shardings\)",
    ),
    "fewer devices": (
        lambda: use(state=make_on(4).init(init)),
        r"lies on {'data': 4}, and the step's devices are others, {'data': 8}: .*zerojax.restore\(",
    ),
    "a mesh of fewer devices, to begin": (
        lambda: within(lay(2, 4).mesh, lambda: make().init(init)),
        r"set_mesh has set {'data': 4}, .* step's, {'data': 8}: .*jax.set_mesh\(step.layout.mesh\)",
    ),
    "a mesh of fewer devices": (
        lambda: within(lay(2, 4).mesh, use, state=make().init(init)),
        "set_mesh has set {'data': 4}",
    ),
    "a mesh with Explicit axes": (
        lambda: within(jax.make_mesh((8,), ("data",), (AxisType.Explicit,)), use),
        "set_mesh has set {'data': 8}, whose devices or axes are not the step's",
    ),
    "without jit": (without_jit, r"disable_jit\(\) is on: debug the loss alone"),
    "layers ahead of whole weights": (
        lambda: make(recipe=zerojax.Recipe(prefetch=0.5)),
        "prefetch=0.5 .* use stage 3, or leave it out",
    ),
    "donated, then a step": (lambda: donated("__call__"), "use the state that the step returned"),
    "donated, then evaluated": (
        lambda: donated("evaluate"),
        "use the state that the step returned",
    ),
    "donated, then lowered": (lambda: donated("lower"), "use the state that the step returned"),
    "weights that were donated": (
        lambda: shared("__call__", "params"),
        r"earlier step, 'params/w' at least: use .*, or a copy: jax.tree.map\(jnp.copy, state\)",
    ),
    "moments that were donated, to evaluate": (
        lambda: shared("evaluate", "opt_state"),
        "earlier step, 'opt_state/0/count' at least",
    ),
    "a start from donated weights": (
        start_from_donated,
        "parameter 'w' was donated to a jitted function",
    ),
    "weights in the batch": (
        lambda: twice("__call__", in_batch=True),
        "'params/w' of the state is 'batch/old/value/w' too, .* hand over jnp.copy of it",
    ),
    "weights as the model's state": (
        lambda: twice("__call__", in_batch=False),
        "'params/w' of the state is 'model_state/w' too",
    ),
    "text to audit": (lambda: make().audit("x"), "batch leaf '.' is a str; a step takes arrays"),
    "another stage": (
        lambda: use(make(stage=3)),
        r"params/w is placed as .* make it with this step",
    ),
    "another optimizer": (
        lambda: use(zerojax.make_train_step(loss_fn, optax.sgd(1.0), lay())),
        "unexpected .*opt_state/0/mu/w",
    ),
    "offload in the step only": (
        lambda: use(make(recipe=zerojax.Recipe(offload=True))),
        "opt_state/0/mu/w is placed|host",
    ),
    "another precision": (lambda: use(make(recipe=zerojax.Recipe(precision="bf16"))), "masters"),
    "params of another dtype": (
        lambda: use(make(recipe=zerojax.Recipe(precision=zerojax.Precision(params="bfloat16")))),
        r"params/w is float32\[64, 64\] where bf",
    ),
    "a key of several microbatches": (
        lambda: use(
            make(
                lambda p, b: (loss_fn(p, b["x"]), {"key": b["key"]}),
                recipe=zerojax.Recipe(accumulate=2),
                has_aux=True,
            ),
            batch={"x": X, "key": jax.random.key(0)},
        ),
        "aux leaf 'key' is a key",
    ),
    "aux without has_aux": (lambda: use(make(lambda p, b: (loss_fn(p, b), {}))), "has_aux=True"),
    "has_aux without aux": (lambda: use(make(has_aux=True)), r"\(loss, aux\), got an array"),
    "a loss per example": (
        lambda: use(make(lambda p, b: b.sum(1))),
        r"shape \(32,\): return the mean",
    ),
    "an integer loss": (lambda: use(make(lambda p, b: jnp.int32(3))), "floating scalar, got int32"),
    "a Python number as loss": (lambda: use(make(lambda p, b: 1.0)), "scalar, got the number 1.0"),
    "integer parameters": (
        lambda: untrained(jax.ShapeDtypeStruct((), jnp.int32)),
        "leaf 'steps' of the parameters is int32.*Whole",
    ),
    "a batch on one device": (
        lambda: use(batch=jax.device_put(X, jax.devices()[0])),
        r"'\.' is placed as Single.*device_put\(batch, layout\.batch\)",
    ),
    "a batch on every device": (
        lambda: use(batch=jax.device_put(X, lay().sharding(P()))),
        r"'\.' is placed as .*device_put\(batch, layout\.batch\)",
    ),
    "a batch of another mesh": (
        lambda: use(batch=jax.device_put(X, lay(2, 4).batch)),
        r"'\.' is placed as .*'data': 4.*device_put\(batch",
    ),
    "what is whole, sharded": (
        lambda: use(
            make(lambda p, b: loss_fn(p, b["x"])),
            batch={"x": X, "t": zerojax.Whole({"w": jax.device_put(X, lay().batch)})},
        ),
        r"'t/value/w' is placed as .*every device gets all of it: .*lora\.py",
    ),
    "a batch that devices don't divide": (lambda: use(batch=X[:31]), "31 examples.*multiple of 8"),
    "text in the batch": (
        lambda: use(batch={"x": X, "name": "one"}),
        "leaf 'name' is a str; a step",
    ),
    "text in an array": (
        lambda: use(batch=X.astype(str)),
        r"leaf '\.' holds <U\d+; a step takes num",
    ),
    "big-endian": (lambda: use(batch=np.asarray(X, ">f4")), "holds >f4; .* x.astype"),
    "a raw key": (lambda: use(batch={"x": X, "k": jax.random.PRNGKey(0)}), "'k' .*wrap_key_data"),
    "a table": (
        lambda: use(batch={"x": X, "t": X[:3]}),
        r"'t' has 3, 'x' has 32; .*zerojax\.Whole",
    ),
    "shapes to begin with": (lambda: make().init(SHAPES), "takes arrays, got shapes"),
    "a bare precision": (lambda: make(recipe="bf16"), "a Recipe is expected, got str"),
    "layout and optimizer swapped": (
        lambda: zerojax.make_train_step(loss_fn, lay(), NO_LAYOUT),
        "a Layout is expected, got Gradient",
    ),
    "a loss that asks for what no step gives": (
        lambda: make(lambda params, x, rng: 0.0),
        "asks for 'rng'.*may name key, step, model_state",
    ),
    "a parameter that is a key": (
        lambda: untrained(jax.random.key(0)),
        "'steps' of the parameters is key<fry>, which has no gradient",
    ),
    "a count that is no flag": (
        lambda: zerojax.Recipe(skip_nonfinite=NO_FLAG),
        "True or False, got 1",
    ),
}


@pytest.mark.parametrize(("misuse", "match"), MISUSES.values(), ids=MISUSES)
def test_a_misuse_ends_in_one_sentence(misuse, match):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=match) as caught:
        misuse()
    assert "\n" not in str(caught.value).split("\n-----")[0]


def test_evaluate_takes_the_weights_in_the_batch():
    assert twice("evaluate", in_batch=True) == twice("evaluate", in_batch=False)


def test_threads_that_share_a_state_are_told_that_it_was_donated():
    """They all check it first; jaxlib crashes on one that is donated meanwhile."""
    step, told = make(), []
    use(step)
    state = step.init(init)

    def run():
        try:
            step(state, X)
        except ValueError as error:
            told.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 3
    assert all("donated" in text for text in told)
