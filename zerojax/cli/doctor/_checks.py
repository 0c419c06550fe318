"""What `zerojax doctor` looks at: packages, devices, compilers and folders."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Status = Literal["ok", "warning", "failed", "not tried"]
#: Free space from which on a folder takes checkpoints of small models.
ROOMY = 1_000_000_000
#: Characters of an error that a row shows.
LONGEST = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found: failed is what zerojax can't work without, a warning what it can.

    Attributes:
        status: the mark.
        found: what there is.
        remedy: what to do about it; nothing where all is well.
        traceback: where an error came from that no check foresaw.
    """

    status: Status
    found: str
    remedy: str = ""
    traceback: str = ""


@dataclasses.dataclass
class Bench:
    """What checks leave for those after them.

    Attributes:
        devices: those of a run, once they have been found.
        layout: the placement of the proof's state.
        state: the proof's state after a step.
        compiled: the proof's step.
    """

    devices: list[Any] = dataclasses.field(default_factory=list)
    layout: Any = None
    state: Any = None
    compiled: Any = None


@dataclasses.dataclass(frozen=True)
class Project:
    """What zerojax says of itself: its version and what it needs."""

    version: str
    requires_python: str
    requirements: list[Requirement]
    is_installed: bool

    @classmethod
    def read(cls) -> Project:
        """Read it from the installed package, or from the pyproject.toml beside its source."""
        from packaging.requirements import Requirement

        try:
            held = metadata.distribution("zerojax")
        except metadata.PackageNotFoundError:
            import tomllib

            project = tomllib.loads((_home() / "pyproject.toml").read_text())["project"]
            lines = project["dependencies"] + [
                _with_extra(line, extra)
                for extra, lines in project["optional-dependencies"].items()
                for line in lines
            ]
            version, python = project["version"], project["requires-python"]
            return cls(version, python, [Requirement(line) for line in lines], is_installed=False)
        version, python = held.version, held.metadata["Requires-Python"]
        lines = held.requires or []
        return cls(version, python, [Requirement(line) for line in lines], is_installed=True)

    def of_extra(self, extra: str = "") -> list[Requirement]:
        """Return the requirements of an extra alone; by default those without any."""

        def holds(one: Requirement, name: str) -> bool:
            return one.marker is None or one.marker.evaluate({"extra": name})

        plain = [one for one in self.requirements if holds(one, "")]
        if not extra:
            return plain
        found = [one for one in self.requirements if holds(one, extra) and one not in plain]
        # An extra may name others of the package's own: zerojax[checkpoint] is no requirement.
        others = [name for one in found if one.name == "zerojax" for name in sorted(one.extras)]
        found = [one for one in found if one.name != "zerojax"]
        return found + [one for name in others for one in self.of_extra(name)]


def check_python(bench: Bench) -> Finding:
    """Check Python's version."""
    from packaging.specifiers import SpecifierSet

    wanted, version = Project.read().requires_python, platform.python_version()
    found = f"Python {version} on {platform.system()} {platform.machine()}"
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding(status="ok", found=found)
    remedy = f"make an environment with Python {wanted} and install zerojax there"
    return Finding(status="failed", found=f"{found}; zerojax needs {wanted}", remedy=remedy)


def check_packages(bench: Bench) -> Finding:
    """Check the versions of the packages that zerojax and its command need."""
    project = Project.read()
    wanted = [*project.of_extra(), *project.of_extra("cli")]
    wrong = _unmet(wanted)
    if wrong:
        return Finding(status="failed", found="; ".join(wrong.values()), remedy=_install(wrong))
    held = ", ".join(f"{one.name} {metadata.version(one.name)}" for one in wanted)
    source = "" if project.is_installed else f", not installed but in {_home()}"
    return Finding(status="ok", found=f"zerojax {project.version}{source}; {held}")


def check_jaxlib(bench: Bench) -> Finding:
    """Check that jax and jaxlib belong together."""
    from packaging.requirements import Requirement

    version = metadata.version("jax")
    lines = (Requirement(line) for line in metadata.requires("jax") or [])
    wanted = [one for one in lines if one.name == "jaxlib" and one.marker is None]
    wrong = _unmet(wanted)
    if wrong:
        found = f"jax {version} does not go with it: {'; '.join(wrong.values())}"
        return Finding(status="failed", found=found, remedy=f'pip install -U "jax=={version}"')
    held = f"jax {version} with jaxlib {metadata.version('jaxlib')}"
    return Finding(status="ok", found=held)


def check_notebooks(bench: Bench) -> Finding:
    """Check what running the notebooks takes."""
    wanted = Project.read().of_extra("notebooks")
    wrong = _unmet(wanted)
    if wrong:
        remedy = "pip install 'zerojax[notebooks]'"
        return Finding(status="warning", found="; ".join(wrong.values()), remedy=remedy)
    held = ", ".join(f"{one.name} {metadata.version(one.name)}" for one in wanted)
    return Finding(status="ok", found=held)


def check_devices(bench: Bench) -> Finding:
    """Find the devices that a run would take."""
    import jax

    from zerojax import aot
    from zerojax.cli.shared._devices import find_devices

    asked = os.environ.get("JAX_PLATFORMS") or getattr(jax.config, "jax_platforms", None)
    if not asked and not aot.has_accelerators() and _version("libtpu"):
        # The compiler for TPUs is here and no TPU: jax would look for one, for minutes.
        jax.config.update("jax_platforms", "cpu")
    try:
        found = find_devices(None)
    except (ValueError, AssertionError) as error:  # jax asserts that a platform has a plugin
        remedy = "set JAX_PLATFORMS=cpu for virtual devices, or install jax for this accelerator"
        if asked:
            remedy = f"unset JAX_PLATFORMS, which asks for {asked}; or set it to cpu"
        found = first_line(error) if str(error) else f"jax finds no devices of {asked}"
        return Finding(status="failed", found=found, remedy=remedy)
    bench.devices = found
    held, one = _describe(found), found[0]
    if one.platform == "cpu" and aot.has_accelerators():
        remedy = 'pip install "jax[cuda12]" or "jax[tpu]", whichever is here'
        if asked:
            remedy = f"unset JAX_PLATFORMS, which asks for {asked}"
        held += "; jax does not use the accelerator that /dev shows"
        return Finding(status="warning", found=held, remedy=remedy)
    if len(found) == 1:
        remedy = "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 gives eight virtual devices to try with"
        held += "; nothing is partitioned over a single one"
        return Finding(status="warning", found=held, remedy=remedy)
    return Finding(status="ok", found=held)


def check_host_memory(bench: Bench) -> Finding:
    """Check for the memory that offloading moves states to."""
    from zerojax.memory import has_host_memory, memory_kinds
    from zerojax.recipe import HOST_MEMORY

    one = bench.devices[0]
    if has_host_memory(one):
        return Finding(status="ok", found=f"devices reach {HOST_MEMORY} memory: offload works")
    kinds = ", ".join(memory_kinds(one)) or "none"
    found = f"devices reach no {HOST_MEMORY} memory (only {kinds}): no offload"
    remedy = "train without --offload, or with OffloadPolicy(missing='device')"
    return Finding(status="warning", found=found, remedy=remedy)


def check_tpu_compiler(bench: Bench) -> Finding:
    """Look for the compiler for TPUs that are not here, without loading it."""
    from zerojax import aot

    return _compiler(aot.require_libtpu, "libtpu")


def check_gpu_compiler(bench: Bench) -> Finding:
    """Look for the compiler for GPUs that are not here, without loading it."""
    from zerojax import aot

    plugins = (name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if _version(name))
    return _compiler(aot.require_cuda, next(plugins, "jax-cuda12-plugin"))


def check_cache(bench: Bench) -> Finding:
    """Check that compiled programs can be kept for the next run."""
    import jax

    held = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not held:
        found = "compiled programs are not kept: every run compiles anew"
        remedy = "export JAX_COMPILATION_CACHE_DIR=~/.cache/jax"
        return Finding(status="warning", found=found, remedy=remedy)
    if "://" in held:
        return Finding(status="ok", found=f"{held} (not tried)")
    try:
        Path(held).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=held):
            return Finding(status="ok", found=f"{held} can be written to")
    except OSError as error:
        found = f"{held} can't be written to ({error.strerror}): every run compiles anew"
        remedy = "set JAX_COMPILATION_CACHE_DIR to a folder of your own"
        return Finding(status="warning", found=found, remedy=remedy)


def check_disk(bench: Bench) -> Finding:
    """Check that runs and their checkpoints can be written here, and temporary files."""
    from rich.filesize import decimal

    free, closed = {}, []
    for folder in dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir()))):
        try:
            with tempfile.TemporaryFile(dir=folder):
                free[folder] = shutil.disk_usage(folder).free
        except OSError as error:
            closed.append(f"{folder} can't be written to ({error.strerror})")
    if closed:
        remedy = "go to a folder of your own, and set TMPDIR to one"
        return Finding(status="failed", found="; ".join(closed), remedy=remedy)
    held = ", ".join(f"{decimal(size)} free in {folder}" for folder, size in free.items())
    if min(free.values()) < ROOMY:
        remedy = "make room; a checkpoint with Adam takes 12 to 16 bytes a parameter"
        return Finding(status="warning", found=held, remedy=remedy)
    return Finding(status="ok", found=held)


def _compiler(require: Callable[[], object], package: str) -> Finding:
    from zerojax.aot import MissingCompiler

    try:
        require()
    except MissingCompiler as error:
        found, command, rest = str(error).partition("pip install")
        remedy = f"{command}{rest}" or "pip install 'zerojax[aot]'"
        # It says in parentheses what is not needed, which reads here as what is missing.
        found = re.sub(r" \(no [^)]*\)", "", found).rstrip(" .:")
        return Finding(status="warning", found=found, remedy=remedy)
    return Finding(status="ok", found=f"{package} {_version(package) or 'is here'}")


def _describe(devices: list[Any]) -> str:
    """Say what the devices are and what each holds."""
    from rich.filesize import decimal

    from zerojax.cli.shared._devices import memory_per_device

    size = memory_per_device(devices)
    each = f", {decimal(size)} of memory each" if size is not None else ""
    many = "s" if len(devices) > 1 else ""
    if devices[0].platform == "cpu":
        return f"{len(devices)} virtual device{many} on the CPU{each}; --devices N makes N of them"
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}){each}"


def _unmet(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Give requirement to fault of what is missing or too old."""
    wrong = {}
    for one in wanted:
        needed = f"{one.name}{one.specifier}"
        version = _version(one.name)
        if version is None:
            wrong[needed] = f"{one.name} is not installed"
        elif not one.specifier.contains(version, prereleases=True):
            wrong[needed] = f"{one.name} is {version}, and {one.specifier} is needed"
    return wrong


def _install(wrong: Iterable[str]) -> str:
    return "pip install -U " + " ".join(f'"{one}"' for one in wrong)


def _with_extra(line: str, extra: str) -> str:
    """Write a requirement of an extra as an installed package's metadata have it."""
    name, _, marker = line.partition(";")
    both = f"({marker.strip()}) and " if marker else ""
    return f"{name.strip()}; {both}extra == '{extra}'"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _home() -> Path:
    return Path(__file__).resolve().parents[3]


def first_line(error: BaseException) -> str:
    """Give the first line of an error, in brief."""
    line = next(iter(str(error).strip().splitlines()), "")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
