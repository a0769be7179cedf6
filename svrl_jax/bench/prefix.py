"""Shared prompts: an update on shared-prompt rows beside plain packed ones, same loss and gradient.

One group of 8 episodes: a prompt of 2,048 tokens (no picture), continuations of 512 tokens, 64 of
them the policy's. Packed rows hold the prompt eight times, shared rows once. The counted operations
say how much faster the latter can be; the question is how much of that is reached.

    group8  the 46-million model of the other suites, float32
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from svrl_jax.bench.train import TEXT_IDS, grpo_config, make_update, run_child

STEPS = 2  # timed ones of each layout, after one that compiles


@dataclasses.dataclass(frozen=True)
class Workload:
    """A group.

    Attributes:
      group: G.
      prompt_tokens: of the prompt.
      continuation_tokens: of each episode behind it.
      policy_tokens: of these, in the middle.
    """

    group: int
    prompt_tokens: int
    continuation_tokens: int
    policy_tokens: int


WORKLOADS = {"group8": Workload(8, 2048, 512, 64)}


def measure(
    workloads: Sequence[str], *, use_peer: bool, report: Callable[[str], None]
) -> list[dict]:
    """One row a workload.

    Args:
      workloads: names of WORKLOADS.
      use_peer: not read: the peer is our own packed layout.
      report: takes lines about what is being done.
    Returns:
      Rows of {workload, packed_s, shared_s, ratio, possible, share_of_possible, packed_flops,
      shared_flops, gradient_difference}: `possible` is the ratio of counted operations,
      `share_of_possible` = (ratio - 1) / (possible - 1), and `gradient_difference` the largest
      difference of the layouts' gradient norms by module, relative.
    """
    rows = []
    for name in workloads:
        report(f"{name}: {WORKLOADS[name]}")
        rows.append({"workload": name} | run_child("svrl_jax.bench.prefix", name))
    return rows


def main(name: str) -> dict:
    """Measures both layouts in turns, so that other load meets both alike."""
    from flax import nnx

    from svrl_jax import grpo
    from svrl_jax.bench.rollout import small_config
    from svrl_jax.models.qwen_vl import QwenVL

    workload = WORKLOADS[name]
    model = QwenVL(small_config(), rngs=nnx.Rngs(0))
    episodes = make_group(workload, model.config)
    whole = workload.prompt_tokens + workload.continuation_tokens
    row_tokens = {
        "packed": whole,
        "shared": workload.prompt_tokens + workload.group * workload.continuation_tokens,
    }
    advantages = np.linspace(-1, 1, workload.group, dtype=np.float32)[None]
    found = {}
    for layout, length in row_tokens.items():
        config = grpo_config(length, microbatch_rows=1, layout=layout)
        state, spec = make_update(model, config, whole, remat="dots")
        found[layout] = [config, state, spec, None, []]
    for _ in range(STEPS + 1):
        for entry in found.values():
            config, state, spec, _, seconds = entry
            batch = grpo.make_batches(
                episodes, advantages, np.ones_like(advantages, bool), config,
                merge_size=model.config.vision_config.spatial_merge_size,
                image_token_id=model.config.image_token_id, pad_id=0,
            )  # fmt: skip
            start = time.perf_counter()
            entry[1], metrics, _ = grpo.update(state, None, batch, spec)
            seconds.append(time.perf_counter() - start)
            entry[3] = entry[3] or metrics
    packed, shared = found["packed"], found["shared"]
    seconds = {name: min(entry[4][1:]) for name, entry in found.items()}
    ratio = seconds["packed"] / seconds["shared"]
    possible = packed[3]["update_flops"] / shared[3]["update_flops"]
    norms = [k for k in packed[3] if k.startswith("grad_norm") and packed[3][k]]
    return {
        "packed_s": seconds["packed"],
        "shared_s": seconds["shared"],
        "ratio": ratio,
        "possible": possible,
        "share_of_possible": (ratio - 1) / (possible - 1),
        "packed_flops": packed[3]["update_flops"],
        "shared_flops": shared[3]["update_flops"],
        "gradient_difference": max(abs(packed[3][k] / shared[3][k] - 1) for k in norms),
    }


def make_group(workload: Workload, config) -> list[list]:
    """[1][G] Episode of random ids, without pictures."""
    from svrl_jax.models.qwen_vl import mrope_positions
    from svrl_jax.types import Episode

    draw = np.random.default_rng(0)
    prompt = draw.integers(10, TEXT_IDS, workload.prompt_tokens)
    length = workload.prompt_tokens + workload.continuation_tokens
    mask = np.zeros(length, np.int32)
    first = workload.prompt_tokens + workload.continuation_tokens // 4
    mask[first : first + workload.policy_tokens] = 1
    no_grids = np.zeros((0, 3), np.int32)
    group = []
    for sample in range(workload.group):
        own = draw.integers(10, TEXT_IDS, workload.continuation_tokens)
        ids = np.concatenate([prompt, own]).astype(np.int32)
        group.append(
            Episode(
                task_id="task",
                step=0,
                sample=sample,
                seed=0,
                policy="bench",
                regime="agent",
                ids=ids,
                loss_mask=mask,
                positions=mrope_positions(ids, no_grids, config)[0],
                sampler_logps=np.full(length, -np.log(config.text_config.vocab_size)),
                pixel_values=np.zeros((0, config.vision_config.patch_dim), np.float32),
                image_grid_thw=no_grids,
                prompt_length=workload.prompt_tokens,
                turns=(),
                end_reason="answered",
                answer=None,
                temperature=1.0,
            )
        )
    return [group]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
