"""`zerojax checkpoint`: look at checkpoints, check them, turn them into weights."""

import dataclasses
import json
import math
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from zerojax._display import decimal, make_table
from zerojax.checkpoint import Manifest, export_safetensors, parts, read_manifest, verify
from zerojax.cli.shared import _command
from zerojax.cli.shared._machine import find_checkpoint, list_checkpoints

#: Columns where there is no terminal to say how many.
WIDTH = 120

checkpoint = typer.Typer(
    name="checkpoint",
    help="Inspect, verify and export checkpoints; needs no accelerator.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions(_command.CommandOptions):
    directory: Path = _command.argument("DIR")
    """A checkpoint, or a run's folder: all of its checkpoints for `verify`, else the newest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(CheckpointOptions):
    out: Path = _command.argument("OUT.safetensors")
    """The file to write."""
    part: str | None = _command.option(None, metavar="PATH", show_default="the parameters")
    """The leaves below a path: `params`, `masters` (fp32 copies of bf16 parameters),
    `opt_state/0/mu`."""


@checkpoint.command()
@_command.command
def inspect(options: CheckpointOptions) -> None:
    """Show what a checkpoint holds, from its manifest alone.

    Neither the model's code nor its devices are needed. checkpoint.json has every leaf and file.

    ```
    zerojax checkpoint inspect runs/books
    zerojax checkpoint inspect runs/books/checkpoints/500
    ```
    """
    screen = _command.Screen(width=WIDTH)
    with _command.refusing():
        path = find_checkpoint(options.directory, screen)
        manifest = read_manifest(path)
    mesh = ", ".join(f"{name}={size}" for name, size in manifest.mesh.items())
    step = "not told" if manifest.step is None else f"{manifest.step:,}"
    facts = {
        "path": str(path),
        "step": f"{step}, written {manifest.written}",
        "placement": f"stage {manifest.stage} over {', '.join(manifest.axis)}; mesh {mesh}",
        "optimizer": " > ".join(manifest.optimizer.values()),
        "data": "" if manifest.data is None else json.dumps(manifest.data),
        "on disk": f"{decimal(manifest.num_bytes)} in {len(manifest.files)} files",
    }
    screen.facts({name: _printable(text) for name, text in facts.items()})
    screen.show(_parts_table(manifest))


@checkpoint.command(name="verify")
@_command.command
def verify_(options: CheckpointOptions) -> None:
    """Compare every file of a checkpoint with its digest; of a run, of all checkpoints.

    Ends with status 1 where something is damaged, and names it.

    ```
    zerojax checkpoint verify runs/books
    ```
    """
    with _command.refusing():
        found = list_checkpoints(options.directory)
    screen, damaged = _command.Screen(width=WIDTH), []
    for path, why in found.items():
        try:
            if why is not None:
                raise ValueError(why)
            with screen.console.status(f"verify {path}"):
                manifest = verify(path)
            files = f"{len(manifest.files)} files, {decimal(manifest.num_bytes)}"
            leaves = "1 leaf" if len(manifest.leaves) == 1 else f"{len(manifest.leaves)} leaves"
            screen.show(Text.assemble(("whole    ", "bold green"), f"{path}: {files}, {leaves}"))
        except (ValueError, OSError) as error:
            screen.show(Text.assemble(("damaged  ", "bold red"), str(error)))
            damaged.append(str(path))
    if damaged:
        told = f"{len(damaged)} of {len(found)} damaged: {', '.join(damaged)}"
        raise _command.Failure(told, status=1)


@checkpoint.command()
@_command.command
def export(options: ExportOptions) -> None:
    """Write the whole weights of a checkpoint to a safetensors file.

    Shards are put together and padding is cut off, a tensor at a time.
    `zerojax train --init` starts from it.

    ```
    zerojax checkpoint export runs/books books.safetensors
    zerojax checkpoint export runs/books books.safetensors --part masters
    ```
    """
    screen = _command.Screen(width=WIDTH)
    with _command.refusing():
        path = find_checkpoint(options.directory, screen)
        with screen.console.status(f"export {path}"):
            file = export_safetensors(path, options.out, part=options.part)
    screen.say(f"wrote {file}, {decimal(file.stat().st_size)}")


def _parts_table(manifest: Manifest) -> Table:
    made = make_table("part", ">leaves", ">elements", ">bytes", "dtype")
    for path, leaves in parts(manifest).items():
        num_elements = f"{sum(math.prod(leaf.shape) for leaf in leaves):,}"
        size = decimal(sum(leaf.num_bytes for leaf in leaves))
        dtypes = _printable(", ".join(dict.fromkeys(leaf.dtype for leaf in leaves)))
        made.add_row(_printable(path), f"{len(leaves):,}", num_elements, size, dtypes)
    made.add_section()
    size = decimal(sum(leaf.num_bytes for leaf in manifest.leaves.values()))
    made.add_row("all", f"{len(manifest.leaves):,}", "", size, "")
    return made


def _printable(text: str) -> str:
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)
