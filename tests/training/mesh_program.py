"""Run as a program on eight virtual CPU devices: one device against meshes, as JSON.

Prints the largest differences of logits, and of parameters and metrics after GRPO steps, and where
arrays lie.
"""

import json
import sys
import tempfile

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from configs.base import get_config
from svrl_jax import api, checkpoint, grpo
from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.models.qwen_vl.sharding import place_params
from svrl_jax.processing.processor import Inputs
from svrl_jax.training.mesh import make_mesh, sampler_params
from tests.grpo import tiny
from tests.grpo.conftest import make_group


def main(meshes):
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    model = QwenVL(tiny.CONFIG, rngs=nnx.Rngs(0))
    episodes = [make_group(p, [((3, 4), (5, 1)), ((4, 2),)] * 2) for p in range(2)]
    advantages = np.array([[0.5, -0.5, 0.25, -0.25], [0.3, 0.1, -0.4, 0.0]], np.float32)
    config = get_config()
    config.grpo.row_tokens, config.grpo.microbatch_rows, config.grpo.kl_coef = 56, 8, 0.05
    # Adam turns rounding of tiny gradients into whole steps, so steps are small.
    config.optim.learning_rate = 1e-4
    batch = grpo.make_batches(
        episodes, advantages, np.ones((2, 4), bool), config.grpo,
        merge_size=2, image_token_id=tiny.IMAGE, pad_id=tiny.PAD, min_rows=8,
    )  # fmt: skip
    reference, report = step(model, batch, config, None), {}
    rows = inputs_of(episodes)
    logits = np.asarray(api.logits(model, rows))
    for sizes in meshes:
        mesh = make_mesh(ConfigDict(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
        found = step(model, batch, config, mesh)
        graphdef, params = nnx.split(model)
        spread = nnx.merge(graphdef, place_params(params, mesh))
        report["x".join(map(str, sizes))] = compared(reference, found) | {
            "logits": float(np.abs(np.asarray(api.logits(spread, rows)) - logits).max()),
            "restored": is_restored(found[0]),
            "gathered": is_gathered(found[0].params),
        }
    print(json.dumps(report))


def inputs_of(episodes):
    """The first episode of each group as a right-padded batch."""
    firsts = [group[0] for group in episodes]
    lengths = np.asarray([len(e.ids) for e in firsts], np.int32)
    ids = np.full((len(firsts), lengths.max()), tiny.PAD, np.int32)
    positions = np.zeros((3, *ids.shape), np.int32)
    for i, e in enumerate(firsts):
        ids[i, : lengths[i]], positions[:, i, : lengths[i]] = e.ids, e.positions
    pixels = np.concatenate([e.pixel_values for e in firsts])
    grids = np.asarray([g for e in firsts for g in e.image_grid_thw], np.int32)
    return Inputs(ids, lengths, positions, pixels, grids)


def is_restored(state):
    """Whether a checkpoint comes back equal, and to the same places."""
    with tempfile.TemporaryDirectory() as folder, checkpoint.Checkpoints(folder, keep=1) as saved:
        saved.save(1, state, data_position=0, config={}, host={})
        back = saved.restore(state).state
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True)
        return all(np.array_equal(a, b) and a.sharding == b.sharding for a, b in pairs)


def is_gathered(params):
    """Whether the sampler's copy is whole, on one device, and the same."""
    whole = sampler_params(params, "float32")
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True)
    return all(len(b.devices()) == 1 and np.array_equal(a, b) for a, b in pairs)


def step(model, batch, config, mesh):
    """(state, metrics, log-probs) after two updates on the same batch."""
    spec = grpo.make_spec(
        model, config.grpo, config.optim, temperature=tiny.TEMPERATURE, budget=tiny.BUDGET,
        banned_ids=tiny.BANNED, mesh=mesh,
    )  # fmt: skip
    params = nnx.split(model)[1]
    state = grpo.init_state(params, spec)
    for _ in range(2):
        state, metrics, logps = grpo.update(state, params, batch, spec)
    return state, metrics, logps


def compared(one, other):
    params = [jax.tree.leaves(jax.device_get(s.params)) for s in (one[0], other[0])]
    moments = [jax.tree.leaves(jax.device_get(s.opt_state)) for s in (one[0], other[0])]
    logps = [np.concatenate([r for g in x[2] for r in g]) for x in (one, other)]
    leaf = other[0].params["language_model"]["layers"]["mlp"]["up_proj"]["weight"][...]
    moment = other[0].opt_state[1].mu["language_model"]["layers"]["mlp"]["up_proj"]["weight"][...]
    return {
        "params": max(float(np.abs(a - b).max()) for a, b in zip(*params, strict=True)),
        "moments": max(float(np.abs(a - b).max()) for a, b in zip(*moments, strict=True)),
        "logps": float((np.abs(logps[0] - logps[1]) / np.maximum(1, np.abs(logps[0]))).max()),
        "metrics": {k: [v, other[1][k]] for k, v in one[1].items()},
        "spec": str(leaf.sharding.spec),
        "moment_spec": str(moment.sharding.spec),
        "shard": list(leaf.addressable_shards[0].data.shape),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
