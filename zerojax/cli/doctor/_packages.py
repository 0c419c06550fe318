"""The packages that `zerojax doctor` looks at: those that are needed, and compilers."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING

from zerojax._version import __version__
from zerojax.aot import MissingCompiler, require_cuda, require_libtpu
from zerojax.cli.doctor._findings import Bench, Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: The extras that the command needs.
EXTRAS = ("", "cli", "checkpoint")


def check_packages(bench: Bench) -> Finding:
    """Check Python and the versions of the packages that zerojax and its command need."""
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    try:
        wanted = requirements()
    except metadata.PackageNotFoundError:
        found = f"zerojax runs from a folder ({python}), and which packages it needs is not known"
        return Finding("warning", found, "pip install -e '.[cli]' in its folder")
    wrong = {f"{one.name}{one.specifier}": fault for one in wanted if (fault := _fault(one))}
    if wrong:
        remedy = "pip install -U " + " ".join(f'"{one}"' for one in wrong)
        return Finding("failed", "; ".join(wrong.values()), remedy)
    versions = ", ".join(f"{one.name} {version_of(one.name)}" for one in wanted)
    return Finding("ok", f"zerojax {__version__}; {python}; {versions}")


def check_tpu_compiler(bench: Bench) -> Finding:
    """Look for the compiler for TPUs that are not here, without loading it."""
    return _compiler(require_libtpu, "libtpu")


def check_gpu_compiler(bench: Bench) -> Finding:
    """Look for the compiler for GPUs that are not here, without loading it."""
    plugins = (name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if version_of(name))
    return _compiler(require_cuda, next(plugins, "jax-cuda12-plugin"))


def requirements() -> list[Requirement]:
    """Return what the installed zerojax and its command require."""
    from packaging.requirements import Requirement

    lines = [Requirement(line) for line in metadata.distribution("zerojax").requires or []]
    # An extra may name others of the package's own: zerojax[checkpoint] is no requirement.
    return [
        one
        for one in lines
        if one.name != "zerojax"
        and (one.marker is None or any(one.marker.evaluate({"extra": name}) for name in EXTRAS))
    ]


def version_of(package: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _fault(wanted: Requirement) -> str:
    """Return what is wrong with a package; empty where nothing is."""
    version = version_of(wanted.name)
    if version is None:
        return f"{wanted.name} is not installed"
    if wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"{wanted.name} is {version}, and {wanted.specifier} is needed"


def _compiler(require: Callable[[], object], package: str) -> Finding:
    try:
        require()
    except MissingCompiler as error:
        # "Compiling for TPUs needs libtpu ==0.0.30 (no TPU): pip install ..."
        found, command, rest = str(error).partition("pip install")
        return Finding("warning", found.rstrip(" .:"), f"{command}{rest}")
    return Finding("ok", f"{package} {version_of(package) or 'is here'}")
