"""The parts of a saved state: parameters, masters, and what the optimizer keeps for each."""

from __future__ import annotations

import dataclasses

from zerojax._tree import num_elements
from zerojax.checkpoint._leaves import PARAMS
from zerojax.checkpoint._manifest import Manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Leaves with one beginning: `params`, `opt_state/0/mu`, or a leaf by itself.

    Attributes:
        path: the beginning.
        num_leaves: how many.
        num_elements: of all of them, logical.
        num_bytes: of all of them, logical.
        dtypes: their dtypes, each once.
    """

    path: str
    num_leaves: int
    num_elements: int
    num_bytes: int
    dtypes: tuple[str, ...]


def parts(manifest: Manifest) -> list[Part]:
    """Group the leaves of a checkpoint by what lies before a parameter's path."""
    params = {path.removeprefix(PARAMS) for path in manifest.leaves if path.startswith(PARAMS)}
    groups: dict[str, list[str]] = {}
    for path in manifest.leaves:
        groups.setdefault(_beginning(path, params), []).append(path)
    return [_part(manifest, path, held) for path, held in groups.items()]


def _beginning(path: str, params: set[str]) -> str:
    keys = path.split("/")
    for first in range(1, len(keys)):
        if "/".join(keys[first:]) in params:
            return "/".join(keys[:first])
    return path if params else keys[0]


def _part(manifest: Manifest, path: str, held: list[str]) -> Part:
    leaves = [manifest.leaves[name] for name in held]
    return Part(
        path=path,
        num_leaves=len(leaves),
        num_elements=sum(num_elements(leaf.shape) for leaf in leaves),
        num_bytes=sum(leaf.num_bytes for leaf in leaves),
        dtypes=tuple(dict.fromkeys(leaf.dtype for leaf in leaves)),
    )
