"""Counts: what counts nothing is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest

from zerojax._arguments import as_amount, as_count

NO_NUMBERS = [True, False, None, "7", float("nan"), float("inf"), -float("inf"), 1j, [1]]


@pytest.mark.parametrize("value", [1, 64, 7.5e9, 1e12, 10**15, np.int64(3), np.float32(8)])
def test_whole_numbers_come_back_as_ints(value):
    count = as_count("num_params", value)
    assert count == value
    assert type(count) is int


@pytest.mark.parametrize(
    "value", [0, -1, -3.0, 0.5, 2.5, np.float32(1.5), np.int8(-1), *NO_NUMBERS]
)
def test_what_is_no_count_is_refused_in_one_line(value):
    with pytest.raises(ValueError, match=r"^num_params must be a whole number of at least 1, got "):
        as_count("num_params", value)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 12, np.float16(2)])
def test_amounts_may_have_fractions(value):
    amount = as_amount("grad_bytes", value)
    assert amount == value
    assert type(amount) is float


@pytest.mark.parametrize("value", [-1, -0.5, *NO_NUMBERS])
def test_what_is_no_amount_is_refused(value):
    with pytest.raises(
        ValueError, match=r"^grad_bytes must be a finite number of at least 0, got "
    ):
        as_amount("grad_bytes", value)


def test_zero_is_refused_where_nothing_is_no_answer():
    with pytest.raises(ValueError, match=r"^memory must be a finite number above 0, got 0$"):
        as_amount("memory", 0, above_zero=True)
