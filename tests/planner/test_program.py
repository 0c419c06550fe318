"""A traced gradient as one flat list: calls written out, and sizes as lines over the batch."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tests import mlp
from tests.planner.live_programs import shape, trace_of
from zerojax._jaxpr import CALLS
from zerojax.models import gpt
from zerojax.planner.traced._operations import Line
from zerojax.planner.traced._reader import read_operations

GPT = {"num_layers": 3, "width": 16, "num_heads": 2, "vocab_size": 40, "context": 8}


def read(function, *args, batches=(2, 4)):
    """Flatten a function of examples [B, ...]; `args` are their shapes without B, or callables."""

    def trace(count):
        given = [arg(count) if callable(arg) else shape(count, *arg) for arg in args]
        return jax.make_jaxpr(function)(*given)

    return read_operations(*map(trace, batches), batches)


def program_of(loss, params, batch, **options):
    return trace_of(loss, params, batch, **options).operations


def gpt_program(examples, **options):
    config = gpt.Config(**GPT, **options)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    batch = shape(examples, config.context + 1, dtype=jnp.int32)
    return program_of(functools.partial(gpt.loss, config), params, batch)


def mlp_program(examples):
    config = mlp.Config(num_layers=3, width=12, input_size=6, output_size=5)
    params = jax.eval_shape(functools.partial(mlp.init, config), jax.random.key(0))
    batch = shape(examples, 6), shape(examples, 5)
    return program_of(functools.partial(mlp.loss, config), params, batch)


def conv_program(examples):
    def loss(params, x):
        strided = jax.lax.conv_general_dilated(x, params["a"], (2, 2), "SAME")
        return jnp.mean(jax.nn.relu(strided) ** 2)

    return program_of(loss, {"a": shape(8, 3, 3, 3)}, shape(examples, 3, 9, 9))


def mapped_program(examples):
    """One example after another: the loop is as long as the batch."""

    def loss(w, x):
        return jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ w), x))

    return program_of(loss, shape(5, 5), shape(examples, 5))


PROGRAMS = {
    "gpt": gpt_program,
    "gpt, no remat": functools.partial(gpt_program, remat=False),
    "gpt, a list": functools.partial(gpt_program, scan=False),
    "gpt, a list, no remat": functools.partial(gpt_program, scan=False, remat=False),
    "mlp": mlp_program,
    "convolution": conv_program,
    "a loop over examples": mapped_program,
}


def walk(program):
    for op in program.ops:
        yield op, program
        for body in op.bodies:
            yield from walk(body)


def names(program):
    return [op.name for op, _ in walk(program)]


# ------------------------------------------------------------------ lines


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_trace_knows_the_sizes_at_every_other_batch(name):
    lines, seen = PROGRAMS[name](4), PROGRAMS[name](7)  # the second saw the shapes for 7
    assert names(lines) == names(seen)
    for (op, program), (other, its_program) in zip(walk(lines), walk(seen), strict=True):
        assert op.flops.at(7) == other.flops.at(7)
        assert op.length.at(7) == other.length.at(7)
        assert op.contracted.at(7) == other.contracted.at(7)
        for v, w in zip(op.outputs, other.outputs, strict=True):
            mine, real = program.values[v], its_program.values[w]
            assert tuple(dim.at(7) for dim in mine.dims) == real.shape
            assert mine.bytes.at(7) == math.prod(real.shape) * real.dtype.itemsize
    grows = [value.bytes.each > 0 for value in lines.values]
    assert any(grows)
    assert not all(grows)


# ------------------------------------------------------------------ flattening


def test_calls_are_written_out_in_their_place():
    @jax.custom_vjp
    def cube(x):
        return x * x * x

    cube.defvjp(lambda x: (cube(x), x), lambda x, bar: (3 * x * x * bar,))

    @jax.jit
    def inner(x):
        return jnp.tanh(jax.checkpoint(jnp.cos)(x))

    def function(x):
        return jax.nn.relu(inner(cube(x))) + inner(x)

    program = read(function, (3,))
    found = names(program)
    assert not set(found) & set(CALLS)
    assert found == ["mul", "mul", "cos", "tanh", "max", "cos", "tanh", "add"]


def test_what_a_call_is_given_and_gives_are_the_values_outside():
    program = read(lambda x: jax.jit(lambda a, b: (b, a * b))(x, jnp.sin(x))[1] + 1.0, (3,))
    sine, product, plus = program.ops
    assert sine.inputs == program.inputs
    assert product.inputs == (*program.inputs, *sine.outputs)
    assert plus.inputs == (*product.outputs, None), "a literal is no value"
    assert program.outputs == plus.outputs


def test_operations_that_nothing_needs_are_dropped():
    def function(x):
        unused = jnp.exp(x) @ jnp.ones((3, 3))
        del unused
        return jnp.sin(x)

    assert names(read(function, (3,))) == ["sin"]


def test_what_a_scan_stacks_for_nobody_is_dropped_with_what_makes_it():
    def loss(w, x):
        def layer(h, _):
            h = jnp.tanh(h @ w)
            return h, jnp.exp(h)

        h, _ = jax.lax.scan(layer, x, length=3)
        return h.sum()

    program = program_of(loss, shape(5, 5), shape(4, 5))
    assert "exp" not in names(program)
    assert "tanh" in names(program)


# ------------------------------------------------------------------ loops


def test_a_scan_knows_constants_carry_slices_and_how_often_it_runs():
    def function(x):
        def layer(carry, row):
            return (carry[0] + row, carry[1] * 2.0), x[0] * row

        return jax.lax.scan(layer, (jnp.zeros(3), jnp.ones(())), jnp.ones((5, 3)) * x[0])

    (scan,) = [op for op in read(function, (3,)).ops if op.name == "scan"]
    assert (scan.kind, scan.length) == ("loop", Line(5.0))
    assert scan.num_carry == 2
    (body,) = scan.bodies
    assert len(body.inputs) == len(scan.inputs)
    assert len(body.outputs) == len(scan.outputs) == 3
    assert body.values[body.inputs[-1]].shape == (3,)


def test_a_while_loop_knows_constants_and_carry():
    def function(x):
        limit, step = x.sum(), jnp.exp(x)
        return jax.lax.while_loop(
            lambda state: state[0].sum() < limit,
            lambda state: (state[0] + step, state[1] * state[0]),
            (x, x),
        )

    program = read(function, (3,))
    (loop,) = [op for op in program.ops if op.name == "while"]
    assert loop.num_carry == len(loop.outputs) == 2
    carried = loop.inputs[2:]  # after the condition's constant and the body's
    assert carried == program.inputs * 2
    (body,) = loop.bodies
    assert len(body.inputs) == 1 + loop.num_carry, "without what the condition reads"
    assert loop.length == Line(1.0), "nobody knows how often it runs"


def test_a_cond_has_a_body_for_each_branch():
    def function(x):
        return jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: jnp.cos(jnp.exp(x)), x)

    (cond,) = [op for op in read(function, (3,)).ops if op.name == "cond"]
    assert sorted(names(body) for body in cond.bodies) == [["exp", "cos"], ["sin"]]
    assert all(len(body.inputs) == len(cond.inputs) - 1 for body in cond.bodies)


# ------------------------------------------------------------------ products


@pytest.mark.parametrize(
    ("function", "args", "flops"),
    [
        (lambda x: x @ jnp.ones((6, 7)), [(5, 6)], 2 * 5 * 6 * 7),
        (lambda x: jnp.einsum("bij,bkj->bik", x, x), [(5, 6)], 2 * 5 * 5 * 6),
        (  # 4 x 4 places of 8 features, each a sum over 3 x 3 of 3 channels
            lambda x: jax.lax.conv_general_dilated(x, jnp.ones((8, 3, 3, 3)), (2, 2), "SAME"),
            [(3, 8, 8)],
            2 * 4 * 4 * 8 * 3 * 3 * 3,
        ),
        (  # in two groups a feature sums over two of four channels
            lambda x: jax.lax.conv_general_dilated(
                x, jnp.ones((6, 2, 3, 3)), (1, 1), "SAME", feature_group_count=2
            ),
            [(4, 5, 5)],
            2 * 5 * 5 * 6 * 2 * 3 * 3,
        ),
    ],
    ids=["a product", "a product for each example", "a convolution", "a grouped convolution"],
)
def test_products_count_a_multiplication_and_an_addition(function, args, flops):
    program = read(function, *args)
    assert sum(op.flops.at(3) for op in program.ops) == 3 * flops


@pytest.mark.parametrize(("cost", "flops"), [(None, 2 * 5 * 6 * 7), (99, 99)])
def test_a_kernel_counts_the_products_of_all_its_steps_or_what_its_author_says(cost, flops):
    def kernel(x, w, out):
        out[...] = (x[0] @ w[...])[None]

    def function(x):
        said = cost and pl.CostEstimate(cost * len(x), bytes_accessed=0, transcendentals=0)
        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct((len(x), 5, 7), x.dtype), grid=len(x),
            in_specs=[pl.BlockSpec((1, 5, 6), lambda i: (i, 0, 0)), pl.BlockSpec()],
            out_specs=pl.BlockSpec((1, 5, 7), lambda i: (i, 0, 0)), cost_estimate=said,
        )(x, jnp.ones((6, 7)))  # fmt: skip

    (op,) = [op for op in read(function, (5, 6)).ops if op.name == "pallas_call"]
    assert (op.kind, op.flops.at(3)) == ("kernel", 3 * flops)


def test_a_shard_map_counts_the_products_of_all_devices(mesh8):
    def on_one_device(x):
        return jax.lax.scan(lambda h, _: (h @ jnp.ones((6, 6)), None), x, length=3)[0]

    def function(x):
        spec = jax.sharding.PartitionSpec("data")
        return jax.shard_map(on_one_device, mesh=mesh8, in_specs=spec, out_specs=spec)(x)

    (op,) = read(function, (5, 6), batches=(8, 16)).ops
    assert (op.kind, op.flops.at(3)) == ("kernel", 3 * 3 * 2 * 5 * 6 * 6)


def test_rows_of_a_ragged_product_meet_one_group_each_forward_and_backward():
    def loss(w, x):
        sizes = jnp.array([x.shape[0], 0, 0])
        return jnp.sin(jax.lax.ragged_dot(jnp.sin(x @ w["in"]), w["experts"], sizes)).sum()

    params = {"in": shape(4, 4), "experts": shape(3, 4, 5)}
    program = program_of(loss, params, shape(8, 4))
    found = [op.flops.at(8) for op in program.ops if op.name == "ragged_dot_general"]
    assert found == [2 * 8 * 4 * 5] * 3


@pytest.mark.parametrize(("dtype", "is_wide"), [(jnp.bfloat16, False), (jnp.float32, True)])
def test_products_know_whether_they_are_in_fp32(dtype, is_wide):
    def function(x):
        flat = x.reshape(x.shape[0], -1) @ jnp.ones((27, 2), dtype)
        return flat, jax.lax.conv_general_dilated(x, jnp.ones((2, 3, 1, 1), dtype), (1, 1), "SAME")

    program = read(function, lambda count: shape(count, 3, 3, 3, dtype=dtype))
    wide = {op.name: op.is_wide for op in program.ops if op.flops.at(1)}
    assert wide == {"dot_general": is_wide, "conv_general_dilated": is_wide}


def test_scanned_layers_hand_on_what_they_carry():
    config = gpt.Config(**GPT)
    for remat in (False, True):
        carried = gpt_program(2, remat=remat).carried_elements(5)
        assert carried == config.num_layers * 5 * config.context * config.width
    assert gpt_program(2, scan=False).carried_elements(5) == 0, "not known of a list of layers"


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda w, x: (w * (jnp.floor if len(x) < 8 else jnp.ceil)(w)).sum(), "floor for one"),
        (lambda w, x: sum((row @ w).sum() for row in x), "eqns for one batch are"),
        (lambda w, x: ((x @ w) @ (x @ w).T).sum(), "grows faster than the batch"),
        (lambda w, x: (x.reshape(2, 2, 5) @ w).sum(), "for 4 examples as for 8.*reshape"),
    ],
    ids=["a branch", "unrolled", "each example with each", "a batch by number"],
)
def test_a_loss_that_is_another_program_for_another_batch_is_refused(loss, why):
    trace = trace_of(loss, shape(5, 5), shape(4, 5))
    with pytest.raises(ValueError, match=why) as caught:
        _ = trace.operations
    assert len(str(caught.value).splitlines()) == 1


def test_a_loss_is_traced_for_multiples_of_its_batch_alone():
    seen = []

    def loss(w, x):
        seen.append(x.shape[0])
        return (x.reshape(6, -1, 5) @ w).sum()

    assert program_of(loss, shape(5, 5), shape(12, 5)).ops
    assert all(size % 12 == 0 for size in seen)
    trace_of(lambda w, x: (x @ w).sum(), shape(5, 5), shape(1, 5)).operations  # noqa: B018


def test_a_loss_is_planned_as_it_is_now():
    """What it reads beside its arguments may have changed since it was traced last."""
    depth = [1]

    def loss(params, batch):
        for _ in range(*depth):
            batch = jnp.tanh(batch @ params["w"])
        return jnp.mean(batch)

    def num_products():
        ops = trace_of(loss, {"w": shape(8, 8)}, shape(16, 8)).operations.ops
        return sum(op.flops.at(16) > 0 for op in ops)

    before = num_products()
    depth[0] = 4
    assert num_products() > before
