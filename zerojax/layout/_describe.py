"""What a layout places where, and why, as a table beside the theory."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import jax.numpy as jnp
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from zerojax._tree import floating_dtype, num_bytes, num_elements
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


def describe(
    layout: TreeLayout, state: OptimizerLayout, precision: Precision, stored: bool
) -> Description:
    """Count what every leaf takes on one device and compare it with the stage's formula."""
    count = _Count(layout, precision, stored)
    by_owner: dict[int, list[LeafLayout]] = {}
    scalars = []
    rows = []
    for leaf in state.leaves:
        if leaf.parameter is not None:
            by_owner.setdefault(leaf.parameter, []).append(leaf)
        elif num_elements(leaf.shape) <= 1:
            scalars.append(leaf)
        else:
            rows.append(_row(f"optimizer: {leaf.path}", leaf, leaf.dtype, count.optimizer([leaf])))
    if scalars:
        names = ", ".join(leaf.path for leaf in scalars[:3]) + (", ..." if scalars[3:] else "")
        title = f"optimizer: {len(scalars)} scalar{'s' if scalars[1:] else ''} ({names})"
        rows.append(_row(title, scalars[0], scalars[0].dtype, count.optimizer(scalars)))
    parameters = [
        _row(
            leaf.path,
            leaf,
            floating_dtype(leaf.dtype, precision.params),
            count.states(leaf) | count.optimizer(by_owner.get(number, [])),
        )
        for number, leaf in enumerate(layout.leaves)
    ]
    rows = [*parameters, *rows]
    total = {key: sum(row.bytes.get(key, 0) for row in rows) for _, key in KINDS}
    theory = {
        key: count.whole[key] // (layout.num_shards if layout.partitions(kind) else 1)
        for kind, key in KINDS
    }
    for counted in (total, theory):
        counted["total"] = sum(counted.values())
    notes = _notes(layout, count.padding, state.unmatched_rules)
    return Description(_title(layout), tuple(rows), total, theory, count.padding, notes)


class _Count:
    """Counts bytes on one device, and beside them what the whole leaves and the padding take."""

    def __init__(self, layout: TreeLayout, precision: Precision, stored: bool) -> None:
        self.layout = layout
        self.precision = precision
        self.stored = stored
        self.whole = {key: 0 for _, key in KINDS}
        self.padding = 0

    def states(self, leaf: LeafLayout) -> dict[str, int]:
        """Count a parameter, its gradient and its master."""
        low = floating_dtype(leaf.dtype, self.precision.params)
        dtypes: dict[Kind, Any] = {"parameter": low, "gradient": low}
        if self.precision.master is not None:
            dtypes["master"] = floating_dtype(leaf.dtype, self.precision.master)
        return {key: self._held(leaf, kind, dtypes[kind]) for kind, key in KINDS if kind in dtypes}

    def optimizer(self, leaves: list[LeafLayout]) -> dict[str, int]:
        """Count leaves of the optimizer's state."""
        return {"optimizer": sum(self._held(leaf, "optimizer", leaf.dtype) for leaf in leaves)}

    def _held(self, leaf: LeafLayout, kind: Kind, dtype: Any) -> int:
        self.whole[dict(KINDS)[kind]] += leaf.whole_bytes(dtype)
        pads = self.stored or kind != "parameter"
        held = leaf.bytes_per_device(kind, stored=pads, dtype=dtype)
        if kind in leaf.kinds and pads and leaf.is_padded:
            parts = leaf.own_parts * leaf.num_shards
            self.padding += held - num_bytes(leaf.shape, dtype) // parts
        return held


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
