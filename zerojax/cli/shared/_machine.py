"""The devices that a command runs on, and the files that it reads and writes."""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax
from rich.text import Text

from zerojax._extras import extra
from zerojax.checkpoint import find_checkpoints, read_manifest
from zerojax.cli.shared._command import Screen

#: Virtual devices where no number is asked for, and the most that a CPU is divided into.
NUM_VIRTUAL, MOST_VIRTUAL = 8, 256


def find_devices(num_devices: int | None, num_processes: int = 1) -> list[Any]:
    """Return `num_devices` devices; by default all real ones, or eight virtual ones on a CPU.

    The CPU is divided before jax starts, which does nothing to an accelerator. A number in the
    environment (XLA_FLAGS, JAX_NUM_CPU_DEVICES) holds where the caller names none.
    """
    if num_devices is not None and num_devices % num_processes:
        raise ValueError(f"--devices {num_devices} is no multiple of its {num_processes} processes")
    own = (num_devices or NUM_VIRTUAL) // num_processes
    if own > MOST_VIRTUAL:
        told = f"--devices {num_devices}: give at most {MOST_VIRTUAL} a process"
        raise ValueError(f"{told}; zerojax compile --topology v5p:8x8x16 needs no devices")
    divided = "JAX_NUM_CPU_DEVICES" in os.environ or (
        "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    )
    if num_devices is not None or not divided:
        with contextlib.suppress(RuntimeError):  # jax has started; its devices stay
            jax.config.update("jax_num_cpu_devices", max(own, 1))
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter: a platform without a plugin
        told = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise ValueError(f"jax finds no devices: {told}") from error
    if num_devices is None:
        return found
    if num_processes > 1 and len(found) > num_devices:
        told = f"--devices {num_devices}: several processes use all of their {len(found)} devices"
        raise ValueError(f"{told}; leave --devices out")
    if len(found) < num_devices:
        kind = found[0].platform
        remedy = "" if kind == "cpu" else "; or set JAX_PLATFORMS=cpu for virtual devices"
        told = f"--devices {num_devices}: there are only {len(found)} here ({kind})"
        raise ValueError(f"{told}; give {len(found)} or fewer{remedy}")
    return found[:num_devices]


def memory_per_device(devices: list[Any]) -> int | None:
    """Return the bytes that each device may hold, None where that is not known.

    Virtual devices share the machine's memory evenly.
    """
    here = [device for device in devices if device.process_index == jax.process_index()]
    if here[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(here)
    return (here[0].memory_stats() or {}).get("bytes_limit")


def check_output(option: str, path: Path | None) -> None:
    """Check that the file of an option can be written, and leave no file behind.

    `--plot` is a drawing; the path is None where nobody asked for it.
    """
    if path is None:
        return
    if option == "--plot":
        if path.suffix.lower() != ".png":
            raise ValueError(f"--plot {path}: give a name that ends in .png")
        with extra("cli", "a plot"):  # before what is to be drawn is computed
            import matplotlib.figure  # noqa: F401
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise OSError(f"can't write to {option} {path}: {error.strerror}") from error


#: The folder of the checkpoints within that of a run.
CHECKPOINTS = "checkpoints"


def list_checkpoints(directory: Path) -> dict[Path, str | None]:
    """List the checkpoints that a folder is or holds, with what can be told to be wrong unread."""
    root = directory / CHECKPOINTS if (directory / CHECKPOINTS).is_dir() else directory
    wrong: dict[Path, str] = {}
    found = dict.fromkeys(find_checkpoints(root, wrong.__setitem__).values()) | wrong
    if found:
        return dict(sorted(found.items(), key=lambda item: int(item[0].name)))
    if not directory.exists():
        raise FileNotFoundError(f"there is no folder {directory}")
    read_manifest(directory)
    return {directory: None}


def find_checkpoint(directory: Path, screen: Screen) -> Path:
    """Find the checkpoint that a folder is, or its newest whole one; show what is passed over."""
    passed_over: list[str] = []
    for path, wrong in reversed(list_checkpoints(directory).items()):
        if wrong is None:
            for why in passed_over:
                screen.show(Text(f"passed over: {why}", style="yellow"))
            if passed_over:
                screen.say(f"taking step {path.name}, {path}")
            return path
        passed_over.append(wrong)
    raise ValueError(f"no whole checkpoint in {directory}: {'; '.join(reversed(passed_over))}")
