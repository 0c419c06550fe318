"""Copies of a state on the hosts themselves, by Orbax's managers for that.

Two kinds are known. With the emergency manager, groups of hosts hold the same state: all groups but
the first write it to disks or memory of their own, and what one of them holds is broadcast to the
others. With the replicator's each host writes its own part, and a service of the cluster brings it
to the host that takes its place. Both write what devices hold, and read it on the same mesh alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax._extras import extra
from zerojax.checkpoint._files import remove
from zerojax.layout import as_entries
from zerojax.processes import gather_texts

Arrays = Mapping[str, jax.Array | jax.ShapeDtypeStruct]


class LocalCopies:
    """The copies in a folder that each host has for itself.

    `steps` are those of which there is a whole copy, `passed_over` folders that were removed, and
    why. In `shared`, which all hosts see, the emergency manager has to find nothing.
    """

    def __init__(
        self, folder: Path, shared: Path, mesh: Mesh, arrays: Arrays, *, replicator: bool
    ) -> None:
        self._check(mesh, arrays)
        axis = 0 if replicator else copied_axis(mesh, arrays)
        self._folder, self.passed_over = folder, {}
        folder.mkdir(parents=True, exist_ok=True)
        _initialize()
        if replicator:
            from etils import epath
            from orbax.checkpoint.checkpoint_managers import LatestN
            from orbax.checkpoint.experimental.emergency import (
                replicator_checkpoint_manager as replicated,
            )

            self.steps = self._drop_parts()
            more = replicated.ReplicatorCheckpointManagerOptions(preservation_policy=LatestN(2))
            self.manager: Any = replicated.ReplicatorCheckpointManager(
                epath.Path(folder), more, global_mesh=mesh
            )
        else:
            from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

            like = jax.ShapeDtypeStruct
            wanted = {k: like(x.shape, x.dtype, sharding=x.sharding) for k, x in arrays.items()}
            options = emergency.CheckpointManagerOptions(
                local=emergency.LocalCheckpointOptions(save_interval_steps=1),
                # What is shared and kept is zerojax's own, which other meshes restore.
                persistent=emergency.PersistentCheckpointOptions(should_save_fn=lambda *_: False),
                replica_axis_index=axis,
            )
            self.manager = emergency.CheckpointManager(
                folder, shared, mesh, wanted, options=options
            )
            self.steps = sorted(self.manager.all_steps())

    def save(self, step: int, arrays: Arrays) -> None:
        """Start to save a step; arrays may be donated meanwhile."""
        from orbax.checkpoint import args

        if self.steps and step <= self.steps[-1]:
            told = f"{self._folder} has a copy of step {self.steps[-1]}, and takes none of step"
            raise ValueError(f"{told} {step}; go on from that, or remove the folder on all hosts")
        self.manager.save(step, args.Composite(state=args.PyTreeSave(dict(arrays))))
        self.steps.append(step)

    def restore(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        from orbax.checkpoint import args, checkpoint_utils

        each = checkpoint_utils.construct_restore_args(dict(wanted))
        state = args.PyTreeRestore(item=dict(wanted), restore_args=each)
        return self.manager.restore(step, args.Composite(state=state)).state

    def _check(self, mesh: Mesh, arrays: Arrays) -> None:
        for path, x in arrays.items():
            placed = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
            if not placed or x.sharding.memory_kind == "pinned_host":
                told = f"leaf {path!r} lies on {x.sharding}; a copy on the hosts takes what lies on"
                raise ValueError(f"{told} devices of the layout's mesh: leave local= out")
        if jax.process_count() == 1:
            raise ValueError("local= keeps copies on the hosts of several processes; this is one")

    def _drop_parts(self) -> list[int]:
        """Return the steps that every host has, and remove what only some have."""
        own = {int(x.name): x for x in self._folder.iterdir() if x.name.isdecimal()}
        told = gather_texts("local copies", json.dumps(list(own)))
        whole = set.intersection(*(set(json.loads(steps)) for steps in told))
        for step in own.keys() - whole:
            remove(own[step])
            self.passed_over[own[step]] = f"{own[step]} is not on every host"
        return sorted(whole)


def cuts(x: Any) -> dict[int, tuple[str, ...]]:
    entries = as_entries(x.sharding.spec, len(x.shape))
    return {dim: names for dim, names in enumerate(entries) if names}


def copied_axis(mesh: Mesh, arrays: Arrays) -> int:
    """Return the axis of the mesh along which processes hold the same of everything."""
    cut = {name for x in arrays.values() for names in cuts(x).values() for name in names}
    for number, name in enumerate(mesh.axis_names):
        groups = [{d.process_index for d in x.flat} for x in np.moveaxis(mesh.devices, number, 0)]
        if name not in cut and len(groups) > 1 and sum(map(len, groups)) == len(set.union(*groups)):
            return number
    raise ValueError(
        f"no axis of the mesh {dict(mesh.shape)} holds copies of the whole state on other hosts, "
        'which local= needs: write make_layout(axis="data", batch_axes=("host", "data")), or have '
        "a service of the cluster copy the folders, with replicator=True"
    )


def _initialize() -> None:
    with extra("checkpoint", "a copy on the hosts"):
        from absl import flags
        from orbax.checkpoint._src.multihost import multihost
        from orbax.checkpoint.experimental.emergency import checkpoint_manager  # noqa: F401

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    if not multihost.is_runtime_to_distributed_ids_initialized():
        multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
