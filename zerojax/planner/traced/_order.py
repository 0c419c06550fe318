"""The order in which XLA's scheduler runs operations on a GPU. Pure.

It goes backwards from the results, and puts each operation right before the first that reads it.
Seen in compiled programs: a tied embedding's gradient is a sum with the look-up's part, so that the
logits' gradient waits for the end of the backward pass; and a layer's softmax is computed again
behind the gradient of the scores, which lie there twice.
"""

import dataclasses
from collections.abc import Collection

from zerojax.planner.traced._operations import Operations


def run_late(program: Operations, gradients: Collection[int], *, is_loss: bool) -> Operations:
    """Return the operations as late as possible; those that wait for the same one keep their order.

    What the loss is made of (the first output, where there is one) comes in its place, and so does
    a gradient that one product makes: it is reduced beside the next product.
    """
    end, made = len(program.ops), {v: op for op in program.ops for v in op.outputs}
    readers: dict[int, set[int]] = {}
    for t, op in enumerate(program.ops):
        for v in op.read:
            readers.setdefault(v, set()).add(t)
    reduced = set(gradients)
    for v in gradients:  # and what they are only views of
        while (op := made.get(v)) is not None and op.kind == "fused" and len(op.read) == 1:
            v = op.read[0]
            reduced.add(v)
    loss = set(program.outputs[:1] if is_loss else ())
    for op in reversed(program.ops):
        if not loss.isdisjoint(op.outputs):
            loss.update(op.read)
    order, waits, product = [end], {}, end  # what each waits for; the first product
    for t in reversed(range(end)):
        op = program.ops[t]
        found = {end}.union(*(readers.get(v, ()) for v in op.outputs))
        if not (loss | reduced).isdisjoint(op.outputs):
            found.add(product)
        at = min(map(order.index, found))
        waits[t] = order[at]
        while at and waits[order[at - 1]] == waits[t]:
            at -= 1
        order.insert(at, t)
        if op.kind == "kernel" and reduced.isdisjoint(op.outputs) and at < order.index(product):
            product = t
    return dataclasses.replace(program, ops=tuple(program.ops[t] for t in order[:-1]))
