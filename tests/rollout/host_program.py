"""One of two processes: samples its own prompts on its own device, then meets the other at a sum.

usage: host_program.py PROCESS PORT; prints one JSON line.
"""

import json
import os
import pathlib
import sys
import threading
import time

os.environ["JAX_PLATFORMS"] = "cpu"
HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_disable_most_optimizations", True)
process = int(sys.argv[1])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=process)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rollout_toys import (  # noqa: E402
    ALL_BUT_PHRASES,
    CONFIG,
    MODEL,
    TOKENIZER,
    ToyTools,
    make_prompt,
    make_task,
    rollout_config,
    search_config,
)

from configs.base import get_config  # noqa: E402
from svrl_jax.models.qwen_vl.sharding import param_shardings  # noqa: E402
from svrl_jax.rollout.episodes import run_episodes  # noqa: E402
from svrl_jax.rollout.scheduler import EnginePolicy  # noqa: E402
from svrl_jax.training.mesh import make_mesh, sampler_params  # noqa: E402

TIMEOUT_S = 5.0
# Prompts of each process in each round: unequal, and none at all.
ROUNDS = (([0, 1, 2], [3]), ([0, 1, 2, 3], []))
mesh = make_mesh(get_config().mesh)
graphdef, params = nnx.split(MODEL)
master = jax.tree.map(
    lambda x, where: jax.make_array_from_callback(x.shape, where, np.asarray(x).__getitem__),
    params,
    param_shardings(params, mesh),
)
is_spread = any(not x.is_fully_replicated for x in jax.tree.leaves(master))
policy = EnginePolicy(nnx.merge(graphdef, sampler_params(master, "float32")), ALL_BUT_PHRASES,
                      rollout_config(budget=400))  # fmt: skip


def sample(numbers, hang=None):
    tasks = [make_task(i) for i in numbers]
    return run_episodes(
        tasks, [make_prompt(t) for t in tasks], policy, ToyTools(hang=hang), TOKENIZER, CONFIG,
        rollout_config(budget=400, tool_timeout_s=TIMEOUT_S), search_config(), seed=1, step=0,
        group_size=4, regime="agent", temperature=0.7, query_choice="random", policy_name="toy",
    )  # fmt: skip


@jax.jit
def meet(tree, counts):
    """A program of all hosts: it stands for the update."""
    scale = counts.sum()
    return jax.tree.map(lambda x: x * (1 + 0 * scale), tree), scale


def all_counts(count):
    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "tensor")))
    local = jnp.asarray([float(count)])
    return jax.make_array_from_single_device_arrays(
        (2,), where, [jax.device_put(local, jax.local_devices()[0])]
    )


found = {"process": process, "is_spread": is_spread, "rounds": []}
policy.set_params(sampler_params(master, "float32"))
sample(ROUNDS[0][process])  # compiles, so that times below are of the work
master, _ = meet(master, all_counts(0))
for number, per_process in enumerate(ROUNDS):
    # In the first round every tool of the second process hangs.
    hang = threading.Event() if (number, process) == (0, 1) else None
    policy.set_params(sampler_params(master, "float32"))
    start = time.monotonic()
    groups = sample(per_process[process], hang)
    sampled_s = time.monotonic() - start
    episodes = [e for g in groups for e in g]
    master, total = meet(master, all_counts(len(episodes)))
    total = float(total)
    found["rounds"].append(
        {
            "sampled_s": sampled_s,
            "met_s": time.monotonic() - start,
            "total": total,
            "failed": sum(e.tool_failures for e in episodes),
            "ids": {f"{e.task_id}/{e.sample}": e.ids.tolist() for e in episodes},
        }
    )
    if hang is not None:
        hang.set()
print(json.dumps(found), flush=True)
jax.distributed.shutdown()
