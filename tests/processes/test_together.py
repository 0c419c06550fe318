"""Two processes train, agree and save as one does; one run of child.py shows all of it."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from tests.processes import child
from tests.processes.starting import COUNT, once, run
from zerojax.checkpoint import restore, verify
from zerojax.layout import STAGES

#: What the message of each way to differ names: what it is, and both values.
NAMED = {
    "optimizer": ("optimizer", "ScaleByAdamState", "TraceState"),
    "rate": ("program", "dense<-0.00999999977>", "dense<-1.000000e-01>"),
    "seed": ("arguments", "[0, 0]", "[0, 7]"),
    "initial parameters": ("arguments", "b: float32[64], CRC-32 "),
    "batch": ("batch", "x: float32[16, 64]", "x: float32[32, 64]"),
    "table": ("leaf 'batch/table/value'", "checksum"),
    "scalar": ("batch", "scale: float32[] = 1.0", "scale: float32[] = 2.0"),
    "accumulate": ("recipe", '"accumulate": 1', '"accumulate": 2'),
    "precision": ("recipe", '"params": null', '"params": "bfloat16"'),
    "stage": ("layout", "stage 2 over", "stage 3 over"),
    "mesh": ("layout", "{'data': 2, 'model': 2}", "{'model': 2, 'data': 2}"),
    "order": ("layout", "devices [0, 1, ", "devices ["),
    "loss": ("program", "dense<1.000000e+00>", "dense<2.000000e+00>"),
    "code": ("program", "stablehlo.abs"),
    "copies": ("leaf 'state/params/b'", "checksum"),
    "jax": ("versions", "jax ", "jax 0.9.9"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def make(folder):
        return run(child.__file__, folder, "together", 50)

    return once(tmp_path_factory, "together", make)


@pytest.fixture
def folder(made):
    return made[0]


@pytest.fixture
def found(made):
    return made[1]


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_one_process_and_bytes_as_planned(found, stage):
    alone = child.learn(stage)["losses"]
    planned = child.make_step(stage).layout.bytes_per_device(optax.adamw(1e-2))
    for one in found:
        learned = one["learn"][stage]
        assert np.allclose(learned["losses"], alone, rtol=1e-6)
        assert learned["held"]["params"] == 2 * planned["parameters"], "of two devices"
        assert learned["held"]["opt_state"] == 2 * planned["optimizer"]


def test_a_model_axis_copies_per_host_and_accumulation_change_no_loss(found):
    alone = child.learn(2)["losses"]
    for one in found:
        for other in ("model axis", "hybrid", "accumulated", "once"):
            assert np.allclose(one[other]["losses"], alone, rtol=1e-6)
        assert one["hybrid"]["held"]["params"] == 2 * one["accumulated"]["held"]["params"]


def test_gloo_is_asked_for_no_reduce_scatter(found):
    """It polls for what arrives early, beside the computation that it waits for."""
    assert "all-reduce(" in found[0]["program of once"]
    assert "reduce-scatter" not in found[0]["program of once"]


def test_joined_gathers_are_fewer_messages_and_change_no_bit(found):
    """Of both matrices in the forward pass, and of the one that the backward pass multiplies."""
    for one in found:
        assert one["learn"][3]["losses"] == one["apart"]["losses"]
        counts = [text.count(" all-gather(") for text in one["programs of stage 3"]]
        assert counts == [3, 4]


def test_processes_that_hold_the_same_rows_place_the_same_part(found):
    for index, one in enumerate(found):
        assert one["parts"] == [[index, 2], [index, 2], [0, 1]]


@pytest.mark.parametrize("way", child.WAYS)
def test_processes_that_differ_are_refused_before_the_first_update(found, way):
    kind, text, seconds = found[0]["ways"][way]
    assert kind == "ProcessesDifferError"
    for named in NAMED[way]:
        assert named in text
    assert "process 0 has" in text
    assert "process 1 has" in text
    assert [one["ways"][way][:2] for one in found] == [[kind, text]] * COUNT, "told by all"
    assert seconds < 60


def test_processes_that_go_elsewhere_are_told_where(found):
    for one in found:
        kind, text, _ = one["elsewhere"]
        assert kind == "ProcessesDifferError"
        assert "process 0 came to 'save', process 1 came to 'step.init'" in text


def test_a_mesh_of_one_process_is_its_own_affair(found):
    assert found[0]["alone"] != found[1]["alone"]


def test_rows_that_cannot_be_placed_are_refused(found):
    for one in found:
        assert "'x' has 6 examples, and needs a multiple of 4" in one["uneven"][1]
        assert "step(state, step.place(batch))" in one["not placed"][1]


def test_processes_that_all_hand_over_the_whole_batch_are_told(found):
    for one in found:
        own, whole = one["own rows and the whole batch"]
        assert own == []
        (told,) = whole
        assert "all processes hand over the same rows: write step.place(x[index::count])" in told


def test_arrays_that_are_placed_already_are_told(found):
    for one in found:
        assert "is placed already: hand it to the step" in one["placed twice"][1]


def test_a_process_without_a_device_in_the_mesh_is_told_at_once(found):
    trained, restored = zip(*(one["left out"] for one in found), strict=True)
    assert trained[0][0] == "nothing", "a mesh of one process is its own affair"
    for kind, text, seconds in (trained[1], restored[1]):
        assert kind == "ValueError"
        assert text == "process 1 has no device in the mesh; make it of jax.devices()"
        assert seconds < 30
    assert "process 1 has no device in the mesh" in restored[0][1]


def test_weights_are_written_by_one_process_and_read_from_one_file(found):
    for one in found:
        kind, text, _ = one["files"]["again"]
        assert kind == "FileExistsError"
        assert text.endswith("and write it on process 0 of the 2")
        kind, text, _ = one["files"]["differ"]
        assert kind == "ProcessesDifferError"
        assert "w: float32[64, 64] that begins with CRC-32" in text
        assert one["files"]["read"] == sorted(child.SHAPES)


def test_a_save_to_a_folder_that_is_not_shared_fails_on_all(folder, found):
    for index, one in enumerate(found):
        kind, text, _ = one["unshared"]
        assert kind == ("ProcessError", "FileNotFoundError")[index]
        assert "saved is not the folder that process 0 writes to" in text
        assert not (folder / f"own.{index}/saved/checkpoint.json").exists()


@pytest.mark.parametrize("failure", child.FAILURES)
def test_a_save_that_fails_on_one_process_fails_on_all(found, failure):
    _, _, failing, index = child.FAILURES[failure]
    error = "PermissionError" if failing is child.denied else "OSError"
    reason = "Permission denied" if failing is child.denied else "No space left on device"
    for number, one in enumerate(found):
        kind, text, seconds = one["saves"][failure]
        assert kind == (error if number == index else "ProcessError")
        assert reason in text
        assert number == index or f"process {index} failed" in text
        assert seconds < 60


def test_after_failures_the_last_checkpoint_is_whole_and_the_next_is_saved(folder, found):
    for one in found:
        assert one["saves"]["steps"] == [1]
        assert one["saves"]["latest"] == 99
        assert one["saves"]["is_same"]
        assert "'\"next\": 0'; process 1 has '\"next\": 1'" in one["saves"]["data"][1]
    assert verify(folder / "run/1").step == 1


def test_one_process_restores_what_two_saved(folder):
    step = child.make_step(3)
    back = restore(folder / "run/99", step.layout, step.abstract_state())
    assert np.allclose(back.params["w"], child.init(jax.random.key(0))["w"], rtol=1e-6)
