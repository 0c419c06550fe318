"""How results show themselves: one line, text on 80 columns, HTML without scripts."""

from __future__ import annotations

import dataclasses
import html.parser
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.text import Text

import zerojax
from zerojax._display import Shown, make_bar, make_table
from zerojax.hlo._memory import Result

PARAMS = {"down": jnp.ones((128, 64)), "up": jnp.ones((64, 128))}
X = jnp.ones((32, 64))
TX = optax.adam(1e-3)
RECIPE = zerojax.Recipe(precision="bf16", accumulate=2)


def loss_fn(params, x):
    y = jnp.tanh(x @ params["up"].astype(x.dtype)) @ params["down"].astype(x.dtype)
    return jnp.mean((y - x) ** 2)


class Reader(html.parser.HTMLParser):
    """Collects the texts of a page; checks that what is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        assert tag != "script"
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(shown):
    reader = Reader()
    reader.feed(shown._repr_html_())
    assert reader.open == []
    return reader.texts


@pytest.fixture(scope="module")
def layout(mesh8):
    params = {"embed": (1009, 64), "blocks": {"qkv": {"kernel": (64, 192), "bias": (192,)}}}
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return zerojax.make_layout(shapes, mesh8, stage=2)


@pytest.fixture(scope="module")
def step(mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=3)
    return zerojax.make_train_step(loss_fn, TX, layout, RECIPE)


@pytest.fixture(scope="module")
def results(layout, step):
    return {
        "Layout": layout,
        "Description": layout.describe(TX, RECIPE),
        "TrainStep": step,
        "TrainState": step.init(PARAMS),
        "AuditReport": (report := step.audit(X)),
        "MemoryReport": report.memory,
    }


NAMES = (
    "Layout",
    "Description",
    "TrainStep",
    "TrainState",
    "AuditReport",
    "MemoryReport",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_a_line_a_text_and_a_page(name, results):
    shown = results[name]
    line = repr(shown)
    assert line.startswith(f"<{name}: ")
    assert "\n" not in line
    text = str(shown)
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"[\d,.]{5,}", " ".join(read(shown))))
    assert words <= set(re.findall(r"[\d,.]{5,}", text)), "the same figures"


def test_a_line_names_stage_mesh_parameters_and_bytes(layout, step):
    held = layout.bytes_per_device(optax.identity())["parameters"]
    assert repr(layout) == (
        "<Layout: ZeRO stage 2 over data (N = 8) on a mesh of data=8; "
        f"{layout.num_params:,} parameters in 3 leaves, {held / 1e3:,.1f} kB of them per device>"
    )
    assert "Recipe(precision='bf16', accumulate=2)" in repr(step)


def test_parts_of_results_are_a_line_each(layout, results, step, tmp_path):
    leaves = {leaf.path: repr(leaf) for leaf in layout.leaves}
    assert leaves["embed"] == "<LeafLayout: embed float32[1009, 64/data], dim 1: divides>"
    for one in results["AuditReport"].collectives:
        assert f"op='{one.op}'" in repr(one)
        assert len(repr(one)) < 250
    run = zerojax.Checkpoints(tmp_path / "run")
    assert repr(run) == f"<Checkpoints: steps [] in {tmp_path / 'run'}>"
    run.save(3, step.init(PARAMS), step.layout).wait()
    assert repr(run) == f"<Checkpoints: steps [3] in {tmp_path / 'run'}>"
    restored = run.restore_latest(step.layout, step.abstract_state())
    assert len(repr(restored)) < 600, repr(restored)


def test_layers_of_a_list_that_are_alike_have_one_row(mesh8):
    matrix, other = jnp.ones((64, 64)), jnp.ones((64, 128))
    params = {f"layer_{n}": {"w": matrix, "b": jnp.ones(64)} for n in range(12)} | {
        "layer_12": other
    }
    described = zerojax.make_layout(params, mesh8, stage=3).describe(TX)
    assert len(described.rows) == 26, "24 alike, one of another shape, and Adam's count"
    rows = dict(re.findall(r"^ (\S.*?)  +float32\[.*?\] +([\d,]+)", str(described), re.MULTILINE))
    assert list(rows) == ["12 x layer_*/b", "12 x layer_*/w", "layer_12"]
    one = 64 * 64 * 4 // 8  # a parameter, a gradient and two moments of it
    assert int(rows["12 x layer_*/w"].replace(",", "")) == 12 * 4 * one


def test_a_state_says_its_step_and_what_became_of_it(results, step):
    state = step.init(PARAMS)
    assert repr(state).startswith("<TrainState: step 0, ")
    new, _ = step(state, X)
    assert "donated to a step" in repr(state)
    assert "step 1" in repr(new)
    assert "shapes of a state" in repr(step.abstract_state())
    assert repr(step.shardings).startswith("<TrainState: ")
    seen = []
    jax.eval_shape(lambda state: seen.append(repr(state)), new)
    assert "shapes of a state" in seen[0]
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), new)  # as vmap over two seeds makes it
    assert "step [1, 1]" in repr(pair)


def test_a_state_counts_what_a_device_holds(results, step):
    state = results["TrainState"]
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state))
    counted = re.findall(r" ([\d,]+)(?:  [█▏▎▍▌▋▊▉]+)?$", str(state), re.MULTILINE)
    assert sum(int(count.replace(",", "")) for count in counted) == held


def test_what_the_host_keeps_is_told_apart(mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=2)
    recipe = zerojax.Recipe(precision="bf16", offload=True)
    state = zerojax.make_train_step(loss_fn, TX, layout, recipe).abstract_state()
    held = layout.bytes_per_device(TX, recipe)
    assert f"{held['parameters'] / 1e3:,.1f} kB, " in repr(state)
    assert re.search(r"^ opt_state on the host +\d", str(state), re.MULTILINE)
    assert re.search(r"^ params +\d", str(state), re.MULTILINE)


def test_a_number_is_never_cut_unseen(results):
    """Texts give way; where numbers alone are too wide, an ellipsis says so."""
    shape = "f32[128, 512], 3 x f32[512, 128, 4096]"
    one = Result(name="fusion" * 12, shape=shape, bytes=88_096_768)
    text = str(dataclasses.replace(results["MemoryReport"], largest=(one,)))
    (row,) = [line for line in text.splitlines() if "f32[128, 512], 3" in line]
    assert row.endswith("88,096,768")
    assert row.count("…") >= 1

    class Numbers(Shown):
        _summary = "numbers"

        def _parts(self):
            table = make_table(*[">of a size"] * 6)
            table.add_row(*["1,234,567,890,123"] * 6)
            yield table

    cells = [cell for cell in str(Numbers()).split() if cell.startswith("1,")]
    assert len(cells) == 6
    assert all(len(cell) == len("1,234,567,890,123") or cell.endswith("…") for cell in cells)


def test_html_is_escaped_and_suits_dark_pages():
    class Sample(Shown):
        _summary = "a sample"

        def _parts(self):
            table = make_table("name", ">size", "part")
            table.add_row(Text("<b>&"), "1", make_bar(3, 4))
            yield table

    page = Sample()._repr_html_()
    assert "&lt;b&gt;&amp;" in page
    assert "background" not in page, "which would hide text on a dark page"
    words = " ".join(read(Sample())).replace("─", "").split()
    assert words == ["a", "sample", "name", "size", "part", "<b>&", "1", "███████▌"]
