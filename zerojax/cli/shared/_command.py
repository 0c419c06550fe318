"""A command of one dataclass: its fields are the options, each written once with its help."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

from zerojax.cli.shared._errors import refusing

#: The key of a field's metadata under which typer's view of it lies.
PARAMETER = "parameter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What a command was asked for; the fields of subclasses that `option` makes are its options.

    Attributes:
        given: the fields that stood on the command line, and were not left out.
    """

    given: frozenset[str] = frozenset()


Options = TypeVar("Options", bound=CommandOptions)


def option(
    default: Any,
    *names: str,
    help: str,  # noqa: A002 - as typer names it
    panel: str | None = None,
    shown: str | None = None,
    metavar: str | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a field that is an option.

    Args:
        default: its value where it is left out; () for an option that may be given several times.
        names: how it is spelled, where that is not the field's name.
        help: what it does.
        panel: the group of options that it is shown in.
        shown: the default in words, where the value does not tell.
        metavar: what stands for the value.
        least: the smallest number that is taken.
        most: the largest.
    """
    info = typer.Option(
        None if default == () else default,
        *names,
        help=help,
        rich_help_panel=panel,
        show_default=True if shown is None else shown,
        metavar=metavar,
        min=least,
        max=most,
    )
    return dataclasses.field(default=default, metadata={PARAMETER: info})


def argument(metavar: str, help: str) -> Any:  # noqa: A002 - as typer names it
    """Return a field that is a positional argument."""
    info = typer.Argument(..., metavar=metavar, help=help, show_default=False)
    return dataclasses.field(metadata={PARAMETER: info})


def command(run: Callable[[Options], None]) -> Callable[..., None]:
    """Make what typer takes of a function of one dataclass, which its annotation names.

    A ValueError of the dataclass, for options that contradict each other, ends the command.
    """
    options: type[CommandOptions] = get_type_hints(run)["options"]
    fields = [field for field in dataclasses.fields(options) if PARAMETER in field.metadata]
    several = {field.name for field in fields if field.default == ()}

    def called(ctx: typer.Context, **values: Any) -> None:
        sources = {name: ctx.get_parameter_source(name) for name in values}
        given = frozenset(name for name, x in sources.items() if x and x.name == "COMMANDLINE")
        values |= {name: tuple(values[name] or ()) for name in several}
        with refusing():
            asked: Any = options(given=given, **values)
        run(asked)

    hints = get_type_hints(options)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY, annotation=typer.Context)
    parameters = [context, *(_parameter(field, hints[field.name]) for field in fields)]
    wrapped: Any = called
    wrapped.__signature__ = inspect.Signature(parameters)
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    wrapped.__name__, wrapped.__doc__ = run.__name__, run.__doc__
    return called


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    """Return the parameter of typer's function that stands for a field."""
    info = field.metadata[PARAMETER]
    if kind is bool and not info.param_decls:  # typer would add --no-NAME
        info.param_decls = (f"--{field.name.replace('_', '-')}",)
    if field.default == ():
        kind = list[str] | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind
    )
