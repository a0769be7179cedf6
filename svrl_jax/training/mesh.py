"""config.mesh -> a device mesh; parameters spread over it -> what the sampler draws from."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from svrl_jax.models.qwen_vl.sharding import mesh_of_params

AXES = ("data", "fsdp", "tensor")


class MeshError(ValueError):
    """A mesh that the devices cannot form; the message names the keys and the remedy."""


def axis_sizes(config: ConfigDict, num_devices: int) -> tuple[int, int, int]:
    """Devices along (data, fsdp, tensor).

    Args:
      config: config.mesh; one axis may be -1 and takes what the others leave.
      num_devices: of all hosts.
    Raises:
      MeshError: more than one -1, a size below 1, or a product that is not the number of devices.
    """
    sizes = [config.data, config.fsdp, config.tensor]
    shown = ", ".join(f"config.mesh.{a}={n}" for a, n in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(n < 1 and n != -1 for n in sizes):
        raise MeshError(f"{shown}: sizes must be 1 or more, and at most one may be -1 (the rest)")
    fixed = math.prod(n for n in sizes if n != -1)
    if -1 in sizes and num_devices % fixed == 0:
        sizes[sizes.index(-1)] = num_devices // fixed
    if math.prod(sizes) != num_devices:
        raise MeshError(
            f"{shown} cannot be formed of {num_devices} devices: their product must be that number;"
            " set one axis to -1"
        )
    return tuple(sizes)


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the given devices, by default all of them, with axes AXES.

    Raises:
      MeshError: see `axis_sizes`.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config, len(devices))
    # Auto: with explicit axes, with_sharding_constraint and many operations raise.
    return jax.make_mesh(sizes, AXES, devices=np.asarray(devices), axis_types=(AxisType.Auto,) * 3)


def mesh_of(config: ConfigDict) -> Mesh | None:
    """The update's mesh by a whole config; None where there is one device.

    Raises:
      MeshError: see `axis_sizes`; or full microbatches that do not divide over data and fsdp.
    """
    mesh = make_mesh(config.mesh)
    ways = row_ways(mesh)
    if config.grpo.microbatch_rows % ways:
        raise MeshError(
            f"config.grpo.microbatch_rows={config.grpo.microbatch_rows} does not divide over the "
            f"{ways} devices of config.mesh.data and config.mesh.fsdp: make it a multiple"
        )
    return mesh if mesh.size > 1 else None


def row_ways(mesh: Mesh | None) -> int:
    """Devices that rows are split over."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def sampler_params(params: nnx.State, dtype: str) -> nnx.State:
    """Parameters as the sampler takes them: in the compute dtype, whole, on one local device.

    Gathered once a step, so that no decode step waits for other devices. On one device and in the
    same dtype they are the given arrays.
    """
    mesh = mesh_of_params(params)
    if mesh is None:
        return jax.tree.map(lambda x: x if x.dtype == dtype else x.astype(dtype), params)
    whole = _gather(dtype, NamedSharding(mesh, PartitionSpec()), params)
    return jax.tree.map(lambda x: x.addressable_data(0), whole)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gather(dtype: str, place: NamedSharding, params: nnx.State) -> nnx.State:
    # Cast first: half as much travels.
    cast = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    return jax.lax.with_sharding_constraint(cast, place)
