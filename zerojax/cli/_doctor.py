"""`zerojax doctor`: look at what is here, then try what zerojax does with it."""

import functools
import math
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.text import Text

import zerojax
from zerojax._display import decimal
from zerojax.aot import has_accelerators, version_of
from zerojax.cli.shared._command import CommandOptions, Failure, Screen, command
from zerojax.cli.shared._machine import find_devices, memory_per_device
from zerojax.models import gpt

PACKAGES = (
    *("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint", "safetensors", "grain"),
    *("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"),
)
#: The proof: a stage that partitions, and a model of which every device has one example.
STAGE = 2
MODEL = gpt.Config(num_layers=2, width=128, num_heads=4, vocab_size=256, context=32)


@command
def doctor(options: CommandOptions) -> None:
    """Check whether this machine can do what zerojax does.

    Looks at the packages and the devices. Then takes a step of a small model at stage 2 in bf16
    over all devices, audits the compiled program, and saves and restores the state. Takes
    half a minute, and leaves no files.

    Exit status: 0 zerojax works; 1 it does not.

    Examples: look at this machine; on eight virtual devices, though it has an accelerator.

    ```
    zerojax doctor
    JAX_PLATFORMS=cpu zerojax doctor
    ```
    """
    screen = Screen()

    def show(name: str, found: str) -> None:
        screen.facts({f"{name:<20}": found})

    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    versions = [f"{name} {version}" for name in PACKAGES if (version := version_of(name))]
    show("packages", f"zerojax {zerojax.__version__}; {python}; {', '.join(versions)}")
    devices = start_devices()
    show("devices", describe_devices(devices))
    try_step(devices, show)
    screen.show(Text("zerojax works here", style="green"))


def start_devices() -> list[Any]:
    asked = os.environ.get("JAX_PLATFORMS") or getattr(jax.config, "jax_platforms", None)
    if not asked and not has_accelerators() and version_of("libtpu"):
        # The compiler for TPUs is here and no TPU: jax would look for one, for minutes.
        jax.config.update("jax_platforms", "cpu")
    try:
        return find_devices(None)
    except ValueError as error:
        remedy = f"unset JAX_PLATFORMS, which asks for {asked}; or" if asked else "install jax for"
        remedy += " set it to cpu" if asked else " this accelerator, or set JAX_PLATFORMS=cpu"
        raise Failure(f"{str(error).splitlines()[0]}; {remedy}", 1) from error


def describe_devices(devices: Sequence[Any]) -> str:
    """Describe devices, and say how to have more if one is unused or there is only one."""
    one, count, size = devices[0], len(devices), memory_per_device([*devices])
    on_cpu = one.platform == "cpu"
    kind = "virtual, on the CPU" if on_cpu else f"{one.device_kind} ({one.platform})"
    held = f"{count} x {kind}" + ("" if size is None else f", {decimal(size)} of memory each")
    if on_cpu and has_accelerators():
        return f'{held}; for the accelerator that is here: pip install "jax[cuda12]" or "jax[tpu]"'
    if count == 1:
        return f"{held}; JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 gives eight to try with"
    return held


def try_step(devices: Sequence[Any], show: Callable[[str, str], None]) -> None:
    mesh = zerojax.make_mesh({"data": len(devices)}, devices=[*devices])
    init, key = functools.partial(gpt.init, MODEL), jax.random.key(0)
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=STAGE)
    recipe = zerojax.Recipe(precision="bf16")
    loss_fn = functools.partial(gpt.loss, MODEL)
    step = zerojax.make_train_step(loss_fn, optax.adamw(1e-3), layout, recipe)
    tokens = np.arange(len(devices) * (MODEL.context + 1)) % MODEL.vocab_size
    batch = jax.device_put(tokens.reshape(len(devices), -1), layout.batch)
    state = step.init(init, key)
    compiled = step.lower(state, batch).compile()
    state, metrics = compiled(state, batch)
    if not math.isfinite(loss := float(metrics["loss"])):
        remedy = "try JAX_PLATFORMS=cpu; if it passes there, the accelerator or driver is faulty"
        raise Failure(f"the loss is {loss}; {remedy}", 1)
    held = f"{layout.num_params:,} parameters over N = {len(devices)}"
    show(f"step at stage {STAGE}", f"{held}, loss {loss:.3f}")

    report = zerojax.audit(compiled, layout, recipe)
    if report.problems:
        raise Failure(f"the step's audit: {report.problems[0]}", 1)
    moved = f"{report.judged_volume:.3f} elements a parameter, theory {report.theory_volume:.3f}"
    show("its audit", f"states are partitioned; moves {moved}")

    with tempfile.TemporaryDirectory(prefix="zerojax-doctor-") as folder:
        path = Path(folder) / "checkpoint"
        zerojax.save(path, state, layout)
        back = jax.tree.leaves(zerojax.restore(path, layout, step.abstract_state()))
    for (name, a), b in zip(jax.tree.leaves_with_path(state), back, strict=True):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            found = f"{jax.tree_util.keystr(name)} came back otherwise than it was saved"
            raise Failure(f"{found}; check the disk that TMPDIR is on", 1)
    show("its checkpoint", f"{len(back)} arrays saved and restored to the bit")
