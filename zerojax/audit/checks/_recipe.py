"""Checks of the states against the recipe: their dtypes, and what lives in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerojax.audit._arguments import STATES, Held
from zerojax.audit._evidence import SHARE, Evidence, Problem, some

_REMEDY = "audit with the recipe that the step was made with, or make the step with this one"


def check_precision(evidence: Evidence) -> Iterator[Problem]:
    """Check that parameters and masters have the dtypes that the recipe names.

    A recipe that names no dtype of the parameters is taken as silent about masters too. Narrow
    shares of other dtypes are left out: models keep norms and biases wide.
    """
    precision = evidence.recipe.precision
    for kind, wanted in (("parameter", precision.params), ("master", precision.master)):
        other = [] if wanted is None else _of_other_dtype(evidence, kind, wanted)
        if sum(one.elements for one in other) >= SHARE * evidence.theory.elements and other:
            yield _finding(other, f"{kind}s in {wanted}", other[0].argument.dtype)
    if precision.params is None or not evidence.is_step:
        return
    masters = evidence.states("master")
    if masters and precision.master is None:
        yield _finding(masters, "no masters", "masters beside the parameters")
    needs_copy = precision.master is not None and precision.master != precision.params
    if needs_copy and not _may_have_masters(evidence):
        params = evidence.states("parameter")
        yield _finding(params, f"masters in {precision.master}", "no masters")


def check_offload(evidence: Evidence) -> Iterator[Problem]:
    """Check that states live in the host's memory where the recipe has them there.

    A program for GPUs that are not here names no memories: what lies on the device is judged
    elsewhere only.
    """
    if not evidence.has_recipe:
        return
    offload = evidence.recipe.offload
    hosted = [one for one in evidence.states(*STATES) if one.is_far]
    if hosted and not offload:
        yield _finding(hosted, "all states on the device", "in the host's memory")
    if not offload or evidence.program.platform == "gpu":
        return
    for kind in ("optimizer", "master"):
        large = [
            one
            for one in evidence.states(kind)
            if one.elements >= evidence.floor and one.argument.placement >= 0
        ]
        if large and not any(one.is_far for one in large):
            yield _finding(large, f"{kind} in the host's memory", "on the device")


def _of_other_dtype(evidence: Evidence, kind: str, wanted: Any) -> list[Held]:
    return [
        one
        for one in evidence.states(kind)
        if one.argument.dtype.startswith(("float", "bfloat")) and one.argument.dtype != str(wanted)
    ]


def _may_have_masters(evidence: Evidence) -> bool:
    """Return whether a leaf may be a master: one with a parameter's shape and the master's dtype.

    An optimizer of the user's own may keep them within its state, under any name.
    """
    wanted = str(evidence.recipe.precision.master)
    if evidence.states("master"):
        return True
    return any(
        one.parameter is not None and one.argument.dtype == wanted
        for one in evidence.held
        if one.kind == "other" or (one.kind == "optimizer" and "master" in one.argument.path)
    )


def _finding(leaves: list[Held], expected: str, seen: str) -> Problem:
    return Problem(
        where=f"{leaves[0].kind}: {some([one.argument.path for one in leaves], 2)}",
        expected=f"{expected}, as the recipe says",
        seen=seen,
        remedy=_REMEDY,
    )
