"""Four processes learn what one learns, in every layout; a launch of four.py shows all of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.processes import four
from tests.processes.starting import once, run
from zerojax.checkpoint import restore


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return once(tmp_path_factory, "four", lambda x: run(four.__file__, x, "learn", count=4))


@pytest.fixture
def found(made):
    return made[1]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return once(tmp_path_factory, "copies", lambda x: run(four.__file__, x, "copies", count=4))[1]


@pytest.fixture(scope="module")
def alone():
    return four.train("stage 2")[0]["losses"]


def planned(name):
    """Give the bytes of parameters and of optimizer states that the layout promises."""
    counted = four.make_layout(name).bytes_per_device(four.TX)
    return [counted["parameters"], counted["optimizer"]]


@pytest.mark.parametrize("name", four.LAYOUTS)
def test_losses_are_those_of_one_process_and_bytes_as_planned(found, alone, name):
    for one in found:
        assert np.allclose(one["trained"][name]["losses"], alone, rtol=1e-6)
        assert one["trained"][name]["held"] == planned(name)


@pytest.mark.parametrize("name", ["stage 2", "stage 3", "hybrid"])
def test_a_loop_of_ones_own_learns_what_it_learns_in_one_process(found, name):
    own = four.own_loop("stage 2")["losses"]
    for one in found:
        assert np.allclose(one["own loop"][name]["losses"], own, rtol=1e-6)
        assert one["own loop"][name]["held"][0] == planned(name)[0]


@pytest.mark.parametrize(("name", "rtol"), [("bf16", 1e-2), ("fp16", 1e-2), ("clipped", 1e-6)])
def test_recipes_learn_what_they_learn_in_one_process(found, name, rtol):
    own = four.train("stage 3", four.RECIPES[name])[0]
    for one in found:
        assert np.allclose(one["recipes"][name]["losses"], own["losses"], rtol=rtol)
        assert one["recipes"][name]["held"] == own["held"]


def test_comparing_copies_keeps_no_program(found):
    """That of 232 leaves took 37 MB for as long as the process ran."""
    assert [one["kept"] for one in found] == [[]] * 4


def test_four_go_on_from_a_checkpoint_at_another_stage(found):
    _, step, state = four.train("stage 2")
    own = four.go_on(step, state)
    for one in found:
        assert np.allclose(one["going on"], own, rtol=1e-6)


@pytest.fixture(scope="module")
def first_loss():
    return four.go_on(*four.start("stage 2"))


def test_copies_on_the_hosts_are_gone_on_from_until_their_hosts_are_lost(copies, first_loss):
    """The second host of a hybrid layout has them; what all share is older."""
    for index, one in enumerate(copies):
        near = one["near"]
        assert near["hosts"] == ["2", "2"]
        assert near["whole"][:2] == [[2, {"next": 2}, {"by": "me"}, f"near.{index}"], []]
        assert near["lost"][:2] == [[1, None, {}, "near"], []]
        for case in ("whole", "lost", "other"):
            assert np.allclose(near[case][-1], first_loss, rtol=1e-6)


def test_copies_on_the_hosts_that_can_not_be_right_are_refused(copies):
    for one in copies:
        near = one["near"]
        assert "has a copy of step 2, and takes none of step 2" in near["late"][1]
        assert "no axis of the mesh {'host': 2, 'data': 2} holds copies" in near["wide"][1]
        (told, (passed_over,), _) = near["other"]
        assert told[0] == 1
        assert "was saved under another layout" in passed_over


def test_a_service_may_bring_a_host_what_its_peer_has_saved(copies, first_loss):
    """Multi-tier checkpointing: each host has its own part, and all are needed."""
    for index, one in enumerate(copies):
        tiers = one["tiers"]
        for case in ("whole", "copied"):
            assert tiers[case][:2] == [[2, None, {}, f"tiers.{index}"], []]
        assert tiers["lost"][0] == [1, None, {}, "tiers"]
        assert len(tiers["lost"][1]) == 2 * (index != 3)  # of those that some have
        for case in ("whole", "copied", "lost"):
            assert np.allclose(tiers[case][-1], first_loss, rtol=1e-6)


def test_one_process_restores_what_four_saved(made):
    step = four.make_step("hybrid")
    back = restore(made[0] / "saved", step.layout, step.abstract_state())
    _, _, state = four.train("stage 2")
    for x, y in zip(*map(jax.tree.leaves, (back.params, state.params)), strict=True):
        assert np.allclose(x[: y.shape[0]], y[: x.shape[0]], rtol=1e-5, atol=1e-6)
