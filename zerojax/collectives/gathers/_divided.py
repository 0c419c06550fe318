"""What each device does for its own examples, as XLA's partitioner would gather them all.

Operations on each example: GPUs and CPUs don't divide a Fourier transform along the batch, libtpu
no decomposition of matrices, and CPUs no `top_k`:

    h:f32[64,32]  8 devices      y = shard_map[ fft h:[8,32] ]

Grouped convolutions: the gradient of a grouped kernel is a convolution that sums over examples, all
gathered unless each feature is a group. The partitioner adds it up over all devices, also over
those that have the same examples: on a mesh of 4 x 2 whose first axis cuts the batch it is twice
what it should be, and nothing is said. So the loss computes the convolution in `shard_map`, and
leaves the sum over copies of the kernel to the partitioner:

    x:f32[16,6,8]  k:f32[3,1,8]    copies:f32[4,3,1,8] of k, one for each part of the examples
    y = shard_map[ conv x:[4,6,8] copies[0] ]     the gradient of `copies` is each device's own

Where devices can't divide the examples they divide the groups, or zeros are added. A convolution
that sums over examples by itself, as a gradient within a loss does, is refused.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.sharding import PartitionSpec as P

from zerojax._jaxpr import REMATERIALISED, bind_here, called, runs_in_place, variables, with_inner
from zerojax.collectives.forms import on_devices
from zerojax.collectives.gathers._boxed import Boxed, Opening, pad_rows
from zerojax.collectives.gathers._structural import waits_elementwise
from zerojax.layout import Layout

#: Operations, and how many of the last dims they mix; a Fourier transform says it itself.
_MIXED = {"eigh": 2, "fft": 0, "lu": 2, "svd": 2, "top_k": 1}


def is_apart(eqn: Any, layout: Layout, from_batch: set[Any]) -> bool:
    """Whether an equation, or a call of it, is one that each device does for its own examples.

    These lie along the first dim; where devices can't divide it, the partitioner has its way.
    """
    parts, name = layout.num_batch_parts, eqn.primitive.name
    if parts == 1 or from_batch.isdisjoint(variables(eqn.invars)):
        return False
    if runs_in_place(eqn) or name == REMATERIALISED:
        return any(is_apart(x, layout, from_batch) for x in called(eqn).eqns)
    if name not in _MIXED or (name == "top_k" and layout.platform != "cpu"):
        return False
    shape = eqn.invars[0].aval.shape
    if eqn.params.get("axis", -1) % len(shape) == 0:  # top_k of the examples
        return False
    mixed = _MIXED[name] or len(eqn.params["fft_lengths"])
    return len(shape) > mixed and shape[0] % parts == 0


def bind_apart(eqn: Any, values: Sequence[Any], layout: Layout) -> list[jax.Array]:
    spec, names = P(layout.batch_axes), {*layout.batch_axes}
    how: Any = {"in_specs": spec, "out_specs": spec, "axis_names": names}
    return on_devices(layout.auto_mesh, lambda *xs: bind_here(eqn, xs), *values, **how)


def has_grouped(eqn: Any, layout: Layout, from_batch: set[Any]) -> bool:
    """Whether an equation is, or holds, a grouped convolution that is divided here.

    That of a `while` loop has no gradient, and a `shard_map` is the user's own. Where all axes cut
    the batch nothing is wrong; only convolutions that would gather examples are divided.
    """
    name, parts = eqn.primitive.name, layout.num_batch_parts
    if parts == 1 == layout.mesh.size or from_batch.isdisjoint(variables(eqn.invars)):
        return False
    if parts == layout.mesh.size:
        if name != "conv_general_dilated" or eqn.params["batch_group_count"] > 1:
            return False
        kernel = eqn.invars[1].aval.shape
        given, made = (kernel[dim] for dim in eqn.params["dimension_numbers"].rhs_spec[1::-1])
        groups = eqn.params["feature_group_count"]
        return groups > 1 and (given > 1 or made > groups)
    found = (x.params for x in with_inner(eqn) if x.primitive.name == "conv_general_dilated")
    counts = (x["feature_group_count"] * x["batch_group_count"] for x in found)
    return name not in ("while", "shard_map") and any(count > 1 for count in counts)


def bind_grouped(eqn: Any, values: Sequence[Any], opening: Opening) -> list[jax.Array]:
    """Open the boxes of a grouped convolution, and let each device compute its own examples.

    Devices along which the user cuts the kernel's output features divide the groups, if they can.
    A convolution within another equation can't be reached, and is refused, as a gradient's is.
    """
    layout = opening.layout
    batch, parts = layout.batch_axes, layout.num_batch_parts
    name = eqn.primitive.name
    if name != "conv_general_dilated" or eqn.params["batch_group_count"] > 1:
        where = "gradient" if name == "conv_general_dilated" else name
        raise ValueError(
            f"{source_info_util.summarize(eqn.source_info)}: a grouped convolution within a "
            f"{where}, where XLA would sum its kernel's gradient over devices that "
            f"have the same examples, as the batch is cut along {batch} alone; cut it along all "
            "axes of the mesh (make_layout(batch_axes=)), or write Recipe(reduce='once')"
        )
    numbers, name = eqn.params["dimension_numbers"], "feature_group_count"
    # Dims of the input, the kernel and the result.
    (n, groups), (o, _), (rows, features) = (
        spec[:2] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    )
    x, kernel = (opening.open_box(v) if isinstance(v, Boxed) else v for v in values)
    count, size, box = eqn.params[name], x.shape[n], values[1]
    by_groups = size % parts != 0 and count % parts == 0
    user = box.entries[o] if isinstance(box, Boxed) and waits_elementwise(box) else ()
    can_divide = count % layout.num_parts(user) == 0 and {*user}.isdisjoint(batch)
    axes = batch if by_groups else user if can_divide else ()
    cut = {groups: axes}, {o: axes}, {features: axes}
    if not by_groups:
        x = pad_rows(x, n, -size % parts)
        kernel = jnp.broadcast_to(kernel, (parts, *kernel.shape))
        cut = {n: batch, groups: axes}, {0: batch, o + 1: axes}, {rows: batch, features: axes}

    def own(x: jax.Array, kernel: jax.Array) -> jax.Array:
        params = {**eqn.params, name: count // layout.num_parts(axes)}
        kernel = kernel if by_groups else kernel[0]
        # One that is opened comes in the dtype in which gradients are summed over devices.
        given = [v.astype(atom.aval.dtype) for v, atom in zip((x, kernel), eqn.invars, strict=True)]
        return bind_here(eqn.replace(params=params), given)[0]

    *in_specs, out_specs = (P(*(s.get(d) or None for d in range(max(s) + 1))) for s in cut)
    how: Any = {"in_specs": (*in_specs,), "out_specs": out_specs}
    out = on_devices(layout.auto_mesh, own, x, kernel, **how)
    return [out if by_groups else jax.lax.slice_in_dim(out, 0, size, axis=rows)]
