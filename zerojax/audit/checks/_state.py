"""Checks of the states: where they live, in which dtype, whose buffers they take and give."""

import math
from collections.abc import Iterator

import jax

from zerojax._tree import grouped
from zerojax.audit._arguments import LAYERS, STATES, WEIGHS, Held, is_read, item_bits
from zerojax.audit._evidence import SHARE, Evidence, Problem, hint, some
from zerojax.audit._match import key_of
from zerojax.hlo import Frame, Value, uses_of

#: What to do about a state that lives in the wrong place, by kind.
_PLACE = {
    "parameter": "place the parameters as layout.params says, and so return them from the step: "
    "zerojax.apply_updates(params, updates, layout) does",
    "optimizer": "give jit in_shardings and out_shardings of layout.opt_state(tx), and make the "
    "state as shards from the start",
}
_PLACE |= dict.fromkeys(("master", "gradient", "copy"), "place it as layout.masters says")
_OF_OPTIMIZER = ("master", "optimizer")
_MAKERS = ("make_train_step", "sharded(tx, layout)")

#: What may differ from step to step: an argument's field, its name, what shows it, what to do.
_DIFFERENCES = (
    ("placement", "sharding", "spec", "give jit the same out_shardings as in_shardings"),
    ("dtype", "dtype", "dtype", "cast the new state to the old one's dtype before it is returned"),
    (
        "weak_type",
        "weak type",
        "weak_type",
        "start from an array with a dtype (jnp.zeros((), jnp.float32)), not a Python number",
    ),
)


def check_recognised(evidence: Evidence) -> Iterator[Problem]:
    """Check that the program holds the parameters that the layout was made from."""
    if evidence.states("parameter"):
        return
    layout, leaves = evidence.layout, evidence.program.inputs
    yield Problem(
        where=some([f"{leaf.path} {list(leaf.shape)}" for leaf in leaves]) or "no argument",
        expected=f"an argument with the layout's {len(layout.leaves)} parameters, the first "
        f"{layout.leaves[0].path!r} {list(layout.leaves[0].shape)}",
        seen="no argument tree has the paths and shapes of the layout's parameters",
        remedy="audit the program with the layout that was made from its parameters",
    )


def check_placement(evidence: Evidence) -> Iterator[Problem]:
    layout, states = evidence.layout, evidence.states(*STATES)
    placed = (one for one in states if one.shards and one.argument.placement >= 0)
    judged = [one for one in placed if one.elements >= evidence.floor]
    whole = [one for one in judged if _excess(one) > 0 and not _is_read(evidence, one)]
    stay = [kind for kind in ("parameter", "optimizer", "master") if not layout.partitions(kind)]
    cut = [one for one in judged if _excess(one) < 0 and one.kind in stay]
    stage, shards = layout.stage, layout.num_shards
    for kind, group in grouped(whole, lambda one: one.kind).items():
        seen = sum(one.argument.shard_bytes for one in group)
        held = [(x.argument.shard_bytes, x.argument.shard_shape, x.shards[0]) for x in group]
        should = sum(math.prod(to) * (size // max(math.prod(of), 1)) for size, of, to in held)
        yield Problem(
            where=f"{kind}: {_where(group)}",
            expected=f"{should:,} B in {list(group[0].shards[0])} by stage {stage} over {shards}",
            seen=f"{kind} not partitioned as the layout says: {seen:,} B per device, the first in "
            f"{list(group[0].argument.shard_shape)}",
            remedy=_PLACE[kind] + (hint(evidence, *_MAKERS) if kind in _OF_OPTIMIZER else ""),
        )
    for kind, group in grouped(cut, lambda one: one.kind).items():
        yield Problem(
            where=f"{kind}: {_where(group)}",
            expected=f"whole leaves, as stage {stage} keeps them, the first {_shape(group[0])}",
            seen=f"{kind} partitioned that the layout keeps whole, the first in "
            f"{list(group[0].argument.shard_shape)}",
            remedy=f"{_PLACE[kind]}; or make the layout of the stage that is meant "
            f"({'3' if kind == 'parameter' else '1 or more'})",
        )


def note_undivided(evidence: Evidence) -> Iterator[str]:
    """Name parameters that are whole at stage 3, since the layout could only cut them padded."""
    leaves, held = evidence.layout.leaves, evidence.states("parameter")
    found = [(x.argument, leaves[x.parameter]) for x in held if x.parameter is not None]
    whole = [x.shard_bytes for x, leaf in found if leaf.is_padded and x.shape == leaf.shape]
    if whole and evidence.layout.partitions("parameter"):
        yield (
            f"{len(whole)} of {len(held)} parameters are whole, {sum(whole):,} B a device: no dim "
            "divides, and a step of make_train_step pads them to shards"
        )


def note_others(evidence: Evidence) -> Iterator[str]:
    """Name what stands beside the states, of no leaf's shape, and is whole on every device."""
    large = [
        x.argument for x in evidence.held if x.kind == "other" and x.elements >= evidence.floor
    ]
    whole = [x for x in large if x.shard_shape == x.shape]
    if whole and evidence.layout.partitions("optimizer"):
        yield (
            f"{sum(x.shard_bytes for x in whole):,} B beside the states are whole on every device, "
            f"{some([f'{x.path} {list(x.shape)}' for x in whole])}: a history, say, can be cut"
        )


def check_donation(evidence: Evidence) -> Iterator[Problem]:
    """Check that a state gives its buffer to what replaces it."""
    taken = {None, *evidence.module.aliases}
    large = [x for x, _ in evidence.pairs if x.kind in STATES and x.elements >= evidence.floor]
    lost = [x for x in large if x.argument.number not in taken]
    for kind, group in grouped(lost, lambda one: one.kind).items():
        seen, remedy = _lost(group)
        size = sum(one.argument.shard_bytes for one in group)
        yield Problem(
            where=f"{kind}: {_where(group)}",
            expected="the new state written into the old one's buffer (input_output_alias)",
            seen=f"donation lost: {seen}; {size:,} B per device are held twice",
            remedy=remedy,
        )


def _lost(group: list[Held]) -> tuple[str, str]:
    if any(one.argument.donated for one in group):
        return "donated, but the compiler found no result to write there", (
            "give the result the same shape, dtype and sharding as the argument "
            "(out_shardings), and return the state first"
        )
    if getattr(jax.config, "jax_debug_nans", False):
        return "not donated", "audit without jax_debug_nans, under which jax donates nothing"
    name = group[0].argument.owner
    donate = f"donate_argnums={name}" if name.isdigit() else f"donate_argnames={name!r}"
    return "not donated", f"jax.jit(step, {donate}, ...), and use the returned state only"


def check_recompile(evidence: Evidence) -> Iterator[Problem]:
    """Check that states come back as they went in: else the second step compiles anew."""
    placed = [pair for pair in evidence.pairs if pair[0].argument.placement >= 0]
    for field, name, shown, remedy in _DIFFERENCES:
        found = [x for x in placed if getattr(x[0].argument, field) != getattr(x[1], field)]
        if not found:
            continue
        first, result = found[0]
        kinds = dict.fromkeys(one.kind for one, _ in found)
        yield Problem(
            where=f"{', '.join(kinds)}: {_where([one for one, _ in found])}",
            expected=f"the {name} that the argument has: {getattr(first.argument, shown)}",
            seen=f"the step returns another {name}: {getattr(result, shown)}; the second step "
            "would be compiled anew, or refused",
            remedy=remedy,
        )


def check_precision(evidence: Evidence) -> Iterator[Problem]:
    """Check that parameters and masters have the dtypes that the recipe names.

    A recipe that names no dtype of the parameters is taken as silent about masters too. Narrow
    shares of other dtypes are left out: models keep norms and biases wide.
    """
    precision = evidence.recipe.precision
    for kind, wanted in (("parameter", precision.params), ("master", precision.master)):
        states = [] if wanted is None else evidence.states(kind)
        floating = (one for one in states if one.argument.dtype.startswith(("float", "bfloat")))
        other = [one for one in floating if one.argument.dtype != str(wanted)]
        if sum(one.elements for one in other) >= SHARE * evidence.theory.elements and other:
            yield _finding(other, f"{kind}s in {wanted}", other[0].argument.dtype)
    if precision.params is None or not evidence.is_step:
        return
    masters = evidence.states("master")
    if masters and precision.master is None:
        yield _finding(masters, "no masters", "masters beside the parameters")
    needs_copy = precision.master is not None and precision.master != precision.params
    if needs_copy and not _may_have_masters(evidence):
        yield _finding(evidence.states("parameter"), f"masters in {precision.master}", "no masters")


def check_offload(evidence: Evidence) -> Iterator[Problem]:
    """Check that states live in the host's memory where the recipe has them there.

    A program for absent GPUs names no memories: what lies on the device is judged elsewhere.
    """
    if not evidence.has_recipe:
        return
    offload = evidence.recipe.offload
    hosted = [one for one in evidence.states(*STATES) if one.on_host]
    if hosted and not offload:
        yield _finding(hosted, "all states on the device", "in the host's memory")
    if not offload or evidence.program.platform == "gpu":
        return
    for kind in ("optimizer", "master"):
        large = [one for one in evidence.states(kind) if one.elements >= evidence.floor]
        large = [one for one in large if one.argument.placement >= 0]
        if large and not any(one.on_host for one in large):
            yield _finding(large, f"{kind} in the host's memory", "on the device")


def check_constants(evidence: Evidence) -> Iterator[Problem]:
    """Check that no weights are constants of the program, as arrays that a loss closes over are.

    Masks and tables that are added or selected are left out, unless a parameter has their shape,
    and what is less than a tenth of the parameters, or of a small model less than 1 MiB and half.
    """
    module, leaves = evidence.module, evidence.layout.leaves
    alike = {key_of(leaf.shape) for leaf in leaves}
    sizes: dict[str, list[int]] = {}
    for computation in module.computations.values():
        for line in (x for x in computation.instructions if x.opcode == "constant"):
            tensor = next((x for x in line.shapes if x.elements >= evidence.floor), None)
            value = Value(Frame(computation=computation), line.name, None)
            uses = [use.line for use in uses_of(module, value, LAYERS) if tensor]
            found = [x for x in uses if x.opcode in WEIGHS]
            if tensor and key_of(tensor.dims) in alike and "f" in tensor.dtype:
                found += uses
            if tensor and (user := next(iter(found), None)):
                name = f"{tensor.dtype}{list(tensor.dims)} ({module.source(user) or user.op_name})"
                sizes.setdefault(name, []).append(tensor.bytes)
    total, count = sum(map(sum, sizes.values())), sum(map(len, sizes.values()))
    whole = sum(math.prod(leaf.shape) * item_bits(str(leaf.dtype)) / 8 for leaf in leaves)
    if not sizes or total < max(whole / 10, min(whole / 2, 2**20)):
        return
    yield Problem(
        where=some(sorted(sizes, key=lambda name: -sum(sizes[name])), 2),
        expected="weights that are arguments of the step, placed and counted as such",
        seen=f"{count} array(s) closed over became constants of the program: "
        f"{total:,} B whole on every device, however they were placed",
        remedy="pass them to the step as arguments: in the batch as zerojax.Whole, or sharded with "
        "the parameters, under stop_gradient",
    )


def _is_read(evidence: Evidence, one: Held) -> bool:
    """Return whether a further copy is read by the loss, and whole as parameters are."""
    is_whole = one.kind == "copy" and not evidence.layout.partitions("parameter")
    return is_whole and is_read(evidence.program, one.argument)


def _excess(one: Held) -> int:
    sizes = [math.prod(shape) for shape in one.shards]
    seen = math.prod(one.argument.shard_shape)
    if seen in sizes:
        return 0
    return 1 if seen > min(sizes) else -1


def _where(group: list[Held]) -> str:
    largest = max(group, key=lambda one: one.elements)
    many = f"{len(group)} leaves, the largest " if len(group) > 1 else ""
    return f"{many}{largest.argument.path} {_shape(largest)}"


def _shape(one: Held) -> str:
    return f"{one.argument.dtype}{list(one.argument.shape)}"


def _may_have_masters(evidence: Evidence) -> bool:
    """Return whether a leaf may be a master: one with a parameter's shape and the master's dtype.

    An optimizer of the user's own may keep them within its state, under any name.
    """
    wanted = str(evidence.recipe.precision.master)
    return bool(evidence.states("master")) or any(
        one.parameter is not None and one.argument.dtype == wanted
        for one in evidence.states("copy", "other", "optimizer")
        if one.kind != "optimizer" or "master" in one.argument.path
    )


def _finding(leaves: list[Held], expected: str, seen: str) -> Problem:
    return Problem(
        where=f"{leaves[0].kind}: {some([one.argument.path for one in leaves], 2)}",
        expected=f"{expected}, as the recipe says",
        seen=seen,
        remedy="audit with the recipe that the step was made with, or make the step with this one",
    )
