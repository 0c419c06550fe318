"""`zerojax checkpoint`: look at checkpoints, check them, turn them into weights and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerojax.cli.checkpoint import _screen as screen
from zerojax.cli.checkpoint._files import find_checkpoint, list_checkpoints
from zerojax.cli.shared._errors import Failure, refusing

checkpoint = typer.Typer(
    name="checkpoint",
    help="Inspect, verify, export and import checkpoints; needs no accelerator.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint, or a run's folder, of which the newest whole one is meant.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print plain data instead.")]
Part = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="The leaves below a path: `params`, `masters` (fp32 copies of bf16 parameters), "
        "`opt_state/0/mu`.",
        show_default="the parameters",
    ),
]
MaxFile = Annotated[
    float, typer.Option(min=1e-6, metavar="GB", help="GB of a file beyond which there are several.")
]


@checkpoint.command()
def inspect(
    directory: Folder,
    leaves: Annotated[bool, typer.Option("--leaves", help="List every leaf.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, from its manifest alone.

    The model's code is not needed, nor the devices that it was saved on.

    ```
    zerojax checkpoint inspect runs/books
    zerojax checkpoint inspect runs/books/checkpoints/500 --leaves
    ```
    """
    with refusing():
        found = list_checkpoints(directory)
        path = find_checkpoint(directory)
        screen.show(path, found, leaves=leaves, as_json=as_json)


@checkpoint.command()
def verify(directory: Folder) -> None:
    """Read all of a checkpoint and hold it against its manifest; of a run, all checkpoints.

    Every file is held against its digest and every leaf is read. Ends with status 1 where
    something is damaged, and names it.

    ```
    zerojax checkpoint verify runs/books
    ```
    """
    with refusing():
        found = list_checkpoints(directory)
    damaged = [path for path, why in found.items() if not screen.verified(path, why)]
    if damaged:
        raise Failure(
            f"{len(damaged)} of {len(found)} damaged: {', '.join(map(str, damaged))}", status=1
        )


@checkpoint.command()
def export(
    directory: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    part: Part = None,
    max_file: MaxFile = 5.0,
) -> None:
    """Write the whole weights of a checkpoint to safetensors files.

    Shards are put together and padding is cut off, a few rows at a time: a model needs no more
    memory than that. Beyond `--max-file` there are several files and an index beside them.

    ```
    zerojax checkpoint export runs/books books.safetensors
    zerojax checkpoint export runs/books books.safetensors --part masters --max-file 2
    ```
    """
    from zerojax.checkpoint import export_safetensors

    with refusing():
        path = find_checkpoint(directory)
        with screen.progress(path, part) as on_leaf:
            written = export_safetensors(
                path, out, part=part, max_file_bytes=int(max_file * 1e9), on_leaf=on_leaf
            )
        screen.wrote(written)


@checkpoint.command(name="import")
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A safetensors file, an index, or its folder.")
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The checkpoint to make; must not be one yet.")
    ],
) -> None:
    """Make a checkpoint of weights in safetensors files.

    It holds parameters and nothing else: `zerojax train --init DIR` starts from them, and in
    Python `restore(DIR, layout, {"params": ...})` places them.

    ```
    zerojax checkpoint import books.safetensors weights/books
    zerojax train --init weights/books --data 'letters/*.txt'
    ```
    """
    from zerojax.cli.checkpoint._files import import_weights

    with refusing():
        import_weights(file, directory)
        screen.show(directory, {directory: None}, leaves=False, as_json=False)
