"""Run as a program on eight virtual CPU devices: episodes of one device scored and sampled on a 4x2
mesh, and sampled by an engine whose heads and caches lie on two devices; as JSON.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402
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

from svrl_jax import api  # noqa: E402
from svrl_jax.models.qwen_vl.sharding import place_params  # noqa: E402
from svrl_jax.processing.processor import Inputs  # noqa: E402
from svrl_jax.rollout.episodes import run_episodes  # noqa: E402
from svrl_jax.rollout.scheduler import EnginePolicy  # noqa: E402
from svrl_jax.training.mesh import make_mesh  # noqa: E402

jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_matmul_precision", "highest")


def play(policy):
    tasks = [make_task(i) for i in range(3)]
    groups = run_episodes(
        tasks, [make_prompt(t) for t in tasks], policy,
        ToyTools(), TOKENIZER, CONFIG, ROLLOUT, search_config(), seed=1, step=0, group_size=4,
        regime="agent", temperature=0.7, query_choice="random", policy_name="toy",
    )  # fmt: skip
    return sum(groups, [])


def divergence(episodes, others):
    """Share of tokens behind the first difference of two episodes, over all sampled tokens."""
    lost = total = 0
    for one, other in zip(episodes, others, strict=True):
        sampled = np.flatnonzero(one.loss_mask)
        total += len(sampled)
        size = min(len(one.ids), len(other.ids))
        same = int(np.cumprod(one.ids[:size] == other.ids[:size]).sum())
        lost += int((sampled >= same).sum())
    return lost / total


def scores(model, episode):
    """float32[T - 1]: the policy tokens' log-probs, teacher-forced."""
    inputs = Inputs(
        prompt_ids=episode.ids[None], lengths=np.asarray([len(episode.ids)], np.int32),
        positions=episode.positions[:, None], pixel_values=episode.pixel_values,
        image_grid_thw=episode.image_grid_thw,
    )  # fmt: skip
    logits = np.asarray(api.logits(model, inputs))[0, :-1].astype(np.float64) / 0.7
    logits[:, list(ALL_BUT_PHRASES)] = -np.inf
    top = logits.max(-1, keepdims=True)
    logps = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    found = np.take_along_axis(logps, episode.ids[1:, None].astype(int), -1)[:, 0]
    return found[episode.loss_mask[1:] == 1]


ROLLOUT = rollout_config(budget=400)
graphdef, params = nnx.split(MODEL)


def spread_over(**axes):
    mesh = make_mesh(ConfigDict(axes), jax.devices()[: int(np.prod(list(axes.values())))])
    return nnx.merge(graphdef, place_params(params, mesh))


on_eight = spread_over(data=1, fsdp=4, tensor=2)
one, eight, two = (
    EnginePolicy(m, ALL_BUT_PHRASES, ROLLOUT)
    for m in (MODEL, on_eight, spread_over(data=1, fsdp=1, tensor=2))
)
episodes, on_mesh, on_pair = play(one), play(eight), play(two)
chosen = sorted(episodes, key=lambda e: len(e.ids))[-3:]
cache = two.engine._state.cache.k
same = [(a, b) for a, b in zip(episodes, on_pair) if np.array_equal(a.ids, b.ids)]
print(
    json.dumps(
        {
            "devices": len(jax.devices()),
            "gap": float(max(np.abs(scores(MODEL, e) - scores(on_eight, e)).max() for e in chosen)),
            "recorded_gap": float(
                max(
                    np.abs(scores(on_eight, e) - e.sampler_logps[e.loss_mask == 1]).max()
                    for e in chosen
                )
            ),
            "episodes": len(episodes),
            "sampled": int(sum(e.loss_mask.sum() for e in episodes)),
            "divergence_rate": divergence(episodes, on_mesh),
            "pair_same": len(same),
            "pair_gap": float(
                max(np.abs(a.sampler_logps - b.sampler_logps).max() for a, b in same)
            ),
            "pair_heads": [shard.data.shape[2] for shard in cache.addressable_shards],
        }
    )
)
