"""`StepRecord`: what a compiled step holds and moves on one device; a lock file is JSON of them."""

import collections
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from zerojax._plain import made
from zerojax._tree import grouped, path_ends
from zerojax._types import Shape
from zerojax.audit import Argument, Program, returned_of, role_of, schedule_of
from zerojax.hlo import Collective, mesh_axes, parse_collectives, sum_moved

#: Version of lock files.
FORMAT = 1
_SPELLED = {"gather": "all-gather", "scatter": "reduce-scatter", "sliced": "reduce-scatter"}
_NUMBER = re.compile(r"\d+(?=/|$)")


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """Arguments that look the same, such as a matrix of each layer."""

    count: int  # how many they are
    dtype: str
    shape: Shape  # of one, whole
    spec: str  # its PartitionSpec
    bytes: int  # that all of them take on a device
    donated: bool
    settled: bool  # whether the step returns them as it takes them, so that it compiles once


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Collectives that look the same."""

    runs: int  # how often a step runs them; loops of unknown length count once
    bytes: int  # that a device sends in a step
    leaf: str  # arguments that they may move; empty for an activation
    source: str = ""  # file:line of one of them; a lock file leaves it out


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a compiled step holds and moves on one device."""

    versions: Mapping[str, str]  # of what compiled it, told where a step differs
    mesh: Mapping[str, int]  # its axes and their sizes, those of one device left out
    leaves: Mapping[str, Leaf]  # arguments by path, layer numbers written as *
    # collectives by what they do: "all-gather bf16[1024,4096] over data"
    moved: Mapping[str, Moved]
    # bytes of the peak, of arguments and of host memory, that are moved along each axis, and of
    # those that block; and the exposed share of the scheduled step, as far as the compiler tells
    totals: Mapping[str, float]
    # what ZeRO moves for such arguments, beside what is moved; in words, and in no lock file
    theory: str = ""

    @classmethod
    def of(
        cls,
        compiled: jax.stages.Compiled | Program,
        devices: Sequence[Any],
        versions: Mapping[str, str] = MappingProxyType({}),
    ) -> "StepRecord":
        """Read a step, what `jax.jit(step).lower(...).compile()` returns or a kept `Program`.

        The devices that it was compiled for are given in any order, with versions of the compiler.
        """
        program = compiled if isinstance(compiled, Program) else Program.of(compiled)
        module = program.module
        if not program.mesh:  # only constraints within the step name one
            mesh, ids = {"device": module.num_devices}, tuple(range(module.num_devices))
            program = replace(program, mesh=mesh, device_ids=ids)
        records = parse_collectives(module).records
        leaves = _leaves(program)
        totals = _totals(program, records)
        if (schedule := schedule_of(program, module, records, devices)) is not None:
            totals["blocking bytes"] = round(schedule.blocking_bytes)
            totals["exposed share"] = round(schedule.exposed_share, 4)
        return cls(
            versions=dict(versions),
            mesh={name: size for name, size in program.mesh.items() if size > 1},
            leaves=leaves,
            moved=_moved(records, program, leaves),
            totals=totals,
            theory=_theory(program, records),
        )


def _leaves(program: Program) -> dict[str, Leaf]:
    # Of what has no name it is the own place that counts, if it is donated.
    named = [one for one in program.inputs if one.path.strip("/0123456789")]
    own = {(one.path, one.shape): one for one in program.outputs}
    returned = {x.path: own.get((x.path, x.shape)) for x in program.inputs if x.donated}
    returned |= returned_of(named, program.outputs)
    groups: dict[tuple[Any, ...], list[Argument]] = {}
    for one in program.inputs:
        settled = _same(one, returned.get(one.path))
        key = (_pattern(one.path), one.dtype, one.shape, one.spec, one.donated, settled)
        groups.setdefault(key, []).append(one)
    names = collections.Counter(_common_path(alike) for alike in groups.values())
    found: dict[str, Leaf] = {}
    for (*_, settled), alike in groups.items():
        path = _common_path(alike)
        if names[path] > 1:
            path = _common_path(alike, with_numbers=True)
        looks = {name: getattr(alike[0], name) for name in ("dtype", "shape", "spec", "donated")}
        size = sum(one.shard_bytes for one in alike)
        found[path] = Leaf(count=len(alike), bytes=size, settled=settled, **looks)
    return dict(sorted(found.items()))


def _pattern(path: str) -> str:
    """Write numbers within a path as *: 0/params/blocks/3/qkv as 0/params/blocks/*/qkv."""
    return _NUMBER.sub("*", path)


def _common_path(alike: Sequence[Argument], *, with_numbers: bool = False) -> str:
    """Write the numbers in which paths differ as *, or as all of them: blocks/0,3/qkv."""
    columns = zip(*(one.path.split("/") for one in alike), strict=True)
    parts = (tuple(dict.fromkeys(column)) for column in columns)
    return "/".join(",".join(x) if with_numbers or len(x) == 1 else _pattern(x[0]) for x in parts)


def _same(one: Argument, returned: Argument | None) -> bool:
    """Whether an argument comes back so that the next call compiles nothing anew."""
    if returned is None or -1 in (one.placement, returned.placement):
        return True
    kept = ("placement", "dtype", "weak_type", "memory_kind")
    return all(getattr(one, name) == getattr(returned, name) for name in kept)


def _moved(
    records: Iterable[Collective], program: Program, leaves: dict[str, Leaf]
) -> dict[str, Any]:

    def words(one: Collective) -> str:
        name, shape = _SPELLED.get(role_of(one), one.op), ",".join(map(str, one.shape))
        return f"{name} {one.dtype}[{shape}] over {_axes(one, program)}"

    groups = grouped((one for one in records if one.moved_elements), words)
    # Moments look like their parameters, and are not what is moved.
    states = {_pattern(one.path) for one in program.inputs if one.role}
    named = {path: leaf for path, leaf in leaves.items() if _pattern(path) not in states}
    return {
        key: Moved(
            runs=sum(one.runs for one in alike),
            bytes=round(sum(one.moved_bytes for one in alike)),
            leaf=_leaf_of(alike[0], named),
            source=alike[0].source.rpartition("site-packages/")[2],
        )
        for key, alike in sorted(groups.items())
    }


def _axes(record: Collective, program: Program) -> str:
    pairs = record.op == "collective-permute"
    return " x ".join(mesh_axes(record.groups, program.mesh, pairs=pairs)) or "slices"


def _leaf_of(record: Collective, leaves: Mapping[str, Leaf]) -> str:
    """Name the arguments that a collective may move: all of one, or a layer of it along any dim."""
    dims = sorted(size for size in record.shape if size > 1)
    is_float = record.dtype[0] in "bf"
    for cut in (0, 1, 2):
        found = dict.fromkeys(
            path
            for path, leaf in leaves.items()
            if ("float" in leaf.dtype) == is_float
            for part in itertools.combinations(leaf.shape, max(len(leaf.shape) - cut, 0))
            if sorted(size for size in part if size > 1) == dims
        )
        if found and dims:
            return " or ".join([*found][:3]) + (" ..." if len(found) > 3 else "")
    return ""


def _totals(program: Program, records: Iterable[Collective]) -> dict[str, float]:
    totals = collections.defaultdict[str, float](float)
    totals["peak bytes"] = program.peak
    totals["argument bytes"] = program.argument_bytes
    totals["host bytes"] = program.statistics.get("host_argument_size_in_bytes", 0)
    for one in records:
        if one.moved_elements:
            totals[f"bytes over {_axes(one, program)}"] += one.moved_bytes
    return {name: round(value) for name, value in totals.items() if value}


def _theory(program: Program, records: Sequence[Collective]) -> str:
    """Say what ZeRO moves for arguments that lie as these, in elements per parameter (Psi).

    Arguments of an optimizer leaf's shape whose path ends as its does are a parameter, and its
    master if there are two. Cut in n parts, a parameter is gathered twice and reduced once,
    3 (n-1)/n; where only its states are, or nothing, 2 (n-1)/n (arXiv 1910.02054, section 7).
    """
    others: dict[tuple[str, Shape], list[Argument]] = {}
    for one in program.inputs:
        for end in path_ends(one.path) if not one.role else ():
            others.setdefault((end, one.shape), []).append(one)
    moments: dict[tuple[str, Shape], list[Argument]] = {}
    for one in program.inputs:
        ends = ((end, one.shape) for end in path_ends(one.path) if (end, one.shape) in others)
        is_moment = one.role == "optimizer" and one.shape and math.prod(one.shape)
        if is_moment and (key := next(ends, None)):
            moments.setdefault(key, []).append(one)
    size, count, partitioned, moves = 0, 0, 0, 0.0
    for key, own in moments.items():
        shape, held = key[1], others[key]
        parameter = min(held, key=lambda one: one.shard_bytes / math.prod(one.shard_shape))
        elements, is_cut = math.prod(shape), parameter.shard_shape != shape
        parts = max(elements // math.prod(x.shard_shape) for x in (*held, *own))
        parts = parts if parts > 1 else len(program.device_ids)
        size, count, partitioned = size + elements, count + 1, partitioned + is_cut
        moves += (3 if is_cut else 2) * elements * (parts - 1) / parts
    if not size:
        return "no optimizer's state is recognised among the arguments, so no theory is told"
    # A CPU has no reduce-scatters: it reduces whole and keeps a part.
    halved = [one for one in records if program.platform == "cpu" and role_of(one) == "sliced"]
    seen = (sum_moved(records) - sum_moved(halved) / 2) / size
    number = sum(map(len, moments.values()))
    return (
        f"inferred from {number} moments: {size:,} parameters, {partitioned} of {count} leaves "
        f"sharded; ZeRO moves {moves / size:.3f} elements a parameter, this step {seen:.3f}"
    )


def read_lock(path: Path) -> dict[str, StepRecord]:
    """Read the records of a lock file, by "step @ target".

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no lock file, or one of another format.
    """
    try:
        # int refuses the constants that Python's json reads: NaN, Infinity.
        held = json.loads(path.read_text(encoding="utf-8"), parse_constant=int)
        if held["format"] != FORMAT:
            raise ValueError(f"format {held['format']}, and this zerojax reads {FORMAT}")
        return {name: made(StepRecord, step) for name, step in held["steps"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = f"{path} is no lock file that can be read ({error}): write it anew with --accept"
        raise ValueError(told) from error


def write_lock(path: Path, records: Mapping[str, StepRecord]) -> None:
    steps = {name: asdict(records[name]) for name in sorted(records)}
    for step in steps.values():
        del step["theory"]
        for one in step["moved"].values():
            del one["source"]
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(_dumps({"format": FORMAT, "steps": steps}, depth=4) + "\n")
    partial.replace(path)


def _dumps(value: Any, depth: int, indent: str = "") -> str:
    if not depth or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + "  "
    lines = (f"{inner}{json.dumps(key)}: {_dumps(x, depth - 1, inner)}" for key, x in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
