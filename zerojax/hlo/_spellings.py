"""What compilers call things: `opcodes.toml` has HLO's own words, `spellings.toml` their marks."""

import re
import tomllib
from importlib import resources


def _read(name: str) -> dict[str, str]:
    return tomllib.loads(resources.files("zerojax.hlo").joinpath(name).read_text("utf-8"))


OPCODES, _MARKS = _read("opcodes.toml"), _read("spellings.toml")


def having(trait: str) -> frozenset[str]:
    return frozenset(OPCODES[trait].split())


def mark(name: str) -> re.Pattern[str]:
    return re.compile(_MARKS[name])
