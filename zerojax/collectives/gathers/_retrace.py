"""Gather where used: the loss re-traced so that each parameter is opened at its first real use.

The user's model is not edited. Its loss is traced to a jaxpr, and the jaxpr is run again with the
parameters in boxes (`_boxed`). A box goes through calls, rematerialised functions, branches, scans
over layers and operations on its own shard (`_structural`); any other operation opens it. So a
scanned layer's weights are gathered inside the loop, and the gradient leaves the loop as shards:

    w:bf16[4,8,8]                                        boxed; each device holds [4,1,8]
    y = scan[jaxpr={ lambda h wi:bf16[8,8].              still boxed; [1,8]
        v = transpose wi                                 still boxed; [8,1]
        o = dot_general h v } ] x w                      opened here: gathered to [8,8]

Outside a function that the user rematerialises, and in every loop, the operation that opens a box
is rematerialised alone: the backward pass gathers again instead of keeping the gathered weight.

Source: arXiv 1910.02054, section 7.2.2 (stage 3 gathers in the forward and the backward pass).
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zerojax import _jaxpr
from zerojax.collectives.gathers import _copies, _structural
from zerojax.collectives.gathers._boxed import Boxed, Opening, wrap_policy
from zerojax.collectives.gathers._divided import bind_apart, bind_grouped, has_grouped, is_apart
from zerojax.collectives.gathers._kept import keep_no_weights


@dataclasses.dataclass(frozen=True)
class Retracer:
    opening: Opening  # how boxes are opened
    from_batch: set[Any]  # variables computed from the batch; others are of weights and constants
    often: set[Any]  # variables that several equations read
    # whether the user rematerialises what is around, so that what is gathered here is not kept
    saved: bool = False
    # whether a scan is around, of whose two passes nothing can be merged
    looped: bool = False
    # what runs the program of a rematerialised function: jax traces layers that share one once
    layers: dict[int, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        return _jaxpr.run(program, self._shared(_jaxpr.opened(program)[0].invars, args), self._step)

    def opened(self, value: Any) -> Any:
        return self.opening.opened(_uncopied(value))

    def _shared(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        pairs = zip(variables, values, strict=True)
        return [x.shared() if isinstance(x, Boxed) and var in self.often else x for var, x in pairs]

    def _step(self, eqn: Any, values: list[Any]) -> list[Any]:
        return self._shared(eqn.outvars, self._bound(eqn, values))

    def _bound(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        has_box = any(isinstance(v, Boxed | _copies.Copied) for v in values)
        layout = self.opening.layout
        is_own = not has_box and is_apart(eqn, layout, self.from_batch)
        is_grouped = not has_box and not is_own and has_grouped(eqn, layout, self.from_batch)
        if not (has_box or is_own or is_grouped):
            return _jaxpr.bind(eqn, values)
        if _jaxpr.runs_in_place(eqn):
            return self.run(_jaxpr.called(eqn), values)
        if name == _jaxpr.REMATERIALISED:
            return self._remat(eqn, values)
        if is_own:
            return bind_apart(eqn, values, layout)
        if name == "scan":
            return self._scan(eqn, values)
        if _jaxpr.refs_of(eqn):  # jax.checkpoint loses the gradient of what is added to one
            return _jaxpr.bind(eqn, [*map(self.opened, values)])
        is_fixed = self.from_batch.isdisjoint(_jaxpr.variables(eqn.invars))
        if is_fixed and _copies.is_enlarged(eqn, values, self.opening):
            copied = functools.partial(_copies.copied, opening=self.opening)
            values = [copied(v) if isinstance(v, Boxed) else v for v in values]
        if any(isinstance(v, _copies.Copied) for v in values):
            used = _copies.use_copies(eqn, values, self.opening, is_fixed, self._again)
            if used is not None:
                return used
            values = [*map(_uncopied, values)]
        if name == "cond":
            return self._cond(eqn, values)
        if is_grouped:
            return bind_grouped(eqn, values, self.opening)
        kept = _structural.keep_boxed(eqn, values, self.opening)
        return self._use(eqn, values) if kept is None else kept

    def _remat(self, eqn: Any, values: list[Any]) -> list[Any]:
        program = _jaxpr.called(eqn)
        if id(program) not in self.layers:
            inner = dataclasses.replace(self, saved=True, layers={})
            self.layers[id(program)] = lambda *values: inner.run(program, values)
        body = self.layers[id(program)]
        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        if self.opening.gathers and (policy is not None or self.opening.keeps):
            policy = wrap_policy(policy, keeps=self.opening.keeps)
        return jax.checkpoint(body, prevent_cse=prevent_cse, policy=policy)(*values)

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Scan with boxed slices: layers are gathered inside the loop.

        Of a scan over `w:[4,8,8]`, cut along dim 1, whose turns also read all of a table
        `e:[512,8]`, and a layer of `v:[4,8,8]` by `dynamic_index_in_dim(v, i)`:

            w    a stack: its array goes in, and each turn boxes its slice [8,8], cut along dim 0
            e    a constant: gathered once, before the first turn
            v    a constant that is sliced: goes in boxed, and each turn opens its slice

        What is gathered before the turns is gathered again before those of the backward pass.
        """
        program = eqn.params["jaxpr"]
        consts, carry, stacks = _jaxpr.scan_split(eqn.params, values)
        consts = [v if self._meets(program, i) else _uncopied(v) for i, v in enumerate(consts)]
        is_sliced = [self._is_sliced(program, i, v) for i, v in enumerate(consts)]
        stacks = [self._sliceable(_uncopied(v)) for v in stacks]
        pairs = zip(consts, is_sliced, strict=True)
        settled = functools.partial(_structural.rules_settled, opening=self.opening)
        consts = [settled(v) if sliced else v for v, sliced in pairs]
        # Kept for the backward pass, what each iteration gathers would be the stack again, also
        # where the loop as a whole is rematerialised.
        regathers = self._gathers_again and not (all(is_sliced) or _jaxpr.refs_of(eqn))
        inner = dataclasses.replace(self, looped=True, saved=False, layers={})

        def loop(*given: Any) -> list[Any]:
            consts, carry, boxes = _jaxpr.scan_split(eqn.params, given)
            found = enumerate(zip(consts, is_sliced, strict=True))
            opened = [v if cut else self._constant(program, i, v) for i, (v, cut) in found]

            def body(values: list[Any]) -> list[Any]:
                consts, carry, slices = _jaxpr.scan_split(eqn.params, values)
                layer = [
                    v.moved(x, tuple(range(1, x.ndim + 1))) if isinstance(v, Boxed) else x
                    for v, x in zip(boxes, slices, strict=True)
                ]
                return [*map(self.opened, inner.run(program, [*consts, *carry, *layer]))]

            arrays = [v.value if isinstance(v, Boxed) else v for v in boxes]
            return _jaxpr.run_scan(eqn, [*opened, *carry, *arrays], body)

        if regathers:
            loop = keep_no_weights(loop, self.opening, looped=self.looped)
        return loop(*consts, *map(self.opened, carry), *stacks)

    def _constant(self, program: Any, index: int, value: Boxed | _copies.Copied) -> Any:
        """Gather what all turns of a loop use; where it meets examples each device has its copy."""
        if isinstance(value, _copies.Copied):
            return value.gathered(self.opening)
        if not value.recorded and self._meets(program, index):
            return _copies.copied(value, self.opening).gathered(self.opening)
        return self.opened(value)

    def _meets(self, program: Any, index: int) -> bool:
        parts = self.opening.layout.num_batch_parts
        return parts > 1 and _copies.meets_examples(program, index, parts, self.from_batch)

    def _is_sliced(self, program: Any, index: int, value: Any) -> bool:
        """Return whether a constant goes into a loop as it is: an array, or a box that is sliced.

        Of `h @ dynamic_index_in_dim(stack, i)` a layer is gathered, inside the loop.
        """
        if not isinstance(value, Boxed):
            return not isinstance(value, _copies.Copied)
        slices = [eqn for eqn, _ in _copies.uses_of(program, index, in_loops=True)]
        if not all(map(_structural.is_slice, slices)):
            return False
        if all(_structural.dims_after(eqn, value, self.opening) is not None for eqn in slices):
            return True
        self._warn_gathered(value)
        return False

    def _sliceable(self, value: Any) -> Any:
        """Open a box whose leading dim can't be sliced while it is partitioned."""
        value = _structural.rules_settled(value, self.opening)
        is_box = isinstance(value, Boxed)
        if not is_box or (0 not in value.held and _structural.waits_elementwise(value)):
            return value
        self._warn_gathered(value)
        return self.opened(value)

    def _warn_gathered(self, value: Boxed) -> None:
        if self.opening.gathers and value.dim is not None:
            why = "the loss computes with the whole stack; do that in the scanned layer"
            if value.dim == 0:
                why = (
                    "it is partitioned along the dim that the loop slices; make the layout with "
                    f"rules=[zerojax.Rule(path={value.path.text!r}, stacked=1)]"
                )
            told = f"all layers of leaf {value.path.text!r} are gathered before the loop: {why}"
            warnings.warn(told, stacklevel=2)

    def _cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        def branch(program: Any, values: Sequence[Any]) -> list[Any]:
            # What a branch keeps for its backward pass is a result of it, and would lie whole.
            placed = [self.opening.placed(v) if isinstance(v, Boxed) else v for v in values]
            # XLA refuses branches whose results are placed otherwise, as weights may be.
            found = [(x, self.opened(x)) for x in self.run(program, placed)]
            return [
                jax.lax.optimization_barrier(y) if isinstance(x, Boxed) else y for x, y in found
            ]

        return _jaxpr.run_bodies(eqn, [self.opened(values[0]), *values[1:]], branch)

    def _use(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Open an equation's boxes and run it; alone, it gathers again for its backward pass."""

        def use(*values: Any) -> list[Any]:
            if has_grouped(eqn, self.opening.layout, self.from_batch):
                return bind_grouped(eqn, [*values], self.opening)
            # So that gradients of weights are born in the reduce dtype, results may be wide.
            out = _copies.use_own_copies(eqn, [*values], self.opening)
            out = self.opening.open_and_bind(eqn, [*values]) if out is None else out
            return [x.astype(var.aval.dtype) for x, var in zip(out, eqn.outvars, strict=True)]

        # A shard_map returns all that it keeps together, weights too.
        is_told = _jaxpr.has_inside(eqn) and eqn.primitive.name != "shard_map"
        if is_told and (self._gathers_again or self._widens_again):
            return keep_no_weights(use, self.opening, looped=self.looped)(*values)
        return self._again(use)(*values)

    @property
    def _gathers_again(self) -> bool:
        return self.opening.gathers and not self.saved

    @property
    def _widens_again(self) -> bool:  # else a loop would stack wide weights
        return self.looped and not self.saved and self.opening.reduce_dtype is not None

    def _again(self, use: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function gather again for its backward pass, where it is not rematerialised."""
        if not (self._gathers_again or self._widens_again):
            return use
        # Where gathered weights are kept, what is made of them is not.
        policy = wrap_policy(None, keeps=True) if self.opening.keeps else None
        return jax.checkpoint(use, prevent_cse=not self.looped, policy=policy)


def _uncopied(value: Any) -> Any:
    return value.box if isinstance(value, _copies.Copied) else value
