"""What a step moves, along which axes of the mesh, of which leaf, with what padding. Pure."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zerojax._types import Axes
from zerojax.audit._match import Key, Match, Matcher, difference, key_of
from zerojax.audit._program import Program
from zerojax.collectives.passes import JOINED
from zerojax.hlo import Collective, Groups, mesh_axes
from zerojax.layout import Layout
from zerojax.optim.whole import OWNERS

_GATHERS = ("windowed all-gather", "all-reduce of parts")
#: How the names of collectives end that a loss asks for itself, of experts or of a ring.
_WRITTEN = ("/all_to_all", "/ppermute")
#: Rows of a tile of TPUs, and how much longer whole tiles may be than a shard.
TILE, LONGER = 8, 1 / 3
#: What adds up gradients.
REDUCTIONS = ("reduce", "scatter", "sliced")
Role = Literal["gather", "scatter", "sliced", "reduce", "owners", "shuffle"]


@dataclass(frozen=True, kw_only=True)
class Move:
    """Hold one collective and what it does for ZeRO."""

    record: Collective  # the collective
    # mesh axes that its groups cover, as `mesh_axes` names them: "data", "data[4/8]"
    spans: tuple[str, ...]
    is_ours: bool  # whether it moves along the axes of ZeRO or of the batch
    # gather, scatter (any spelling of a reduce-scatter), sliced (an all-reduce of which each
    # device keeps one part), reduce (an all-reduce), owners (matrices on their way to devices that
    # compute with whole ones), or shuffle (all else)
    role: Role
    match: Match  # the leaves that the tensor may be; of no form for an activation
    # elements as they are judged: without padding. On a CPU an all-reduce of which each device
    # keeps a part counts as a reduce-scatter, and of two that are whole and added, which others
    # add up first, one counts. Moves to an optimizer's owners count nothing, and nor do
    # all_to_all and ppermute that a loss asks for
    judged: float
    padding: float = 0.0  # elements that the compiler adds to fit its tiles

    @property
    def axes(self) -> Axes:
        """Return the axes of `spans` without the parts."""
        return _axes(self.spans)

    @property
    def branches(self) -> tuple[tuple[str, int], ...]:
        return self.record.branches

    @property
    def moved(self) -> float:
        """Count the elements that a device sends in a step."""
        return self.record.moved_elements

    @property
    def handled(self) -> float:
        """Count the elements of the whole tensor, once for each time that it runs."""
        return self.record.elements * self.record.runs


def moves_of(
    records: Sequence[Collective], program: Program, layout: Layout, matcher: Matcher
) -> Iterator[Move]:
    """Place every collective on the mesh and find its leaf."""
    spans_of = _span_finder(program, layout)
    ours = {*layout.axis, *layout.batch_axes}
    found = [(x, spans_of(x.op, x.groups, x.group_size)) for x in records if x.moved_elements]
    windows = _window_scales(found, layout)
    for record, spans in found:
        role = role_of(record)
        scale = windows.get((record.op_name, record.elements), 1.0)
        if role == "owners" or (role == "shuffle" and record.op_name.endswith(_WRITTEN)):
            scale = 0.0
        elif program.platform == "cpu" and role in ("sliced", "reduce"):
            scale = 0.5 if role == "sliced" else 0.0 if record.is_added else 1.0
        # Between slices libtpu moves [32, 1536] in tiles, as [48, 8, 128].
        shape = (record.elements,) if record.spelling == "megascale" else record.shape
        joined = Match("joined", (), key_of(shape)) if JOINED in record.op_name else None
        yield Move(
            record=record,
            spans=spans,
            is_ours=bool(ours.intersection(_axes(spans))),
            role=role,
            match=joined or matcher.match(shape, record.trips),
            judged=record.moved_elements * scale,
        )


def role_of(record: Collective) -> Role:
    if record.op == "all-gather" or record.spelling in _GATHERS:
        return "gather"
    if record.op == "reduce-scatter" or record.spelling == "windowed reduce-scatter":
        return "scatter"
    if record.spelling == "all-reduce + slice":
        return "sliced"
    if record.op == "all-reduce":
        return "reduce"
    return "owners" if OWNERS in record.op_name else "shuffle"


def likeliest(move: Move, layout: Layout) -> list[str]:
    """Name the leaves that a collective may move: those whose last dims are in its order, if any.

    Of [8, 2048, 8192] and [8, 8192, 2048], a gather of [1, 2048, 8192] is the first's.
    """
    dims = tuple(size for size in move.record.shape if size > 1)
    leaves = [layout.leaves[index] for index in move.match.leaves]
    same = [leaf for leaf in leaves if leaf.stored_shape[-len(dims) :] == dims]
    return [leaf.path for leaf in same or leaves]


def _axes(spans: Iterable[str]) -> Axes:
    return tuple(span.partition("[")[0] for span in spans)


def _span_finder(program: Program, layout: Layout) -> Callable[..., tuple[str, ...]]:
    """Return what names the mesh axes along which a collective moves.

    Groups count devices in the program's order, which need not be the layout's; on several TPU
    slices they count within a slice, and transfers between slices have no groups.
    """
    sizes, theirs = dict(layout.mesh.shape), program.device_ids
    position = {int(device.id): at for at, device in enumerate(layout.devices.flat)}
    if theirs and len(theirs) != len(position):
        told = f"devices: the program has {len(theirs)}, the layout's mesh {sizes} {len(position)};"
        raise ValueError(f"{told} audit it with the layout that it was compiled for")
    # From a device, as the program counts them, to its place in the layout.
    same = position.keys() == set(theirs)
    order = {at: position[device] for at, device in enumerate(theirs)} if same else {}

    @functools.cache
    def spans(op: str, groups: Groups, group_size: int) -> tuple[str, ...]:
        if not groups:
            return tuple(_between_slices(layout, group_size))
        placed = (tuple(order.get(i, i) for i in group) for group in groups)
        return mesh_axes(placed, sizes, pairs=op == "collective-permute")

    return spans


def _between_slices(layout: Layout, num_slices: int) -> Iterator[str]:
    """Name the axes that TPU slices lie along: the first ones, where devices don't tell."""
    numbers = [getattr(device, "slice_index", 0) or 0 for device in layout.devices.flat]
    slices = np.array(numbers).reshape(layout.devices.shape)
    for dim, (axis, size) in enumerate(layout.mesh.shape.items()):
        lines = np.moveaxis(slices, dim, 0).reshape(size, -1)
        count = max(len(set(column)) for column in lines.T.tolist())
        if slices.min() == slices.max():
            count = math.gcd(size, num_slices)
            num_slices //= count
        if count > 1:
            yield axis if count == size else f"{axis}[{count}/{size}]"


def _window_scales(
    found: Sequence[tuple[Collective, tuple[str, ...]]], layout: Layout
) -> dict[tuple[str, int], float]:
    """Return the factors by which to shrink permutes that a matmul overlaps to the ring they are.

    They turn both ways, and peeling their loop adds up to two hops to the ring's n - 1.
    """
    hops: dict[tuple[str, int], float] = {}
    sizes: dict[tuple[str, int], int] = {}
    for record, spans in found:
        if record.spelling.startswith("windowed"):
            key = (record.op_name, record.elements)
            sizes[key] = layout.num_parts(_axes(spans))
            hops[key] = hops.get(key, 0.0) + record.moved_elements / max(record.elements, 1)
    scales = {}
    for (key, count), extra in itertools.product(hops.items(), (1, 0)):
        ring = sizes[key] + extra
        if count and count % ring == 0 and key not in scales:
            scales[key] = (sizes[key] - 1) / ring
    return scales


def find_padding(moves: Sequence[Move], matcher: Matcher) -> tuple[Move, ...]:
    """Return the same moves with `padding`, and padded scatters and their permutes with a leaf.

    libtpu pads a reduce-scatter whose shards are an awkward number of rows: 1600 rows over 8
    devices become 8 x 216. Then a shard lies up to 7 x 16 rows from where it belongs, and a permute
    of that many rows brings the rest.
    """
    told = [_measure(move, matcher) for move in moves]
    padded = [move for move in told if move.role == "scatter" and move.padding]
    return tuple(_follow(move, padded) for move in told)


def _measure(move: Move, matcher: Matcher) -> Move:
    match = move.match
    if not match.form and move.role == "scatter" and move.is_ours:
        longer = matcher.match_longer(move.record.shape, move.record.trips)
        if longer.form and _is_padded(move, longer.key):
            match = longer
    if not match.form:
        return move
    padding = (1 - math.prod(match.key) / max(move.record.elements, 1)) * move.judged
    return dataclasses.replace(move, match=match, padding=padding, judged=move.judged - padding)


def _is_padded(move: Move, of: Key) -> bool:
    """Return whether shards are a leaf's in whole tiles: 20 rows in 24, 100 were seen in 128."""
    rows, size = (x / move.record.group_size for x in difference(key_of(move.record.shape), of))
    return rows % TILE == 0 and rows <= max(size * (1 + LONGER), math.ceil(size / TILE) * TILE)


def _follow(move: Move, padded: Sequence[Move]) -> Move:
    key = key_of(move.record.shape)
    is_permute = move.is_ours and move.role == "shuffle" and move.record.op == "collective-permute"
    for scatter in padded if is_permute else ():
        whole = key_of(scatter.record.shape)
        rows, size = difference(key, whole)
        is_near = rows <= size / 2 and len(key) == len(whole)
        if is_near and (move.record.trips, move.axes) == (scatter.record.trips, scatter.axes):
            return dataclasses.replace(move, match=scatter.match, padding=move.judged, judged=0.0)
    return move
