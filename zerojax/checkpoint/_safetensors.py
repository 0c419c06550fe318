"""Weights between checkpoints and files of the safetensors format, a tensor at a time.

    8 bytes   length of the header
    header    {"w": {"dtype": "BF16", "shape": [4, 3], "data_offsets": [0, 24]}}
    data      the tensors end to end, to the end of the file

Several files of one model have an index beside them: `{"metadata": {...}, "weight_map": {"w":
"model-00001-of-00002.safetensors"}}`. Of the library only the check is used: it writes a file at
once, its NumPy side has no float8, and a file that is cut short while it is mapped ends the
process. NumPy maps what is wanted.

Source: https://github.com/huggingface/safetensors, section Format.
"""

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax._extras import extra
from zerojax._tree import num_bytes, path_name
from zerojax._types import PyTree
from zerojax.checkpoint._files import local_path, sync
from zerojax.checkpoint._leaves import PARAMS, SavedLeaf, places, saved_leaves
from zerojax.checkpoint._manifest import Manifest, parts, read_leaf, read_manifest, verify
from zerojax.checkpoint._verdict import IncompatibleCheckpointError, compare_leaves
from zerojax.layout import Layout
from zerojax.processes import agree, together

SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"

#: The format's name of a dtype to JAX's. 4 and 6 bits to an element are no dtype in memory.
DTYPES = {
    **{f"{x[0].upper()}{n}": f"{x}{n}" for x in ("uint", "int") for n in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
#: A tensor, its file, and where in the file its bytes begin.
TensorInFile = tuple[jax.ShapeDtypeStruct, Path, int]


def find_tensors(path: Path) -> dict[str, TensorInFile]:
    """Find the tensors of one file, or of the several that an index names, by their headers."""
    if not path.is_file():
        told = f"there is no file {path}; give one of {SUFFIX}"
        raise FileNotFoundError(f"{told}, or {INDEX_SUFFIX} of several")
    return _read_indexed(path) if path.name.endswith(INDEX_SUFFIX) else _read_header(path)


def read_tensor(stored: TensorInFile, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Read a part of a tensor, a slice for each of the first dims; only that part is copied."""
    tensor, path, offset = stored
    if not tensor.size:  # nothing can't be mapped
        return np.empty(tensor.shape, tensor.dtype)[index]
    try:
        mapped = np.memmap(path, tensor.dtype, "r", offset, tensor.shape)
    except ValueError as error:
        raise ValueError(f"{path} has been cut short since it was opened") from error
    return np.array(mapped[index])


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    return local_path(path).name.endswith((SUFFIX, INDEX_SUFFIX))


def _read_header(path: Path) -> dict[str, TensorInFile]:
    with extra("checkpoint", "reading a safetensors file"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            held = [(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices]
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    # The tensors lie in this order, without holes, to the end of the file.
    found, offset = {}, path.stat().st_size
    for name, code, shape in reversed(held):
        if code not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{path}: {name!r} is {code}, which JAX has not; it has {known}")
        tensor = jax.ShapeDtypeStruct(shape, jnp.dtype(DTYPES[code]))
        offset -= num_bytes(shape, tensor.dtype)
        found[name] = tensor, path, offset
    return found


def _read_indexed(path: Path) -> dict[str, TensorInFile]:
    try:
        names = dict(json.loads(path.read_bytes())["weight_map"])
        files = dict.fromkeys(names.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of tensors to files: {error!r}") from error
    held: dict[str, dict[str, TensorInFile]] = {}
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path} names {file!r}, which is not a file beside it")
        if not (path.parent / file).is_file():
            raise FileNotFoundError(f"{path} names {file}, which is not beside it; fetch it too")
        held[file] = _read_header(path.parent / file)
    for name, file in names.items():
        if name not in held[file]:
            raise ValueError(f"{path} does not fit its files: {file} does not hold {name!r}")
    return {name: held[file][name] for name, file in names.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], np.ndarray]
) -> None:
    """Write tensors to a file, one at a time; it has its name when all of it is on disk.

    The widest elements come first, so that each is aligned. `read` returns the tensor of a name.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"{path} must end in {SUFFIX}")
    if path.exists():
        told = f"{path} exists already; remove it or write to another name"
        of_one = f", and write it on process 0 of the {jax.process_count()}"
        raise FileExistsError(told + of_one * (jax.process_count() > 1))
    codes = {name: code for code, name in DTYPES.items()}
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header, end = {}, 0
    for name in names:
        x = tensors[name]
        if x.dtype.name not in codes:
            raise ValueError(f"{name!r} is {x.dtype}, which safetensors has not; convert it")
        begin, end = end, end + num_bytes(x.shape, x.dtype)
        where = {"shape": x.shape, "data_offsets": (begin, end)}
        header[name] = {"dtype": codes[x.dtype.name], **where}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".partial", f"{path.name}.", path.parent) as own:
        partial = Path(own) / path.name
        try:
            with partial.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for name in names:  # not by tofile, whose errors don't say why
                    file.write(np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8).data)
            sync(partial)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        partial.replace(path)
    sync(path.parent)


def export_safetensors(
    directory: str | os.PathLike[str], path: str | os.PathLike[str], *, part: str | None = None
) -> Path:
    """Write the whole, logical weights of a checkpoint to a safetensors file; return its path.

    Holds one tensor at a time. Needs no accelerator and no code of the model. A leaf `layers/qkv`
    is the tensor `layers.qkv`.

    Args:
        directory: the checkpoint's folder.
        path: `NAME.safetensors`.
        part: the leaves below this path: "params", "masters", "opt_state/0/mu". Left out, it is
            the parameters of a train state, or all that there is.

    Raises:
        DamagedCheckpointError: a file of the checkpoint is not what was written.
        FileExistsError: the file is there already.
        ValueError: there is no such part, or a dtype that the format has not.
    """
    root, path = local_path(directory), local_path(path)
    manifest = read_manifest(root)
    endings = _endings(manifest, part, root)
    verify(root)

    held = dict(zip(_tensor_names(endings.values(), root), endings, strict=True))
    leaves = ((name, manifest.leaves[leaf]) for name, leaf in held.items())
    shapes = {name: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for name, x in leaves}
    write_safetensors(path, shapes, lambda name: read_leaf(root, manifest, held[name]))
    return path


def _tensor_names(leaves: Iterable[str], path: Path) -> list[str]:
    owners: dict[str, str] = {}
    for leaf in leaves:
        if (other := owners.setdefault(leaf.replace("/", "."), leaf)) != leaf:
            told = f"leaves {other!r} and {leaf!r} are one tensor by name"
            raise ValueError(f"{path}: {told}; rename the one that has a dot")
    return list(owners)


def _endings(manifest: Manifest, part: str | None, root: Path) -> dict[str, str]:
    prefix = PARAMS if part is None else f"{part.rstrip('/')}/"
    found = {p: p.removeprefix(prefix) for p in manifest.leaves if p.startswith(prefix)}
    if not found:  # an array of its own
        found = {p: p for p in manifest.leaves if p == prefix.rstrip("/")}
    if not found and part is None:
        found = {p: p for p in manifest.leaves}
    if not found:
        raise ValueError(f"{root} has no part {part!r}; it has {', '.join(parts(manifest))}")
    keys = [path for path in found if manifest.leaves[path].is_key]
    if keys:
        told = f"leaf {keys[0]!r} holds PRNG keys, which safetensors files can't"
        raise ValueError(f"{told}; give the part that holds the weights, such as params")
    return found


def _begin(x: jax.ShapeDtypeStruct, path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(min(num_bytes(x.shape, x.dtype), 1 << 16))
    return f"{x.dtype}{list(x.shape)} that begins with CRC-32 {zlib.crc32(data):08x}"


def import_safetensors(path: str | os.PathLike[str], layout: Layout, like: PyTree) -> PyTree:
    """Read weights into the structure and the placement of `like`, for each device its part.

    The leaf `layers/qkv` is the tensor `layers.qkv`.

    Args:
        path: a file, or the index of several beside it.
        layout: the placement of the result.
        like: shapes with shardings, logical or stored, as `step.abstract_state().params` gives.

    Raises:
        FileNotFoundError: there is no such file.
        IncompatibleCheckpointError: tensors are missing, left over, of another shape or of a wider
            dtype; nothing has been read then.
        ValueError: a file is damaged, or two leaves are one tensor by name.
    """
    path = local_path(path)
    with together("import_safetensors"):
        tensors = find_tensors(path)
        begins = {} if jax.process_count() == 1 else {x: _begin(*tensors[x]) for x in tensors}
    agree("import_safetensors", {"tensors": "\n".join(map(": ".join, begins.items()))})
    wanted = saved_leaves(like, layout, optax.identity())  # no leaf is an optimizer's
    named = zip(wanted, _tensor_names(wanted, path), strict=True)
    names = {leaf: name for leaf, name in named if name in tensors}
    names |= {name.replace(".", "/"): name for name in sorted(tensors.keys() - names.values())}
    found = {}
    for leaf, name in names.items():
        x, _, _ = tensors[name]
        dtype, size = x.dtype.name, num_bytes(x.shape, x.dtype)
        found[leaf] = SavedLeaf(shape=x.shape, stored_shape=x.shape, dtype=dtype, num_bytes=size)
    if lines := compare_leaves(found, wanted)[1]:
        raise IncompatibleCheckpointError(path, lines, "does not hold the model's weights")

    def read(keys: tuple[Any, ...], x: Any) -> jax.Array:
        """Read a tensor as shards; those of one place are read once, padding is zeros."""
        parts: dict[str, np.ndarray] = {}

        def part(index: Any) -> np.ndarray:
            if str(index) not in parts:
                block = read_tensor(tensors[names[path_name(keys)]], index)  # without padding
                block = block.astype(x.dtype, copy=False)
                dims = zip(index, x.shape, block.shape, strict=True)
                padding = [(0, len(range(*one.indices(n))) - have) for one, n, have in dims]
                is_whole = all(after == 0 for _, after in padding)
                parts[str(index)] = block if is_whole else np.pad(block, padding)
            return parts[str(index)]

        return jax.make_array_from_callback(x.shape, placed[path_name(keys)], part)

    placed = places(like, layout)
    return jax.tree.map_with_path(read, like)
