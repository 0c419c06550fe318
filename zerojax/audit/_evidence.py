"""What a check returns, a `Problem`; and everything that it may look at, worked out once."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.sharding import AxisType

from zerojax import hlo
from zerojax._display import wrapped
from zerojax._tree import grouped
from zerojax.audit._arguments import STATES, Held, classify, item_bits, returned_of
from zerojax.audit._match import Matcher
from zerojax.audit._origins import Key, Origins, without_activations
from zerojax.audit._program import Argument, Program
from zerojax.audit._schedule import ScheduleReport, schedule_of
from zerojax.audit._traffic import REDUCTIONS, Move, find_padding, likeliest, moves_of, role_of
from zerojax.collectives.forms import block_dim, num_blocks
from zerojax.layout import Layout
from zerojax.planner import Theory, theory_of
from zerojax.recipe import Recipe, as_recipe

#: The least share of the volume by theory for which unexpected traffic is a problem.
SHARE = 0.01

#: A file or function whose lines a program has where it was written with a part of zerojax.
TOOLS = {
    "make_train_step": "zerojax/train/_step.py",
    "sharded(tx, layout)": "_update.<locals>.",
    "gather_where_used": "zerojax/collectives/gathers/_gather.py",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Hold one thing that is wrong; its text has all of it."""

    kind: str = ""  # one of the names in `zerojax.audit.CHECKS`, which sets it
    where: str  # the leaf's path, or the operation
    expected: str  # what the layout asks for
    seen: str  # what the program does
    remedy: str  # what to do

    def __str__(self) -> str:
        parts = (f"  {name}: {getattr(self, name)}" for name in ("seen", "expected", "remedy"))
        return wrapped(f"{self.kind}: {self.where}", *parts)

    def __contains__(self, words: str) -> bool:
        """Whether its text has some words: `any("optimizer" in p for p in report.problems)`."""
        return words in " ".join(str(self).split())


class Evidence:
    """A program, the layout that it should follow, and what was read off them.

    Without a recipe a program is taken for one of the default's.
    """

    def __init__(
        self, program: Program, layout: Layout, recipe: Recipe | None, joins_examples: bool = False
    ) -> None:
        self.program, self.layout = program, layout
        self.has_recipe, self.recipe = recipe is not None, as_recipe(recipe)
        #: the elements below which a tensor raises no problem
        self.floor = max(layout.min_size, 2)
        #: whether the backend has a reduce-scatter; a CPU's partitioner makes none
        self.has_scatter = program.platform != "cpu"
        is_cut = layout.partitions("parameter")
        #: whether weights that a pass gathers are freed after their use
        self.reshards_after_use = is_cut and not self.recipe.keeps_gathered(layout.kinds)
        self.module = module = program.module
        #: every argument leaf with its kind
        self.held = held = tuple(classify(program, layout))
        found = hlo.parse_collectives(module)
        scales = _scales_shapes(layout) if self.recipe.precision.gather is not None else {}
        #: leaves whose weights the recipe gathers in one byte an element
        self.narrow = frozenset(scales)
        matcher = Matcher(layout, _own_shapes(held, layout).union(*scales.values()))
        #: the loops of the program whose turns are steps, outermost first; it is judged by one turn
        self.steps = tuple(self._find_steps(found.records))
        inner = (tuple(x for x in one.loops if x not in self.steps) for one in found.records)
        records = [replace(x, loops=loops) for x, loops in zip(found.records, inner, strict=True)]
        #: by identity, records as they stand in the program
        self._written = dict(zip(map(id, records), found.records, strict=True))
        moves = tuple(moves_of(records, program, layout, matcher))
        #: what values of the program are made of
        self.origins = Origins(module, held, moves, self.steps)
        moves = find_padding(without_activations(moves, self.origins), matcher)
        self.joins_examples = joins_examples
        #: every collective with its axes and its leaf
        self.moves = tuple(replace(x, judged=0.0) if self._is_joined(x) else x for x in moves)
        self.ours = tuple(move for move in self.moves if move.is_ours)
        #: what moves at least the floor's elements in a step, in all turns of its loops
        self.large = tuple(move for move in self.ours if move.handled >= self.floor)
        #: lines with a collective that could not be read
        self.unread = found.unread
        #: the elements per device of all leaves that the layout partitions, gathered
        self.partitioned_elements = self.gathered_elements(range(len(layout.leaves)))
        dtypes = ((one.parameter, one.argument.dtype) for one in self.states("parameter"))
        #: by leaf of the layout, the bits of the dtype that its parameter is held in
        self.parameter_bits = {leaf: item_bits(x) for leaf, x in dtypes if leaf is not None}
        tables = (module.tables[name].values() for name in ("FileNames", "FunctionNames"))
        names = "\n".join(itertools.chain(*tables))
        #: the parts of zerojax that the step was written with, as its source lines tell
        self.tools = frozenset(tool for tool, file in TOOLS.items() if file in names)

    def _find_steps(self, records: Sequence[hlo.Collective]) -> Iterator[hlo.Loop]:
        """Visit the loops that give a large parameter its new value, and reduce in each turn.

        %w = (s32[], f32[64,8], ...) while(%state), body=%b    4 turns
        %b: %sum = f32[64] all-reduce(%g);  %new = f32[64,8] subtract(%old, %step)
        ROOT %p = f32[64,8] get-tuple-element(%w), index=1     %w takes 4 steps
        """
        around = {x.name: x for one in records if role_of(one) in REDUCTIONS for x in one.loops}
        new = {leaf: x["parameter"] for leaf, x in self.updated.items() if "parameter" in x}
        # What the loss does not train stays as it was given, maybe through a loop.
        values = [value for leaf, value in new.items() if not self._is_own(leaf, value)]
        values.sort(key=lambda value: -value.line.shapes[0].elements)
        through = hlo.HANDS_ON | {"all-gather", "all-gather-start", "all-gather-done"}
        every = (hlo.source_of(self.module, x.frame, x.name, through) for x in values)
        made = next(filter(None, every), None)
        while made and made[1].opcode == "get-tuple-element":
            (frame, line), loop = made, made[0].computation.by_name[made[1].operands[0]]
            body = frame.enter(self.module, loop) if loop.name in around else None
            if body is None or (root := body.computation.root).opcode != "tuple":
                return
            made = hlo.source_of(self.module, body, root.operands[line.index])
            if made is None or made[1].opcode == "dynamic-update-slice":
                return
            yield around[loop.name]

    def _is_joined(self, move: Move) -> bool:
        """Return whether an activation moves for a loss that joins examples, behind all layers."""
        around = len(move.record.loops) - (self.recipe.accumulate > 1)
        return self.joins_examples and not move.match.form and around <= 0

    @cached_property
    def instead(self) -> tuple[Move, ...]:
        """Return gathers of what lookups give back, less than to reduce their table's gradient."""
        given = [x for x in self.moves if x.role == "gather" and not x.match.form]  # few are small
        given = [x for x in given if x.record.dtype[0] in "bf" and self.is_for(x, "scatter-add")]
        sums = [move for move in self.large if move.role in REDUCTIONS]
        due = sum([*self.theory.scattered.values(), *self.theory.summed.values()])
        return (*given,) if hlo.sum_moved([*sums, *given], "judged") <= due else ()

    @cached_property
    def pairs(self) -> list[tuple[Held, Argument]]:
        """Pair every argument of a state, or beside one, with the result that takes its place."""
        owners = {one.argument.owner for one in self.states(*STATES)}
        held = [one for one in self.held if one.argument.owner in owners]
        new = returned_of([one.argument for one in held], self.program.outputs)
        return [(one, new[path]) for one in held if (path := one.argument.path) in new]

    @cached_property
    def is_step(self) -> bool:
        """Return whether the program gives new states for old ones."""
        return any(one.kind in STATES for one, _ in self.pairs)

    @cached_property
    def theory(self) -> Theory:
        return self.theory_with(self.recipe)

    def theory_with(self, recipe: Recipe) -> Theory:
        def is_handed_on(new: hlo.Value) -> bool:  # as it came, and so not gathered
            found = hlo.source_of(self.module, new.frame, new.name)
            return found is not None and (found[1].opcode, found[0].parent) == ("parameter", None)

        untouched = {x for x in self.frozen if is_handed_on(self.updated[x]["parameter"])}
        return theory_of(self.layout, recipe, frozen=self.frozen, untouched=untouched)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Return the leaves that the loss does not train: they have no gradient to reduce.

        The new parameter of such a leaf is made of its own states and of scalars. A trained leaf
        whose reduction was forgotten depends on the batch, and is not taken for frozen. A program
        that trains no leaf is a part of a step, which is judged as if it trained all. One reduction
        a step may sum all gradients, also those that no batch reaches, as of a penalty.
        """
        once = self.recipe.reduction(self.layout.kinds) == "once"
        tensors = (move.record for move in self.moves if move.role in REDUCTIONS)
        sums = {(x.computation, x.name) for x in tensors if x.elements > 1}

        def is_frozen(leaf: int, new: hlo.Value) -> bool:
            seen = set[Key]()
            is_own = self._is_own(leaf, new, seen)
            return is_own and not (once and any(key[:2] in sums for key in seen))

        parameters = {leaf: values.get("parameter") for leaf, values in self.updated.items()}
        frozen = frozenset(leaf for leaf, new in parameters.items() if new and is_frozen(leaf, new))
        return frozen if len(frozen) < len(self.layout.leaves) else frozenset()

    def _is_own(self, leaf: int, new: hlo.Value, seen: set[Key] | None = None) -> bool:
        made_of = hlo.arguments_of(self.module, new, seen=seen)
        return all(x in self._numbers[leaf] for x in made_of)  # the first other one ends the walk

    @cached_property
    def _numbers(self) -> dict[int | None, set[int | None]]:
        each = grouped(self.held, lambda one: one.parameter).items()
        return {leaf: {one.argument.number for one in held} for leaf, held in each}

    @cached_property
    def updated(self) -> dict[int, dict[str, hlo.Value]]:
        """Map leaves of the layout to what the program makes of them: kinds of state to values."""
        entry, outputs = hlo.Frame(computation=self.module.entry), self.program.outputs
        results = entry.computation.root.operands
        results = dict(zip(outputs, results, strict=True)) if len(results) == len(outputs) else {}
        found: dict[int, dict[str, hlo.Value]] = {}
        for one, new in self.pairs if results else ():
            if one.parameter is not None:
                found.setdefault(one.parameter, {})[one.kind] = hlo.Value(entry, results[new], None)
        return found

    @cached_property
    def carries(self) -> tuple[hlo.Carry, ...]:
        return tuple(hlo.find_carries(self.module))

    @cached_property
    def schedule(self) -> ScheduleReport | None:
        records = [self._written[id(move.record)] for move in self.moves]
        pairs = zip(records, self.moves, strict=True)
        # What moves along the user's own axes may look like a leaf.
        leaves = {id(x): likeliest(one, self.layout) if one.is_ours else [] for x, one in pairs}
        devices, leaf_of = list(self.layout.devices.flat), lambda record: leaves[id(record)]
        remedy, kinds = "", self.layout.kinds
        if "parameter" not in kinds:
            remedy = "gather it in the forward pass (stage 3 with reshard_after_forward=False)"
        elif not (self.has_recipe and self.recipe.lookahead(kinds, self.program.platform)):
            remedy = "gather it while another layer computes (a train step with Recipe(prefetch=))"
        return schedule_of(self.program, self.module, records, devices, leaf_of, remedy)

    def is_for(self, move: Move, name: str) -> bool:
        """Return whether a pattern finds a collective's name in JAX, or that of what reads it."""
        lines = (move.record, *(use.line for use in self.uses(move)))
        return any(re.search(name, line.op_name) for line in lines)

    def uses(self, move: Move) -> list[hlo.Value]:
        return list(hlo.uses_of(self.module, move.record.result))

    def gathered_elements(self, indices: Iterable[int]) -> int:
        leaves = [self.layout.leaves[index] for index in indices]
        local = (self.layout.local_shape(x, x.stored_shape) for x in leaves if x.dim is not None)
        return sum(map(math.prod, local))

    def states(self, *kinds: str) -> list[Held]:
        return [one for one in self.held if one.kind in kinds]

    def leaf_names(self, *moves: Move) -> str:
        return self.paths(index for move in moves for index in move.match.leaves)

    def paths(self, indices: Iterable[int]) -> str:
        return some([self.layout.leaves[index].path for index in dict.fromkeys(indices)], 2)


def _own_shapes(held: Iterable[Held], layout: Layout) -> set[tuple[int, ...]]:
    """List the shapes, whole and cut, of optimizer leaves that are not shaped like a parameter."""
    found: set[tuple[int, ...]] = set()
    for one in held:
        like = None if one.parameter is None else layout.leaves[one.parameter]
        shapes = (like.shape, like.stored_shape) if like else ()
        if one.kind == "optimizer" and one.elements > 1 and one.argument.shape not in shapes:
            found |= {one.argument.shape, one.argument.shard_shape}
    return found


def _scales_shapes(layout: Layout) -> dict[int, set[tuple[int, ...]]]:
    found: dict[int, set[tuple[int, ...]]] = {}
    for index, leaf in enumerate(layout.leaves):
        cut = {dim for dim, axes in enumerate(leaf.entries) if axes} | {leaf.dim}
        for count in range(leaf.num_sliced + 1 if leaf.dim is not None else 0):
            along = block_dim(leaf.shape[count:], {dim - count for dim in cut if dim is not None})
            if along is not None:
                shape = [*layout.local_shape(leaf, leaf.stored_shape)][count:]
                shape[along] = num_blocks(shape[along])
                found.setdefault(index, set()).add(tuple(shape))
    return found


def some(names: Sequence[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def hint(evidence: Evidence, *tools: str) -> str:
    """Say which tools of zerojax do what a remedy asks for, unless the step has one of them."""
    do = "do" if tools[1:] else "does"
    return "" if evidence.tools & {*tools} else f" ({' and '.join(tools)} {do} so)"


def reducing(evidence: Evidence) -> str:
    """Advise a step whose loss the partitioner divides to reduce each gradient once."""
    layout, whole = evidence.layout, not evidence.layout.partitions("parameter")
    if "make_train_step" in evidence.tools:
        has_state = any("model_state" in x.argument.path.split("/") for x in evidence.held)
        if not whole or has_state or evidence.recipe.reduce == "once" or evidence.joins_examples:
            return ""
        told = "of a mean over examples, have each device add up its gradients, and hold them whole"
        return f"{told}: Recipe(reduce='once')"
    if whole and AxisType.Explicit in layout.mesh.axis_types:
        told = "gradients of what lies whole on Explicit axes are whole as well"
        return f"take make_train_step, or a mesh of zerojax.make_mesh: {told}"
    if "gather_where_used" in evidence.tools:
        return ""
    return (
        "differentiate gather_where_used(loss_fn, layout), or take make_train_step: they reduce "
        "each gradient once, to shards"
    )


def describe_move(move: Move) -> str:
    """Name a collective as a person would look for it, with the last folders of its source."""
    record = move.record
    loops = ["?" if count is None else str(count) for count in record.trips]
    where = f" in a loop of {' x '.join(loops)}" if loops else ""
    what = f"{record.spelling} {record.dtype}{list(record.shape)}"
    origin = "/".join(record.source.split("/")[-3:]) or record.op_name
    source = f"{record.name}{f', {origin}' if origin else ''}"
    return f"{what} along {' x '.join(move.spans) or 'one device'}{where} ({source})"


def whose(evidence: Evidence, move: Move) -> str:
    form = move.match.form
    if not move.match.leaves:
        return {"": "of no leaf", "joined": "of several leaves"}.get(form, "of the optimizer")
    part = f"a {form} of " if form != "leaf" else ""
    return f"probably {part}{evidence.leaf_names(move)}"
