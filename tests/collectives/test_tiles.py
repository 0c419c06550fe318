"""In which order of its dims a TPU holds an array; tests/aot has what libtpu makes of it."""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.collectives.forms import as_state
from zerojax.collectives.forms._tiles import _padded_least


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((11822, 1728), [1, 0]),
        ((7693, 448), [1, 0]),
        ((50257, 96), [1, 0]),
        ((64, 12), [1, 0]),
        ((216, 1728), [0, 1]),
        ((30001, 256), [0, 1]),
        ((320, 320), [0, 1]),
        ((12, 1728, 648), [0, 2, 1]),
        ((3, 64, 1000, 20), [0, 3, 1, 2]),
        ((64, 64, 3, 3), [2, 3, 0, 1]),
        ((3, 3, 64, 64), [0, 1, 2, 3]),
    ],
)
def test_the_order_is_libtpus(shape, order):
    """Of arguments of programs compiled for v5p:2x2x2 and v6e:2x4 (libtpu 0.0.43)."""
    assert _padded_least(shape) == order


@pytest.mark.parametrize(
    ("platform", "shape", "stage", "num_turned"),
    [
        ("tpu", (2008, 192), 0, 1),  # held by columns, reduced in order
        ("tpu", (16024, 192), 3, 1),  # [2003, 192]
        ("tpu", (2008, 192), 3, 0),  # [251, 192]: small
        ("tpu", (16001, 192), 3, 0),  # [16001, 24]: reduced by columns already
        ("tpu", (16384, 256), 3, 0),  # held in order
        ("tpu", (16001, 193), 3, 0),  # padded: no shards of equal size
        ("tpu", (2**22,), 3, 0),
        ("gpu", (16024, 192), 3, 0),
        ("cpu", (2008, 192), 0, 0),
    ],
)
def test_a_gradient_is_held_as_its_states(platform, shape, stage, num_turned, mesh8, monkeypatch):
    layout = zerojax.make_layout({"w": jnp.ones(shape)}, mesh8, stage=stage, min_size=16)
    monkeypatch.setattr(type(layout), "platform", platform)
    (leaf,) = layout.leaves
    program = jax.make_jaxpr(lambda x: as_state(x, leaf, layout))(jnp.ones(shape))
    assert str(program).count("layout_constraint") == 2 * num_turned
