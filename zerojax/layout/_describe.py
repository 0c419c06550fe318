"""What a layout places where, and why, as a table beside the theory."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import jax.numpy as jnp
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from zerojax._tree import floating_dtype, num_elements
from zerojax._types import Kind
from zerojax.layout._leaf import LeafLayout
from zerojax.layout._optimizer import OptimizerLayout
from zerojax.layout._rule import Rule
from zerojax.layout._tree_layout import TreeLayout
from zerojax.recipe import Precision

#: Columns of the table: the kind of tensor and the key under which its bytes are reported.
KINDS: tuple[tuple[Kind, str], ...] = (
    ("parameter", "parameters"),
    ("gradient", "gradients"),
    ("master", "masters"),
    ("optimizer", "optimizer"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter: its placement and the bytes per device of each kind."""

    path: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes: dict[str, int]
    reason: str


@dataclasses.dataclass(frozen=True)
class Description:
    """The placement of every leaf.

    Attributes:
        title: stage, mesh and axis in one line.
        rows: one per parameter; leaves of the optimizer that belong to none are a row of their own.
        bytes: bytes per device by kind, and their total.
        theory: the same by the stage's formula, whole / N for what the stage partitions.
        padding: bytes per device that padding adds.
        notes: rules that matched nothing, leaves that stay whole.
    """

    title: str
    rows: tuple[Row, ...]
    bytes: dict[str, int]
    theory: dict[str, int]
    padding: int
    notes: tuple[str, ...]

    def table(self) -> Table:
        """Return the rows as a rich table."""
        shown = [key for _, key in KINDS if self.bytes[key] or self.theory[key]]
        table = Table(title=self.title, title_justify="left", show_footer=True)
        table.add_column("leaf", "total\ntheory\nratio", overflow="fold")
        table.add_column("shape", overflow="fold")
        table.add_column("shard")
        for key in shown:
            ratio = f"{self.bytes[key] / self.theory[key]:.3f}" if self.theory[key] else "-"
            footer = f"{self.bytes[key]:,}\n{self.theory[key]:,}\n{ratio}"
            table.add_column(f"{key}\nB/device", footer, justify="right")
        ratio = self.bytes["total"] / max(self.theory["total"], 1)
        table.add_column(
            "why",
            f"{self.bytes['total']:,} B/device in all\n{self.theory['total']:,} B/device by the "
            f"formula\n{ratio:.3f}",
        )
        for row in self.rows:
            stored = "" if row.stored_shape == row.shape else f" as {list(row.stored_shape)}"
            table.add_row(
                Text(row.path),
                Text(f"{row.dtype}{list(row.shape)}{stored}"),
                Text(row.spec),
                *(f"{row.bytes[key]:,}" if key in row.bytes else "" for key in shown),
                Text(row.reason),
            )
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the table and the notes under it."""
        yield self.table()
        for note in self.notes:
            yield Text(note)

    def __str__(self) -> str:
        """Render the table as plain text."""
        out = io.StringIO()
        Console(file=out, width=180, color_system=None).print(self)
        return out.getvalue()


#: A kind of tensor that a row of the table holds: its leaf and dtype.
_Held = tuple[Kind, LeafLayout, Any]


def describe(
    layout: TreeLayout, state: OptimizerLayout, precision: Precision, stored: bool
) -> Description:
    """Count what every leaf takes on one device and compare it with the stage's formula."""
    owned: dict[int | None, list[_Held]] = {}
    for leaf in state.leaves:
        owned.setdefault(leaf.parameter, []).append(("optimizer", leaf, leaf.dtype))
    held, rows = [], []

    def add(path: str, leaf: LeafLayout, holds: list[_Held]) -> None:
        counted = {key: 0 for kind, key in KINDS if kind in {"optimizer", *(x[0] for x in holds)}}
        for kind, of, dtype in holds:
            counted[dict(KINDS)[kind]] += _held_bytes(kind, of, dtype, stored)
        held.extend(holds)
        rows.append(_row(path, leaf, holds[0][2], counted))

    for number, leaf in enumerate(layout.leaves):
        low = floating_dtype(leaf.dtype, precision.params)
        holds: list[_Held] = [("parameter", leaf, low), ("gradient", leaf, low)]
        if precision.master is not None:
            holds.append(("master", leaf, floating_dtype(leaf.dtype, precision.master)))
        add(leaf.path, leaf, holds + owned.get(number, []))
    others = owned.get(None, [])
    scalars = [one for one in others if num_elements(one[1].shape) <= 1]
    for one in others:
        if one not in scalars:
            add(f"optimizer: {one[1].path}", one[1], [one])
    if scalars:
        names = ", ".join(x.path for _, x, _ in scalars[:3]) + (", ..." if scalars[3:] else "")
        count = f"{len(scalars)} scalar{'s' if scalars[1:] else ''}"
        add(f"optimizer: {count} ({names})", scalars[0][1], scalars)
    total = {key: sum(row.bytes.get(key, 0) for row in rows) for _, key in KINDS}
    theory = {
        key: sum(x.whole_bytes(dtype) for of, x, dtype in held if of == kind)
        // (layout.num_shards if layout.partitions(kind) else 1)
        for kind, key in KINDS
    }
    for counted in (total, theory):
        counted["total"] = sum(counted.values())
    padding = sum(_padding(kind, x, dtype, stored) for kind, x, dtype in held)
    notes = _notes(layout, padding, state.unmatched_rules)
    return Description(_title(layout), tuple(rows), total, theory, padding, notes)


def _held_bytes(kind: Kind, leaf: LeafLayout, dtype: Any, stored: bool) -> int:
    return leaf.bytes_per_device(kind, stored=stored or kind != "parameter", dtype=dtype)


def _padding(kind: Kind, leaf: LeafLayout, dtype: Any, stored: bool) -> int:
    """Count the bytes of one device that hold padding."""
    if kind not in leaf.kinds or not leaf.is_padded or not (stored or kind != "parameter"):
        return 0
    logical = leaf.whole_bytes(dtype) // leaf.num_shards
    return _held_bytes(kind, leaf, dtype, stored) - logical


def _row(path: str, leaf: LeafLayout, dtype: Any, held: dict[str, int]) -> Row:
    spec = str(leaf.shard_spec).removeprefix("PartitionSpec")
    kind = jnp.dtype(dtype).name if isinstance(dtype, type) else str(dtype)
    return Row(path, leaf.shape, leaf.stored_shape, kind, spec, held, leaf.reason)


def _title(layout: TreeLayout) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    return (
        f"ZeRO stage {layout.stage} over {' x '.join(layout.axis)} (N = {layout.num_shards}) "
        f"on a mesh of {axes}; {layout.num_params:,} parameters"
    )


def _notes(layout: TreeLayout, padding: int, of_optimizer: tuple[Rule, ...]) -> tuple[str, ...]:
    notes = []
    small = [leaf for leaf in layout.leaves if leaf.dim is None]
    if layout.kinds and small:
        elements = sum(num_elements(leaf.shape) for leaf in small)
        notes.append(f"{len(small)} leaves with {elements:,} elements stay whole (reasons above)")
    if padding:
        notes.append(f"padding takes {padding:,} B per device")
    if layout.kinds and str(layout.phases):
        notes.append(str(layout.phases))
    unmatched = (*layout.unmatched_rules, *of_optimizer)
    notes += [f"rule {rule.path!r} of kind {rule.kind!r} matched no leaf" for rule in unmatched]
    return tuple(notes)
