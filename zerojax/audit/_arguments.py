"""What each argument of a program is to ZeRO, and how large the layout wants its shard."""

import collections
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerojax._tree import path_ends
from zerojax._types import Kind, Shape
from zerojax.audit._program import Argument, Program
from zerojax.hlo import HANDS_ON, Frame, Value, element_bits, uses_of
from zerojax.layout import Layout, LeafLayout, optimizer_leaves

HeldKind = Literal["parameter", "master", "optimizer", "gradient", "copy", "batch", "other"]
STATES: tuple[HeldKind, ...] = ("parameter", "master", "optimizer", "gradient", "copy")

_MASTER = re.compile(r"(^|[/_])(master|fp32)", re.IGNORECASE)
_GRADIENT = re.compile(r"(^|[/_])(grad|acc_grad|accum)", re.IGNORECASE)
_PARAMETER = re.compile(r"(^|/)(params|parameters|weights|model)(/|$)", re.IGNORECASE)
#: What computes with weights, as with no mask; compilers call libraries for products.
GATHERS = {"all-gather", "all-gather-start"}
WEIGHS = GATHERS | {"dot", "convolution", "custom-call", "gather"}
LAYERS = HANDS_ON | {"concatenate", "dynamic-slice"}


@dataclass(frozen=True, kw_only=True)
class Held:
    """Hold one argument leaf and what it is."""

    argument: Argument  # the facts
    kind: HeldKind  # a copy is a further one of the parameters that a step updates: an average
    parameter: int | None = None  # index of the layout's leaf that it belongs to, None for none
    # shapes that one device's part may have by the layout, the likeliest first, if it says any
    shards: tuple[Shape, ...] = ()
    on_host: bool = False  # whether it lives in the host's memory

    @property
    def elements(self) -> int:
        return math.prod(self.argument.shape)


def classify(program: Program, layout: Layout) -> Iterator[Held]:
    """Yield what every argument leaf of a program is.

    Trees with the layout's paths and shapes are parameters, masters or gradients, told apart by
    name, else by what is multiplied and by dtype: parameters are the narrower. What lies within an
    optax state is the optimizer's. A further tree is a copy where the step returns as many, and so
    is what comes back in a parameter's shape. The rest is the batch, or stands beside states.

        0/params/up        bf16[64,128]    parameter
        0/masters/up       f32[64,128]     master
        0/opt_state/0/mu/up  f32[64,128]   optimizer, of parameter "up"
        0/step             s32[]           other
        1                  f32[32,64]      batch
    """
    leaves = program.inputs
    kinds: dict[int, HeldKind] = {}
    owners: dict[int, int | None] = {}
    placed: dict[int, Sequence[LeafLayout]] = {}
    paths = {leaf.path for leaf in leaves}
    for number, leaf in enumerate(leaves):
        if leaf.role == "optimizer":
            placed[number] = optimizer_leaves(leaf.path, leaf.shape, layout, paths)
            owner = owners[number] = placed[number][0].parameter
            state = "" if owner is None else leaf.path.removesuffix(layout.leaves[owner].path)
            kinds[number] = "gradient" if _GRADIENT.search(state) else "optimizer"
    alike = find_trees(leaves, layout)
    trees = {path: tree for path, tree in alike.items() if kinds.keys().isdisjoint(tree)}
    returned = max(len(find_trees(program.outputs, layout)) - len(alike) + len(trees), 1)
    if layout.leaves[0].path == ".":  # any array of its shape looks like it, a batch too
        trees = dict(itertools.islice(trees.items(), returned))
    tree_kinds = _tree_kinds(program, trees, layout, returned)
    hosted = program.module.host_parameters
    for path, tree in trees.items():
        kinds |= dict.fromkeys(tree, tree_kinds[path])
        owners |= {number: index for index, number in enumerate(tree)}
    for number, (index, kind) in _alone(leaves, program.outputs, kinds, owners, layout).items():
        kinds[number], owners[number] = kind, index
    states, nets = {leaves[number].owner for number in kinds}, _nets(program, layout)
    for number, leaf in enumerate(leaves):
        kind = kinds.get(number) or _rest(leaf, leaf.owner in states, layout)
        kind = "other" if kind == "batch" and leaf.owner in nets else kind
        owner, on_host = owners.get(number), bool(leaf.memory_kind) or leaf.number in hosted
        shards = _shards(leaf, kind, owner, placed.get(number, ()), layout)
        yield Held(argument=leaf, kind=kind, parameter=owner, shards=shards, on_host=on_host)


def find_trees(leaves: Sequence[Argument], layout: Layout) -> dict[str, list[int]]:
    """Return the numbers of the leaves of every tree like the layout's parameters, by its path.

    Others may stand between them: running means, and what draws noise, in an nnx model.
    """
    numbers = {f"/{leaf.path}": number for number, leaf in enumerate(leaves)}
    ends = ["" if own.path == "." else f"/{own.path}" for own in layout.leaves]
    starts = [path.removesuffix(ends[0]) for path in numbers if path.endswith(ends[0])]
    found = {}
    for start in starts:  # "/0/params" of "/0/params/down", where "down" is the first parameter
        tree = [numbers[start + end] for end in ends if start + end in numbers]
        pairs = zip(tree, layout.leaves, strict=False)
        fits = (leaves[n].shape in (own.shape, own.stored_shape) for n, own in pairs)
        if len(tree) == len(ends) and all(fits):
            found[start[1:]] = tree
    return found


def is_read(program: Program, leaf: Argument) -> bool:
    """Return whether a program computes with an argument as a loss does with its weights."""
    return any(name in WEIGHS for name in _first_uses(program, leaf))


def _first_uses(program: Program, leaf: Argument) -> Iterator[str]:
    if leaf.number is None:
        return
    entry = program.module.entry
    value = Value(Frame(computation=entry), entry.parameters[leaf.number].name, None)
    yield from (x.line.opcode for x in uses_of(program.module, value, LAYERS))


def _tree_kinds(
    program: Program, trees: Mapping[str, Sequence[int]], layout: Layout, returned: int
) -> dict[str, HeldKind]:
    """Return which trees are parameters, masters, gradients and copies.

    Those are `returned`: of more trees the last are of the batch, a reference say.
    """
    named, leaves = dict[str, HeldKind](), program.inputs
    # What is given away comes back; a reference may stand before it.
    own = sorted(trees, key=lambda path: not leaves[trees[path][0]].donated)[:returned]
    for path in trees:
        if _GRADIENT.search(path):
            named[path] = "gradient"
        elif _MASTER.search(path):
            named[path] = "master"
        elif _PARAMETER.search(path) and path in own and "parameter" not in named.values():
            named[path] = "parameter"
    open_ = [path for path in own if path not in named]
    bits = {path: sum(item_bits(leaves[n].dtype) for n in tree) for path, tree in trees.items()}

    def rank(path: str) -> tuple[bool, int, int]:
        held = [(leaves[number], index) for index, number in enumerate(trees[path])]
        is_idle = not any(is_read(program, x) for x, _ in held)
        own = (x.shard_shape in _shards(x, "parameter", index, (), layout) for x, index in held)
        return is_idle, bits[path], -sum(own)

    if open_ and "parameter" not in named.values():
        named[min(open_, key=rank) if open_[1:] else open_[0]] = "parameter"
    widest = max(open_, key=lambda path: bits[path], default=None)
    if widest is not None and widest not in named and "master" not in named.values():
        parameter = next(path for path, kind in named.items() if kind == "parameter")
        if bits[widest] > bits[parameter]:
            named[widest] = "master"
    return {path: named.get(path, "copy" if path in own else "other") for path in trees}


def _alone(
    leaves: Sequence[Argument],
    results: Sequence[Argument],
    kinds: Mapping[int, HeldKind],
    owners: Mapping[int, int | None],
    layout: Layout,
) -> dict[int, tuple[int, HeldKind]]:
    """Return states in no tree like the parameters', as a list of averages: their leaves and kinds.

    They are matrices of parameters' shapes that come back, together at least a third as large as
    the parameters: what has such a shape by chance is less. Masters are wider than parameters.
    """
    new, states = returned_of(leaves, results), {leaves[n].owner for n in kinds}
    taken = {new[leaves[n].path].path for n in kinds if leaves[n].path in new}
    back = {path for path, result in new.items() if result.path not in taken}
    params = {owners[n]: leaves[n].dtype for n, kind in kinds.items() if kind == "parameter"}
    has_masters, found = "master" in kinds.values(), dict[int, tuple[int, HeldKind]]()
    for number, leaf in enumerate(leaves):
        is_matrix = len(leaf.shape) > 1 and leaf.dtype.startswith(("float", "bfloat", "complex"))
        is_batch = not leaf.donated and leaf.owner not in states
        if leaf.path not in back or is_batch or not is_matrix:
            continue
        alike = ((n, _shards(leaf, "copy", n, (), layout)) for n in params if n is not None)
        if fits := {n: shapes for n, shapes in alike if shapes}:
            index = next((n for n in fits if leaf.shard_shape in fits[n]), min(fits))
            is_wide = item_bits(leaf.dtype) > item_bits(params[index]) and not has_masters
            is_sum = _GRADIENT.search(leaf.path)
            found[number] = index, "gradient" if is_sum else "master" if is_wide else "copy"
    covered = sum(math.prod(leaves[number].shape) for number in found)
    return found if 3 * covered >= layout.num_params else {}


def item_bits(dtype: str) -> int:
    """Return the bits of one element; 32 where the dtype is not known."""
    return element_bits(dtype) or 32


def _rest(leaf: Argument, is_beside_states: bool, layout: Layout) -> HeldKind:
    if not leaf.shape or leaf.dtype.startswith("key<") or "model_state" in leaf.path.split("/"):
        return "other"
    cut = leaf.shard_shape and leaf.shard_shape[0] < leaf.shape[0]
    along = any(f"'{axis}'" in leaf.spec for axis in layout.batch_axes)
    return "batch" if (cut and along) or not is_beside_states else "other"


def _nets(program: Program, layout: Layout) -> set[str]:
    """Return the arguments that are weights of another net, as a teacher's or a frozen base.

    They are cut along dims of several sizes. Some are cut along an inner dim: `[1024, 512]` of an
    embedding along 1024, `[6, 512, 2048]` along 512; or all are floats, gathered as they come. A
    batch is cut along as many examples; points within a domain and on its edge are not gathered.
    """
    cuts = collections.defaultdict[str, dict[int, bool]](dict)
    others = set[str]()
    for leaf in program.inputs:
        pairs = enumerate(zip(leaf.shape, leaf.shard_shape, strict=True))
        cut = [(size, 0 < dim < len(leaf.shape) - 1) for dim, (size, part) in pairs if part < size]
        if len(cut) == 1 and any(f"'{axis}'" in leaf.spec for axis in layout.batch_axes):
            cuts[leaf.owner].update(cut)
            uses = () if leaf.owner in others else {*_first_uses(program, leaf)}
            if leaf.dtype[0] not in "bf" or not uses or uses - GATHERS:
                others.add(leaf.owner)
    several = {owner for owner, sizes in cuts.items() if len(sizes) > 1}
    return {owner for owner in several if any(cuts[owner].values()) or owner not in others}


def _shards(
    leaf: Argument, kind: HeldKind, owner: int | None, placed: Sequence[LeafLayout], layout: Layout
) -> tuple[Shape, ...]:
    own = None if owner is None or kind == "other" else layout.leaves[owner]
    if own is not None and leaf.shape in (own.shape, own.stored_shape):
        # One that no dim divides stays whole in a loop of the user's own.
        is_whole = kind in ("parameter", "copy") and own.is_padded and leaf.shape == own.shape
        if is_whole or not layout.partitions("parameter" if kind == "parameter" else "optimizer"):
            return (layout.local_shape(own, leaf.shape),)
        kinds: Any = ("optimizer", "parameter") if kind == "copy" else (kind,)
        kinds = kinds if layout.partitions("parameter") else kinds[:1]
        return tuple(shard_of(own, leaf.shape, layout, name) for name in kinds)
    return tuple(dict.fromkeys(shard_of(x, x.stored_shape, layout) for x in placed))


def shard_of(own: LeafLayout, shape: Shape, layout: Layout, kind: Kind = "optimizer") -> Shape:
    """Return one device's part of a leaf that is partitioned, in a shape of it."""
    local = layout.local_shape(own, shape)
    if own.dim is None:
        return local
    parts = layout.num_parts(layout.axes[kind])
    return (*local[: own.dim], math.ceil(local[own.dim] / parts), *local[own.dim + 1 :])


def returned_of(arguments: Iterable[Argument], results: Iterable[Argument]) -> dict[str, Argument]:
    """Find, by paths of arguments, the results that take their places in the next step.

    A result has the argument's shape, and its path within the function's argument: `0/params/w` is
    returned as that, or as `params/w` where the state is the one result, or `1/params/w`; nnx.jit
    returns `0/0/params/w`. The outermost is meant: of `step(params, state, x) -> (params, state)`
    `0/up` is returned as `0/up`, not `1/0/mu/up`. Of several it is one of the same dtype, that no
    other argument has, of the same placement, at the same position.
    """
    by_end: dict[tuple[str, Shape], list[Argument]] = {}
    for new in results:
        for end in {*path_ends(new.path), "."}:
            by_end.setdefault((end, new.shape), []).append(new)
    found: dict[str, Argument] = {}
    taken: set[str] = set()
    # What is given away comes back; a reference may stand before it.
    for old in sorted(arguments, key=lambda leaf: not leaf.donated):

        def rank(new: Argument, old: Argument = old) -> tuple[int, bool, bool, bool, bool]:
            is_free, stays = new.path not in taken, new.placement == old.placement
            depth, same = new.path.count("/"), new.dtype == old.dtype
            return -depth, same, is_free, stays, new.path == old.path

        if alike := by_end.get((old.path.partition("/")[2] or ".", old.shape)):
            found[old.path] = max(alike, key=rank)
            taken.add(found[old.path].path)
    return found
