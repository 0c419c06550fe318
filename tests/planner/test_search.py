"""A search finds what fits and ranks it, or says what the smallest would need."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax.numpy as jnp
import pytest

from tests.planner import plans
from tests.planner.plans import ODD, TRACED, TX, first_word, nouns, odd_batch
from zerojax import Precision, plan, search_plans
from zerojax.planner import Space

SOURCES = {"traced": TRACED, "nothing": {"params": ODD}}


def find(source, **options):
    return plans.find(**(SOURCES[source] | options))


@functools.cache
def everything(source):
    return find(source)


#: Without those stages that differ least: under a tight limit every microbatch is planned.
NARROW = Space(stages=(0, 3))
ONE_BYTE = Precision(params=jnp.bfloat16, gather="int8")


@functools.cache
def smallest_need(source):
    """Read off the refusal what the smallest would need, and what it is."""
    with pytest.raises(ValueError, match="nothing fits") as caught:
        find(source, memory_limit=1000, space=NARROW)
    message = str(caught.value)
    found = re.fullmatch(
        r"nothing fits 0.000 GB \(1,000 B\) per device; the smallest need is [\d.,]+ GB "
        r"\(([\d,]+) B\): (.+)",
        message,
    )
    assert found, message
    return int(found[1].replace(",", "")), found[2]


def planned_again(source, one, **options):
    """Ask `plan` for what a search chose."""
    given = SOURCES[source] | options
    given |= {"num_devices": one.num_devices, "hardware": one.hardware, "stage": one.stage}
    given |= {"num_shards": one.num_shards, "model_axis": one.model_axis}
    return plan(tx=TX, recipe=one.recipe, **nouns(**given))


def divided(one, accumulate):
    """Change the microbatches of a plan."""
    return dataclasses.replace(one, recipe=dataclasses.replace(one.recipe, accumulate=accumulate))


def family(one):
    return (
        one.stage, one.num_shards, one.model_axis, one.remat, one.offload,
        one.partitions_activations, one.recipe.reshard_after_forward,
    )  # fmt: skip


# ------------------------------------------------------------------ choices


@pytest.mark.parametrize("source", SOURCES)
def test_choices_fit_and_come_fastest_first_one_of_each_family(source):
    sizes = sorted(one.bytes.total for one in everything(source).tried)
    limit = sizes[len(sizes) // 3]
    choices = find(source, memory_limit=limit, space=NARROW)
    times = [one.step_time for one in choices]
    assert times == sorted(times)
    assert all(one.bytes.total <= limit for one in choices)
    families = [family(one) for one in choices]
    assert len(set(families)) == len(families)
    for one in choices:
        rivals = [
            other for other in choices.tried
            if family(other) == family(one) and other.bytes.total <= limit
        ]  # fmt: skip
        assert one.step_time == min(other.step_time for other in rivals)
    assert list(choices) == [choices[n] for n in range(len(choices))]


@pytest.mark.parametrize("source", SOURCES)
def test_a_choice_is_the_plan_with_the_same_options(source):
    choices = everything(source)
    step = max(1, len(choices) // 12)
    for one in choices.plans[::step]:
        again = planned_again(source, one)
        for field in dataclasses.fields(one):
            assert getattr(one, field.name) == getattr(again, field.name), field.name


def test_every_combination_is_tried():
    found = {family(one) for one in everything("traced").tried}
    stages, remats = (0, 1, 2, 3), ("none", "dots", "full")
    axes = {1: (16, 8), 2: (8, 4), 4: (4, 2), 8: (2,)}  # all devices, and those of a node
    wanted = set()
    for stage, remat, (axis, groups) in itertools.product(stages, remats, axes.items()):
        for group in groups:
            if stage == 0 and group * axis < 16:
                continue  # without shards a group is nothing
            for pa in (False, True) if axis > 1 and remat == "full" else (False,):
                hosts = [(), ("optimizer",)]
                hosts += [("activations", "optimizer")] * (remat == "full")
                reshards = (True, False) if stage == 3 else (True,)
                ways = itertools.product(hosts, (pa,), reshards)
                wanted |= {(stage, group, axis, remat, *way) for way in ways}
    assert found == wanted


def test_groups_smaller_than_all_devices_are_tried_beyond_a_node_alone():
    for num_devices in (1, 4, 8):
        given = {"num_devices": num_devices, "space": Space(model_axes=(1,))}
        assert {one.num_shards for one in find("traced", **given).tried} == {num_devices}
    pod = find("traced", hardware="v5p", space=Space(model_axes=(1,)))
    assert {one.num_shards for one in pod.tried} == {16}


def test_a_group_that_was_asked_for_goes_with_the_axes_that_it_divides():
    found = find("traced", space=Space(num_shards=(4,)))
    assert {one.num_shards for one in found.tried} == {4}
    assert {one.model_axis for one in found.tried} == {1, 2, 4}


def test_model_axes_are_tried_where_what_they_move_is_known():
    def axes(source, **options):
        return {one.model_axis for one in find(source, num_devices=8, **options).tried}

    assert axes("traced") == {1, 2, 4, 8}
    assert axes("nothing") == {1}
    unscanned = {"loss_fn": lambda params, x: jnp.mean(x @ params["head"])}
    assert axes("traced", **unscanned) == {1}
    asked = find("traced", num_devices=8, space=Space(model_axes=(2,)), **unscanned)
    assert "not known" in " ".join(asked[0].assumptions)


def test_microbatches_are_tried_from_the_largest_to_the_first_that_fits_and_one_beyond():
    one = Space(stages=(2,), model_axes=(1,), num_shards=(8,), offload=False)
    given = {"num_devices": 8, "space": one, "remat": "full", "batch": odd_batch(8 * 12)}
    found = find("traced", **given)
    assert [plan.recipe.accumulate for plan in found.tried] == [1, 2]
    with pytest.raises(ValueError, match="nothing fits"):
        find("traced", **given, memory_limit=1000)
    sizes = {
        n: planned_again("traced", divided(found[0], n), batch=odd_batch(96))
        for n in (1, 2, 3, 4, 6, 12)
    }
    limit = sizes[3].bytes.total
    found = find("traced", **given, memory_limit=limit)
    tried = [1, 2, 3, 4] if sizes[2].bytes.total > limit else [1, 2, 3]
    assert [plan.recipe.accumulate for plan in found.tried] == tried


def test_a_third_of_an_odd_batch_can_be_what_fits():
    """Powers of two do not divide it: the smallest microbatch is one example all the same."""
    space = Space(stages=(0,), model_axes=(1,), num_shards=(8,), offload=False)
    given = {"num_devices": 8, "space": space, "remat": "full", "batch": odd_batch(8 * 3, 256)}
    whole = find("traced", **given)[0]
    smaller = planned_again("traced", divided(whole, 3), batch=given["batch"])
    assert smaller.bytes.total < whole.bytes.total
    found = find("traced", **given, memory_limit=smaller.bytes.total)
    assert [one.recipe.accumulate for one in found] == [3]


# ------------------------------------------------------------------ the front


def test_the_front_is_what_nothing_beats_in_time_and_memory():
    choices = find("traced")
    points = {
        (one.step_time, one.bytes.total)
        for one in choices.tried
        if one.bytes.total <= choices.limit
    }
    front = {
        (time, size)
        for time, size in points
        if not any(t <= time and s <= size and (t, s) != (time, size) for t, s in points)
    }
    found = [(one.step_time, one.bytes.total) for one in choices.pareto]
    assert found == sorted(front)
    assert found[0][0] == choices[0].step_time


# ------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize("source", SOURCES)
def test_the_smallest_need_is_named_and_true(source):
    needed, title = smallest_need(source)
    enough = find(source, memory_limit=needed, space=NARROW)
    assert enough[0].bytes.total == needed
    assert title.startswith(enough[0].title)
    with pytest.raises(ValueError, match="nothing fits"):
        find(source, memory_limit=needed - 1, space=NARROW)


def test_a_batch_that_no_mesh_divides_is_refused():
    with pytest.raises(ValueError, match="batch of 3 examples") as caught:
        find("traced", batch=odd_batch(3), space=Space(model_axes=(1, 2)))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_limit": 0}, ["memory_limit", "0"]),
        ({"memory_limit": -1.0}, ["memory_limit", "-1.0"]),
        ({"num_devices": 0}, ["num_devices", "0"]),
        ({"hardware": "h10"}, ["nearest first: h100"]),
        ({"space": Space(stages=(4,))}, ["stage", "4"]),
        ({"space": Space(model_axes=(3,))}, ["model_axis=3"]),
        ({"space": Space(model_axes=(1,), num_shards=(3,))}, ["num_shards=3"]),
        ({"space": Space(num_shards=(0,))}, ["num_shards", "0"]),
        ({"space": Space(microbatches=(0,))}, ["microbatches", "0"]),
        ({"batch": None}, ["loss_fn and batch: one"]),
        ({"accumulate": 5}, ["batch of 48 examples", "accumulate=5", "another accumulate"]),
    ],
    ids=first_word,
)
def test_options_that_can_t_be_meant_are_refused_in_one_line(options, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find("traced", **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize("given", [{"stages": ()}, {"stages": 2}, {"microbatches": ()}])
def test_a_space_that_lists_nothing_is_refused(given):
    (name,) = given
    with pytest.raises(ValueError, match=rf"Space\.{name} lists what is tried, at least one"):
        Space(**given)


@pytest.mark.parametrize("given", [{}, False, 3, len])
def test_what_is_not_of_the_class_that_is_expected_is_refused_in_one_line(given):
    one = {"params": ODD, "tx": TX, "hardware": "h100", "num_devices": 8}
    for use, options, names in (
        (search_plans, one, ["workload", "space"]),
        (functools.partial(plan, stage=1), one, ["workload", "placement"]),
    ):
        for name in names:
            expected = f"a {name.title()} is expected, got {type(given).__name__}: make one"
            with pytest.raises(TypeError, match=expected):
                use(**options, **{name: given})
        with pytest.raises(TypeError, match="a Recipe is expected"):
            use(**options, recipe=given)


def test_what_the_recipe_chooses_holds_and_what_it_leaves_open_is_searched():
    chosen = {"remat": "dots", "offload": True, "accumulate": 3}
    found = find("traced", space=Space(model_axes=(1,)), **chosen)
    assert {(one.remat, one.offload, one.recipe.accumulate) for one in found.tried} == {
        ("dots", ("optimizer",), 3)
    }
    once = find("traced", reduce="once", remat="full", space=Space(model_axes=(1,)))
    assert {(one.stage, one.recipe.reduce) for one in once} == {(n, "once") for n in range(3)}
    for counts in ((1,), (3, 1)):
        space = Space(model_axes=(1,), microbatches=counts, stages=(2,), offload=False)
        assert {x.recipe.accumulate for x in find("traced", space=space).tried} == {*counts}
    narrow = find("traced", precision=ONE_BYTE, space=Space(model_axes=(1,)))
    assert {one.stage for one in narrow} == {3}


# ------------------------------------------------------------------ what it says


def test_tables_hold_choices_and_front():
    limit = smallest_need("traced")[0] * 6 // 5
    choices = find("traced", memory_limit=limit, space=NARROW)
    lines = [line.rstrip() for line in str(choices).splitlines()]
    text = " ".join(lines)
    title = f"fastest of {len(choices)} that fit {choices.limit / 1e9:,.3f} GB"
    assert f"{title} ({choices.limit:,.0f} B)" in lines, "on one line"
    assert "none is both faster and smaller" in text


@pytest.mark.parametrize(
    ("stage", "option"),
    [
        (2, {"reshard_after_forward": False}),
        (3, {"reduce": "once"}),
        (1, {"precision": ONE_BYTE}),
    ],
)
def test_a_recipe_that_no_stage_takes_is_refused_by_its_name(stage, option):
    with pytest.raises(ValueError, match=rf"none of the stages \({stage},\) takes") as caught:
        find("traced", space=Space(stages=(stage,)), **option)
    assert next(iter(option)) in str(caught.value)
    assert "batch" not in str(caught.value)
