"""Run as a program: compiles a released model's forward pass for TPUs that are not here, as JSON.

Arguments: model, topology, rows, tokens a row, patches on a side of each row's picture, devices
along the tensor axis. Parameters bfloat16, spread by FSDP over all other devices. Needs libtpu.
"""

import json
import os
import sys
import time

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from svrl_jax.models.qwen_vl import QwenVL, plan_vision
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.released import RELEASED
from svrl_jax.models.qwen_vl.sharding import on_mesh, param_shardings, spec_of
from svrl_jax.training.mesh import make_mesh


def main(name, topology, rows, length, side, tensor):
    config = RELEASED[name]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = make_mesh(ConfigDict({"data": 1, "fsdp": -1, "tensor": tensor}), devices)
    sizes = dict(mesh.shape)

    def spec(shape, dtype, *axes):
        place = NamedSharding(mesh, spec_of(axes, shape, sizes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    blank = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
    blank.set_execution(Execution(attention="pallas"))
    graphdef, params = nnx.split(blank)
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        params,
        param_shardings(params, mesh),
    )
    plan = plan_vision(np.tile([[1, side, side]], (rows, 1)), config.vision_config)
    plan = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
        plan,
    )
    pixels = spec((rows * side**2, config.vision_config.patch_dim), jnp.float32, "patches", None)
    ids = spec((rows, length), jnp.int32, "batch", None)
    positions = spec((3, rows, length), jnp.int32, None, "batch", None)

    def forward(params, ids, positions, group, branch, index, pixels, plan):
        model = nnx.merge(graphdef, params)
        hidden = model(ids, positions, group, branch, model.encode_images(pixels, plan), index)
        return model.logits(hidden[:, -1])

    start = time.perf_counter()
    with on_mesh(mesh):
        lowered = jax.jit(forward).lower(params, ids, positions, ids, ids, ids, pixels, plan)
    program = lowered.compile()
    memory = program.memory_analysis()
    print(
        json.dumps(
            {
                "model": name,
                "topology": topology,
                "mesh": sizes,
                "seconds": time.perf_counter() - start,
                "argument_bytes": memory.argument_size_in_bytes,
                "temp_bytes": memory.temp_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes,
                "parameters": sum(x.size for x in jax.tree.leaves(params)),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:7]))
