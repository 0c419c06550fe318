"""Packages that only some calls need: which extra brings them, said when one is missing."""

import contextlib
from collections.abc import Iterator


class MissingExtra(ImportError):
    """Raised where a call needs a package that an extra of zerojax brings."""


@contextlib.contextmanager
def extra(name: str, user: str) -> Iterator[None]:
    """Import packages of an extra within this; `user` is what needs them, such as "zerojax.save".

    Raises:
        MissingExtra: a package is not installed; the message has the pip line.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "zerojax"):
            raise
        raise MissingExtra(
            f"{user} needs {package}, which is not installed: in a clone of zerojax, "
            f"pip install '.[{name}]'",
            name=error.name,
        ) from error
