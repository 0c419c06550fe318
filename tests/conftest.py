"""Eight virtual CPU devices for every test, set up before jax starts."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
NUM_DEVICES = 8

#: What a test marked `aot` may name: the modules, of which one will do.
COMPILERS = {"libtpu": ("libtpu",), "cuda": ("xla_cuda12", "xla_cuda13")}
#: Set for tests that run in a process of their own, with the emitters that users have.
EMITTERS = "ZEROJAX_TEST_FUSION_EMITTERS"
#: jaxlib 0.10 has two ways to emit CPU code: the older compiles a step up to three times faster.
HAS_BOTH = importlib.metadata.version("jaxlib").startswith("0.10.")
#: It also rounds otherwise: more than the bounds of these allow, which divide differences.
ROUNDED = ("dadapt_adamw",)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f),
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        # The tests compile far longer than they run: without optimization, in half the time.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",  # small programs: a module each costs a tenth
        *(
            ["--xla_cpu_use_fusion_emitters=false"]
            if HAS_BOTH and EMITTERS not in os.environ
            else []
        ),
    ]
)
# XLA sizes its thread pool by this, and by default makes one thread per virtual device: steps that
# are queued without waiting then fill the pool with halves of collectives, which wait for ever.
os.environ.setdefault("NPROC", str(4 * NUM_DEVICES))
# Tracing makes many objects and few cycles: looking for them less often saves a tenth as well.
gc.set_threshold(200_000, 20, 20)
# Two workers share the machine: linear algebra outside XLA takes one thread in each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that imports jax takes 5 s where bytecode is never kept, as in many containers, and 2 s
# where it is. The tests start hundreds.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(CACHE / "bytecode")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(CACHE / "hypothesis"))

import jax
import pytest
from jax.sharding import AxisType, Mesh


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `aot` where a compiler that it names is not installed."""
    for mark in item.iter_markers("aot"):
        for name in mark.args:
            if not any(map(_is_installed, COMPILERS[name])):
                pytest.skip(f"{name} is not installed here; scripts/test --aot runs this test")


def _is_installed(module: str) -> bool:
    found = importlib.util.find_spec(module)
    if found is None and importlib.util.find_spec("jax_plugins") is not None:
        found = importlib.util.find_spec(f"jax_plugins.{module}")
    return found is not None


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that the faster emitters round too coarsely in a process with the usual ones."""
    if not HAS_BOTH or EMITTERS in os.environ:
        return None
    if not any(name in pyfuncitem.name for name in ROUNDED):
        return None
    node = pyfuncitem.nodeid
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", node],
        cwd=CACHE.parent,
        env={**os.environ, EMITTERS: "1", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return True


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    """Refuse to test on anything else: partitioned over one device, every check would pass."""
    found = jax.devices()
    assert [d.platform for d in found] == ["cpu"] * NUM_DEVICES, f"jax started with {found}"


@pytest.fixture(scope="session")
def mesh8() -> Mesh:
    """Give a mesh of eight devices along `data`, its axis Auto."""
    return jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
