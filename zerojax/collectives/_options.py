"""Compiler options of a step: what lets collectives run beside computation, and their size.

`options.toml` has sets of them: for which devices, whose advice they are, and what they were seen
to change in compiled programs.

XLA merges neighbouring gathers into large ones. For a model that does not scan over its layers that
means the weights of several layers at once, gathered long before they are used. Larger buckets are
fewer collectives and more memory (CB, arXiv 1910.02054, section 6.2).
"""

import functools
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._plain import read_table
from zerojax.layout import Layout

#: Sets of options by name, as `options.toml` has them.
OPTIONS: Mapping[str, Mapping[str, Any]] = read_table("zerojax.collectives", "options.toml")
#: What bounds the bytes that are combined into one collective, by platform. libtpu combines
#: all-reduces and the reduce-scatters it makes of them; it leaves gathers alone.
_OPS = "all_gather", "reduce_scatter", "all_reduce"
_BUCKETS = {
    "gpu": tuple(f"xla_gpu_{op}_combine_threshold_bytes" for op in _OPS),
    "tpu": ("xla_jf_crs_combiner_threshold_in_bytes", "xla_tpu_ars_combiner_threshold_in_bytes"),
}
#: Where a user sets options for all programs of a process.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def compiler_options(layout: Layout, bucket_bytes: int | None = None) -> dict[str, Any]:
    """Return the compiler options of a step, for `jax.jit(step, compiler_options=...)`.

    They are the sets of `options.toml` for the layout's devices, without those that `XLA_FLAGS` or
    `LIBTPU_INIT_ARGS` sets: a user's own value holds. An option that the installed compiler does
    not take is left out with a warning, for it would refuse the program.
    `bucket_bytes` are the most of a collective that is made of several; None for the table's.
    """
    user = {x for name in _VARIABLES for x in re.findall(r"--(\w+)", os.environ.get(name, ""))}
    rows = (row["options"].items() for row in OPTIONS.values() if _is_for(row, layout))
    wanted = {name: value for row in rows for name, value in row if name not in user}
    if bucket_bytes is not None:
        wanted |= dict.fromkeys(_BUCKETS.get(layout.platform, ()), str(bucket_bytes))
    return dict(_known(layout.mesh, tuple(wanted.items()))) if wanted else {}


def _is_for(row: Mapping[str, Any], layout: Layout) -> bool:
    chip = layout.hardware
    return (
        layout.platform == row["platform"]
        and ("chips" not in row or (chip is not None and chip.name in row["chips"]))
        and (not row.get("sparse_cores") or (chip is not None and chip.sparse_cores))
        and row.get("partitions", "any") in {"any", *(layout.kinds or {"nothing"})}
    )


@functools.lru_cache
def _known(mesh: Mesh, options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    lowered = jax.jit(lambda x: x).lower(scalar)
    kept = dict(options)
    while True:
        try:
            lowered.compile(compiler_options=kept)
        except jax.errors.JaxRuntimeError as error:
            # "INVALID_ARGUMENT: No such compile option: 'xla_tpu_overlap_compute_collective_tc'"
            # "FAILED_PRECONDITION: ... Please disable it with xla_tpu_enable_...=false"
            found = next((x for x in re.findall(r"\w+", str(error)) if x in kept), None)
            if found is None:
                raise
            del kept[found]
            told = f"the installed compiler does not take {found}: a step is compiled without it"
            warnings.warn(told, stacklevel=2)
        else:
            return tuple(kept.items())
