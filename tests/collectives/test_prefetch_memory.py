"""What loops that gather ahead hold: two layers at most, and nothing that waits for the links."""

import functools
import math

import jax
import numpy as np
import pytest

from tests.collectives.test_prefetch import gradient_of, needed
from tests.collectives.uses import WIDE
from zerojax._jaxpr import depending, opened, scan_parts, variables
from zerojax.collectives import prefetched
from zerojax.collectives._order import is_gather


def loops_of(program, args):
    """List the scans of a program, with their bodies and what depends on what they carry."""
    for eqn in opened(needed(program, args))[0].eqns:
        if eqn.primitive.name == "scan":
            first, num_carry = scan_parts(eqn.params)
            body = opened(eqn.params["jaxpr"])[0]
            yield eqn, body, depending(body.eqns, body.invars[first : first + num_carry])


@pytest.mark.parametrize("name", ["scan", "scan of remat", "indexed"])
def test_two_layers_are_held_at_most(name, mesh8):
    gradient, layout, args = gradient_of([name], mesh8)
    run = functools.partial(jax.jit, out_shardings=layout.grads)
    before, after = (
        run(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for f in (gradient, prefetched(gradient, 1, layout))
    )
    a_layer = 4 * 2 * math.prod(WIDE)
    assert after <= before + 2 * a_layer


def test_on_a_tpu_layers_wait_for_those_before(mesh8, monkeypatch):
    """Two a turn: none is gathered before the layer before the last is done; nor is one behind."""
    gradient, layout, args = gradient_of(["scan"], mesh8)
    want = jax.jit(gradient, out_shardings=layout.grads)(*args)
    monkeypatch.setattr(type(layout), "platform", "tpu")
    ahead = prefetched(gradient, 1, layout)
    loops = [*loops_of(ahead, args)]
    assert [eqn.params["unroll"] for eqn, *_ in loops] == [2, 2]
    for _, body, behind in loops:
        gathered = [one for one in body.eqns if is_gather(one)]
        assert len(gathered) == 2
        assert all(behind.issuperset(one.outvars) for one in gathered)
    outer = opened(needed(ahead, args))[0].eqns
    for loop, *_ in loops:  # the last layer waits for all that the loop made, its stacks too
        waiting = [e for e in outer if e.primitive.name == "optimization_barrier"]
        assert any(set(loop.outvars) & {*variables(e.invars)} >= made_by(loop) for e in waiting)
    # What the last layer of the backward loop reduces is there before what stands behind it.
    rows = {x for e in outer if e.primitive.name == "jit" for x in e.outvars}
    assert len(rows & {*variables(waiting[-1].invars)}) == 2
    got = jax.jit(ahead, out_shardings=layout.grads)(*args)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def made_by(loop):
    """Return the results of a loop that are used."""
    return {var for var in loop.outvars if type(var).__name__ != "DropVar"}


def test_what_a_layer_computes_twice_waits_for_its_gradient(mesh8):
    """Of a part without weights: its values would lie beside all that is computed before."""
    gradient, layout, args = gradient_of(["in_part_again"], mesh8)
    (_, body, behind) = [*loops_of(prefetched(gradient, 1, layout), args)][-1]
    (again,) = [eqn for eqn in body.eqns if eqn.primitive.name == "cos"]
    assert behind.issuperset(again.outvars)
