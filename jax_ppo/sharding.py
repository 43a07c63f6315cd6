"""Where every array lives: one mesh, and two tables from parameter to logical axes to mesh axes.

The mesh has three axes. `data` and `fsdp` split the rows of a batch; `fsdp` also splits every parameter and its optimizer
moments; `tensor` splits heads, MLP columns and the vocabulary.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ppo.types import InputError, Params

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

# Parameter path, without the leading "model" and "layers" -> logical axis of each dimension.
PARAMETER_AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens/weight": ("vocab", "embed"),
    "norm/weight": ("norm",),
    "lm_head/kernel": ("embed", "vocab"),
    "score/kernel": ("norm", "one"),
    "input_layernorm/weight": ("layers", "norm"),
    "post_attention_layernorm/weight": ("layers", "norm"),
    "self_attn/q_proj/kernel": ("layers", "embed", "heads"),
    "self_attn/k_proj/kernel": ("layers", "embed", "heads"),
    "self_attn/v_proj/kernel": ("layers", "embed", "heads"),
    "self_attn/q_proj/bias": ("layers", "heads"),
    "self_attn/k_proj/bias": ("layers", "heads"),
    "self_attn/v_proj/bias": ("layers", "heads"),
    "self_attn/q_norm/weight": ("layers", "norm"),
    "self_attn/k_norm/weight": ("layers", "norm"),
    "self_attn/o_proj/kernel": ("layers", "heads", "embed"),
    "mlp/gate_proj/kernel": ("layers", "embed", "mlp"),
    "mlp/up_proj/kernel": ("layers", "embed", "mlp"),
    "mlp/down_proj/kernel": ("layers", "mlp", "embed"),
}

# Logical axis -> mesh axis, or None where every device holds all of it.
MESH_AXES: dict[str, Any] = {
    "layers": None,
    "norm": None,
    "one": None,
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "rank": None,
    "rows": ROWS,
}


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """Builds the mesh over all devices.

    Args:
      data, fsdp, tensor: devices along each axis; at most one of them -1, which takes the rest.

    Raises:
      InputError: if the product is not the device count.
    """
    sizes, count = [data, fsdp, tensor], jax.device_count()
    written = f"config.mesh: data={data}, fsdp={fsdp}, tensor={tensor}"
    if any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
        raise InputError(f"{written}: each must be at least 1, and at most one may be -1 (the rest)")
    known = int(np.prod([s for s in sizes if s != -1]))
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(count // known, 1)
    if int(np.prod(sizes)) != count:
        raise InputError(f"{written}: the product must be the number of devices, {count}, not {int(np.prod(sizes))}")
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def parameter_specs(params: Params, mesh: Mesh) -> Params:
    """The `NamedSharding` of every parameter.

    Args:
      params: nested dict of arrays or of shapes.
      mesh:   the mesh.

    Raises:
      InputError: for a parameter without a row in PARAMETER_AXES, or with a dimension its mesh axis does not divide.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _sharding(path, leaf.shape, mesh), params)


def decode_specs(params: Params, mesh: Mesh) -> Params:
    """The same for the weights that decode: split over `tensor` only, since gathering them over `fsdp` for every token
    would cost more than the token."""
    return jax.tree.map(lambda s: NamedSharding(mesh, _without_fsdp(s.spec)), parameter_specs(params, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The leading axis is split over the row shards."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def result(lowered: Any) -> Any:
    """Shapes of what a lowered program returns, and where it will lie: enough to compile the next program for."""
    places = lowered.compile().output_shardings
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), lowered.out_info, places)


def place(tree: Any, where: NamedSharding) -> Any:
    """Host arrays on their devices. Where other processes hold a part of them, each takes its own from its equal copy."""
    if where.is_fully_addressable:
        return jax.device_put(tree, where)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, where, lambda index: x[index]), tree)


def fetch(x: jax.Array) -> np.ndarray:
    """An array on the host, whole, whichever processes hold parts of it; then all of them must ask for it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Pins the sharding of an activation, by logical axes; does nothing where no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(MESH_AXES[a] if a else None for a in logical)))


def _sharding(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    name = "/".join(str(p.key) for p in path)
    axes = _axes(name.removeprefix("model/").removeprefix("layers/"))
    if axes is None or len(axes) != len(shape):
        raise InputError(f"parameter {name} {shape}: no row of rank {len(shape)} in sharding.PARAMETER_AXES")
    spec = PartitionSpec(*(MESH_AXES[a] for a in axes))
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise InputError(f"parameter {name} {shape}: {size} is not divisible by mesh axis {axis}={mesh.shape[axis]}")
    return NamedSharding(mesh, spec)


def _axes(name: str) -> tuple[str, ...] | None:
    """The row of a parameter. An adapter lies as the kernel it stands beside, with its rank in the place of one side."""
    module, _, last = name.rpartition("/")
    kernel = PARAMETER_AXES.get(f"{module}/kernel", ())
    adapter = {"lora_a": (*kernel[:-1], "rank"), "lora_b": (*kernel[:-2], "rank", *kernel[-1:])}
    return adapter.get(last) if kernel and last in adapter else PARAMETER_AXES.get(name)


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))
