"""Which values of a program are made of a device's own examples."""

import dataclasses
from collections.abc import Iterable, Sequence

from zerojax.audit._arguments import Held
from zerojax.audit._match import UNMATCHED
from zerojax.audit._traffic import Move
from zerojax.hlo import Loop, Module, Value, arguments_of, is_collective

Key = tuple[str, str, int | None]  # of a value: computation, name, index


class Origins:
    """Follow values of a program back to its batch, as far as the collectives on their way."""

    def __init__(
        self, module: Module, held: Sequence[Held], moves: Sequence[Move], steps: Sequence[Loop]
    ) -> None:
        self._module = module
        self._steps = {loop.name for loop in steps}
        numbers = [(one.kind, one.argument.number) for one in held if one.argument.shape]
        batch = [one.argument for one in held if one.kind == "batch"]
        # What is whole, a graph's edges say, is the same on all devices.
        own = [leaf for leaf in batch if leaf.shard_shape != leaf.shape]
        self._batch = {leaf.number for leaf in own or batch}
        self._states = {number for kind, number in numbers if kind in ("master", "optimizer")}
        self._weights = {number for kind, number in numbers if kind == "parameter"}
        self._given = {number for kind, number in numbers if kind in ("copy", "other")}
        # One instruction may move several tensors: it is another's if all are.
        named = [(m.is_ours, m.record.computation, m.record.name) for m in moves]
        ours, others = ({x[1:] for x in named if x[0] is own} for own in (True, False))
        self._others = others - ours
        self._clean: dict[tuple[str, ...], set[Key]] = {}  # by what a walk goes through

    def are_of_examples(self, values: Iterable[Value]) -> bool:
        return not self._batch.isdisjoint(self._arguments(values))

    def is_activation(self, value: Value) -> bool:
        """Return whether a value is made of examples, and not of the optimizer's states.

        A new parameter is made of both where its gradient's reduction is no single collective.
        Without states of the optimizer the two can't be told apart, and the answer is False.
        """
        found = self._arguments([value]) if self._states else set()
        return not self._batch.isdisjoint(found) and self._states.isdisjoint(found)

    def is_of_weights(self, value: Value) -> bool:
        """Return whether a value is made of parameters and states alone, as norms of them are."""
        found = self._arguments([value])
        return bool(found) and found <= self._states | self._weights

    def is_given(self, value: Value) -> bool:
        """Return whether a value is made of neither states nor examples: of a reference, say."""
        # On a torus some axes are gathered first: what is gathered is a gather's result.
        found = self._arguments([value], "all-gather") if self._given else set()
        return bool(found) and found <= self._given

    def are_inputs(self, value: Value) -> bool:
        """Return whether a value is made of examples alone, in another order say."""
        found = self._arguments([value], "all-gather")
        return not found.isdisjoint(self._batch) and found.isdisjoint(self._weights | self._states)

    def _arguments(self, values: Iterable[Value], *through: str) -> set[int]:
        seen, clean = set[Key](), self._clean.setdefault(through, set())

        def until(value: Value) -> bool:
            is_end = self._ends(value) and not value.line.opcode.startswith(through)
            return is_end or value.key in clean

        found = set(arguments_of(self._module, *values, until=until, seen=seen))
        if found.isdisjoint(self._batch | self._states | self._weights | self._given):
            clean |= seen  # where one walk found nothing, the next need not go
        return found

    def _ends(self, value: Value) -> bool:
        line = value.line
        # What runs in a branch or beside the program may have a collective in it.
        beside = line.opcode.startswith(("conditional", "async-", "call-", "fusion-"))
        is_sum = is_collective(line) and not line.opcode.endswith("-done")
        crosses = is_sum and value.key[:2] not in self._others
        # What the step before has made is what a step is given.
        caller, root = value.frame.caller, value.frame.computation.root
        is_before = caller is not None and caller.name in self._steps and line is root
        return beside or crosses or is_before


def without_activations(moves: Sequence[Move], origins: Origins) -> tuple[Move, ...]:
    """Return the same moves; gathers of what is made of examples are of no leaf.

    Of `h = tanh(x @ w)` with as many rows as a weight has, the gather looks like the weight's. What
    a loss gathers of a target network, a reference or a frozen base is not judged.
    """

    def one(move: Move) -> Move:
        if move.role != "gather":
            return move
        if move.match.form and origins.is_activation(move.record.operand):
            return dataclasses.replace(move, match=UNMATCHED)
        is_given = origins.is_given(move.record.operand)
        return dataclasses.replace(move, judged=0.0) if is_given else move

    return tuple(map(one, moves))
