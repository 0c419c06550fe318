"""What audits of programs for a GPU advise, and of what they say nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax

pytestmark = pytest.mark.aot("cuda")


def report_of(loss, shapes, stage, precision="fp32", **options):
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    layout = zerojax.make_layout(shapes, mesh, stage=stage)
    recipe = zerojax.Recipe(precision=precision)
    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout, recipe, **options)
    dtype = jnp.float32 if precision == "fp32" else jnp.bfloat16
    return step.audit(jax.ShapeDtypeStruct((4096, 256), dtype))


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_that_a_model_carries_are_no_gradients(stage):
    """Sums of a codebook's examples, in fp32, have the size of an eighth of a weight."""
    state = {"s": jax.ShapeDtypeStruct((256, 256), jnp.float32)}

    def loss(params, x, model_state):
        z = x + jax.nn.relu(x @ params["a"]) @ params["b"]
        found = jnp.argmin(z @ model_state["s"].astype(z.dtype), -1)
        sums = jnp.zeros((256, 256)).at[found].add(jax.lax.stop_gradient(z).astype(jnp.float32))
        new = {"s": 0.9 * model_state["s"] + 0.1 * sums}
        return jnp.mean(jnp.square(z - x[:, ::-1]).astype(jnp.float32)), new

    shapes = {"a": (256, 2048), "b": (2048, 256)}
    report = report_of(loss, shapes, stage, "bf16", model_state=state)
    assert "dtype" not in {problem.kind for problem in report.problems}


def test_what_a_shared_triangular_matrix_solves_is_solved_by_each_device():
    def solved(solve, params, x):
        lower = jnp.tril(params["l"], -1) * 0.1 + jnp.eye(256)
        return jnp.mean((jnp.tanh(solve(lower, x)) @ params["w"]) ** 2)

    def solve(lower, x):
        return jax.scipy.linalg.solve_triangular(lower, x.T, lower=True, unit_diagonal=True).T

    def apart(lower, x):
        return jax.shard_map(solve, in_specs=(P(), P("data")), out_specs=P("data"))(lower, x)

    shapes = {"l": (256, 256), "w": (256, 1024)}
    report = report_of(lambda *given: solved(solve, *given), shapes, 2)
    assert {problem.kind for problem in report.problems} == {"activation", "volume"}
    told = "jax.shard_map(solve, in_specs=(P(), P('data',)), out_specs=P('data',))"
    assert all(told in problem.remedy for problem in report.problems)
    assert report_of(lambda *given: solved(apart, *given), shapes, 2).problems == ()


def test_a_precision_that_is_set_is_not_advised():
    def loss(params, x):
        for name in "ab":
            w = params[name]
            least = jnp.quantile(jax.lax.stop_gradient(jnp.abs(w)).astype(jnp.float32), 0.5)
            x = x + jnp.tanh(x @ jnp.where(jnp.abs(w) >= least, w, 0))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    report = report_of(loss, {"a": (256, 256), "b": (256, 256)}, 3, "bf16")
    (found,) = [problem for problem in report.problems if problem.kind == "dtype"]
    assert "as it comes" in found.remedy
    assert "Precision(params" not in found.remedy
