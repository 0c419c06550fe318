"""Rules of custom derivatives that are linear in the gradient of each example, and that are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.experimental import pallas as pl
from jax.experimental.ode import odeint

from tests.collectives.losses import CLASSES, TOKENS, WIDTH, logits


def ruled(forward, backward):
    """Make a function of `forward(*args) -> result, kept` and `backward(kept, g) -> gradients`."""
    function = jax.custom_vjp(lambda *args: forward(*args)[0])
    function.defvjp(forward, backward)
    return function


def passing(rule):
    """Make a function that passes a value on, and its gradient through a rule."""
    return ruled(lambda x: (x, None), lambda _, g: (rule(g),))


def own_rule_of(function):
    """Give a function that others wrote a backward rule."""
    found = jax.custom_vjp(function)
    found.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))
    return found


def own_jvp_of(function):
    """Give a function that others wrote a derivative, which joins examples."""
    found = jax.custom_jvp(function)
    found.defjvp(lambda x, t: (x[0], t[0] - t[0].mean(0)))
    return found


def through(function):
    """Make a function's own backward pass a rule."""
    return ruled(lambda *args: jax.vjp(function, *args), lambda pull, g: pull(g))


def of_values(function):
    return lambda p, b: jnp.mean(function(b["x"].mean(1) @ p["out"]) ** 2)


def of_weights(function):
    return lambda p, b: jnp.mean((b["x"].mean(1) @ function(p["out"])) ** 2)


@jax.custom_gradient
def clipped(x):
    return x, lambda g: (jnp.clip(g, -1e-3, 1e-3),)


@jax.custom_gradient
def tripled(x):
    return x, lambda g: (3 * g,)


@jax.custom_jvp
def centred(x):
    return x


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


centred.defjvp(lambda xs, dots: (xs[0], dots[0] - dots[0].mean(0)))
rounded.defjvp(lambda xs, dots: (rounded(xs[0]), dots[0]))
sine.defjvps(lambda dot, _, x: jnp.cos(x) * dot)


def attended(q, k, v):
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2))
    return weights @ v, (q, k, v)


def attended_backward(kept, g):
    """Go through keys in blocks and compute their weights again, as flash attention does."""
    q, k, v = kept
    scores = q @ k.swapaxes(1, 2)
    total = jax.nn.logsumexp(scores, -1, keepdims=True)
    delta = jnp.sum(g * attended(*kept)[0], -1, keepdims=True)

    def block(i, grads):
        of_q, of_k, of_v = grads
        key, value = (jax.lax.dynamic_slice_in_dim(x, 2 * i, 2, 1) for x in (k, v))
        weights = jnp.exp(q @ key.swapaxes(1, 2) - total)
        scores = weights * (g @ value.swapaxes(1, 2) - delta)
        return (
            of_q + scores @ key,
            jax.lax.dynamic_update_slice_in_dim(of_k, scores.swapaxes(1, 2) @ q, 2 * i, 1),
            of_v.at[:, 2 * i + jnp.arange(2)].add(weights.swapaxes(1, 2) @ g),
        )

    return jax.lax.fori_loop(0, TOKENS // 2, block, tuple(map(jnp.zeros_like, kept)))


def attention(p, b):
    heads = ruled(attended, attended_backward)
    x = b["x"] @ p["layers"][0]
    one_by_one = jax.vmap(lambda x: heads(x[None], x[None], x[None])[0])(x)
    return jnp.mean(heads(x, 2 * x, x + 1) ** 2) + jnp.mean(one_by_one)


def entropy(x, w, labels):
    out = x @ w
    losses = jax.nn.logsumexp(out, -1) - out[jnp.arange(len(labels)), labels]
    return losses.mean(), (x, w, labels)


def entropy_backward(kept, g):
    x, w, labels = kept
    errors = jax.nn.softmax(x @ w).at[jnp.arange(len(labels)), labels].add(-1) * g / len(labels)
    return errors @ w.T, x.T @ errors, None


def looked_up_backward(kept, g):
    table, tokens = kept
    return jnp.zeros_like(table).at[tokens].add(g), None


def fixed_point(p, b):
    """Differentiate a fixed point of each example implicitly."""

    def step(w, x, z):
        return 0.3 * jnp.tanh(z @ w + x)

    def forward(w, x):
        def goes_on(carry):
            return (carry[2] < 50) & (jnp.max(jnp.abs(carry[0] - carry[1])) > 1e-7)

        z = jax.lax.while_loop(
            goes_on, lambda c: (step(w, x, c[0]), c[0], c[2] + 1), (x * 0, x * 0 + 1, 0)
        )[0]
        return z, (w, x, z)

    def backward(kept, g):
        w, x, z = kept
        _, pull = jax.vjp(lambda z: step(w, x, z), z)
        u = jax.lax.fori_loop(0, 40, lambda _, u: g + pull(u)[0], g)
        return jax.vjp(lambda w, x: step(w, x, z), w, x)[1](u)

    find = ruled(forward, backward)
    return jnp.mean(jax.vmap(lambda x: find(p["layers"][0], x))(b["x"].mean(1)) ** 2)


def doubled_in_a_kernel(x):
    def kernel(x, out):
        out[...] = 2 * x[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def jax_functions(p, b):
    x, square = logits(p, b), p["layers"][0] + 4 * jnp.eye(WIDTH)
    functions = (
        jax.nn.relu, jax.nn.silu, jax.nn.gelu, jax.nn.softplus, jax.nn.log_softmax, jax.nn.relu6,
        jax.nn.celu, jax.scipy.special.i0, jax.scipy.special.erf, jnp.sinc, jnp.nan_to_num,
    )  # fmt: skip
    each = b["x"][:, 0, :, None] * p["layers"][1] + 9 * jnp.eye(WIDTH)
    return (
        sum(jnp.mean(function(x)) for function in functions)
        + jnp.mean(jax.nn.logsumexp(x, -1) + optax.safe_norm(x, 1e-6, axis=-1))
        + jnp.mean(optax.sigmoid_focal_loss(x, jax.nn.one_hot(b["y"], CLASSES)))
        + jnp.mean(jnp.linalg.inv(each)) * 1e-2
        + jnp.linalg.slogdet(square)[1] * 1e-2
    )


def ordinary_equation(p, b, function=jnp.tanh):
    def solve(x):
        return odeint(lambda y, t, w: function(y @ w), x, jnp.linspace(0.0, 1.0, 3), p["layers"][0])

    return jnp.mean(jax.vmap(solve)(b["x"][:, 0]))


LINEAR_RULES = {
    "mask": of_values(ruled(lambda x: (x, x > 0), lambda mask, g: (g * mask,))),
    "chosen": of_values(ruled(lambda x: (x, x > 0), lambda mask, g: (jnp.where(mask, g, 0),))),
    "guided": of_values(
        ruled(lambda x: (jax.nn.relu(x), x), lambda x, g: (jax.nn.relu(g) * (g > 0) * (x > 0),))
    ),
    "reversed": of_values(passing(lambda g: -0.5 * g)),
    "straight through": of_values(ruled(lambda x: (jnp.round(x), None), lambda _, g: (g,))),
    "rounded weights": of_weights(
        ruled(lambda w: (jnp.round(w), jnp.abs(w).max()), lambda largest, g: (g * largest,))
    ),
    "decay": of_weights(ruled(lambda w: (w, w), lambda w, g: (g + 0.1 * w,))),
    "no gradient": of_values(passing(jnp.zeros_like)),
    "custom gradient": of_values(tripled),
    "tangents": lambda p, b: of_values(rounded)(p, b) + of_weights(sine)(p, b),
    "one by one": lambda p, b: jnp.mean(jax.lax.map(passing(lambda g: -g), logits(p, b)) ** 2),
    "layers": lambda p, b: jnp.mean(
        jax.lax.scan(
            jax.checkpoint(lambda x, w: (jnp.tanh(passing(lambda g: g / 2)(x @ w)), None)),
            b["x"],
            p["layers"],
        )[0]
    ),
    "attention": attention,
    "entropy": lambda p, b: ruled(entropy, entropy_backward)(b["x"].mean(1), p["out"], b["y"]),
    "table": lambda p, b: jnp.mean(
        ruled(lambda e, i: (e[i], (e, i)), looked_up_backward)(p["embed"], b["tokens"]) ** 2
    ),
    "convolved": lambda p, b: jnp.mean(
        through(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
        )(b["x"], p["filter"])
        ** 2
    ),
    "normalised": of_values(through(jax.nn.standardize)),
    "fixed point": fixed_point,
    "kernel": of_weights(
        ruled(lambda w: (doubled_in_a_kernel(w), None), lambda _, g: (doubled_in_a_kernel(g),))
    ),
    "of JAX and optax": jax_functions,
    "odeint": ordinary_equation,
}
OTHER_RULES = {
    "clipped": (of_values(passing(lambda g: jnp.clip(g, -1e-3, 1e-3))), "what that divides: max"),
    "clipped, of weights": (
        of_weights(passing(lambda g: jnp.clip(g, -1e-3, 1e-3))),
        "not linear .*: max",
    ),
    "clipped, one by one": (
        lambda p, b: jnp.mean(jax.lax.map(passing(lambda g: jnp.clip(g, -1, 1)), logits(p, b))),
        "not linear .*: max",
    ),
    "clipped, of a function of jax": (
        of_values(own_rule_of(jnp.positive)),
        "what that divides: max",
    ),
    "centred, of a function of jax": (of_values(own_jvp_of(jnp.positive)), "what was made of all"),
    "clipped, of a custom gradient": (of_values(clipped), "what that divides: max"),
    "clipped, in a rule": (of_values(through(clipped)), "what that divides: max"),
    "clipped, in an equation of odeint": (
        lambda p, b: ordinary_equation(p, b, clipped),
        "what that divides: max",
    ),
    "clipped, in a loop": (
        of_values(passing(lambda g: jax.lax.fori_loop(0, 3, lambda _, g: jnp.minimum(g, 1), g))),
        "what that divides: min",
    ),
    "halved until small": (
        of_values(passing(lambda g: jax.lax.while_loop(lambda g: g.sum() > 1, lambda g: g / 2, g))),
        "not linear .*: gt",
    ),
    "over its norm": (of_values(passing(lambda g: g / jnp.linalg.norm(g))), "not linear .*: sqrt"),
    "sign": (of_values(passing(jnp.sign)), "what it returns is not: custom_vjp_call"),
    "cast": (of_values(passing(lambda g: jnp.where(g.astype(bool), 1.0, 0.0))), "rounds .*"),
    "square": (of_values(passing(lambda g: g * g)), "what it returns is not: custom_vjp_call"),
    "constant": (of_values(passing(jnp.ones_like)), "what it returns is not: custom_vjp_call"),
    "activity": (
        of_values(ruled(lambda x: (x, x), lambda x, g: (g + 0.1 * x,))),
        "to what does not: add",
    ),
    "centred": (of_values(passing(lambda g: g - g.mean(0))), "with what was made of all: sub"),
    "centred tangents": (of_values(centred), "with what was made of all: "),
    "turned around": (of_values(passing(lambda g: g[::-1])), "joins examples.*: rev"),
    "times the largest": (
        of_values(ruled(lambda x: (x, jnp.abs(x).max()), lambda largest, g: (g * largest,))),
        "joins examples.*: reduce_max",
    ),
}
