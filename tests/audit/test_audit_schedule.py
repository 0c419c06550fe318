"""What a step waits for, as scheduled: the clock, and the problem of what loops wait for."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console

import zerojax
from tests.hlo.programs import text_of
from zerojax.audit import Program
from zerojax.audit._audit import schedule_table
from zerojax.audit._evidence import TOOLS, Evidence
from zerojax.audit._schedule import Clock, schedule_of
from zerojax.audit.checks._traffic import check_exposed
from zerojax.hardware import HARDWARE
from zerojax.hlo import Cost, Operation
from zerojax.planner import Transfer

SHAPES = {"down": (6, 4096, 1024), "up": (6, 1024, 4096)}  # of scripts/golden's scan
LAYER = 4096 * 1024 * 2  # bytes of a matrix of one layer
KINDS = {"v6e": "TPU v6 lite", "v5p": "TPU v5", "h100": "NVIDIA H100 80GB HBM3"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """Stand in for a device that you don't have."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0


def evidence_of(target, kind=None, stage=3, text=None, prefetch=None, axes=(("data", 8),)):
    platform = "gpu" if target == "h100" else "tpu"
    places = np.ndindex((2, 2, 2) if target == "v5p" else (2, 4, 1))
    chips = [Chip(i, platform, kind or KINDS[target], place) for i, place in enumerate(places)]
    layout = zerojax.make_layout(
        {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in SHAPES.items()},
        Mesh(np.array(chips).reshape([size for _, size in axes]), [name for name, _ in axes]),
        stage=stage,
        rules=(zerojax.Rule(path=".", stacked=1),),
    )
    program = Program(
        text=text or text_of(f"jax-0.10.2/scan.{target}"),
        platform=platform,
        device_ids=tuple(range(8)),
        statistics={},
        inputs=(),
        outputs=(),
    )
    return Evidence(program, layout, zerojax.Recipe(accumulate=3, prefetch=prefetch))


def work(name, seconds):
    return Operation(name=name, op_name="", source="", cost=Cost(cycles=seconds))


def gather(name, ends=""):
    key = ("main", name, ())
    return Operation(name=name, op_name="", source="", cost=Cost(), begins=(key,), ends=ends)


def done(start):
    return Operation(name=f"{start}-done", op_name="", source="", cost=Cost(), ends=start)


def loop(times, *body):
    return Operation(
        name="while", op_name="", source="", cost=Cost(), times=times, bodies=(tuple(body),)
    )


def run(*operations, links=lambda one: ("fast",)):
    """Run the clock, with 3 s of links for each gather."""
    clock = Clock(lambda cost: float(cost.cycles), lambda one: Transfer(3.0, links(one)))
    clock.run(operations)
    assert clock.now == clock.work + clock.exposed
    return clock


def test_collectives_on_the_same_links_share_the_work_beside_them():
    both = (gather("a"), gather("b"), work("x", 4), done("a"), done("b"))
    assert run(*both).exposed == 2.0
    assert run(*both, links=lambda one: (one.name,)).exposed == 0.0  # links of their own
    assert run(gather("a", ends="a"), work("x", 4)).exposed == 3.0  # it blocks
    assert run(gather("a"), work("x", 1), done("a")).exposed == 2.0


def test_a_loop_waits_in_each_of_its_turns():
    turn = (gather("a"), work("x", 1), done("a"))
    for times in (0, 1, 2, 5):
        clock = run(loop(times, *turn))
        assert (clock.exposed, clock.work, clock.now) == (2.0 * times, times, 3.0 * times)
    nested = run(loop(4, loop(5, *turn)), work("y", 7))
    assert nested.exposed == 40.0
    (tally,) = nested.tallies.values()
    assert tally.runs[-1][1] < tally.until == 60.0, "all turns, of which two of each are kept"
    # What is issued before the loop moves beside its first turns.
    clock = run(gather("b"), loop(5, work("x", 1)), done("b"))
    assert clock.exposed == 0.0


def test_of_a_conditional_the_longer_branch_is_taken():
    branches = Operation(
        name="c",
        op_name="",
        source="",
        cost=Cost(),
        bodies=((work("x", 2),), (gather("a", ends="a"),)),
    )
    assert run(branches).now == 3.0


@pytest.mark.parametrize("target", ["v6e", "v5p"])
def test_a_synchronous_reduction_in_the_layer_loop_is_a_problem(target):
    """A reduce-scatter on v6e, an all-reduce on v5p: the two cases that were published."""
    evidence = evidence_of(target)
    schedule = evidence.schedule
    assert schedule is not None
    assert schedule.blocking_share == 1.0
    (problem,) = check_exposed(evidence)
    reduction = "all-reduce-scatter fusion" if target == "v6e" else "all-reduce + slice"
    (reduced,) = (one for one in schedule.collectives if one.op == reduction)
    assert set(reduced.leaves) == set(SHAPES)
    assert reduced.trips == (3, 6)
    assert not reduced.beside
    # Both matrices of a layer, 18 times; what an all-reduce sends is twice the ring's.
    sent = 2 * LAYER * 7 / 8 * (1 if target == "v6e" else 2)
    assert reduced.moved_bytes == 18 * sent
    # Two torus dims of 2 and 4, three of 2: each a line, with half of a link's rate.
    rate = HARDWARE[target].link_bandwidth / 2 * (2 if target == "v6e" else 3)
    assert reduced.link_seconds == pytest.approx(18 * sent / rate)
    assert reduced.exposed_seconds == pytest.approx(reduced.link_seconds)
    assert problem.seen.startswith("5 in loops with nothing scheduled beside them")


def test_it_is_none_where_the_wait_is_short():
    text = re.sub(r'(estimated_cycles":"\d+)', r"\g<1>00", text_of("jax-0.10.2/scan.v6e"))
    evidence = evidence_of("v6e", text=text)
    assert evidence.schedule is not None
    assert evidence.schedule.blocking_share == 1.0
    assert not list(check_exposed(evidence))


def test_what_moves_beside_other_work_is_exposed_for_what_is_left():
    evidence = evidence_of("h100")
    schedule = evidence.schedule
    assert schedule is not None
    (problem,) = check_exposed(evidence)
    assert problem.seen.startswith("1 in loops")  # a gather that is used at once
    (scatter,) = (one for one in schedule.collectives if one.op == "reduce-scatter")
    assert not scatter.is_blocking
    assert scatter.beside == "gemm_fusion_dot.6"
    # 2048 tokens through a layer's matrix: 18 us at 990 TFLOP/s, bytes take less.
    product = 2 * 2048 * 4096 * 1024 / HARDWARE["h100"].flops
    added = 3 * 2048 * 1024 * 2 / HARDWARE["h100"].hbm_bandwidth
    links = 18 * 2 * LAYER * 7 / 8 / HARDWARE["h100"].link_bandwidth
    assert scatter.link_seconds == pytest.approx(links)
    assert scatter.exposed_seconds == pytest.approx(links - 18 * (product + added), rel=0.01)


def test_the_train_step_s_own_waits_are_no_problem():
    text = text_of("jax-0.10.2/scan.v6e").replace(
        "FileNames\n", f'FileNames\n999 "{Path("/x") / TOOLS["make_train_step"]}"\n', 1
    )
    evidence = evidence_of("v6e", text=text)
    assert "make_train_step" in evidence.tools
    assert not list(check_exposed(evidence))


@pytest.mark.parametrize(
    ("stage", "prefetch", "remedy"),
    [
        (2, None, "gather it in the forward pass (stage 3 with reshard_after_forward=False)"),
        (3, 0, "gather it while another layer computes (a train step with Recipe(prefetch=))"),
        (3, 0.5, "put more work beside it (a larger batch)"),
    ],
)
def test_a_remedy_is_for_the_step_that_waits(stage, prefetch, remedy):
    schedule = evidence_of("h100", stage=stage, prefetch=prefetch).schedule
    assert schedule is not None
    waits = {one.op: one.remedy for one in schedule.collectives if one.exposed_seconds}
    assert waits["all-gather"] == remedy
    assert waits["reduce-scatter"] == "put more work beside it (a larger batch)"


def test_what_moves_along_the_users_own_axis_is_no_leaf():
    schedule = evidence_of("h100", axes=(("data", 1), ("model", 8))).schedule
    assert schedule is not None
    assert not any(one.leaves for one in schedule.collectives)


def test_a_cpu_and_an_unknown_chip_have_none():
    one = evidence_of("v6e")
    program = dataclasses.replace(one.program, platform="cpu")
    devices = list(one.layout.devices.flat)
    assert schedule_of(program, one.module, [move.record for move in one.moves], devices) is None
    assert evidence_of("v6e", kind="TPU v99").schedule is None


@pytest.mark.parametrize("target", KINDS)
def test_the_table_fits_80_columns(target):
    schedule = evidence_of(target).schedule
    assert schedule is not None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(schedule_table(schedule))
    text = console.export_text()
    assert "not measured" in text
    assert re.search(r"a step of [\d.]+ ms waits for its links for [\d.]+ ms \(", text)
    assert "exposed ms" in text
    assert ("of the first: " in " ".join(text.split())) == (schedule.exposed_share >= 0.1)


def test_the_table_says_what_may_hide_what_a_step_waits_for():
    schedule = evidence_of("h100", stage=2).schedule
    assert schedule is not None
    slow = dataclasses.replace(schedule, exposed_seconds=schedule.work_seconds)
    assert slow.collectives[0].remedy in str(schedule_table(slow).caption)
