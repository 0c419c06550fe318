"""Plain data: tables in TOML, and dataclasses of what JSON holds."""

import dataclasses
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, get_args, get_origin


def made(kind: Any, x: Any) -> Any:
    """Make a value of a type, a dataclass say, of JSON; a TypeError or KeyError tells of others."""
    if dataclasses.is_dataclass(kind):
        types = {field.name: field.type for field in dataclasses.fields(kind)}
        make: Any = kind
        return make(**{name: made(types[name], part) for name, part in x.items()})
    if get_origin(kind) in (Mapping, dict):
        return {name: made(get_args(kind)[1], part) for name, part in x.items()}
    if get_origin(kind) is tuple and isinstance(x, list):
        return tuple(made(get_args(kind)[0], part) for part in x)
    wanted = int | float if kind is float else kind
    is_flag = isinstance(x, bool) and kind is not bool
    if kind is not Any and (is_flag or not isinstance(x, wanted)):
        raise TypeError(f"{x!r} is no {kind}")
    return x


def read_table(package: str, name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))
