"""Refuse an argument of another class than the one that is expected, in one line."""

from __future__ import annotations

from typing import Any, TypeVar

Noun = TypeVar("Noun")


def as_given(noun: type[Noun], given: Any, example: str, default: Noun | None = None) -> Noun:
    """Return what was given, or the default for None.

    Args:
        noun: the class that is expected.
        given: the argument.
        example: how one is made.
        default: what None stands for; without it None is refused too.

    Raises:
        TypeError: something of another class was given.
    """
    value = default if given is None else given
    if isinstance(value, noun):
        return value
    raise TypeError(
        f"a {noun.__name__} is expected, got {type(given).__name__}: make one as in {example}"
    )
