"""Losses that are means over examples, and some that are none, with what is said of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import zerojax

EXAMPLES, TOKENS, WIDTH, CLASSES = 16, 6, 8, 5
KEY = jax.random.key(0)
NUMBERS = jnp.arange(EXAMPLES * TOKENS).reshape(EXAMPLES, TOKENS)
PARAMS = {
    "embed": jax.random.normal(KEY, (CLASSES, WIDTH)),
    "layers": jax.random.normal(jax.random.fold_in(KEY, 1), (3, WIDTH, WIDTH)) * 0.3,
    "out": jax.random.normal(jax.random.fold_in(KEY, 2), (WIDTH, CLASSES)),
    "filter": jax.random.normal(jax.random.fold_in(KEY, 3), (3, WIDTH, WIDTH)),
}
BATCH = {
    "x": jax.random.normal(jax.random.fold_in(KEY, 4), (EXAMPLES, TOKENS, WIDTH)),
    "tokens": jax.random.randint(jax.random.fold_in(KEY, 5), (EXAMPLES, TOKENS), 0, CLASSES),
    "y": jax.random.randint(jax.random.fold_in(KEY, 6), (EXAMPLES,), 0, CLASSES),
    "mask": (NUMBERS % 7 > NUMBERS % 4).astype(jnp.float32),
    "weights": zerojax.Whole(jnp.arange(1.0, 1 + CLASSES)),
    "key": jax.random.key(9),
}
entropy = optax.softmax_cross_entropy_with_integer_labels


def printed(p, b):
    """Print the mean over all examples, or over those of a device."""
    loss = jnp.mean((b["x"] @ p["out"]) ** 2)
    jax.debug.callback(lambda _: None, loss)
    return loss


def logits(p, b):
    return b["x"].mean(1) @ p["out"]


def grouped(z):
    return z.reshape((-1, 8, CLASSES) if z.shape[1] >= EXAMPLES else z.shape[1:])


def scaled(x, weight):
    return jnp.mean(x * weight + x * 2.0 if len(x) > EXAMPLES // 4 else x * 2.0 + x * weight)


def layers(p, b):
    x, _ = jax.lax.scan(
        jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), b["x"], p["layers"]
    )
    return x


def attention(p, b):
    scores = jnp.einsum("btd,bsd->bts", b["x"], b["x"])
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS))) > 0, scores, -1e9)
    heads = jax.nn.softmax(scores).reshape(-1, TOKENS) @ b["x"].reshape(-1, WIDTH)[:TOKENS] * 0
    return jnp.mean((jax.nn.softmax(scores) @ b["x"]) ** 2) + 0 * heads.sum()


def steps(p, b):
    """Index the time of all examples in a loop: its 0 of their dim is `select_n (0 < 0) 0 n`."""
    _, out = jax.lax.scan(lambda _, t: (None, b["x"][:, t] @ p["out"]), None, jnp.arange(TOKENS))
    return jnp.mean(out**2)


def heads(p, b):
    x = b["x"].reshape(*b["x"].shape[:2], 2, -1)
    q = x.transpose(0, 2, 1, 3).reshape(-1, TOKENS, WIDTH // 2)
    mixed = jax.nn.softmax(q @ q.swapaxes(1, 2)) @ q
    mixed = mixed.reshape(-1, 2, TOKENS, WIDTH // 2).transpose(0, 2, 1, 3)
    return jnp.mean((mixed.reshape(b["x"].shape) @ p["layers"][0]) ** 2)


def recurrent(p, b):
    """Go through time-major tokens, a row per example carried, and add the errors up."""

    def step(carry, inputs):
        hidden, total = carry
        x, mask = inputs
        hidden = jnp.tanh(hidden @ p["layers"][0] + x)
        return (hidden, total + jnp.mean(mask[:, None] * hidden**2)), hidden

    start = (jnp.zeros_like(b["x"][:, 0]), 0.0)
    (_, total), states = jax.lax.scan(step, start, (b["x"].swapaxes(0, 1), b["mask"].T))
    flat = states.reshape(-1, WIDTH) @ p["layers"][1]  # [tokens * examples, width]
    return total + jnp.mean(flat.reshape(states.shape) * states)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def convolved(p, b):
    out = jax.lax.conv_general_dilated(
        b["x"], p["filter"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.mean(jax.nn.relu(out).max(1))


def rotated(x):
    """Turn pairs of features, as rotary embeddings do."""
    a, b = jnp.unstack(x.reshape(*x.shape[:-1], -1, 2), axis=-1)
    cos = jnp.tile(jnp.cos(jnp.arange(TOKENS))[:, None], (1, WIDTH // 2))
    return jnp.stack([a * cos - b, b * cos + a], axis=-1).reshape(x.shape)


def solved(p, b):
    """Systems of each example's matrix, and of one matrix with an example per column."""
    x, shared = b["x"], p["layers"][0] + 4 * jnp.eye(WIDTH)
    each = jnp.einsum("bti,btj->bij", x, x) + 9 * jnp.eye(WIDTH)
    inverse = jnp.linalg.inv(jnp.linalg.cholesky(each)) @ jnp.linalg.solve(each, x.swapaxes(1, 2))

    def conjugate(a, y):
        return jax.scipy.sparse.linalg.cg(lambda v: a @ (a.T @ v) + v, y, maxiter=2)[0]

    right = jax.lax.linalg.triangular_solve(shared, x[:, 0], left_side=False)
    columns = jnp.linalg.solve(shared, x[:, 0].T).T + right
    return jnp.mean(inverse**2) + jnp.mean(columns * jax.vmap(conjugate)(each, x[:, 0]))


def routed(p, b):
    """Sort the tokens of each example by their expert, and multiply them in groups."""
    x, count = b["x"], len(p["layers"])
    experts = jnp.argmax(x @ p["out"], -1) % count

    def grouped(x, experts, weights):
        order = jnp.argsort(experts)
        sums = jax.ops.segment_sum(x, experts, num_segments=count)
        rows = jax.lax.ragged_dot(x[order], weights, jnp.bincount(experts, length=count))
        return jnp.zeros_like(x).at[order].set(rows) + sums[experts]

    weights = jnp.broadcast_to(p["layers"], (len(x), *p["layers"].shape))
    one_by_one = jax.lax.map(lambda given: grouped(*given, p["layers"]), (x, experts))
    return jnp.mean((jax.vmap(grouped)(x, experts, weights) + one_by_one) ** 2)


MEANS = {
    "steps": steps,
    "labels": lambda p, b: entropy(logits(p, b), b["y"]).mean(),
    "tokens": lambda p, b: entropy(p["embed"][b["tokens"]] @ p["out"], b["tokens"]).mean(),
    "flat tokens": lambda p, b: entropy(
        (b["x"] @ p["out"]).reshape(-1, CLASSES), b["tokens"].reshape(-1)
    ).mean(),
    "one hot": lambda p, b: optax.softmax_cross_entropy(
        logits(p, b), jax.nn.one_hot(b["y"], CLASSES)
    ).mean(),
    "picked by position": lambda p, b: (
        -jax.nn.log_softmax(logits(p, b))[jnp.arange(len(b["y"])), b["y"]].mean()
    ),
    "along an axis": lambda p, b: (
        -jnp.take_along_axis(jax.nn.log_softmax(logits(p, b)), b["y"][:, None], 1).mean()
    ),
    "mean of means": lambda p, b: jnp.mean(jnp.mean((b["x"] @ p["out"]) ** 2, axis=(1, 2))),
    "sum over the count": lambda p, b: jnp.sum((b["x"] @ p["out"]) ** 2) / (2 * b["x"].shape[0]),
    "scaled before the sum": lambda p, b: jnp.sum((b["x"] @ p["out"]) ** 2 / len(b["x"])),
    "dot with itself": lambda p, b: jnp.vdot(logits(p, b), logits(p, b)) / len(b["y"]),
    "a constant mask": lambda p, b: (
        jnp.sum(b["mask"] * (b["x"] @ p["out"]).sum(-1)) / 1.0 / b["mask"].size
    ),
    "masked per example": lambda p, b: jnp.mean(
        (b["mask"] * (b["x"] ** 2 @ p["out"]).sum(-1)).sum(1) / b["mask"].sum(1)
    ),
    "vmapped": lambda p, b: jax.vmap(lambda x, y: entropy(x.mean(0) @ p["out"], y))(
        b["x"], b["y"]
    ).mean(),
    "layers": lambda p, b: jnp.mean(layers(p, b) ** 2),
    "heads": heads,
    "recurrent": recurrent,
    "convolved": convolved,
    "custom derivative": lambda p, b: jnp.mean(doubled(b["x"] @ p["out"]) ** 2),
    "dropout": lambda p, b: jnp.mean(
        (jax.random.bernoulli(b["key"], 1.0, b["x"].shape) * b["x"]) @ p["out"]
    ),
    "keys of examples": lambda p, b: jnp.mean(
        jax.vmap(lambda k, x: jax.random.bernoulli(k, 1.0, x.shape) * x)(
            jax.random.split(b["key"], len(b["x"])), b["x"]
        )
        @ p["out"]
    ),
    "searched": lambda p, b: jnp.mean(
        jax.vmap(jnp.searchsorted)(b["mask"].cumsum(1), b["x"][:, 0, 0]) * logits(p, b)[:, 0]
    ),
    "printed": printed,
    "class weights": lambda p, b: jnp.mean(b["weights"][b["y"]] * entropy(logits(p, b), b["y"])),
    "penalty": lambda p, b: (
        jnp.mean((b["x"] @ p["out"]) ** 2) + 0.1 * jnp.sum(p["out"] ** 2) ** 0.5
    ),
    "two losses": lambda p, b: (
        0.3 * jnp.mean(b["x"] @ p["out"]) - entropy(logits(p, b), b["y"]).mean() * p["out"].mean()
    ),
    "layer norm": lambda p, b: jnp.mean((jax.nn.standardize(b["x"]) @ p["out"]) ** 2),
    "sorted classes": lambda p, b: jnp.mean(
        jnp.sort(logits(p, b), -1)[:, -2:] + jax.lax.top_k(logits(p, b), 2)[0]
    ),
    "shifted tokens": lambda p, b: jnp.mean(
        (b["x"][:, 1:] - jnp.pad(b["x"], ((0, 0), (1, 0), (0, 0)))[:, 1:-1]) @ p["out"]
    ),
    "written in place": lambda p, b: jnp.mean(b["x"].at[:, 0].set(0.0) @ p["out"]),
    "branch": lambda p, b: jax.lax.cond(
        p["out"].sum() > 0, lambda x: x.mean(), lambda x: 2 * x.mean(), b["x"] @ p["out"]
    ),
    "loop": lambda p, b: jnp.mean(
        jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["layers"][i]), b["x"])
    ),
    "one by one": lambda p, b: jnp.mean(jax.lax.map(lambda x: jnp.tanh(x @ p["out"]), b["x"])),
    "rotated": lambda p, b: jnp.mean(rotated(b["x"]) @ p["out"]),
    "stacked losses": lambda p, b: jnp.sum(
        jnp.stack([jnp.mean(b["x"] @ p["out"]), jnp.mean(b["x"] ** 2)])
    ),
    "spectra": lambda p, b: jnp.mean(jnp.abs(jnp.fft.rfft(b["x"] @ p["out"], axis=1)) ** 2),
    "solved": solved,
    "routed": routed,
    "no examples": lambda p, b: jnp.sum(p["out"] ** 2),
}
OTHERS = {
    "a sum": (lambda p, b: jnp.sum((b["x"] @ p["out"]) ** 2), "grows with the number of examples"),
    "a sum and a mean": (
        lambda p, b: jnp.sum(b["x"] @ p["out"]) + p["out"].mean(),
        "to what does not: add",
    ),
    "masked mean": (
        lambda p, b: jnp.sum(b["mask"] * (b["x"] @ p["out"]).sum(-1)) / jnp.sum(b["mask"]),
        "made of all examples: div",
    ),
    "mean where": (
        lambda p, b: jnp.mean(b["x"] @ p["out"], where=b["mask"][..., None] > 0),
        "made of all examples: div",
    ),
    "batch norm": (
        lambda p, b: jnp.mean((b["x"] - b["x"].mean(0)) @ p["out"]),
        "with what was made of all: ",
    ),
    "variance": (lambda p, b: jnp.var(b["x"] @ p["out"]), "with what was made of all: "),
    "root of a mean": (
        lambda p, b: jnp.sqrt(jnp.mean((b["x"] @ p["out"]) ** 2)),
        "not linear .*: sqrt",
    ),
    "log of a mean": (
        lambda p, b: jnp.log(jnp.mean(jnp.exp(b["x"] @ p["out"]))),
        "not linear .*: log",
    ),
    "square of a mean": (
        lambda p, b: jnp.mean(b["x"] @ p["out"]) ** 2,
        "not linear .*: (square|integer_pow)",
    ),
    "square of a mean, in the next turn of a loop": (
        lambda p, b: jax.lax.fori_loop(0, 3, lambda i, m: m * m + jnp.mean(logits(p, b)), 0.0),
        "not linear.*: mul",
    ),
    "product of means": (
        lambda p, b: jnp.mean(b["x"] @ p["out"]) * jnp.mean(b["x"]),
        "not linear .*: mul",
    ),
    "largest": (lambda p, b: jnp.max(b["x"] @ p["out"]), "joins examples.*: reduce_max"),
    "sorted examples": (
        lambda p, b: jnp.mean(jnp.sort(logits(p, b), 0)[:4]),
        "joins examples.*: sort",
    ),
    "solved with a matrix of all": (
        lambda p, b: jnp.mean(jnp.linalg.solve(jnp.cov(b["x"][:, 0].T), p["layers"][0])),
        "made of all",
    ),
    "tokens of all examples, sorted": (
        lambda p, b: jnp.mean(b["x"].reshape(-1, WIDTH)[jnp.argsort(b["tokens"].reshape(-1))]),
        "place of examples in the batch: sort",
    ),
    "contrastive": (
        lambda p, b: entropy(logits(p, b) @ logits(p, b).T, jnp.arange(len(b["y"]))).mean(),
        "joins examples with each other: dot_general",
    ),
    "distances": (
        lambda p, b: jnp.mean((logits(p, b)[:, None] - logits(p, b)[None]) ** 2),
        "joins examples with each other",
    ),
    "grouped where there are many": (
        lambda p, b: jnp.mean(grouped(logits(p, b)[None]) ** 2),
        "another program for another number of examples: reshape",
    ),
    "a weight where there are many": (
        lambda p, b: scaled(b["x"], p["out"][0, 0]),
        "another program for another number of examples: mul",
    ),
    "neighbours": (
        lambda p, b: jnp.mean(jnp.roll(logits(p, b), 1, 0) * logits(p, b)),
        "at a number of examples that is fixed",
    ),
    "other order": (
        lambda p, b: jnp.mean(
            (b["x"][..., 0].T.reshape(-1) * b["mask"].reshape(-1)) * p["out"].sum()
        ),
        "in another order",
    ),
    "half of them": (
        lambda p, b: jnp.mean((b["x"] @ p["out"])[: len(b["x"]) // 2]),
        "joins examples.*slice",
    ),
    "the first": (
        lambda p, b: jnp.mean(b["x"][0] @ p["out"]),
        "at a number of examples that is fixed",
    ),
    "by number": (
        lambda p, b: jnp.mean(b["x"][b["y"]] @ p["out"]),
        "picks examples by their number: add",
    ),
    "the first in the place of those that a mask names": (
        lambda p, b: jnp.mean(
            logits(p, b)[jnp.where(b["mask"][:, 0] > 0, jnp.arange(len(b["y"])), 0)]
        ),
        "picks examples by their number: select_n",
    ),
    "their own number and a multiple of what they have": (
        lambda p, b: jnp.mean(
            logits(p, b)[jnp.arange(len(b["y"])) + len(b["y"]) * b["y"], jnp.zeros_like(b["y"])]
        ),
        "place of examples in the batch: add",
    ),
    "position": (
        lambda p, b: jnp.mean(logits(p, b) * jnp.arange(len(b["y"]))[:, None]),
        "place of examples",
    ),
    "position in a table": (
        lambda p, b: jnp.mean(logits(p, b) + p["embed"][jnp.arange(len(b["y"]))].sum()),
        "joins examples|place of",
    ),
    "running mean": (
        lambda p, b: jnp.mean(jnp.cumsum(logits(p, b), 0)),
        "joins examples.*: cumsum",
    ),
    "repeated": (lambda p, b: jnp.mean(jnp.tile(logits(p, b), (2, 1))), "joins examples.*: tile"),
    "spectrum of the batch": (
        lambda p, b: jnp.mean(jnp.abs(jnp.fft.fft(logits(p, b), axis=0))),
        "joins examples.*: fft|in another order",
    ),
    "a list of examples": (
        lambda p, b: jnp.unstack(logits(p, b))[0].mean(),
        "one by one: unstack",
    ),
    "the count": (
        lambda p, b: jnp.mean(logits(p, b)) / jnp.log(len(b["y"])),
        "grows with|computes with the number",
    ),
    "a running sum": (
        lambda p, b: jax.lax.scan(lambda c, x: (jnp.tanh(c + x.sum()), None), 0.0, b["x"])[0],
        r"one after the other \(for chunks cut what each example has.*: scan",
    ),
    "one by one, with all": (
        lambda p, b: jnp.mean(jax.lax.map(lambda x: x * jnp.exp(jnp.mean(b["x"])), b["x"])),
        "not linear in what was made of all|joins single examples",
    ),
    "a constant key": (
        lambda p, b: jnp.mean(
            (jax.random.normal(jax.random.key(0), b["x"].shape) * b["x"]) @ p["out"]
        ),
        "its noise is of a key that is the same",
    ),
    "gamma noise of a constant key": (
        lambda p, b: jnp.mean(jax.random.gamma(jax.random.key(0), jnp.exp(b["x"])) @ p["out"]),
        "its noise is of a key that is the same.*: random_gamma",
    ),
    "a fixed batch": (
        lambda p, b: jnp.mean(b["x"].reshape(2, TOKENS, WIDTH) @ p["out"]),
        "can't be traced for 4 examples",
    ),
    "segments": (
        lambda p, b: jnp.mean(jax.ops.segment_sum(logits(p, b), b["y"], CLASSES) ** 2),
        "joins examples|made of all",
    ),
    "parts of the batch": (
        lambda p, b: jnp.mean(jnp.max((b["x"] @ p["out"]).reshape(2, -1, CLASSES), 1)),
        "cuts the batch into parts|another program",
    ),
    "chunks of the batch": (
        lambda p, b: jnp.mean(jax.lax.map(lambda x: x @ p["out"], b["x"], batch_size=2)),
        r"into parts of several examples \(for chunks cut what each example .* without batch_size",
    ),
}
