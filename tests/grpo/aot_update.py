"""Run as a program: compiles a released model's whole update for TPUs that are not here, as JSON.

Arguments: model, topology, rows (of 8,192 tokens), tensor. One optimiser step: gradient of one
microbatch (vision tower, scanned text layers, the head over trained tokens in blocks) and AdamW.
Parameters and moments float32, products bfloat16, layers computed again in the backward pass, all
of it spread by FSDP. Needs libtpu.
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

from configs.base import get_config
from svrl_jax.grpo.update import TrainState, _apply, _gradient, make_spec
from svrl_jax.models.qwen_vl import QwenVL, plan_vision
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.released import RELEASED
from svrl_jax.models.qwen_vl.sharding import on_mesh, param_shardings, spec_of
from svrl_jax.training.mesh import make_mesh
from svrl_jax.types import TrainBatch

LENGTH, SIDE = 8192, 48  # tokens of a row, patches on a side of each row's picture


def main(name, topology, rows, tensor):
    model_config = RELEASED[name]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = make_mesh(ConfigDict({"data": 1, "fsdp": -1, "tensor": tensor}), devices)
    blank = nnx.eval_shape(lambda: QwenVL(model_config, rngs=nnx.Rngs(0)))
    blank.set_execution(Execution(attention="pallas", compute_dtype="bfloat16"))
    config = get_config()
    spec = make_spec(
        blank, config.grpo, config.optim, temperature=1.0, budget=LENGTH,
        banned_ids=(model_config.image_token_id,), remat="layer", mesh=mesh,
    )  # fmt: skip

    def placed(tree):
        shapes = param_shardings(tree, mesh)
        make = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
        return jax.tree.map(make, tree, shapes)

    params = placed(nnx.split(blank)[1])
    opt_state = placed(jax.eval_shape(spec.optim.make().init, params))
    batch, plan = abstract_rows(model_config, mesh, rows)
    reports = {}
    with on_mesh(mesh):
        grads = placed(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params))
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
        state = TrainState(params, opt_state, step)
        given = (spec.model, spec.loss, spec.optim, params, batch, plan, batch.loss_mask, 1.0)
        reports["gradient"] = compiled(_gradient, given)
        reports["apply"] = compiled(_apply, (spec.optim, state, grads))
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) // mesh.size
    gradient = reports["gradient"]
    print(
        json.dumps(
            {
                "model": name, "topology": topology, "mesh": dict(mesh.shape), "rows": rows,
                "parameters": sum(x.size for x in jax.tree.leaves(params)),
                "state_gib": state_bytes / 2**30,
                # While gradients are computed the optimiser's moments lie there too.
                "peak_gib": (
                    state_bytes - gradient["parameter_bytes"] / mesh.size
                    + gradient["argument_bytes"] + gradient["temp_bytes"] + gradient["output_bytes"]
                ) / 2**30,
                **reports,
            }
        )
    )  # fmt: skip


def abstract_rows(config, mesh, rows):
    """A microbatch of full rows, an eighth of it trained, and the plan of its pictures."""
    sizes = dict(mesh.shape)

    def array(shape, dtype, *axes):
        place = NamedSharding(mesh, spec_of(axes, shape, sizes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    ids = array((rows, LENGTH), jnp.int32, "batch", None)
    targets = array((rows, LENGTH // 8), jnp.int32, "batch", None)
    values = array((rows, LENGTH // 8), jnp.float32, "batch", None)
    plan = plan_vision(np.tile([[1, SIDE, SIDE]], (rows, 1)), config.vision_config)
    plan = jax.tree.map(lambda x: array(x.shape, x.dtype, *[None] * x.ndim), plan)
    patches = (rows * SIDE**2, config.vision_config.patch_dim)
    batch = TrainBatch(
        ids=ids,
        positions=array((3, rows, LENGTH), jnp.int32, None, "batch", None),
        group_id=ids,
        branch_id=ids,
        target_index=targets,
        predictor_index=targets,
        episode_index=targets,
        span_index=targets,
        loss_mask=values,
        advantages=array((4 * rows,), jnp.float32, None),
        old_per_token_logps=values,
        ref_per_token_logps=values,
        pixel_values=array(patches, jnp.float32, "patches", None),
        image_grid_thw=(),
        image_index=ids,
    )
    return batch, plan


def compiled(function, given):
    start = time.perf_counter()
    memory = function.lower(*given).compile().memory_analysis()
    params = given[3] if len(given) > 3 else given[1].params
    report = {
        "seconds": time.perf_counter() - start,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "parameter_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)),
    }
    print(report, file=sys.stderr, flush=True)
    return report


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
