"""`Program`: the facts of a compiled step, taken once, so that it can be kept and audited again."""

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.tree_util import DictKey

from zerojax._plain import made
from zerojax._tree import is_named_tuple, num_bytes, path_name
from zerojax._types import Shape, platform_of
from zerojax.audit._allocations import allocated_bytes
from zerojax.hlo import Module, parse_module
from zerojax.layout import as_entries, as_spec

#: Names under which programs keep the state of an optimizer.
OPTIMIZER_NAMES = frozenset({"opt_state", "opt_states", "optimizer_state", "optimizer", "optim"})
#: Bytes that a TPU's program sets aside, beside what `memory_analysis` tells.
_ALLOCATED = "allocated_size_in_bytes"
# eqx.filter_jit splits arguments in two by what is donated, and flattens each part.
_FILTERED = re.compile(r"[01]/(first|rest)/\d+")


@dataclass(frozen=True, kw_only=True)
class Argument:
    """Hold what is known of one argument or result; `number` and `donated`: arguments only."""

    path: str  # slash separated; an argument's begins with its position or its keyword
    shape: Shape  # global shape
    dtype: str  # as numpy spells it
    shard_shape: Shape  # shape of one device's part
    shard_bytes: int  # bytes of one device's part
    spec: str  # the placement, for people
    placement: int  # equal numbers are equivalent placements, within one program
    weak_type: bool = False  # whether the dtype is a Python scalar's
    memory_kind: str = ""  # "device", "pinned_host", ...; empty for the default
    # the entry parameter that it is; None where the program does not use it
    number: int | None = None
    donated: bool = False  # whether the caller gave its buffer away
    role: str = ""  # "optimizer" within the state of an optax optimizer, else empty

    @property
    def owner(self) -> str:
        """Return the position or the keyword of the function's argument that it is a leaf of."""
        return self.path.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Hold a compiled step as plain data: everything that an audit reads."""

    text: str  # HLO of the compiled program
    platform: str  # "cpu", "gpu" or "tpu"
    device_ids: tuple[int, ...]  # ids of the devices in the program's order
    statistics: dict[str, int]  # bytes, named as `memory_analysis` names its own
    inputs: tuple[Argument, ...]  # one leaf per argument leaf, in flattening order
    outputs: tuple[Argument, ...]  # one leaf per result leaf
    # axes of the mesh that the arguments lie on, and their sizes; empty for none
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Program":
        """Take the facts from a compiled step; a TypeError says what to call for one."""
        # What eqx.filter_jit and nnx.jit compile wraps what jit compiled.
        compiled = getattr(compiled, "compiled", compiled)
        if not hasattr(compiled, "memory_analysis") or not hasattr(compiled, "output_shardings"):
            told = f"a compiled step is audited, got a {type(compiled).__name__}; hand over"
            raise TypeError(f"{told} step.lower(state, batch).compile(), or use step.audit(batch)")
        text = compiled.as_text()
        if not text:
            raise ValueError(
                "this backend gives no text of its compiled programs (as_text), so nothing can be "
                "audited; compile the same step for a backend that does"
            )
        places = _Placements()
        inputs = tuple(_inputs(compiled, places))
        shardings = compiled.out_tree.flatten_up_to(compiled.output_shardings)
        avals = getattr(compiled._executable, "out_avals", None)
        outputs = tuple(_leaves(compiled.out_info, shardings, places, avals))
        return cls(
            text=text,
            platform=places.platform,
            device_ids=places.device_ids,
            mesh=places.mesh,
            statistics=_statistics(compiled, places.platform),
            inputs=_named_after(inputs, outputs),
            outputs=outputs,
        )

    @cached_property
    def module(self) -> Module:
        return parse_module(self.text)

    @property
    def argument_bytes(self) -> int:
        """Count the bytes that arguments take on a device."""
        used = (x.shard_bytes for x in self.inputs if x.number is not None and not x.memory_kind)
        return self.statistics.get("argument_size_in_bytes", sum(used))

    @property
    def output_bytes(self) -> int:
        """Count the bytes of results that take no argument's buffer."""
        stats = self.statistics
        return max(stats.get("output_size_in_bytes", 0) - stats.get("alias_size_in_bytes", 0), 0)

    @property
    def peak(self) -> int:
        """Count the bytes of a device at the worst moment, as the compiler says where it does."""
        stats = self.statistics
        known = self.argument_bytes + self.output_bytes + stats.get("temp_size_in_bytes", 0)
        told = stats.get("peak_memory_in_bytes", 0)
        # A TPU's temporaries can add up to more: not all of them live at once. A CPU's figure
        # leaves temporaries out.
        peak = told if told and self.platform != "cpu" else known
        # libtpu's includes the host's memory, which is subtracted. Of a small program it is that of
        # vector memory (tens of MiB) where that takes more: the known sum bounds it.
        peak = min(max(peak - stats.get("host_argument_size_in_bytes", 0), 0), known)
        return min(peak, stats.get(_ALLOCATED, peak))

    @property
    def allocated(self) -> int:
        """Count the bytes that a device sets aside: on a TPU more than it uses at the peak."""
        return max(self.statistics.get(_ALLOCATED, 0), self.peak)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Program":
        return made(cls, json.loads(text))


class _Placements:
    """Number placements, so that equivalent ones have one number, and hold the devices."""

    def __init__(self) -> None:
        self.device_ids: tuple[int, ...] = ()
        self.mesh: dict[str, int] = {}
        self.platform = ""
        self._placed: list[tuple[int, Any]] = []

    def number(self, sharding: Any, ndim: int) -> int:
        if sharding is None:
            return -1
        for number, (dims, other) in enumerate(self._placed):
            if dims == ndim and sharding.is_equivalent_to(other, ndim):
                return number
        if isinstance(sharding, NamedSharding) and not self.device_ids:
            self.device_ids = tuple(x.id for x in np.asarray(sharding.mesh.devices).flat)
            self.mesh = dict(sharding.mesh.shape)
        self.platform = self.platform or platform_of(next(iter(sharding.device_set)))
        self._placed.append((ndim, sharding))
        return len(self._placed) - 1

    def memory_kind(self, sharding: Any) -> str:
        kind = getattr(sharding, "memory_kind", None) or "device"
        own = ("device", "unpinned_host") if self.platform == "cpu" else ("device",)
        return "" if kind in own else kind


def _inputs(compiled: Any, places: _Placements) -> Iterator[Argument]:
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    numbers = _entry_numbers(compiled, len(shardings))
    donated = [bool(info.donated) for info in jax.tree.leaves(compiled.args_info)]
    leaves = _leaves(compiled.args_info, shardings, places)
    for one, number, is_donated in zip(leaves, numbers, donated, strict=True):
        # The path begins with 0 and a position, or with 1 and a keyword.
        path = one.path.partition("/")[2]
        yield dataclasses.replace(one, path=path, number=number, donated=is_donated)


def _named_after(inputs: Sequence[Argument], outputs: Sequence[Argument]) -> tuple[Argument, ...]:
    """Name the arguments that eqx.filter_jit flattened after the results that take their place.

    Of f32[8], f32[4,8], f32[2,4] as arguments 0/rest/0, 0/rest/1 and 0/rest/2, with results
    1/0/b: f32[8] and 1/0/w: f32[4,8], the first two are 1/0/b and 1/0/w, and the third the batch.
    """
    if not all(_FILTERED.fullmatch(one.path) for one in inputs):
        return tuple(inputs)
    named = list(inputs)
    wanted, found = ([(one.shape, one.dtype) for one in leaves] for leaves in (inputs, outputs))
    blocks = difflib.SequenceMatcher(None, wanted, found, autojunk=False).get_matching_blocks()
    for start, place, count in blocks:
        for number, result in enumerate(outputs[place:][:count], start):
            one = inputs[number]
            named[number] = dataclasses.replace(one, path=result.path, role=result.role)
    return tuple(named)


def _leaves(
    tree: Any, shardings: Sequence[Any], places: _Placements, avals: Sequence[Any] | None = None
) -> Iterator[Argument]:
    pairs = list(flatten_with_paths(tree))
    nodes = jax.tree.leaves_with_path(tree, is_leaf=_is_optimizer_state)
    states = [path for path, node in nodes if _is_optimizer_state(node)]
    avals = avals or [getattr(info, "_aval", info) for _, info in pairs]
    for (path, info), aval, sharding in zip(pairs, avals, shardings, strict=True):
        shape, name = tuple(info.shape), path_name(path)
        shard = shape if sharding is None else tuple(sharding.shard_shape(shape))
        is_held = any(path[: len(prefix)] == prefix for prefix in states)
        yield Argument(
            path=name,
            shape=shape,
            dtype=str(info.dtype),
            shard_shape=shard,
            shard_bytes=0 if sharding is None else num_bytes(shard, info.dtype),
            spec=_spec(sharding).removeprefix("PartitionSpec"),
            placement=places.number(sharding, len(shape)),
            weak_type=bool(getattr(aval, "weak_type", False)),
            memory_kind=places.memory_kind(sharding),
            role="optimizer" if is_held or OPTIMIZER_NAMES.intersection(name.split("/")) else "",
        )


def _spec(sharding: Any) -> str:
    """Write a placement in one way, without axes of one device and without None at the end.

    P(("data", "fsdp"), "tensor", None) is P("data") where only "data" has more than one device.
    """
    if not isinstance(sharding, NamedSharding):
        return str(getattr(sharding, "spec", sharding))
    spec, sizes = sharding.spec, sharding.mesh.shape
    entries = (tuple(a for a in axes if sizes[a] != 1) for axes in as_entries(spec, len(spec)))
    return str(spec.update(partitions=tuple(as_spec(tuple(entries)))))


def _entry_numbers(compiled: Any, num_leaves: int) -> list[int | None]:
    """Return which entry parameter each argument leaf is: jit drops those that are not used."""
    executable = compiled._executable
    constants = len(getattr(getattr(compiled, "_params", None), "const_args", ()))
    kept = getattr(executable, "_kept_var_idx", None)
    order = sorted(kept) if kept is not None else range(constants + num_leaves)
    numbers = {index - constants: number for number, index in enumerate(order)}
    return [numbers.get(index) for index in range(num_leaves)]


def _is_optimizer_state(node: Any) -> bool:
    if is_named_tuple(node):
        is_state = not isinstance(node, optax.LookaheadParams)  # a pair of parameters
        return is_state and type(node).__module__.split(".")[0] == "optax"
    # A chain is a plain tuple; states of a user's own transformation stand in it beside optax's.
    chained = type(node) is tuple and bool(node) and all(map(is_named_tuple, node))
    return chained and any(map(_is_optimizer_state, node))


def _statistics(compiled: jax.stages.Compiled, platform: str) -> dict[str, int]:
    found = compiled.memory_analysis()
    if found is None:
        return {}
    sizes = {name: int(getattr(found, name)) for name in dir(found) if name.endswith("_in_bytes")}
    if platform == "tpu":
        size = getattr(found, "total_allocation_bytes", None)  # from jax 0.12 on
        with contextlib.suppress(RuntimeError, AttributeError):  # not every runtime serializes
            executable: Any = compiled.runtime_executable()
            size = size or allocated_bytes(executable.serialize())
        sizes |= {_ALLOCATED: size} if size else {}
    return sizes


def flatten_with_paths(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield leaves with their key paths; those of an nnx module have its attributes' names.

    nnx.jit hands over NodeStates(graphdef, ([bias, kernel],)): states/0/1 is linear/kernel/value.
    """
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_graph)[0]:
        names = list(_graph_names(node._graphdef)) if _is_graph(node) else []
        for inner, leaf in jax.tree_util.tree_flatten_with_path(node)[0]:
            if names:  # inner is states, 0, and the leaf's number
                inner = (DictKey(names[inner[2].idx]), *inner[3:])
            yield (*path, *inner), leaf


def _is_graph(node: Any) -> bool:
    states = getattr(node, "states", ())
    is_flat = isinstance(states, tuple) and len(states) == 1 and type(states[0]) is list
    return is_flat and getattr(node, "_graphdef", None) is not None


def _graph_names(graphdef: Any) -> Iterator[str]:
    """Name the leaves of a GraphDef, which lists nodes and attributes as they are met.

    nodes       NodeDef(Net, num_attributes=2), NodeDef(Linear, num_attributes=2),
                VariableDef, VariableDef
    attributes  ("linear", NodeAttr()), ("bias", NodeAttr()), ("kernel", NodeAttr()),
                ("size", Static(8))
    leaves      linear/bias/value, linear/kernel/value
    """
    nodes, attributes = iter(graphdef.nodes), iter(graphdef.attributes)

    def walk(path: tuple[str, ...]) -> Iterator[str]:
        node = next(nodes)
        if type(node).__name__ == "VariableDef":
            yield "/".join((*path, "value"))  # as in the module's nnx.state
        # A NodeRef is a node that was met before: it has no attributes.
        for _ in range(getattr(node, "num_attributes", 0)):
            key, kind = next(attributes)
            if type(kind).__name__ == "NodeAttr":
                yield from walk((*path, str(key)))
            elif type(kind).__name__ == "LeafAttr":
                yield "/".join((*path, str(key)))

    return walk(())
