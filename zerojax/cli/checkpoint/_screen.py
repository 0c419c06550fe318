"""What `zerojax checkpoint` prints."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zerojax.checkpoint import Manifest, read_manifest, verify
from zerojax.checkpoint import parts as parts_of

#: Columns where there is no terminal to say how many.
WIDTH = 120


def show(path: Path, found: Mapping[Path, str | None], *, leaves: bool, as_json: bool) -> None:
    """Show a checkpoint, and the others that lie beside it."""
    manifest = read_manifest(path)
    if as_json:
        typer_print(json.dumps({"path": str(path), **dataclasses.asdict(manifest)}, indent=1))
        return
    console = _console()
    with console:
        for name, text in _facts(path, manifest).items():
            console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=True)
        console.print()
        console.print(_parts_table(manifest))
        if leaves:
            console.print(_leaves_table(manifest))
        if len(found) > 1:
            console.print(_list_table(found))


def typer_print(text: str) -> None:
    """Print plain text, as it is."""
    sys.stdout.write(text + "\n")


def verified(path: Path, why: str | None) -> bool:
    """Verify a checkpoint with a bar, say how it is, and tell whether it is whole."""
    console = _console()
    try:
        if why is not None:
            raise ValueError(why)
        with _bar(console, len(read_manifest(path).leaves), f"verify {path}") as step:
            manifest = verify(path, step)
    except (ValueError, OSError) as error:
        console.print(Text.assemble(("damaged  ", "bold red"), str(error)), soft_wrap=True)
        return False
    console.print(
        Text.assemble(
            ("whole    ", "bold green"),
            f"{path}: {len(manifest.files)} files, {decimal(manifest.num_bytes)}, "
            f"{len(manifest.leaves)} leaves",
        ),
        soft_wrap=True,
    )
    return True


@contextmanager
def progress(path: Path, part: str | None) -> Iterator[Callable[[str], None]]:
    """Show how far an export is."""
    manifest = read_manifest(path)
    prefix = "params/" if part is None else part.rstrip("/") + "/"
    count = sum(leaf.startswith(prefix) for leaf in manifest.leaves) or len(manifest.leaves)
    with _bar(_console(), count, f"export {path}") as step:
        yield step


def wrote(paths: Iterable[Path]) -> None:
    """Say which files there are now."""
    console = _console()
    for path in paths:
        console.print(f"wrote {path}, {decimal(path.stat().st_size)}", soft_wrap=True)


def _console() -> Console:
    given = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if given else WIDTH)


@contextmanager
def _bar(console: Console, total: int, text: str) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda _: bar.advance(task)


def _facts(path: Path, manifest: Manifest) -> dict[str, str]:
    mesh = ", ".join(f"{name}={size}" for name, size in manifest.mesh.items())
    step = "not told" if manifest.step is None else f"{manifest.step:,}"
    facts = {
        "path": str(path),
        "step": f"{step}, written {manifest.written}",
        "placement": f"stage {manifest.stage} over {', '.join(manifest.axis)}; mesh {mesh}",
        "precision": ", ".join(f"{dtype} {part}" for part, dtype in manifest.precision.items()),
        "optimizer": " > ".join(manifest.optimizer.values()),
        "data": "" if manifest.data is None else json.dumps(manifest.data),
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "on disk": f"{decimal(manifest.num_bytes)} in {len(manifest.files)} files",
    }
    return {name: text for name, text in facts.items() if text}


def _parts_table(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    kept = parts_of(manifest)
    table.add_column("part", footer="all")
    for name, footer in (
        ("leaves", f"{len(manifest.leaves):,}"),
        ("elements", ""),
        ("bytes", decimal(sum(part.num_bytes for part in kept))),
    ):
        table.add_column(name, footer=footer, justify="right")
    table.add_column("dtype")
    for part in kept:
        table.add_row(
            part.path, f"{part.num_leaves:,}", f"{part.num_elements:,}", decimal(part.num_bytes),
            ", ".join(part.dtypes),
        )  # fmt: skip
    return table


def _leaves_table(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("leaf", "dtype", "shape", "stored", "placed as"):
        table.add_column(name, overflow="fold")
    for path, leaf in manifest.leaves.items():
        stored = "" if leaf.stored_shape == leaf.shape else str(list(leaf.stored_shape))
        if leaf.same_as is not None:
            stored = f"same as {leaf.same_as}"
        spec = (leaf.spec or "").removeprefix("PartitionSpec")
        table.add_row(path, leaf.dtype, str(list(leaf.shape)), stored, spec)
    return table


def _list_table(found: Mapping[Path, str | None]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="checkpoints beside it", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("state")
    for path, why in found.items():
        table.add_row(path.name, why or "files are all there")
    return table
