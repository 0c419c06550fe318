"""Prefetch: while a layer computes, the weights of the next one are gathered.

A pass over a program that is differentiated already, so that it holds for forward and backward
loops alike, whatever rematerialisation keeps. The body of a scan over stacked weights

    h = scan[{ lambda h wi. v = GATHER wi; o = dot_general h v; p = tanh o in p }] x w

is cut in two: what `GATHER` needs, which must not depend on what the loop computes, and the rest,
which is given its result. The loop then carries the weights of the layer at hand:

    v = GATHER w[0]
    h, v = scan[{ lambda h v i. u = GATHER w[i+1]; o = dot_general h v; p = tanh o in p, u }] x v
    o = dot_general h v; p = tanh o

The last layer stands behind the loop, so that nothing is gathered in vain. What is carried is not
kept for a backward pass: there is nothing left to differentiate. `_turn` says when the gathers and
reductions of a turn end, `_order` those of a list of layers.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util

from zerojax import _jaxpr
from zerojax._tree import as_shapes
from zerojax.collectives.forms import uses_gloo
from zerojax.collectives.passes._equations import BACKWARD, is_gather
from zerojax.collectives.passes._joined import joined
from zerojax.collectives.passes._order import run_in_order
from zerojax.collectives.passes._turn import Turn
from zerojax.layout import Layout


def prefetched(
    function: Callable[..., Any],
    layers: float,
    layout: Layout,
    bucket_bytes: int | None = None,
    told: Callable[[str], None] = lambda reason: None,
) -> Callable[..., Any]:
    """Make a function that gathers weights of the next layer while one computes.

    The function is the gradient of a loss; it can't be differentiated again without keeping what
    its loops carry. Of a layer the part `layers` is gathered ahead, by bytes, of what it uses
    first, but at least the first large weight; 0 leaves gathers as they are. `told` is called with
    why a loop, or a program without layers, can't gather ahead. `bucket_bytes`, None for the
    default: on GPUs and SparseCores products wait while more bytes of gradients than these, or than
    three layers', are not reduced; between processes on CPUs at most as many of weights are
    gathered in one message, or kept for the backward pass.
    """
    waits = layout.by_sparse_cores or layout.platform == "gpu"
    waiting = (BUCKET if bucket_bytes is None else bucket_bytes) * waits
    # A stack that a Python loop indexes is a list as well, of gradients that are reduced by layer.
    is_list = any(not one[0].stacked for one in layout.layers) or layout.partitions("optimizer")
    joins = uses_gloo(layout) and layout.partitions("parameter") and not layers
    bound = (bucket_bytes or BUCKET) if joins else 0
    if not (layers or waits or joins):
        return function

    def wrapped(*args: Any) -> Any:
        traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
        most = min(waiting, 3 * 2 * layout.layer_size)  # three layers of bf16
        runner = _Prefetch(layers, layout, bound, most)
        leaves = jax.tree.leaves(args)
        in_place = runner.in_place(traced, leaves, looped=False)
        ahead, most = layers * layout.layer_size, most if is_list else 0
        results, num_tied = run_in_order(in_place, leaves, layout, ahead, most)
        if layers and not (runner.num_ahead or num_tied or runner.late):
            told(NO_LAYERS)
        for reason in dict.fromkeys(runner.late) if layers else ():
            told(reason)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return wrapped


NO_LAYERS = (
    "nothing is gathered ahead (Recipe.prefetch): no loop gathers weights of its own for each "
    "iteration, and no layers are gathered one after another"
)
LATE = (
    "not gathered ahead (Recipe.prefetch): what a loop reads at {} is chosen by what the loop "
    "computes, computed with it, or read in a branch; scan over the stack, index it with the "
    "loop's counter, or choose between results instead of weights"
)
KEEPS = (
    "not gathered ahead (Recipe.prefetch) in the forward pass: the loop at {} keeps more for its "
    "backward pass than it gathers, and libtpu would copy that; rematerialise its layer "
    "(jax.checkpoint)"
)


#: What XLA combines on a GPU: the default of `xla_gpu_reduce_scatter_combine_threshold_bytes`.
BUCKET = 30 * 2**20


class _Prefetch:
    def __init__(self, layers: float, layout: Layout, bound: int, waiting: int) -> None:
        self.layers, self.layout, self.bound, self.waiting = layers, layout, bound, waiting
        self.is_tpu = layout.platform == "tpu"
        self.parts = layout.num_batch_parts if self.is_tpu and not layout.by_sparse_cores else 0
        self.num_ahead, self.late = 0, list[str]()
        #: variables that are made of constants alone, such as masks
        self.fixed = set[Any]()

    def in_place(self, program: Any, args: Sequence[Any], *, looped: bool) -> Any:
        """Return a program, of a loop's body or outside of loops, with its calls in place."""
        step = functools.partial(self._step, looped=looped)
        traced = jax.make_jaxpr(lambda *args: _jaxpr.run(program, args, step))(*args)
        return joined(traced, self.layout, self.bound)

    def _step(self, eqn: Any, values: list[Any], *, looped: bool) -> Sequence[Any]:
        if self.fixed.issuperset(_jaxpr.variables(eqn.invars)):
            self.fixed.update(eqn.outvars)
        step = functools.partial(self._step, looped=looped)
        if eqn.primitive.name == _jaxpr.REMATERIALISED:
            # As jax does it, so that the forward pass is not taken for what is computed again.
            program = _jaxpr.called(eqn)
            prevents = any(jax.tree.leaves(eqn.params["prevent_cse"]))
            if self.layers or prevents:
                is_apart = self.layers and looped
                alone = _gathered(program) if is_apart else [False] * len(values)
                values = _held(values, alone, self.is_tpu and not prevents and _is_use(program))
            return _jaxpr.run(program, values, step)
        if _jaxpr.runs_in_place(eqn):
            return _jaxpr.run(_jaxpr.called(eqn), values, step)
        if eqn.primitive.name == "scan" and (self.layers or self.bound or self.waiting):
            return self._scan(eqn, values)
        return _jaxpr.bind(eqn, values)

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        program = eqn.params["jaxpr"]
        inputs = as_shapes([var.aval for var in _jaxpr.opened(program)[0].invars])
        body = self.in_place(program, inputs, looped=True)
        turn = Turn(body, eqn.params, self.layers, self.parts, self.is_tpu)
        summarize = source_info_util.summarize
        self.late += [LATE.format(summarize(gather.source_info)) for gather in turn.late]
        # Of a stack in the host's memory only a scan's own buffer is never on the device.
        hosted = any(var.aval.memory_space == jax.memory.Space.Host for var in eqn.outvars)
        keeps = self.is_tpu and turn.keeps(self.layout.num_batch_parts)
        is_plain = keeps and not turn.reduces
        self.late += [KEEPS.format(summarize(eqn.source_info))] * is_plain
        if not turn.gathers or eqn.params["length"] < 2 or hosted or is_plain:
            most = self.waiting if turn.reduces else 0
            ordered = functools.partial(run_in_order, body, layout=self.layout, is_turn=True)
            return _jaxpr.run_scan(eqn, values, lambda given: ordered(given, waiting=most)[0])
        self.num_ahead += 1
        fixed = [self.fixed.issuperset(_jaxpr.variables([x])) for x in eqn.invars]
        return _run_ahead(eqn, values, turn, fixed, keeps)


def _held(values: list[Any], alone: Sequence[bool], merges: bool) -> list[Any]:
    """Put a barrier before values together, unless a product merges them, and before some alone.

    What gathers are made of, in loops, must not wait for what the loop carries. All else must: of
    two layers in a turn the first would be computed again before the second is done with.
    """
    hold, pairs = jax.lax.optimization_barrier, [*zip(values, alone, strict=True)]
    others = [x for x, is_alone in pairs if not is_alone]
    rest = iter(others if merges else hold(others))
    return [hold(x) if is_alone else next(rest) for x, is_alone in pairs]


def _is_use(program: Any) -> bool:
    """Whether a program gathers a weight again for the gradients of one product, of two factors.

    Libtpu makes the factors within the products, and a bias's gradient. Behind a barrier they lie
    in memory: a scan of 6 layers, not rematerialised, took 3.67 ms on v5p, and takes 3.14.
    """
    eqns = itertools.chain(*map(_jaxpr.with_inner, _jaxpr.opened(program)[0].eqns))
    return sum(_jaxpr.num_products(eqn) > 0 for eqn in eqns) <= 2


def _gathered(program: Any) -> list[bool]:
    """Return which inputs of a program its gathers are made of, in its calls and loops too."""
    jaxpr, wanted = _jaxpr.opened(program)[0], set[Any]()
    for eqn in reversed(jaxpr.eqns):
        inner = _jaxpr.called(eqn)
        if is_gather(eqn) or not wanted.isdisjoint(eqn.outvars):
            wanted.update(_jaxpr.variables(eqn.invars))
        for held in _jaxpr.bodies(eqn) if inner is None else (inner,):
            flags = _gathered(held)
            wanted.update(itertools.compress(eqn.invars[-len(flags) :], flags))
    return [var in wanted for var in jaxpr.invars]


def _run_ahead(eqn: Any, values: list[Any], turn: Turn, fixed: Sequence[bool], keeps: bool) -> Any:
    consts, start, stacks = _jaxpr.scan_split(eqn.params, values)
    num_carry, length, is_tpu = len(start), eqn.params["length"], turn.is_tpu

    def inputs(count: Any, consts: Sequence[Any], carry: Sequence[Any]) -> tuple[Any, list[Any]]:
        index = length - 1 - count if eqn.params["reverse"] else count
        slices = [jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in stacks]
        return index, [*consts, *carry, *slices]

    def layer(count: Any, state: Any, following: list[Any]) -> Any:
        # Were the loop's results stacked by a scan, adding the last layer's would copy them all.
        carry, now, rows = state
        index, given = inputs(count, held, carry)
        out, following = turn.compute(given, now, following)
        update = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return out[:num_carry], following, [*map(update, rows, out[num_carry:])]

    def one(state: Any, count: Any) -> tuple[Any, None]:
        count, state = in_turn((count, state))
        following = turn.gather(inputs(count + 1, consts, turn.counted(state[0]))[1])
        return layer(count, state, following), None

    # What a layer computes and reduces is done before the next one starts.
    in_turn = jax.lax.optimization_barrier if is_tpu else lambda values: values
    # Zeros that a scan overwrites as a whole cost nothing; libtpu writes these, which lack a layer.
    # On a GPU an empty array is not partitioned (seen in jaxlib 0.10.2), and zeros are made of
    # numbers that wait for what the first layer reads: those of a scan in a layer lay there while
    # loops before it ran. Where weights alone are stacked, broadcast to examples, these would lie
    # whole: nothing but what reads the stack says how it is cut.
    held, avals = consts, [var.aval for var in eqn.outvars[num_carry:]]
    if is_tpu:
        rows = [jax.lax.empty(x.shape, x.dtype) for x in avals]
    else:
        varying = [None if is_fixed else x for x, is_fixed in zip(consts, fixed, strict=False)]
        given = varying, start, [jnp.zeros((), x.dtype) for x in avals]
        varying, start, zeros = jax.lax.optimization_barrier(given)
        held = [x if y is None else y for x, y in zip(consts, varying, strict=True)]
        given = {var for var, x in zip(turn.jaxpr.invars, varying, strict=False) if x is not None}
        given |= {*turn.carried, *turn.activations} - turn.counters
        moved = _jaxpr.depending(turn.eqns, given)
        stacked = (_jaxpr.is_variable(x) and x in moved for x in turn.jaxpr.outvars[num_carry:])
        zeros = [
            x if is_own else jnp.zeros_like(x) for x, is_own in zip(zeros, stacked, strict=True)
        ]
        rows = [*map(jax.lax.broadcast, zeros, (x.shape for x in avals))]
    if turn.ends:
        start = [checkpoint_name(x, BACKWARD) for x in start]
    state = (start, turn.gather(inputs(0, consts, start)[1]), rows)
    # libtpu copies what a turn gathered into the place of the weights at hand. Two layers a turn
    # have two places; the barrier lets a gather wait until its place is free.
    unroll = max(eqn.params["unroll"], 2 if is_tpu and not keeps else 1)
    state, _ = jax.lax.scan(one, state, jnp.arange(length - 1), unroll=unroll)
    # Of a slice at a fixed place libtpu chooses the layout, and copied into it what each forward
    # turn had kept: a GPT that is not rematerialised took 24.4 ms on v6e, and takes 18.7.
    last = jax.lax.optimization_barrier(jnp.asarray(length - 1)) if keeps else length - 1
    carry, _, rows = layer(last, in_turn(state), [])
    # libtpu starts a reduction as late as it can: without the barrier those of the last layer stood
    # at the end of the step, where no product is left that they could be merged with. Of stacks XLA
    # reads a slice before the last layer is written on GPUs, and so kept both.
    if turn.ends:
        return in_turn([*carry, *rows])
    return [*carry, *(rows if is_tpu else jax.lax.optimization_barrier(rows))]
