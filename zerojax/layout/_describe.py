"""What a layout places where, and why: as a table beside the theory, and as who holds what."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, decimal, make_bar, make_table
from zerojax._tree import floating_dtype, grouped
from zerojax._types import Kind
from zerojax.layout._leaf import LeafLayout
from zerojax.layout._optimizer import OptimizerLayout
from zerojax.layout._tree_layout import TreeLayout
from zerojax.recipe import Precision, Recipe

#: The kinds of tensor, and how many of one are called: the key of their bytes in reports.
PLURALS: dict[Kind, str] = {kind: f"{kind}s" for kind in ("parameter", "gradient", "master")}
PLURALS["optimizer"] = "optimizer"


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter: its placement and the bytes per device of each kind."""

    path: str
    placed: str  # as `LeafLayout.placed` writes it
    bytes: dict[str, int]
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class Description(Shown):
    """The placement of every leaf."""

    title: str  # stage, mesh and axis in one line
    # one per parameter; leaves of the optimizer that belong to none are a row of their own
    rows: tuple[Row, ...]
    bytes: dict[str, int]  # bytes per device by kind, and their total
    # the same by the stage's formula, whole / N for what the stage partitions
    theory: dict[str, int]
    padding: int  # bytes per device that padding adds
    notes: tuple[str, ...]  # rules that matched nothing, leaves that stay whole

    @property
    def _summary(self) -> str:
        return f"{self.title}; {decimal(self.bytes['total'])} of model states per device"

    def _parts(self) -> Iterator[Text | Table]:
        reasons = list(dict.fromkeys(row.reason for row in self.rows))
        yield self._leaves_table(reasons)
        for number, reason in enumerate(reasons, 1):
            yield Text(f"({number}) {reason}", style="dim")
        yield self.kinds_table()
        for note in self.notes:
            yield Text(note)

    def kinds_table(self) -> Table:
        """Return the bytes of one device by kind, beside the stage's formula."""
        made = make_table("one device holds", ">B", ">by the formula", ">ratio", "share")
        shown = [key for key in PLURALS.values() if self.bytes[key] or self.theory[key]]
        for key in (*shown, "total"):
            held, theory = self.bytes[key], self.theory[key]
            ratio = f"{held / theory:.3f}" if theory else ""
            bar = make_bar(held, self.bytes["total"])
            made.add_row(key, f"{held:,}", f"{theory:,}", ratio, bar, end_section=key in shown[-1:])
        return made

    def _leaves_table(self, reasons: Sequence[str]) -> Table:
        alike = grouped(self.rows, lambda x: (re.sub(r"\d+", "*", x.path), x.placed, x.reason))
        held = [sum(sum(row.bytes.values()) for row in rows) for rows in alike.values()]
        made = make_table("leaf", "shape / axes", ">B/device", "share", ">why")
        for ((path, placed, reason), rows), size in zip(alike.items(), held, strict=True):
            name = f"{len(rows)} x {path}" if rows[1:] else rows[0].path
            why = f"({reasons.index(reason) + 1})"
            made.add_row(Text(name), Text(placed), f"{size:,}", make_bar(size, max(held)), why)
        return made


#: A kind of tensor that a row of the table holds: its leaf and dtype.
_Held = tuple[Kind, LeafLayout, Any]


def describe(layout: TreeLayout, state: Any, recipe: Recipe, stored: bool) -> Description:
    """Count what every leaf takes on one device and compare it with the stage's formula."""
    rows: list[Row] = []
    theory, padding = dict.fromkeys(PLURALS.values(), 0), 0
    for path, held in _groups(layout, state, recipe.precision):
        counted = dict.fromkeys(PLURALS.values(), 0)
        for kind, leaf, dtype in held:
            key, is_stored = PLURALS[kind], stored or kind != "parameter"
            size = leaf.bytes_per_device(kind, stored=is_stored, dtype=dtype)
            whole = leaf.whole_bytes(dtype)
            counted[key] += size
            theory[key] += whole
            if kind in leaf.axes and leaf.is_padded and is_stored:
                padding += size - whole // leaf.parts[kind]
        _, first, dtype = held[0]
        rows.append(Row(path, first.placed(dtype), counted, first.reason))
    total = {key: sum(row.bytes[key] for row in rows) for key in PLURALS.values()}
    whole = theory["parameters"]
    for kind, key in PLURALS.items():
        theory[key] = layout.by_formula(kind, theory[key])
    for counted in (total, theory):
        counted["total"] = sum(counted.values())
    notes = []
    small = [leaf for leaf in layout.leaves if leaf.dim is None]
    if layout.kinds and small:
        elements = sum(math.prod(leaf.shape) for leaf in small)
        leaves = f"{len(small)} leaves stay" if small[1:] else "1 leaf stays"
        notes.append(f"{leaves} whole, {elements:,} elements (reasons above)")
    if padding:
        notes.append(f"padding takes {padding:,} B per device")
    if layout.torus_note:
        notes.append(layout.torus_note)
    unmatched = (*layout.unmatched_rules, *state.unmatched_rules)
    notes += [f"rule {rule.path!r} of kind {rule.kind!r} matched no leaf" for rule in unmatched]
    if recipe.keeps_gathered(layout.kinds):
        notes.append(f"until the backward pass, gathered parameters take {whole:,} B beside")
    return Description(layout.title, tuple(rows), total, theory, padding, tuple(notes))


def _groups(
    layout: TreeLayout, state: OptimizerLayout, precision: Precision
) -> Iterator[tuple[str, list[_Held]]]:
    of_state: list[_Held] = [("optimizer", leaf, leaf.dtype) for leaf in state.leaves]
    owned = grouped(of_state, lambda held: held[1].parameter)
    for number, leaf in enumerate(layout.leaves):
        low = floating_dtype(leaf.dtype, precision.params)
        held: list[_Held] = [("parameter", leaf, low), ("gradient", leaf, low)]
        if precision.master is not None:
            held.append(("master", leaf, floating_dtype(leaf.dtype, precision.master)))
        yield leaf.path, held + owned.get(number, [])
    scalars = []
    for one in owned.get(None, []):
        if math.prod(one[1].shape) <= 1:
            scalars.append(one)
        else:
            yield f"optimizer: {one[1].path}", [one]
    if scalars:
        names = ", ".join(x.path for _, x, _ in scalars[:3]) + (", ..." if scalars[3:] else "")
        count = f"{len(scalars)} scalar{'s' if scalars[1:] else ''}"
        yield f"optimizer: {count} ({names})", scalars
