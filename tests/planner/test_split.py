"""A product is made in as many parts as XLA:GPU makes it in."""

from __future__ import annotations

import pytest

from zerojax.planner.traced._split import is_padded, num_parts

#: Products of two bf16 matrices [m, k] x [k, n], and their parts in steps compiled for h100:1x8 by
#: jax 0.10.2: gpt-6-640-72821-128-list of scripts/planned at stage 2, 1 x 2, and its mlp, 1 x 64.
SEEN = {
    (256, 640, 1920): 2,
    (256, 640, 640): 4,
    (256, 640, 2560): 1,
    (256, 2560, 640): 8,
    (256, 72821, 640): 16,
    (256, 1920, 640): 8,
    (2560, 256, 640): 1,
    (640, 256, 640): 1,
    (256, 640, 72821): 1,
    (64, 4096, 4096): 8,
    (4096, 64, 4096): 1,
}


@pytest.mark.parametrize(("m", "k", "n"), SEEN)
def test_parts_are_those_of_compiled_programs(m, k, n):
    assert num_parts(m, n, k, 1, 2) == SEEN[m, k, n]


def test_the_products_of_a_batch_are_tiles_too():
    assert num_parts(128, 128, 64, 20, 2) == 1
    assert num_parts(256, 640, 2560, 1, 2) > num_parts(256, 640, 2560, 64, 2)


def test_parts_are_of_one_size():
    assert [is_padded(k, 16) for k in (72_821, 72_832, 50_304)] == [True, False, False]
    assert not is_padded(50_257, 1)
