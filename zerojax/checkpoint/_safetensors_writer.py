"""Writing safetensors files by their library: one, or several of bounded size with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from zerojax._extras import extra
from zerojax.checkpoint._files import sync
from zerojax.checkpoint._safetensors import INDEX_SUFFIX, SUFFIX


def write(
    path: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], np.ndarray],
    *,
    metadata: dict[str, str],
    max_file_bytes: int,
) -> list[Path]:
    """Write tensors to files, holding those of one file at a time.

    Nothing has its name before all of it is on disk; the index gets its own last, and is the last
    of the paths that come back. Arguments and errors are those of `export_safetensors`.

    Args:
        path: `NAME.safetensors`.
        sizes: the bytes of each tensor, by name.
        read: returns a tensor of that name.
        metadata: of each file.
        max_file_bytes: bytes of tensors in a file; one that is larger has a file of its own.
    """
    with extra("checkpoint", "writing a safetensors file"):
        from safetensors.numpy import save_file

    if path.suffix != SUFFIX:
        raise ValueError(f"{path} must end in {SUFFIX}")
    groups = _group(sizes, max_file_bytes)
    outputs, index = [path], path.with_name(f"{path.stem}{INDEX_SUFFIX}")
    if len(groups) > 1:
        count = len(groups)
        names = [f"{path.stem}-{i:05}-of-{count:05}{SUFFIX}" for i in range(1, count + 1)]
        outputs = [*map(path.with_name, names), index]
    for output in dict.fromkeys((*outputs, path, index)):
        if output.exists():
            raise FileExistsError(f"{output} exists already; remove it or write to another name")
    partials = [output.with_name(f"{output.name}.partial") for output in outputs]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for partial, group in zip(partials, groups, strict=False):
            save_file({name: read(name) for name in group}, partial, metadata)
        if len(groups) > 1:  # as Hugging Face writes it
            pairs = zip(outputs, groups, strict=False)
            files = {name: output.name for output, group in pairs for name in group}
            total = {"total_size": sum(sizes.values())}
            text = json.dumps({"metadata": {**metadata, **total}, "weight_map": files}, indent=2)
            partials[-1].write_text(text + "\n")
        for partial in partials:
            sync(partial)
        for partial, output in zip(partials, outputs, strict=True):
            partial.replace(output)
    finally:
        for partial in partials:  # there only after an exception
            partial.unlink(missing_ok=True)
    sync(path.parent)
    return outputs


def _group(sizes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Part tensors into files, in their order."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        held += size
        if groups[-1] and held > max_file_bytes:
            groups.append([])
            held = size
        groups[-1].append(name)
    return groups
