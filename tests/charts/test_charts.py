"""Figures say what their results say: every bar, line and axis is read back."""

from __future__ import annotations

import collections
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.audit.test_audit_schedule import evidence_of
from zerojax import charts
from zerojax._display import duration
from zerojax.audit import audit
from zerojax.charts import _figures
from zerojax.charts._figures import TOO_MUCH

PARAMS = {
    "down": jax.ShapeDtypeStruct((4, 2048, 512), jnp.float32),
    "up": jax.ShapeDtypeStruct((4, 512, 2048), jnp.float32),
}
TX = optax.adam(1e-3)


def loss_fn(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0])


WORKLOAD = zerojax.Workload(loss_fn=loss_fn, batch=jax.ShapeDtypeStruct((64, 512), jnp.float32))


def plan(stage):
    options = {"num_devices": 8, "hardware": "h100", "workload": WORKLOAD}
    return zerojax.plan(PARAMS, TX, stage=stage, **options)


def heights(axes):
    """Return the height of each bar: its parts, one on top of the other."""
    tops = {}
    for part in axes.patches:
        tops[part.get_x()] = max(tops.get(part.get_x(), 0), part.get_y() + part.get_height())
    return [tops[x] for x in sorted(tops)]


def words(figure):
    return " ".join(
        text.get_text() for text in figure.findobj(match=lambda x: hasattr(x, "get_text"))
    )


@pytest.fixture(scope="module")
def plans():
    return {f"stage {stage}": plan(stage) for stage in (0, 1, 2, 3)}


def test_a_step_of_many_seconds_has_a_label_of_few_digits():
    given = {0.02813: "28.13 ms", 0.9: "900.0 ms", 0.99996: "1.00 s", 17.97: "17.97 s"}
    assert {x: duration(x) for x in given} == given


def test_plans_are_drawn_beside_each_other(plans, tmp_path):
    figure = charts.compare(plans, title="a title")
    left, right = figure.axes
    assert heights(left) == pytest.approx([one.bytes.total / 1e6 for one in plans.values()])
    assert heights(right) == pytest.approx([one.volume for one in plans.values()])
    assert [tick.get_text() for tick in left.get_xticklabels()] == [f"stage {n}" for n in range(4)]
    assert left.get_title() == "used of a device's 84,943 MB"
    assert left.get_ylabel() == "MB"
    assert right.get_ylabel() == "elements per parameter"
    for said in ("a title", "activations and buffers", "by the theory", "along data", " ms"):
        assert said in words(figure)
    charts.write(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_label_stands_by_its_bar_unless_a_line_is_near():
    """By a line far above it would be read as what the theory says; one near would strike it."""
    states = {name: {"parameters": held} for name, held in (("a", 100.0), ("b", 20.0), ("c", 57.0))}
    bars = {n: charts.Bar(parts=parts, theory=60.0) for n, parts in states.items()}
    (axes,) = charts.compare(bars).axes
    assert [label.xy[1] for label in axes.texts] == pytest.approx([100, 20, 60])


def test_a_description_has_bytes_alone(mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=2)
    described = layout.describe(TX)
    (axes,) = charts.compare({"mine": described}).axes
    assert heights(axes) == pytest.approx([described.bytes["total"] / 1e6])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["mine"]


def test_what_does_not_fit_is_beneath_its_line_and_red(plans):
    one = plans["stage 0"]
    (axes, _) = charts.compare({"one": one}, available=one.bytes.total / 2).axes
    (line,) = axes.lines
    assert line.get_ydata()[0] == pytest.approx(one.bytes.total / 2e6)
    assert line.get_label() == "a device's memory"
    (label,) = axes.texts
    assert label.get_color() == TOO_MUCH


def test_labels_of_five_bars_do_not_touch(plans):
    figure = charts.compare({f"C{number}": plans["stage 3"] for number in range(5)})
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.texts]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_a_layout_is_refused_with_the_remedy(mesh8):
    layout: Any = zerojax.make_layout(PARAMS, mesh8, stage=2)
    with pytest.raises(TypeError, match=r"got Layout; of a layout, layout\.describe\(tx\)"):
        charts.compare({"mine": layout})


def test_a_schedule_is_drawn_as_it_was_clocked():
    evidence = evidence_of("h100")
    report = audit(evidence.program, evidence.layout)
    (axes,) = charts.schedule(report).axes
    found = report.schedule.collectives
    lanes = {(one.op, one.leaves) for one in found}
    assert len(axes.get_yticks()) == len(lanes) < len(found), "one of a leaf has one line"
    assert "3 of 3 collectives" in words(axes.figure)
    assert axes.get_xlim() == pytest.approx((0, 1e3 * report.schedule.step_seconds))
    runs = [run for one in found for run in one.runs]
    seen = {(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axes.patches}
    assert {(round(1e3 * a, 6), round(1e3 * (b - a), 6)) for a, b, _ in runs} <= seen
    loops = {(one.runs[0][0], one.until) for one in found}
    assert {(round(1e3 * a, 6), round(1e3 * (b - a), 6)) for a, b in loops} <= seen
    assert all(one.until > one.runs[-1][1] for one in found), "turns that are not drawn"
    assert all(waits <= end - begin + 1e-12 for begin, end, waits in runs)
    assert "the device waits" in words(axes.figure)


def test_a_schedule_leaves_out_what_is_waited_for_least(monkeypatch):
    monkeypatch.setattr(_figures, "LANES", 1)
    evidence = evidence_of("h100")
    report = audit(evidence.program, evidence.layout)
    figure = charts.schedule(report, title="mine")
    waits = collections.Counter()
    for one in report.schedule.collectives:
        waits[one.op] += one.exposed_seconds
    ((most, seconds),) = waits.most_common(1)
    (label,) = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert label.startswith(f"{most} of ")
    assert label.endswith(f": waits {1e3 * seconds:.2f} ms")
    assert re.search(r"mine; [12] of 3 collectives", words(figure))


def test_a_part_has_one_shade_in_all_pictures_and_a_row_where_it_can_be_seen():
    states = {"parameters": 40.0, "optimizer": 60.0}
    alone = charts.Bar(parts={"optimizer": 60.0, "batch and the rest": 0.1, "mine": 5.0})
    pictures = [charts.compare({"a": charts.Bar(parts=states)}), charts.compare({"a": alone})]
    shades = [
        {box.get_label(): box.patches[0].get_facecolor() for box in one.axes[0].containers}
        for one in pictures
    ]
    assert shades[0]["optimizer"] == shades[1]["optimizer"] != shades[0]["parameters"]
    assert shades[1]["mine"] != shades[1]["optimizer"]
    assert "batch and the rest" not in shades[1], "below 1% of the bar"


def test_one_panel_has_one_title():
    bar = {"a": charts.Bar(parts={"parameters": 40.0})}
    figure = charts.compare(bar, title="a title", available=80.0)
    assert figure._suptitle is not None
    assert (figure._suptitle.get_text(), figure.axes[0].get_title()) == ("a title", "")
    assert charts.compare(bar).axes[0].get_title() == "one device's memory"


def test_a_program_of_a_cpu_has_no_schedule_to_draw(mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=3)
    step = zerojax.make_train_step(loss_fn, TX, layout)
    report = step.audit(jax.ShapeDtypeStruct((64, 512), jnp.float32))
    with pytest.raises(ValueError, match="compile the step for a TPU or GPU"):
        charts.schedule(report)
    left, right = charts.compare({"CPU": report}).axes
    assert heights(left)[0] >= report.memory.peak / 1e6 * 0.99
    assert heights(right) == [pytest.approx(report.volume)]


def test_a_search_shows_all_that_was_tried_its_front_and_the_limit():
    choices = zerojax.search_plans(
        PARAMS, TX, num_devices=8, hardware="h100", workload=WORKLOAD, memory_limit=5e8
    )
    (axes,) = charts.pareto(choices).axes
    assert sum(len(points.get_offsets()) for points in axes.collections) == len(choices.tried)
    front, limit = axes.lines
    assert list(front.get_xdata()) == [1e3 * one.step_time for one in choices.pareto]
    assert len(set(limit.get_ydata())) == 1
    assert {"ms", "MB"} <= set(words(axes.figure).replace("(", " ").replace(")", " ").split())


def test_a_long_title_is_wrapped_and_steps_are_whole_numbers():
    """matplotlib itself would write it past the edges, and mark steps 0.25, 0.5 of a short run."""
    lines = [{"step": step, "train_bits_per_byte": 8.0 - step} for step in range(3)]
    figure = charts.training(lines, title="a step waits for its links " * 8)
    figure.draw_without_rendering()
    assert figure._suptitle is not None
    title = figure._suptitle.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= figure.bbox.width
    assert all(float(at).is_integer() for at in figure.axes[0].get_xticks())
