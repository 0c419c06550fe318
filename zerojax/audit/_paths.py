"""Key paths of leaves, also of those that flax nnx hands to jit as a flat list."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import DictKey


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
