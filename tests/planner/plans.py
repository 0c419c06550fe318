"""Models to plan that are quick to trace, and what asks for plans of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from tests.planner.live_programs import shape
from zerojax import Placement, Recipe, RematPolicy, Workload, plan, search_plans

PA = RematPolicy(partition="model")
PA_CPU = RematPolicy(partition="model", offload=("layer_input",))
TX = optax.adam(1e-3)
WIDTH, TOKENS = 128, 64


def first_word(value):
    """Name a case by the first word of what is said of it; `None` is pytest's own name."""
    return value[0] if isinstance(value, list) else None


SHAPES = {"w": shape(512, 1024), "b": shape(1024)}  # all divide by 64
PSI = 512 * 1024 + 1024


def nouns(**options):
    """Put every option into the noun that has it: `accumulate=2` into a recipe."""
    for name, noun in (("recipe", Recipe), ("workload", Workload), ("placement", Placement)):
        fields = {field.name for field in dataclasses.fields(noun)} & set(options)
        if fields:
            options[name] = noun(**{field: options.pop(field) for field in fields})
    return options


def plan_shapes(params=SHAPES, tx=TX, **options):
    given = {"stage": 1, "num_devices": 8, "hardware": "h100", "precision": "bf16"} | options
    return plan(params, tx, **nouns(**given))


def mix(params, x):
    """Scanned layers [D, 4D] and back over examples [B, T, D], far quicker to trace than a GPT."""

    def layer(h, w):
        return h + jnp.sin(jnp.sin(h @ w["up"]) @ w["down"]), None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(jnp.sin(h @ params["head"]))


def mix_params(num_layers=4):
    stacked = {
        "up": shape(num_layers, WIDTH, 4 * WIDTH), "down": shape(num_layers, 4 * WIDTH, WIDTH),
    }  # fmt: skip
    return {"layers": stacked, "head": shape(WIDTH, WIDTH)}


def plan_mix(num_examples=16, *, num_layers=4, **options):
    batch = shape(num_examples, TOKENS, WIDTH, dtype=jnp.bfloat16)
    given = {"stage": 2, "num_devices": 8, "hardware": "h100", "precision": "bf16"}
    given |= {"loss_fn": mix, "batch": batch} | options
    return plan(mix_params(num_layers), TX, **nouns(**given))


ODD = {
    "layers": {"up": shape(5, 45, 77)},
    "head": shape(45, 46),
}  # 8 divides nothing: all is padded


def odd_mix(params, x):
    """Scanned layers [45, 77] and back over examples [B, T, 45]."""

    def layer(h, w):
        return h + jnp.sin(h @ w) @ jnp.sin(w).T, None

    h, _ = jax.lax.scan(layer, x, params["layers"]["up"])
    return jnp.mean(jnp.sin(h @ params["head"]))


def odd_batch(num_examples, tokens=64):
    return shape(num_examples, tokens, 45, dtype=jnp.bfloat16)


TRACED = {"params": ODD, "loss_fn": odd_mix, "batch": odd_batch(16 * 3)}


def find(**options):
    """Search on sixteen devices."""
    given = {"tx": TX, "num_devices": 16, "hardware": "h100", "precision": "bf16"}
    return search_plans(**nouns(**(given | options)))
