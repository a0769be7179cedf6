"""Parameter paths -> logical axes -> mesh axes, and where activations lie between blocks.

A mesh has up to three axes (`svrl_jax.training.mesh`):

    data     rows are split, parameters are copied
    fsdp     rows are split, and so is each parameter, along its model width
    tensor   heads, MLP units and the vocabulary are split

A dimension that its mesh axis does not divide evenly stays whole. Activations are constrained only
inside `with jax.set_mesh(mesh):`; elsewhere `constrain` does nothing.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# (pattern of the path inside its stack, logical axes); the first match counts. Weights are
# [out, in]. A stack's leading layer axis is added by the rule below.
TABLE: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(embed_tokens|lm_head)\.weight", ("vocab", "embed")),
    (r"self_attn\.[qkv]_proj\.weight", ("heads", "embed")),
    (r"self_attn\.[qkv]_proj\.bias", ("heads",)),
    (r"self_attn\.o_proj\.weight", ("embed", "heads")),
    (r"attn\.qkv\.weight", ("heads", "embed")),
    (r"attn\.qkv\.bias", ("heads",)),
    (r"attn\.proj\.weight", ("embed", "heads")),
    (r"mlp\.(gate_proj|up_proj|linear_fc1)\.weight", ("mlp", "embed")),
    (r"mlp\.(gate_proj|up_proj|linear_fc1)\.bias", ("mlp",)),
    (r"mlp\.(down_proj|linear_fc2)\.weight", ("embed", "mlp")),
    (r"(merger|deepstack_merger_list)\.(mlp\.0|linear_fc1)\.weight", ("mlp", "embed")),
    (r"(merger|deepstack_merger_list)\.(mlp\.0|linear_fc1)\.bias", ("mlp",)),
    (r"(merger|deepstack_merger_list)\.(mlp\.2|linear_fc2)\.weight", ("embed", "mlp")),
    (r"patch_embed\.proj\.weight", ("embed", None)),
    (r"pos_embed\.weight", (None, "embed")),
    (r"(proj|down_proj|linear_fc2|mlp\.2)\.bias", (None,)),
    (r"(norm\w*|\w+norm|ln_q)\.(weight|bias)", (None,)),
)
# Stacks of layers: one program runs through them, so the leading axis is never split.
STACKED = re.compile(r"(language_model\.layers|visual\.blocks|visual\.deepstack_merger_list)\.")
# Logical axis -> mesh axes, in order.
RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
    "batch": ("data", "fsdp"),
    "patches": ("data", "fsdp"),
}


def logical_axes(path: str) -> tuple[str | None, ...]:
    """The logical axis of each dimension of a parameter, None where it is never split.

    Args:
      path: dotted, such as `language_model.layers.mlp.up_proj.weight`.
    Raises:
      ValueError: the table has no such parameter. A new one must be put there: left out, it would
        be copied to every device without a word.
    """
    name, _, leaf = path.rpartition(".")
    if leaf in ("lora_a", "lora_b"):  # [r, in] and [out, r]: the rank is never split
        *stack, out_axis, in_axis = logical_axes(f"{name}.weight")
        return (*stack, None, in_axis) if leaf == "lora_a" else (*stack, out_axis, None)
    for pattern, axes in TABLE:
        if re.search(rf"(^|\.){pattern}$", path):
            return (None, *axes) if STACKED.match(path) else axes
    raise ValueError(f"no sharding rule for the parameter {path}; add its pattern to TABLE")


def spec_of(
    axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: dict[str, int]
) -> PartitionSpec:
    """Logical axes of an array -> its PartitionSpec.

    Args:
      axes: one a dimension.
      shape: of the array.
      sizes: mesh axis -> devices along it.
    Raises:
      ValueError: axes and shape differ in number.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {axes} for the shape {shape}")
    entries: list[Any] = []
    for axis, size in zip(axes, shape, strict=True):
        names = tuple(n for n in RULES[axis] if sizes.get(n, 1) > 1) if axis else ()
        fits = names and size % math.prod(sizes[n] for n in names) == 0
        entries.append((names if len(names) > 1 else names[0]) if fits else None)
    return PartitionSpec(*entries)


def sharding_of(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """(a parameter's dotted name, its shape) -> its NamedSharding, as `load_weights` asks for."""

    def one(name: str, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, spec_of(logical_axes(name), shape, dict(mesh.shape)))

    return one


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """The NamedSharding of every leaf of a parameter tree, or of a tree that holds such trees.

    Args:
      params: `nnx.split(model)[1]`, an optimiser's state over it, ...; shapes suffice. A leaf whose
        path names no parameter (a step counter) is copied to every device.
    """
    of_param = sharding_of(mesh)

    def one(path, leaf):
        name = path_name(path)
        if not name:
            return NamedSharding(mesh, PartitionSpec())
        return of_param(name, leaf.shape)

    return jax.tree_util.tree_map_with_path(one, params)


def place_params(params: Any, mesh: Mesh | None) -> Any:
    """Parameters spread over the mesh; as they are without one."""
    return params if mesh is None else jax.device_put(params, param_shardings(params, mesh))


def place(x: Any, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """An array on the mesh by its logical axes; on the default device without a mesh."""
    if mesh is None:
        return jax.device_put(x)
    spec = spec_of(tuple(axes), x.shape, dict(mesh.shape))
    return jax.device_put(x, NamedSharding(mesh, spec))


def mesh_of_params(params: Any) -> Mesh | None:
    """The mesh that parameters are spread over; None where they lie on one device."""
    sharding = jax.tree.leaves(params)[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Puts the mesh in force for `constrain` and the kernels; without one, nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def path_name(path: tuple) -> str:
    """A key path of `jax.tree_util` over a parameter tree as a dotted name."""
    names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    return ".".join(names)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Fixes where an activation lies on the mesh in force; x itself without one.

    Args:
      axes: logical axis of each dimension.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec_of(axes, x.shape, dict(mesh.shape)))


def constrain_params(params: Any) -> Any:
    """Fixes where a parameter tree, or a gradient in its shape, lies on the mesh in force; as it is
    without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return params

    def one(path, leaf):
        spec = spec_of(logical_axes(path_name(path)), leaf.shape, dict(mesh.shape))
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree_util.tree_map_with_path(one, params)
