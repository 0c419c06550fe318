"""A plan counts what an optimizer that needs whole matrices moves and multiplies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import zerojax
from tests.planner.live_programs import shape
from zerojax.hlo import sum_moved

LAYERS, ROWS, COLUMNS, ITERATIONS = 12, 32, 64, 5
PARAMS = {"stack": shape(LAYERS, ROWS, COLUMNS), "norms": shape(LAYERS, COLUMNS)}
#: X X^T and B X take 2 m^2 k FLOPs each and A A takes 2 m^3, of m rows and k >= m columns.
FLOPS = ITERATIONS * 2 * ROWS**2 * (2 * COLUMNS + ROWS)


def muon():
    numbers = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return contrib.muon(
        1e-3,
        ns_steps=ITERATIONS,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda x: numbers if x.ndim == 3 else None, params
        ),
    )


def plan_of(tx, stage, num_devices=8, **options):
    return zerojax.plan(
        PARAMS, tx, stage=stage, num_devices=num_devices, hardware="h100", **options
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrices_go_to_owners_and_back(stage):
    """Of 12 matrices each of 8 devices owns one and 4 of them another: 16 places for 12."""
    plan, bare = plan_of(muon(), stage), plan_of(optax.adamw(1e-3), stage)
    places = 16 * ROWS * COLUMNS / 8  # that a device sends from, an 8th of each matrix
    own = (plan.volume - bare.volume) * plan.num_params
    assert own == pytest.approx(2 * places * 7 / 8)
    assert plan.flops == 2 * FLOPS  # the busiest device's
    assert plan.step_time > 0


def test_a_step_moves_what_is_planned(mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=2)

    def loss_fn(params, x):
        return jnp.mean((jnp.einsum("br,lrc->blc", x, params["stack"]) + params["norms"]) ** 2)

    report = zerojax.make_train_step(loss_fn, muon(), layout).audit(shape(16, ROWS))
    moved = sum_moved([x for x in report.collectives if x.op == "all-to-all"], "moved_elements")
    own = plan_of(muon(), 2).volume - plan_of(optax.adamw(1e-3), 2).volume
    assert moved / layout.num_params == pytest.approx(own)


def test_where_nothing_is_partitioned_every_device_multiplies_all():
    plan = plan_of(muon(), 0)
    assert plan.flops == LAYERS * FLOPS
    assert plan.volume == plan_of(optax.adamw(1e-3), 0).volume


@pytest.mark.parametrize(
    "tx",
    [
        optax.adafactor(1e-3),
        optax.lbfgs(),
        optax.polyak_sgd(),
        contrib.sophia(1e-3),
    ],
)
def test_other_optimizers_move_what_the_stage_does(tx):
    """L-BFGS asks for a function of the loss, and Polyak's rate for its value."""
    plan = plan_of(tx, 2)
    assert (plan.volume, plan.flops) == (plan_of(optax.adamw(1e-3), 2).volume, 0)
