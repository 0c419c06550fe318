"""Do all processes do the same, and end before the same step? What differs is named on all."""

import base64
import functools
import hashlib
import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._tree import is_key, leaves_by_path, mixed_bits
from zerojax._types import AnyMesh, PyTree
from zerojax.processes._texts import ProcessesDifferError, connection, gather_texts

#: Characters of a line that are shown, and of a compressed text that are exchanged.
MOST_SHOWN, MOST_SENT = 160, 1 << 20
_ASKED, _STEP = "zerojax/stop/asked/", "zerojax/stop/step/"


def agree(name: str, facts: Mapping[str, str]) -> None:
    """Compare texts between processes, by name; all call it.

    The first line that differs of each text is an error on all processes. The fact `program`
    follows from the others: it is named only where they agree.
    """
    if jax.process_count() == 1:
        return
    digests = {fact: hashlib.sha256(text.encode()).hexdigest()[:16] for fact, text in facts.items()}
    every = [json.loads(told) for told in gather_texts(name, json.dumps(digests))]
    names = dict.fromkeys(fact for told in every for fact in told)
    differing = [fact for fact in names if len({told.get(fact) for told in every}) > 1]
    found = []
    for fact in [fact for fact in differing if fact != "program"] or differing:
        packed = base64.b64encode(zlib.compress(facts.get(fact, "").encode()))[:MOST_SENT]
        cut = (
            text[: len(text) // 4 * 4] for text in gather_texts(f"{name}: {fact}", packed.decode())
        )
        every = (zlib.decompressobj().decompress(base64.b64decode(text)) for text in cut)
        found.append(f"{fact}: {_difference([text.decode(errors='replace') for text in every])}")
    if found:
        raise ProcessesDifferError(f"the processes differ before {name}: {'; '.join(found)}")


def _difference(texts: Sequence[str]) -> str:
    """Write the first line that differs: `process 0 has 'lr: 0.1'; process 1, 2 has 'lr: 0.2'`."""
    rows = itertools.zip_longest(*(text.splitlines() for text in texts), fillvalue="")
    row = next((row for row in rows if len(set(row)) > 1), None)
    if row is None:
        return "they differ in what is too long to show"
    equal = itertools.takewhile(lambda found: len(set(found)) == 1, zip(*row, strict=False))
    start, holders = max(0, len(list(equal)) - MOST_SHOWN // 2), defaultdict(list)
    for index, line in enumerate(row):
        holders[line[start:][:MOST_SHOWN].strip()].append(str(index))
    return "; ".join(f"process {', '.join(who)} has {line!r}" for line, who in holders.items())


def check_present(mesh: AnyMesh) -> None:
    """Refuse a mesh without a device of this process, which would wait for the others in vain."""
    index = jax.process_index()
    if isinstance(mesh, Mesh) and all(x.process_index != index for x in mesh.devices.flat):
        raise ValueError(f"process {index} has no device in the mesh; make it of jax.devices()")


def check_copies(name: str, tree: PyTree) -> None:
    """Compare the copies of what several devices hold, by checksums that the devices compute.

    All processes raise, with the leaves whose copies differ.
    """
    leaves = {path: x for path, x in leaves_by_path(tree).items() if _has_copies(x)}
    if jax.process_count() == 1 or not leaves:
        return
    mesh = next(iter(leaves.values())).sharding.mesh
    leaves = {path: x for path, x in leaves.items() if x.sharding.mesh == mesh}
    specs = tuple(x.sharding.spec for x in leaves.values())
    # Made anew: a jitted function of the module would keep its program, 37 MB for 232 leaves.
    same, sums = jax.jit(functools.partial(_compare, mesh, specs))(*leaves.values())
    pairs = zip(leaves, np.asarray(same), np.asarray(sums.addressable_data(0))[0], strict=True)
    found = {f"leaf {path!r}": f"checksum {value:08x}" for path, same, value in pairs if not same}
    agree(name, found)
    if found:
        told = f"the devices of a process differ before {name}: the copies of {', '.join(found)}"
        raise ProcessesDifferError(told)


def _has_copies(x: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.memory_kind == "pinned_host":
        return False
    return x.size > 0 and _axes_of_copies(sharding.mesh, sharding.spec) != ()


def _axes_of_copies(mesh: AnyMesh, spec: P) -> tuple[str, ...]:
    cut = {name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())}
    return tuple(name for name in mesh.axis_names if name not in cut and mesh.shape[name] > 1)


def _compare(mesh: Mesh, specs: tuple[P, ...], *leaves: jax.Array) -> tuple[jax.Array, jax.Array]:
    axes = [_axes_of_copies(mesh, spec) for spec in specs]

    def run(*parts: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = jnp.stack([_checksum(x) for x in parts])
        alike = {names: lax.pmin(sums, names) == lax.pmax(sums, names) for names in set(axes)}
        same = jnp.stack([alike[names][number] for number, names in enumerate(axes)])
        return lax.pmin(same.astype(jnp.int32), mesh.axis_names), sums[None]

    out = P(), P(mesh.axis_names)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(*leaves)


def _checksum(x: jax.Array) -> jax.Array:
    """Add up the bits of an array in uint32, each element mixed with its place (as MurmurHash)."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)  # exact for all types of 8 bits and less
    bits = lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
    places = lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B9)
    return mixed_bits(bits.reshape(-1).astype(jnp.uint32) + places).sum(dtype=jnp.uint32)


class CommonStop:
    """Any process may ask to stop; process 0 says before which step all do.

    A process that has done its collectives of step n knows that process 0 has started step n. So
    process 0 writes down a step that nobody can have passed, before it starts its next one; whoever
    arrives there has waited for that step of process 0, and reads it.

    Args:
        most_queued: steps that a process may start before an earlier one has ended.
    """

    def __init__(self, most_queued: int) -> None:
        self._most_queued = most_queued
        self._step: int | None = None

    def is_reached(self, step: int, *, asked: bool) -> bool:
        if jax.process_count() == 1:
            return asked
        if self._step is None:
            self._step = self._agreed_step(step, asked)
        return self._step is not None and step >= self._step

    def _agreed_step(self, step: int, asked: bool) -> int | None:
        client, index = connection().client, jax.process_index()
        if asked:
            client.key_value_set(f"{_ASKED}{index}", "", allow_overwrite=True)
        if index:
            told = client.key_value_dir_get(_STEP)
            return int(told[0][1]) if told else None
        if not client.key_value_dir_get(_ASKED):
            return None
        last = step + self._most_queued + 1
        client.key_value_set(f"{_STEP}last", str(last))
        return last
