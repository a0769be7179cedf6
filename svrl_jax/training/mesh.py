"""config.mesh -> a device mesh; a train state -> the same state spread over it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

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
