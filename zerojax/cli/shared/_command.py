"""A command of one dataclass: fields are options, their docstrings the help; how it prints."""

import ast
import dataclasses
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from zerojax.aot import MissingCompiler
from zerojax.processes import ProcessError

#: Ctrl-C, as shells have it; and preemption, as mail servers say "come again" (EX_TEMPFAIL).
INTERRUPTED, PREEMPTED = 130, 75


class Failure(Exception):
    """Ends the command with one line on stderr and a status."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def refusing() -> Iterator[None]:
    """Turn errors about what the user asked for, which have the remedy, into one line.

    Wrap only what reads the request: a ValueError of training is a bug and keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError, MissingCompiler, ProcessError) as error:
        raise Failure(str(error)) from error


#: The groups of options, in the order in which they are shown.
PANELS = ("Model", "Hardware", "ZeRO", "Training", "Data", "Other questions", "Output", "Processes")
#: The key of a field's metadata under which typer's view of it lies.
PARAMETER = "parameter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What a command was asked for; its options are the fields that `option` makes."""

    # the fields that stood on the command line, and were not left out
    given: frozenset[str] = frozenset()


Options = TypeVar("Options", bound=CommandOptions)


def option(default: Any, *names: str, panel: str | None = None, **looks: Any) -> Any:
    """Return a field that is an option; the string below the field is its help.

    One that may be given several times has the default (). `names` spell it, where that is not the
    field's name; `panel` is the group that it is shown in; `looks` is for `typer.Option`.
    """
    info = typer.Option(None if default == () else default, *names, rich_help_panel=panel, **looks)
    return dataclasses.field(default=default, metadata={PARAMETER: info})


def argument(metavar: str, *, several: bool = False) -> Any:
    """Return a field that is a positional argument; the string below the field is its help.

    With `several` it takes all words that are left, in a tuple.
    """
    info = typer.Argument(None if several else ..., metavar=metavar, show_default=False)
    default: Any = () if several else dataclasses.MISSING
    return dataclasses.field(default=default, metadata={PARAMETER: info})


def command(run: Callable[[Options], None]) -> Callable[..., None]:
    """Make what typer takes of a function of one dataclass, which its annotation names.

    A ValueError of the dataclass, for options that contradict each other, ends the command.
    """
    options: type[CommandOptions] = get_type_hints(run)["options"]
    fields = [field for field in dataclasses.fields(options) if PARAMETER in field.metadata]
    panels = {panel: place for place, panel in enumerate(PANELS)}
    fields.sort(key=lambda field: panels.get(field.metadata[PARAMETER].rich_help_panel, 0))
    several = {field.name for field in fields if field.default == ()}

    def called(ctx: typer.Context, **values: Any) -> None:
        sources = {name: ctx.get_parameter_source(name) for name in values}
        given = frozenset(name for name, x in sources.items() if x and x.name == "COMMANDLINE")
        values |= {name: tuple(values[name] or ()) for name in several}
        with refusing():
            asked: Any = options(given=given, **values)
        run(asked)

    hints, helps = get_type_hints(options), _read_helps(options)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY, annotation=typer.Context)
    parameters = [context]
    for field in fields:
        info, kind = field.metadata[PARAMETER], hints[field.name]
        info.help = helps.get(field.name, info.help)
        if kind in (Path, Path | None):
            info.parser = _read_path
        if kind is bool and not info.param_decls:  # typer would add --no-NAME
            info.param_decls = (f"--{field.name.replace('_', '-')}",)
        kind = list[str] | None if field.name in several else kind
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, keyword, default=info, annotation=kind))
    wrapped: Any = called
    wrapped.__signature__ = inspect.Signature(parameters)
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    wrapped.__name__, wrapped.__doc__ = run.__name__, run.__doc__
    return called


def _read_path(text: str | Path) -> Path:
    if text == "":  # which pathlib takes for the current folder
        raise typer.BadParameter('the path is empty; "." is the current folder')
    return Path(text)


def _read_helps(options: type) -> dict[str, str]:
    """Read the strings below the fields of a class and of those that it inherits from.

    steps: int = option(200, min=1)
    '''Steps to train for, in all.'''         -> {"steps": "Steps to train for, in all."}
    """
    helps: dict[str, str] = {}
    for one in (x for x in reversed(options.__mro__) if dataclasses.is_dataclass(x)):
        infos = {field.name: field.metadata.get(PARAMETER) for field in dataclasses.fields(one)}
        helps |= {name: info.help for name, info in infos.items() if info and info.help}
        (tree,) = ast.parse(inspect.getsource(one)).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    helps[name] = " ".join(text.split())
    return helps


class Screen:
    """Prints to stdout, on `width` columns where there is no terminal to say how many."""

    def __init__(self, *, width: int | None = None, quiet: bool = False) -> None:
        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(highlight=False, width=None if known else width, quiet=quiet)

    def show(self, what: RenderableType) -> None:
        self.console.print(what, soft_wrap=isinstance(what, Text))

    def facts(self, rows: Mapping[str, str]) -> None:
        """Print names and what they are, one below the other; nothing of what is empty."""
        width = max(map(len, rows)) + 1
        for name, text in rows.items():
            lines = text.replace("\n", "\n" + " " * width)
            if text:
                self.show(Text.assemble((f"{name:<{width}}", "bold"), lines))

    def title(self, text: str) -> None:
        self.show(Text(f"\n{text}", style="bold"))

    def say(self, text: str) -> None:
        self.show(Text(text, style="dim"))

    def wrote(self, *paths: Path) -> None:
        self.say(f"wrote {', '.join(map(str, paths))}")

    @contextmanager
    def task(self, what: str) -> Iterator[None]:
        """Print what is done, and how long it took; Ctrl-C ends the process at once.

        Python's own handler would wait for the compiler, which does not hear it.
        """
        start, before = time.monotonic(), signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.show(Text(f"{what} ..."))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if (seconds := time.monotonic() - start) >= 1:
            self.show(Text(f"  took {seconds:,.0f} s"))
