"""`zerojax checkpoint`: look at checkpoints, check them, turn them into weights and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import typer
from rich.filesize import decimal
from rich.text import Text

from zerojax.checkpoint import (
    export_safetensors,
    import_safetensors,
    read_manifest,
    save,
    verify,
    weights_of,
)
from zerojax.cli.checkpoint._screen import CheckpointScreen
from zerojax.cli.shared._checkpoints import find_checkpoint, list_checkpoints
from zerojax.cli.shared._command import CommandOptions, argument, command, option
from zerojax.cli.shared._errors import Failure, refusing
from zerojax.layout import make_layout, make_mesh

checkpoint = typer.Typer(
    name="checkpoint",
    help="Inspect, verify, export and import checkpoints; needs no accelerator.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions(CommandOptions):
    """Which checkpoint."""

    directory: Path = argument("DIR")
    """A checkpoint, or a run's folder, of which the newest whole one is meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(CheckpointOptions):
    """What `zerojax checkpoint inspect` was asked for."""

    leaves: bool = option(False)
    """List every leaf."""
    json: bool = option(False)
    """Print plain data instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(CheckpointOptions):
    """What `zerojax checkpoint export` was asked for."""

    out: Path = argument("OUT.safetensors")
    """The file to write."""
    part: str | None = option(None, metavar="PATH", show_default="the parameters")
    """The leaves below a path: `params`, `masters` (fp32 copies of bf16 parameters),
    `opt_state/0/mu`."""
    max_file: float = option(5.0, min=1e-6, metavar="GB")
    """GB of a file beyond which there are several."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions(CommandOptions):
    """What `zerojax checkpoint import` was asked for."""

    file: Path = argument("FILE")
    """A safetensors file, an index of several, or the folder that holds them."""
    directory: Path = argument("DIR")
    """The checkpoint to make."""


@checkpoint.command()
@command
def inspect(options: InspectOptions) -> None:
    """Show what a checkpoint holds, from its manifest alone.

    The model's code is not needed, nor the devices that it was saved on.

    ```
    zerojax checkpoint inspect runs/books
    zerojax checkpoint inspect runs/books/checkpoints/500 --leaves
    ```
    """
    with refusing():
        found = list_checkpoints(options.directory)
        path = find_checkpoint(options.directory)
        manifest = read_manifest(path)
    if options.json:
        plain = {"path": str(path), **dataclasses.asdict(manifest)}
        typer.echo(json.dumps(plain, indent=1))
    else:
        CheckpointScreen().manifest(path, manifest, found, leaves=options.leaves)


@checkpoint.command(name="verify")
@command
def verify_(options: CheckpointOptions) -> None:
    """Read all of a checkpoint and hold it against its manifest; of a run, all checkpoints.

    Every file is held against its digest and every leaf is read. Ends with status 1 where
    something is damaged, and names it.

    ```
    zerojax checkpoint verify runs/books
    ```
    """
    with refusing():
        found = list_checkpoints(options.directory)
    screen, damaged = CheckpointScreen(), []
    for path, why in found.items():
        try:
            if why is not None:
                raise ValueError(why)
            with screen.bar(len(read_manifest(path).leaves), f"verify {path}") as on_leaf:
                manifest = verify(path, on_leaf)
            screen.verified(path, manifest)
        except (ValueError, OSError) as error:
            screen.show(Text.assemble(("damaged  ", "bold red"), str(error)))
            damaged.append(str(path))
    if damaged:
        raise Failure(f"{len(damaged)} of {len(found)} damaged: {', '.join(damaged)}", status=1)


@checkpoint.command()
@command
def export(options: ExportOptions) -> None:
    """Write the whole weights of a checkpoint to safetensors files.

    Shards are put together and padding is cut off, a few rows at a time: a model needs no more
    memory than that. Beyond `--max-file` there are several files and an index beside them.
    `zerojax train --init` starts from them.

    ```
    zerojax checkpoint export runs/books books.safetensors
    zerojax checkpoint export runs/books books.safetensors --part masters --max-file 2
    ```
    """
    screen = CheckpointScreen()
    with refusing():
        path = find_checkpoint(options.directory)
        leaves = read_manifest(path).leaves
        prefix = "params/" if options.part is None else options.part.rstrip("/") + "/"
        count = sum(leaf.startswith(prefix) for leaf in leaves) or len(leaves)
        with screen.bar(count, f"export {path}") as on_leaf:
            size = int(options.max_file * 1e9)
            written = export_safetensors(
                path, options.out, part=options.part, max_file_bytes=size, on_leaf=on_leaf
            )
    for file in written:
        screen.say(f"wrote {file}, {decimal(file.stat().st_size)}")


@checkpoint.command(name="import")
@command
def import_(options: ImportOptions) -> None:
    """Make a checkpoint of the weights in safetensors files.

    It holds parameters and nothing else. `zerojax train --init DIR` starts from it, and
    `zerojax.restore(DIR, layout, {"params": ...})` places it on any mesh.

    ```
    zerojax checkpoint import books.safetensors weights/books
    ```
    """
    with refusing():
        shapes = weights_of(options.file)
        mesh = make_mesh({"data": 1}, devices=jax.devices("cpu")[:1])
        layout = make_layout(shapes, mesh, stage=0)
        params = import_safetensors(options.file, layout, shapes)
        save(options.directory, {"params": params}, layout, metadata={"source": str(options.file)})
        manifest = read_manifest(options.directory)
    CheckpointScreen().manifest(options.directory, manifest, {}, leaves=False)
