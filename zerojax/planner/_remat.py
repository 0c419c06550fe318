"""Other rematerialisation of a loss that nobody edits: its jaxpr run again with other rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
from jax.extend import core

from zerojax._jaxpr import bind, opened, scan_parts
from zerojax.planner._program import CALLS, LOOPS, OPAQUE, PLAIN_CALLS, REMATERIALISED, called

#: What the backward pass computes again: nothing; all but products; each layer from its input.
Remat = Literal["none", "dots", "full"]


def check_remat(remat: str | None) -> None:
    """Refuse a name that is none; None is as the model has it."""
    if remat is not None and remat not in get_args(Remat):
        raise ValueError(
            f"remat must be one of {', '.join(get_args(Remat))}, or None for what the model does "
            f"by itself, got {remat!r}"
        )


def rematerialised(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Make a function whose layers are rematerialised as `remat` says.

    Layers are what it hands to `jax.checkpoint` itself, and the bodies of its scans, apart from
    those whose products all lie in such layers. "none" keeps all that the backward pass reads;
    "dots" keeps the results of products with weights
    (`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`); "full" keeps a layer's input. What
    is rematerialised within a layer, attention say, stays so except for "none".

    Args:
        function: of arrays.
        remat: "none", "dots" or "full".
    """

    def wrapped(*args: Any) -> Any:
        traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
        runner = _Runner(remat)
        flat = runner.run(*opened(traced), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), flat)

    return wrapped


def has_layers(jaxpr: Any) -> bool:
    """Tell whether a function has layers that `rematerialised` sees."""
    for eqn in opened(jaxpr)[0].eqns:
        name = eqn.primitive.name
        if name in REMATERIALISED or name == "scan":
            return True
        if name in PLAIN_CALLS and has_layers(called(eqn)):
            return True
    return False


def _works_outside(jaxpr: Any) -> bool:
    """Tell whether some product or loop lies in no rematerialised call."""
    for eqn in opened(jaxpr)[0].eqns:
        name = eqn.primitive.name
        if name in OPAQUE or name in LOOPS:
            return True
        if name in CALLS - REMATERIALISED and _works_outside(called(eqn)):
            return True
    return False


class _Runner:
    """Runs jaxprs; layers are wrapped."""

    def __init__(self, remat: Remat) -> None:
        self.remat = remat

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Run a jaxpr outside of layers."""
        env: dict[Any, Any] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
        )

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._eqn(eqn, [*map(read, eqn.invars)]), strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _eqn(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in REMATERIALISED:
            return self._layer(called(eqn))(*values)
        if name in PLAIN_CALLS:
            return self.run(*opened(called(eqn)), values)
        if name == "scan":
            return self._scan(eqn, values)
        return bind(eqn, values)

    def _layer(self, jaxpr: Any, *, wraps: bool = True) -> Callable[..., list[Any]]:
        """Make a layer a function, rematerialised as asked for."""
        if self.remat == "none" or not wraps:
            return lambda *args: self.run(*opened(jaxpr), args)
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(
            lambda *args: _as_it_is(*opened(jaxpr), args),
            policy=policy if self.remat == "dots" else None,
        )

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        params = eqn.params
        num_consts, num_carry = scan_parts(params)
        body = params["jaxpr"]
        holds_layers = has_layers(body) and not _works_outside(body)
        layer = self._layer(body, wraps=not holds_layers)
        consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            out = layer(*consts, *carry, *xs)
            return out[:num_carry], out[num_carry:]

        carry, ys = jax.lax.scan(
            step,
            carry,
            values[num_consts + num_carry :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]


def _as_it_is(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, consts))(*args))
