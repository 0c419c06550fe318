"""The packages that `zerojax doctor` looks at: those that are needed, and compilers."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import TYPE_CHECKING

from zerojax._version import __version__
from zerojax.aot import MissingCompiler, require_cuda, require_libtpu
from zerojax.cli.doctor._findings import Bench, Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def check_packages(bench: Bench) -> Finding:
    """Check Python and the versions of the packages that zerojax and its command need."""
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    try:
        wanted = [*requirements(), *requirements("cli")]
    except metadata.PackageNotFoundError:
        found = f"zerojax runs from a folder ({python}), and which packages it needs is not known"
        return Finding("warning", found, "pip install -e '.[cli]' in its folder")
    if wrong := _unmet(wanted):
        remedy = "pip install -U " + " ".join(f'"{one}"' for one in wrong)
        return Finding("failed", "; ".join(wrong.values()), remedy)
    return Finding("ok", f"zerojax {__version__}; {python}; {_versions(wanted)}")


def check_notebooks(bench: Bench) -> Finding:
    """Check what running the notebooks takes."""
    try:
        wanted = requirements("notebooks")
    except metadata.PackageNotFoundError:
        return Finding("warning", "not known, as the packages are not", "pip install -e '.[cli]'")
    if wrong := _unmet(wanted):
        return Finding("warning", "; ".join(wrong.values()), "pip install 'zerojax[notebooks]'")
    return Finding("ok", _versions(wanted))


def check_tpu_compiler(bench: Bench) -> Finding:
    """Look for the compiler for TPUs that are not here, without loading it."""
    return _compiler(require_libtpu, "libtpu")


def check_gpu_compiler(bench: Bench) -> Finding:
    """Look for the compiler for GPUs that are not here, without loading it."""
    plugins = (name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if version_of(name))
    return _compiler(require_cuda, next(plugins, "jax-cuda12-plugin"))


def requirements(extra: str = "") -> list[Requirement]:
    """Return what the installed zerojax requires, or what an extra adds to that."""
    from packaging.requirements import Requirement

    def holds(one: Requirement, name: str) -> bool:
        return one.marker is None or one.marker.evaluate({"extra": name})

    lines = [Requirement(line) for line in metadata.distribution("zerojax").requires or []]
    plain = [one for one in lines if holds(one, "")]
    if not extra:
        return plain
    found = [one for one in lines if holds(one, extra) and one not in plain]
    # An extra may name others of the package's own: zerojax[checkpoint] is no requirement.
    others = [name for one in found if one.name == "zerojax" for name in sorted(one.extras)]
    found = [one for one in found if one.name != "zerojax"]
    return found + [one for name in others for one in requirements(name)]


def version_of(package: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _unmet(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Return requirement to fault of what is missing or too old."""
    wrong = {}
    for one in wanted:
        version = version_of(one.name)
        if version is None:
            wrong[f"{one.name}{one.specifier}"] = f"{one.name} is not installed"
        elif not one.specifier.contains(version, prereleases=True):
            fault = f"{one.name} is {version}, and {one.specifier} is needed"
            wrong[f"{one.name}{one.specifier}"] = fault
    return wrong


def _versions(wanted: Iterable[Requirement]) -> str:
    return ", ".join(f"{one.name} {version_of(one.name)}" for one in wanted)


def _compiler(require: Callable[[], object], package: str) -> Finding:
    try:
        require()
    except MissingCompiler as error:
        # "Compiling for TPUs needs libtpu ==0.0.30 (no TPU): pip install ...": it tells in
        # parentheses what is not needed, which reads here as what is missing.
        found, command, rest = str(error).partition("pip install")
        found = re.sub(r" \(no [^)]*\)", "", found).rstrip(" .:")
        return Finding("warning", found, f"{command}{rest}" or "pip install 'zerojax[aot]'")
    return Finding("ok", f"{package} {version_of(package) or 'is here'}")
