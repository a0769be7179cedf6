"""Updates: one GRPO step of ours beside a torch step with whole logits, in the same run.

A random Qwen2.5-VL of 46 million parameters with the true vocabulary, float32. Every row is one
episode: 64 tokens of text, a 336 px picture, more text, and policy tokens at its end. Both sides
make forward pass, backward pass and AdamW step on the same weights and arrays; the peer does what
most code does (whole logits, gradient checkpointing). Each side runs in a process of its own, whose
peak of resident memory is reported.

    rows    2 rows x 2,048 tokens, 256 policy tokens a row
    long    1 row x 8,192 tokens, 512 policy tokens (ours alone: the peer's logits take 5 GB)
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

from svrl_jax.bench.rate import product_rate

TEXT_IDS = 150_000  # random text is drawn below; what stands above are special tokens
STEPS = 3  # timed ones, after one that compiles


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained on.

    Attributes:
      rows: episodes, each a row.
      tokens: of a row.
      policy_tokens: at the end of a row.
      side_px: of the square picture in each row.
      has_peer: the peer runs it too.
    """

    rows: int
    tokens: int
    policy_tokens: int
    side_px: int = 336
    has_peer: bool = True

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches of a picture."""
        return 1, self.side_px // 14, self.side_px // 14


WORKLOADS = {
    "rows": Workload(rows=2, tokens=2048, policy_tokens=256),
    "long": Workload(rows=1, tokens=8192, policy_tokens=512, has_peer=False),
}


def measure(
    workloads: Sequence[str], *, use_peer: bool, report: Callable[[str], None]
) -> list[dict]:
    """One row a workload.

    Args:
      workloads: names of WORKLOADS.
      use_peer: False leaves the peer's figures None.
      report: takes lines about what is being done.
    Returns:
      Rows of {workload, ours_s, peer_s, ratio, ours_gib, peer_gib, memory_ratio, flops,
      share_of_rate, rate_gflops}: seconds of an update, peak resident GiB of each process, counted
      operations of one update, and their share of the machine's product rate (a fraction).
    Raises:
      MissingPeerError: the peer's packages are not installed.
    """
    rows = []
    for name in workloads:
        workload = WORKLOADS[name]
        report(f"{name}: {workload}")
        with tempfile.TemporaryDirectory() as folder:
            run_child("svrl_jax.bench.train", "make", name, folder)
            rate = product_rate()
            ours = run_child("svrl_jax.bench.train", "run", name, folder)
            report(f"ours: {ours}")
            peer = None
            if use_peer and workload.has_peer:
                peer = run_child("svrl_jax.bench.train_peer", folder)
                report(f"peer: {peer}")
            rate = max(rate, product_rate())
        rows.append(
            {
                "workload": name,
                "ours_s": ours["seconds"],
                "peer_s": peer and peer["seconds"],
                "ratio": peer and peer["seconds"] / ours["seconds"],
                "ours_gib": ours["gib"],
                "peer_gib": peer and peer["gib"],
                "memory_ratio": peer and ours["gib"] / peer["gib"],
                "flops": ours["flops"],
                "share_of_rate": ours["flops"] / ours["seconds"] / rate,
                "rate_gflops": rate / 1e9,
            }
        )
    return rows


def run_child(module: str, *arguments: str) -> dict:
    """Runs `python -m module arguments` and reads its last line as JSON.

    Raises:
      MissingPeerError: the child says that packages are missing.
      RuntimeError: it failed otherwise; holds the end of what it said.
    """
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    if found.returncode:
        from svrl_jax.bench.rollout_peer import MissingPeerError

        kind = MissingPeerError if "MissingPeerError" in found.stderr else RuntimeError
        raise kind(f"{module} failed: {found.stderr[-2000:]}")
    return json.loads(found.stdout.splitlines()[-1])


def peak_gib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def make_arrays(workload: Workload, config) -> dict[str, np.ndarray]:
    """Random ids int64[B, T], pixels float32[B, L, C], policy mask [B, T], advantages [B]; equal
    for equal workloads."""
    draw = np.random.default_rng(0)
    shape = (workload.rows, workload.tokens)
    ids = draw.integers(10, TEXT_IDS, shape)
    cells = int(np.prod(workload.grid)) // config.vision_config.merge_unit
    ids[:, 64] = config.vision_start_token_id
    ids[:, 65 : 65 + cells] = config.image_token_id
    ids[:, 65 + cells] = config.vision_end_token_id
    mask = np.zeros(shape, np.int32)
    mask[:, -workload.policy_tokens :] = 1
    pixels = (workload.rows, int(np.prod(workload.grid)), config.vision_config.patch_dim)
    return {
        "ids": ids,
        "mask": mask,
        "pixel_values": draw.normal(size=pixels).astype(np.float32),
        "grid": np.asarray([workload.grid] * workload.rows),
        "advantages": draw.normal(size=workload.rows).astype(np.float32),
    }


def make_episodes(workload: Workload, config, arrays: dict[str, np.ndarray]) -> list[list]:
    """[B][1] Episode of those arrays."""
    from svrl_jax.models.qwen_vl import mrope_positions
    from svrl_jax.types import Episode

    grids = arrays["grid"].astype(np.int32)[:, None]  # [B, 1, 3]
    return [
        [
            Episode(
                task_id=str(row),
                step=0,
                sample=0,
                seed=0,
                policy="bench",
                regime="agent",
                ids=arrays["ids"][row].astype(np.int32),
                loss_mask=arrays["mask"][row],
                positions=mrope_positions(
                    arrays["ids"][row], arrays["grid"][row : row + 1], config
                )[0],
                # About what a random policy gives; the first update returns the exact ones.
                sampler_logps=np.full(workload.tokens, -np.log(config.text_config.vocab_size)),
                pixel_values=arrays["pixel_values"][row],
                image_grid_thw=grids[row],
                prompt_length=workload.tokens - workload.policy_tokens,
                turns=(),
                end_reason="answered",
                answer=None,
                temperature=1.0,
            )
        ]
        for row in range(workload.rows)
    ]


def grpo_config(row_tokens: int, microbatch_rows: int, **changes):
    """The part of a config that the update reads: no KL term, as the peer has none."""
    from ml_collections import ConfigDict

    values = {
        "objective": "dapo", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0,
        "kl_estimator": "k3", "ref_dtype": "float32", "inner_steps": 1, "minibatches": 1,
        "drop_equal_groups": False, "equal_tolerance": 1e-6, "mask_overlong": False,
        "importance_cap": 0.0, "layout": "shared", "row_tokens": row_tokens,
        "length_buckets": (row_tokens,), "microbatch_rows": microbatch_rows,
    }  # fmt: skip
    return ConfigDict(values | changes)


def make_update(model, config, budget: int, remat: str = "none", is_abstract: bool = False):
    """(state, spec) of a model; AdamW as torch's default. Of a model of shapes: no state."""
    from flax import nnx
    from ml_collections import ConfigDict

    from svrl_jax import grpo
    from svrl_jax.bench.rollout import banned

    optim = ConfigDict(
        {
            "learning_rate": 1e-6, "warmup_steps": 0, "weight_decay": 0.01, "b1": 0.9,
            "b2": 0.999, "clip_norm": 0.0, "freeze": (),
        }
    )  # fmt: skip
    spec = grpo.make_spec(
        model, config, optim, temperature=1.0, budget=budget, banned_ids=banned(model.config),
        remat=remat,
    )  # fmt: skip
    return None if is_abstract else grpo.init_state(nnx.split(model)[1], spec), spec


def make_folder(name: str, folder: str) -> dict:
    """Writes the random model and the arrays of a workload."""
    from flax import nnx

    from svrl_jax.bench.rollout import small_config
    from svrl_jax.models.qwen_vl import QwenVL
    from svrl_jax.models.qwen_vl.weights import save_folder

    model = QwenVL(small_config(), rngs=nnx.Rngs(0))
    save_folder(model, folder, dtype="float32")
    arrays = make_arrays(WORKLOADS[name], model.config)
    np.savez(pathlib.Path(folder) / "arrays.npz", **arrays)
    return {}


def run_ours(name: str, folder: str) -> dict:
    """Seconds of an update, peak GiB, counted operations, and the first step's loss and norm."""
    from svrl_jax import grpo
    from svrl_jax.models.qwen_vl.weights import load_weights

    workload = WORKLOADS[name]
    model, model_config = load_weights(folder)
    arrays = dict(np.load(pathlib.Path(folder) / "arrays.npz"))
    episodes = make_episodes(workload, model_config, arrays)
    config = grpo_config(workload.tokens, microbatch_rows=1)
    state, spec = make_update(model, config, workload.tokens, remat="dots")
    del model  # the state has a copy of its parameters
    seconds, first = [], {}
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        batch = grpo.make_batches(
            episodes,
            arrays["advantages"][:, None],
            np.ones((workload.rows, 1), bool),
            config,
            merge_size=model_config.vision_config.spatial_merge_size,
            image_token_id=model_config.image_token_id,
            pad_id=0,
        )
        state, metrics, logps = grpo.update(state, None, batch, spec)
        seconds.append(time.perf_counter() - start)
        if not first:  # from here on against the model's own log-probs, as the peer
            first = metrics
            episodes = [
                [dataclasses.replace(episode, sampler_logps=values)]
                for (episode,), (values,) in zip(episodes, logps, strict=True)
            ]
    return {
        "seconds": min(seconds[1:]),
        "first_s": seconds[0],
        "gib": peak_gib(),
        "flops": metrics["update_flops"],
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
    }


if __name__ == "__main__":
    TASKS = {"make": make_folder, "run": run_ours}
    print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:4])))
