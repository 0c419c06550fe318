"""The check that every trained leaf learns of the examples of all devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zerojax.audit._evidence import Evidence, hint
from zerojax.audit._problems import Finding
from zerojax.audit.checks._traffic import check_scatter
from zerojax.hlo import Value, arguments_of, is_collective


def check_reduction(evidence: Evidence) -> Iterator[Finding]:
    """Check that what becomes of examples in a new parameter went through a collective.

        %g = f32[64] reduce(%x_of_own_examples);  %new = f32[64] subtract(%bias, %g)

    follows from each device's own examples alone, so that devices train apart. It is a problem of
    small leaves, a bias that is left out of a `psum`; where nothing is reduced, that alone is told.
    Where parameters are gathered after the update, the states of the optimizer show it.
    """
    layout, axes = evidence.layout, set(evidence.layout.batch_axes)
    batch = {one.argument.number for one in evidence.states("batch")}
    # A matmul that overlaps a ring of permutes adds its own part to what has come around.
    rings = any(move.record.spelling == "windowed reduce-scatter" for move in evidence.ours)
    if not batch or layout.num_batch_parts == 1 or rings:
        return
    others = {(m.record.computation, m.record.name) for m in evidence.moves if not m.is_ours}

    def crosses(value: Value) -> bool:
        # What runs in a branch or beside the program may have a collective in it.
        line = value.line
        beside = line.opcode == "conditional" or line.opcode.startswith("async-")
        return beside or (is_collective(line) and value.key[:2] not in others)

    def reaches(*values: str) -> bool:
        return not batch.isdisjoint(arguments_of(evidence.module, *values, until=crosses))

    # A leaf that the user cuts over the batch axes has a part for each device, as experts have.
    trained = {
        leaf: values.values()
        for leaf, values in evidence.updated.items()
        if axes.isdisjoint(itertools.chain(*layout.leaves[leaf].entries))
    }
    # All leaves in one walk first: most programs have nothing to find.
    is_found = reaches(*itertools.chain(*trained.values()))
    found = [leaf for leaf, values in trained.items() if is_found and reaches(*values)]
    if not found or (len(found) == len(trained) and any(check_scatter(evidence))):
        return
    yield Finding(
        where=evidence.paths(found),
        expected=f"its gradient summed over {' x '.join(layout.batch_axes)}",
        seen="its new value is made of one device's own examples, and others learn nothing of them",
        remedy="sum or average the gradient over devices (jax.lax.pmean in shard_map)"
        f"{hint(evidence, 'make_train_step')}",
    )
