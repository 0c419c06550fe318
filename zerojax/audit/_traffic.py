"""What a step moves, along which axes of the mesh, and of which leaf. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zerojax._types import Axes
from zerojax.audit._match import Match, Matcher
from zerojax.audit._program import Program
from zerojax.hlo import Collective, Groups, mesh_axes, sum_moved
from zerojax.layout import Layout

Role = Literal["gather", "scatter", "sliced", "reduce", "shuffle"]


@dataclass(frozen=True, kw_only=True)
class Move:
    """Hold one collective and what it does for ZeRO.

    Attributes:
        record: the collective.
        spans: mesh axes that its groups cover, as `mesh_axes` names them: "data", "data[4/8]".
        axes: the same without the parts.
        is_ours: whether it moves along the axes of ZeRO or of the batch.
        role: gather, scatter (any spelling of a reduce-scatter), sliced (an all-reduce of which
            each device keeps one part), reduce (an all-reduce), or shuffle (all else).
        match: the leaves that the tensor may be; None for an activation.
        judged: elements as they are judged: without padding, and where the backend has no
            reduce-scatter, an all-reduce of which a part is kept counts as one.
        padding: elements that the compiler adds to fit its tiles.
    """

    record: Collective
    spans: tuple[str, ...]
    axes: Axes
    is_ours: bool
    role: Role
    match: Match | None
    judged: float
    padding: float = 0.0

    @property
    def branches(self) -> tuple[tuple[str, int], ...]:
        """Return the conditionals around it."""
        return self.record.branches

    @property
    def trips(self) -> tuple[int | None, ...]:
        """Return the lengths of the loops around it, outermost first."""
        return self.record.trips

    @property
    def is_partial(self) -> bool:
        """Return whether its groups cover a part of an axis, as the steps of a staged gather do."""
        return any("[" in span for span in self.spans)

    @property
    def moved(self) -> float:
        """Count the elements that a device sends in a step."""
        return self.record.moved_elements

    @property
    def handled(self) -> float:
        """Count the elements of the whole tensor, once for each time that it runs."""
        count = self.record.trip_count
        return self.record.elements * (1 if count is None else count)


def moves_of(
    records: Sequence[Collective], program: Program, layout: Layout, matcher: Matcher
) -> tuple[Move, ...]:
    """Place every collective on the mesh and find its leaf."""
    axes = _AxisFinder(program, layout)
    ours = {*layout.axis, *layout.batch_axes}
    windows = _window_scales(records, layout, axes)
    moves = []
    for record in records:
        if not record.moved_elements:
            continue
        spans = axes.spans(record)
        along = tuple(span.partition("[")[0] for span in spans)
        role = role_of(record)
        scale = windows.get((record.op_name, record.elements), 1.0)
        if role == "sliced" and program.platform == "cpu":
            scale = 0.5
        moves.append(
            Move(
                record=record,
                spans=spans,
                axes=along,
                is_ours=bool(ours.intersection(along)),
                role=role,
                match=matcher.match(record.shape, record.trips),
                judged=record.moved_elements * scale,
            )
        )
    return tuple(moves)


def role_of(record: Collective) -> Role:
    """Return what a collective does, whatever its spelling."""
    if record.op == "all-gather" or record.spelling in (
        "windowed all-gather",
        "all-reduce of parts",
    ):
        return "gather"
    if record.op == "reduce-scatter" or record.spelling == "windowed reduce-scatter":
        return "scatter"
    if record.spelling == "all-reduce + slice":
        return "sliced"
    return "reduce" if record.op == "all-reduce" else "shuffle"


def judged_elements(moves: Iterable[Move]) -> float:
    """Add what is judged, with each conditional's worst branch."""
    return sum_moved(moves, value=lambda move: move.judged)


def moved_elements(moves: Iterable[Move]) -> float:
    """Add what a device sends, with each conditional's worst branch."""
    return sum_moved(moves, value=lambda move: move.moved)


def padding_elements(moves: Iterable[Move]) -> float:
    """Add what the compiler adds, with each conditional's worst branch."""
    return sum_moved(moves, value=lambda move: move.padding)


class _AxisFinder:
    """Find the mesh axes of replica groups.

    Groups count devices in the program's order, which need not be the layout's; on several TPU
    slices they count within a slice, and transfers between slices have no groups.
    """

    def __init__(self, program: Program, layout: Layout) -> None:
        devices = layout.devices
        self._sizes = dict(layout.mesh.shape)
        self._known: dict[tuple[Groups, bool], tuple[str, ...]] = {}
        own = [int(device.id) for device in devices.flat]
        theirs = list(program.device_ids)
        if theirs and len(theirs) != len(own):
            raise ValueError(
                f"the program runs on {len(theirs)} devices and the layout's mesh "
                f"{self._sizes} has {len(own)}; audit it with the layout that it was compiled for"
            )
        position = {device: at for at, device in enumerate(own)}
        same = not theirs or theirs == own or set(theirs) != set(own)
        self._order = None if same else [position[device] for device in theirs]
        slices = [getattr(device, "slice_index", 0) or 0 for device in devices.flat]
        self._slices = np.array(slices).reshape(devices.shape)

    def spans(self, record: Collective) -> tuple[str, ...]:
        """Name the axes along which a collective moves."""
        if not record.groups:
            return self._between_slices(record.group_size)
        is_permute = record.op == "collective-permute"
        key = (record.groups, is_permute)
        if key not in self._known:
            groups = record.groups
            if self._order is not None:
                groups = tuple(tuple(self._order[i] for i in group) for group in groups)
            self._known[key] = mesh_axes(groups, self._sizes, pairs=is_permute)
        return self._known[key]

    def _between_slices(self, num_slices: int) -> tuple[str, ...]:
        """Name the axes that the slices lie along: the first ones, where devices don't tell."""
        spans = []
        known = len(np.unique(self._slices)) > 1
        for dim, (axis, size) in enumerate(self._sizes.items()):
            lines = np.moveaxis(self._slices, dim, 0).reshape(size, -1)
            count = max(len(set(column)) for column in lines.T.tolist())
            if not known:
                count = math.gcd(size, num_slices)
                num_slices //= count
            if count > 1:
                spans.append(axis if count == size else f"{axis}[{count}/{size}]")
        return tuple(spans)


def _window_scales(
    records: Sequence[Collective], layout: Layout, axes: _AxisFinder
) -> dict[tuple[str, int], float]:
    """Return the factors by which to shrink permutes that a matmul overlaps to the ring they are.

    They turn both ways, and peeling their loop adds up to two hops to the ring's n - 1.
    """
    hops: dict[tuple[str, int], float] = {}
    sizes: dict[tuple[str, int], int] = {}
    for record in records:
        if record.spelling.startswith("windowed"):
            key = (record.op_name, record.elements)
            along = [span.partition("[")[0] for span in axes.spans(record)]
            sizes[key] = layout.num_parts(tuple(along))
            hops[key] = hops.get(key, 0.0) + record.moved_elements / max(record.elements, 1)
    scales = {}
    for (key, count), extra in itertools.product(hops.items(), (1, 0)):
        ring = sizes[key] + extra
        if count and count % ring == 0 and key not in scales:
            scales[key] = (sizes[key] - 1) / ring
    return scales
