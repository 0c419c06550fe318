"""What `zerojax checkpoint` prints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zerojax.checkpoint import Manifest, SavedLeaf, parts
from zerojax.cli.shared._screen import Screen, table


class CheckpointScreen(Screen):
    """Prints checkpoints, and how far they are read."""

    def __init__(self) -> None:
        super().__init__(width=120)

    def manifest(
        self, path: Path, manifest: Manifest, found: Mapping[Path, str | None], *, leaves: bool
    ) -> None:
        """Show a checkpoint, and the others that lie beside it."""
        with self.console:
            self.facts(_facts(path, manifest))
            self.show(_parts_table(manifest))
            if leaves:
                self.show(_leaves_table(manifest))
            if len(found) > 1:
                beside = table(">checkpoint", "state")
                for one, why in found.items():
                    beside.add_row(one.name, why or "files are all there")
                self.show(beside)

    def verified(self, path: Path, manifest: Manifest) -> None:
        """Show a checkpoint that is whole."""
        files = f"{len(manifest.files)} files, {decimal(manifest.num_bytes)}"
        text = f"{path}: {files}, {len(manifest.leaves)} leaves"
        self.show(Text.assemble(("whole    ", "bold green"), text))

    @contextmanager
    def bar(self, total: int, text: str) -> Iterator[Callable[[str], None]]:
        """Show a bar that the function it gives moves on by one leaf."""
        columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        is_hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=is_hidden) as bar:
            task = bar.add_task(text, total=total)
            yield lambda _: bar.advance(task)


def _facts(path: Path, manifest: Manifest) -> dict[str, str]:
    mesh = ", ".join(f"{name}={size}" for name, size in manifest.mesh.items())
    step = "not told" if manifest.step is None else f"{manifest.step:,}"
    return {
        "path": str(path),
        "step": f"{step}, written {manifest.written}",
        "placement": f"stage {manifest.stage} over {', '.join(manifest.axis)}; mesh {mesh}",
        "optimizer": " > ".join(manifest.optimizer.values()),
        "data": "" if manifest.data is None else json.dumps(manifest.data),
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "on disk": f"{decimal(manifest.num_bytes)} in {len(manifest.files)} files",
    }


def _parts_table(manifest: Manifest) -> Table:
    made = table("part", ">leaves", ">elements", ">bytes", "dtype")
    for path, leaves in parts(manifest).items():
        num_elements = sum(math.prod(leaf.shape) for leaf in leaves)
        dtypes = dict.fromkeys(leaf.dtype for leaf in leaves)
        made.add_row(
            path, f"{len(leaves):,}", f"{num_elements:,}", _size(leaves), ", ".join(dtypes)
        )
    made.add_section()
    leaves = manifest.leaves.values()
    made.add_row("all", f"{len(leaves):,}", "", _size(leaves), "")
    return made


def _size(leaves: Iterable[SavedLeaf]) -> str:
    return decimal(sum(leaf.num_bytes for leaf in leaves))


def _leaves_table(manifest: Manifest) -> Table:
    made = table("leaf", "dtype", "shape", "stored", "placed as")
    for path, leaf in manifest.leaves.items():
        stored = "" if leaf.stored_shape == leaf.shape else str(list(leaf.stored_shape))
        if leaf.same_as is not None:
            stored = f"same as {leaf.same_as}"
        spec = (leaf.spec or "").removeprefix("PartitionSpec")
        made.add_row(path, leaf.dtype, str(list(leaf.shape)), stored, spec)
    return made
