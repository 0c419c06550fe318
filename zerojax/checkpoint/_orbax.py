"""How orbax is set up: OCDBT, in chunks that other meshes can read parts of, as fast as disks are.

Chunks are not compressed: weights and moments shrink by 7%, and compressing takes three times as
long as writing (docs/benchmarks.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

#: Bytes of a chunk: the least that is read of a leaf, the most beyond what a device needs.
CHUNK_BYTES = 16 << 20
#: Replicas share the writing of a leaf where each has so much to write; a slice costs a copy.
MIN_SLICE_BYTES = 4 << 20


def make_checkpointer() -> Any:
    """Make an orbax `AsyncCheckpointer` for flat dicts of arrays."""
    import orbax.checkpoint as ocp

    return ocp.AsyncCheckpointer(_make_handler())


def _make_handler() -> Any:
    import orbax.checkpoint as ocp  # takes a second, which importing zerojax should not

    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )


def save_args(arrays: dict[str, jax.Array]) -> Any:
    """Give the arguments that save a flat dict of arrays."""
    import orbax.checkpoint as ocp

    each = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.args.PyTreeSave(arrays, save_args=dict.fromkeys(arrays, each))


def read_arrays(directory: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read some of the arrays as they are wanted.

    Padding is cut off or added as zeros, and floating dtypes are cast. No process waits for another
    here, so that one which finds damage leaves none behind.
    """
    import orbax.checkpoint as ocp
    from etils import epath  # orbax's paths

    each = {
        name: ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=False
        )
        for name, x in wanted.items()
    }
    args = ocp.args.PyTreeRestore(wanted, restore_args=each, partial_restore=True)
    handler = _make_handler()
    try:
        return handler.restore(epath.Path(directory), args=args)
    finally:
        handler.close()


def barrier(name: str) -> None:
    """Wait for all processes; may be called from any thread, by all in the same order."""
    if jax.process_count() == 1:
        return
    import orbax.checkpoint as ocp

    wait = ocp.multihost.get_barrier_sync_fn()
    wait(key=ocp.multihost.unique_barrier_key(name), timeout_ms=BARRIER_MS)


#: How long processes wait for each other.
BARRIER_MS = 20 * 60 * 1000
