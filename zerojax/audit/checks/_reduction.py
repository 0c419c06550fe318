"""The check that every trained leaf learns of the examples of all devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zerojax.audit._evidence import Evidence, hint
from zerojax.audit._origins import Origins
from zerojax.audit._problems import Finding
from zerojax.audit.checks._traffic import check_scatter


def check_reduction(evidence: Evidence) -> Iterator[Finding]:
    """Check that what becomes of examples in a new parameter went through a collective.

        %g = f32[64] reduce(%x_of_own_examples);  %new = f32[64] subtract(%bias, %g)

    follows from each device's own examples alone, so that devices train apart. It is a problem of
    small leaves, a bias that is left out of a `psum`; where nothing is reduced, that alone is told.
    Where parameters are gathered after the update, the states of the optimizer show it.
    """
    layout, axes = evidence.layout, set(evidence.layout.batch_axes)
    # A matmul that overlaps a ring of permutes adds its own part to what has come around.
    rings = any(move.record.spelling == "windowed reduce-scatter" for move in evidence.ours)
    if layout.num_batch_parts == 1 or rings:
        return
    reaches = Origins(evidence.module, evidence.held, evidence.moves).are_of_examples
    # A leaf that the user cuts over the batch axes has a part for each device, as experts have.
    trained = {
        leaf: values.values()
        for leaf, values in evidence.updated.items()
        if axes.isdisjoint(itertools.chain(*layout.leaves[leaf].entries))
    }
    found = [leaf for leaf, values in trained.items() if reaches(values)]
    if not found or (len(found) == len(trained) and any(check_scatter(evidence))):
        return
    yield Finding(
        where=evidence.paths(found),
        expected=f"its gradient summed over {' x '.join(layout.batch_axes)}",
        seen="its new value is made of one device's own examples, and others learn nothing of them",
        remedy="sum or average the gradient over devices (jax.lax.pmean in shard_map)"
        f"{hint(evidence, 'make_train_step')}",
    )
