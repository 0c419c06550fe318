"""How orbax is set up: OCDBT, in chunks that other meshes can read parts of, as fast as disks are.

Chunks are not compressed: weights and moments shrink by 7%, and compressing takes three times as
long as writing (docs/benchmarks.md).
"""

import asyncio
import contextlib
import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

import jax

from zerojax._extras import extra
from zerojax._tree import num_bytes

#: The name of the arrays while they are written.
UNFINISHED = "arrays.unfinished"
#: Bytes of a chunk: the least that is read of a leaf, the most beyond what a device needs.
CHUNK_BYTES = 16 << 20
#: Replicas share the writing of a leaf where each has so much to write; a slice costs a copy.
MIN_SLICE_BYTES = 4 << 20
#: Of what a process restores, one of so many parts is being read at any time, or so many bytes.
READ_PARTS, READ_BYTES = 32, 8 << 20
#: Shards that orbax is asked for at once: each that was read wakes all others that wait.
MOST_READS = 1024


def require_orbax() -> None:
    """Check that the extra `checkpoint` is installed, before anything is written or read."""
    with extra("checkpoint", "a checkpoint"):
        for package in ("orbax.checkpoint", "tensorstore", "xxhash"):
            importlib.import_module(package)


def check_dtypes(arrays: Mapping[str, jax.Array]) -> None:
    """Refuse what tensorstore has no dtype for, such as uint4, before anything is written."""
    import tensorstore

    for path, x in arrays.items():
        try:
            tensorstore.dtype(x.dtype)
        except ValueError:
            raise TypeError(
                f"leaf {path!r} is {x.dtype}, which the files of a checkpoint can't hold; save it "
                "in a wider dtype, such as uint8 or bfloat16"
            ) from None


def _untold(record: logging.LogRecord) -> bool:
    """Tell no log of what a save raises; threads of orbax write a traceback each."""
    return UNFINISHED not in record.getMessage()


class Writing:
    """A flat dict of arrays on its way to a folder that is there; all processes make one.

    orbax's own checkpointers wait for all processes in places where one that failed can't tell.
    """

    def __init__(self, directory: Path, arrays: dict[str, jax.Array]) -> None:
        import orbax.checkpoint as ocp

        self._directory, self._handler = _folder(directory), _make_handler()
        self._futures: Any = ()
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_untold)
        if arrays:  # orbax takes no empty tree, as the state of a stateless optimizer is one
            each = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
            args = ocp.args.PyTreeSave(arrays, save_args=each)
            with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own in this one
                started = self._handler.async_save(self._directory, args=args)
                self._futures = thread.submit(asyncio.run, started).result()

    def wait(self) -> None:
        for future in self._futures:
            future.result()

    def join(self) -> None:
        if self._futures:
            self._handler.finalize(self._directory)
            if not (self._directory / "manifest.ocdbt").exists():  # orbax only logs it
                raise OSError(f"orbax did not join the arrays in {self._directory}")


def _folder(directory: Path) -> Any:
    """Return a path as orbax knows them, but for `glob`, which takes the folder "[1]" for "1"."""
    from etils import epath

    class Folder(type(epath.Path(directory))):
        def glob(self, pattern: str) -> Iterator[Any]:
            return (self / name for name in glob(pattern, root_dir=self))  # noqa: PTH207

    return Folder(directory)


def _make_handler(gigabytes_at_once: Any = None) -> Any:
    import orbax.checkpoint as ocp  # takes a second, which importing zerojax should not

    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        use_compression=False,
        restore_concurrent_gb=gigabytes_at_once,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )


def read_arrays(directory: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read some of the arrays as they are wanted.

    Padding is cut off or added as zeros, and floating dtypes are cast. What is being read is in
    memory twice or, on a CPU, three times: so only a part of everything is, at any time. No process
    waits for another here, so that one which finds damage leaves none behind.
    """
    import orbax.checkpoint as ocp

    held = sum(
        num_bytes(x.sharding.shard_shape(x.shape), x.dtype) * len(x.sharding.addressable_devices)
        for x in wanted.values()
    )
    max_bytes = 1 + max(_largest_read(directory, wanted), held // READ_PARTS, READ_BYTES)
    devices = max((len(x.sharding.addressable_devices) for x in wanted.values()), default=1)
    names, size = list(wanted), max(1, MOST_READS // max(1, devices))
    found = {}
    for start in range(0, len(names), size):
        some = {name: wanted[name] for name in names[start : start + size]}
        each = {
            name: ocp.ArrayRestoreArgs(
                sharding=x.sharding, global_shape=x.shape, dtype=x.dtype, strict=False
            )
            for name, x in some.items()
        }
        args = ocp.args.PyTreeRestore(some, restore_args=each, partial_restore=True)
        with contextlib.closing(_make_handler(max_bytes / 1e9)) as handler:
            found |= handler.restore(_folder(directory), args=args)
    return found


def _largest_read(directory: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> int:
    import tensorstore

    context = tensorstore.Context()
    largest = 0
    for name, opened in {name: open_array(directory, name, context) for name in wanted}.items():
        store, shard = opened.result(), wanted[name].sharding.shard_shape(wanted[name].shape)
        dims = zip(shard, store.shape, store.chunk_layout.read_chunk_template.shape, strict=True)
        sizes = [min(-(-own // c) + 1, -(-whole // c)) * c for own, whole, c in dims]
        largest = max(largest, math.prod(sizes) * store.dtype.numpy_dtype.itemsize)
    return largest


def open_array(directory: Path, name: str, context: Any) -> Any:
    """Start to open an array that orbax has written; returns tensorstore's future."""
    import tensorstore

    trees = {"driver": "ocdbt", "base": f"{directory.as_uri()}/", "path": f"{name}/"}
    spec = {"driver": "zarr3", "kvstore": trees}
    return tensorstore.open(spec, open=True, read=True, context=context)
