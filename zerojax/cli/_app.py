"""The `zerojax` command, and how every one of its commands ends."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from zerojax._extras import MissingExtra
from zerojax._version import __version__
from zerojax.cli._check import check
from zerojax.cli._checkpoint import checkpoint
from zerojax.cli._compile import compile_
from zerojax.cli._doctor import doctor
from zerojax.cli._launch import launch
from zerojax.cli._plan import plan
from zerojax.cli.shared._command import INTERRUPTED, Failure
from zerojax.cli.train._command import train
from zerojax.processes import fail

# typer names one of its usage errors in public; that one's base is all of them.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="zerojax",
    epilog="`zerojax COMMAND --help` explains a command and gives examples.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command(context_settings={"allow_interspersed_args": False})(launch)  # all that follows
app.command()(plan)
app.command(name="compile")(compile_)
app.command()(check)
app.add_typer(checkpoint)
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        import jax

        typer.echo(f"zerojax {__version__}, jax {jax.__version__}")
        raise typer.Exit


@app.callback()
def zerojax(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """ZeRO for JAX: train a GPT, plan steps, and audit compiled ones (`compile`, `check`)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; errors are one line on stderr.

    0: done. 1: the run failed. 2: it was asked for what can't be done. 75: preempted (SIGTERM or
    SIGHUP), saved, to be resumed. 130: interrupted.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if sys.stdout is None:  # Python's name for a stream that is closed
            raise Failure("stdout is closed: send it to a file, or to /dev/null")
        if isinstance(sys.stdout, io.TextIOWrapper):  # which may lack letters of a user's names
            sys.stdout.reconfigure(errors="backslashreplace")
        status = app(given, prog_name="zerojax", standalone_mode=False) or 0
        # typer itself catches Ctrl-C in a command and gives its status without a word.
        return _end("interrupted", status) if status == INTERRUPTED else status
    except _UsageError as error:
        return _end(error.format_message().replace("Value error, ", ""), 2)
    except (MissingExtra, Failure) as failure:
        return _end(str(failure), getattr(failure, "status", 2))
    except (KeyboardInterrupt, typer.Abort):
        return _end("interrupted", INTERRUPTED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _end(f"{error}: make room where stdout or the command's files go", 1)


def _end(message: str, status: int) -> int:
    message = " ".join(message.split())
    if message:  # bare `zerojax` has printed its help already
        with contextlib.suppress(OSError):  # stderr may be the pipe that is closed
            typer.echo(f"zerojax: {message}", err=True)
    try:
        sys.stdout.flush()
    except (OSError, AttributeError):  # which Python would tell of again, and so end with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    fail(message, status)  # where there are other processes, that wait for this one
    return status
