"""Rollouts: tokens a second of our sampler beside transformers' `generate`, in the same run.

A random Qwen2.5-VL of 46 million parameters with the true vocabulary, float32. Each episode has
three turns of 64 sampled tokens with tool text between; nothing ends a turn early, so that both
sides do the same work. The peer does what most code does: every turn it sends the whole history
again, pictures included.

    short   4 questions x 8 episodes, 336 px, 256 tokens of text, 256 tool tokens between turns
    agent   2 questions x 8 episodes, 672 px, 512 tokens of text, 1,024 tool tokens between turns
    tools   16 questions x 8 episodes whose tools take 2 s, beside the same with instant ones
"""

from __future__ import annotations

import collections
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from svrl_jax import rng
from svrl_jax.bench import rollout_peer
from svrl_jax.bench.rate import product_rate
from svrl_jax.models.qwen_vl.config import QwenVLConfig, TextConfig, VisionConfig
from svrl_jax.models.qwen_vl.flops import forward_flops
from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.models.qwen_vl.weights import save_folder
from svrl_jax.rollout.policy import Request
from svrl_jax.rollout.scheduler import EnginePolicy

NO_PIXELS, NO_GRIDS = np.zeros((0, 0), np.float32), np.zeros((0, 3), np.int32)
TEXT_IDS = 150_000  # random text is drawn below; what stands above are special tokens


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is sampled.

    Attributes:
      questions, group: P and G.
      side_px: of the square picture of each question.
      text_tokens: of the prompt, beside the picture's.
      turns: sampled turns of an episode.
      turn_tokens: sampled tokens of a turn.
      tool_tokens: of the environment between two turns.
      lanes: rows decoded at once; 0: all episodes.
      slots: episodes held at once; 0: all.
      tool_s: seconds that each tool takes, simulated.
    """

    questions: int
    group: int
    side_px: int
    text_tokens: int
    turns: int
    turn_tokens: int
    tool_tokens: int
    lanes: int = 0
    slots: int = 0
    tool_s: float = 0.0

    @property
    def num_episodes(self) -> int:
        """B, rows."""
        return self.questions * self.group

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of all episodes."""
        return self.num_episodes * self.turns * self.turn_tokens

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches of a picture."""
        return 1, self.side_px // 14, self.side_px // 14

    @property
    def prompt_tokens(self) -> int:
        """Of one question: text, picture and its two marks."""
        return self.text_tokens + 2 + int(np.prod(self.grid)) // 4

    @property
    def episode_tokens(self) -> int:
        """Of one episode that is over."""
        tools = (self.turns - 1) * self.tool_tokens
        return self.prompt_tokens + self.turns * self.turn_tokens + tools


WORKLOADS = {
    "short": Workload(4, 8, 336, 256, 3, 64, 256),
    "agent": Workload(2, 8, 672, 512, 3, 64, 1024),
    "tools": Workload(16, 8, 112, 64, 3, 32, 64, lanes=32, slots=96, tool_s=2.0),
}
WAITING = WORKLOADS["tools"]


def measure(
    workloads: Sequence[str], *, use_peer: bool, report: Callable[[str], None]
) -> list[dict]:
    """One row a workload.

    Args:
      workloads: names of WORKLOADS.
      use_peer: False leaves the peer's figures None.
      report: takes lines about what is being done.
    Returns:
      Rows with the workload's name, tokens a second of both sides and their ratio, the counted
      operations of our side, their share of the machine's product rate (fraction), tokens prefilled
      over those that had to be, padding, programs compiled after the first pass, and seconds.
    Raises:
      MissingPeerError: the peer's packages are not installed.
    """
    model = QwenVL(small_config(), rngs=nnx.Rngs(0))
    rows = []
    for name in workloads:
        if name == "tools":
            rows.append(measure_tools(model, report))
            continue
        workload = WORKLOADS[name]
        report(f"{name}: {workload}")
        prompts = make_prompts(workload, model.config)
        rate = product_rate()
        ours_s, counted = _measure_ours(model, workload, prompts, report)
        peer_s = _seconds_of_peer(model, workload, prompts) if use_peer else None
        rate = max(rate, product_rate())
        flops = count_flops(workload, model.config)
        rows.append(
            {
                "workload": name,
                "ours_tokens_per_s": workload.num_sampled / ours_s,
                "peer_tokens_per_s": peer_s and workload.num_sampled / peer_s,
                "ratio": peer_s and peer_s / ours_s,
                "flops": flops,
                "share_of_rate": flops / ours_s / rate,
                "rate_gflops": rate / 1e9,
                **counted,
            }
        )
    return rows


def small_config() -> QwenVLConfig:
    """Qwen2.5-VL of 46 million parameters, 39 of them in the vocabulary of the release."""
    return QwenVLConfig(
        text_config=TextConfig(
            vocab_size=151_936,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            mrope_section=(8, 12, 12),
        ),
        vision_config=VisionConfig(
            hidden_size=128,
            out_hidden_size=256,
            depth=4,
            num_heads=4,
            intermediate_size=256,
            patch_size=14,
            fullatt_block_indexes=(3,),
        ),
        image_token_id=151_655,
        video_token_id=151_656,
        vision_start_token_id=151_652,
        vision_end_token_id=151_653,
        tie_word_embeddings=True,
    )


def banned(config: QwenVLConfig) -> tuple[int, ...]:
    """Ids that neither side draws."""
    return config.image_token_id, config.video_token_id, config.vision_start_token_id


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What both sides are given.

    Attributes:
      prompt_ids: int32[P, T].
      pixel_values: float32[P, L, C], one picture a question.
      tool_ids: int32[turns - 1, B, n].
    """

    prompt_ids: np.ndarray
    pixel_values: np.ndarray
    tool_ids: np.ndarray


def make_prompts(workload: Workload, config: QwenVLConfig) -> Inputs:
    """Random text and pictures; equal for equal workloads."""
    draw = np.random.default_rng(0)
    count, before = workload.questions, workload.text_tokens // 2
    cells = int(np.prod(workload.grid)) // config.vision_config.merge_unit
    text = draw.integers(10, TEXT_IDS, (count, workload.text_tokens))
    middle = [config.vision_start_token_id, *[config.image_token_id] * cells]
    middle = np.tile([*middle, config.vision_end_token_id], (count, 1))
    shape = (workload.turns - 1, workload.num_episodes, workload.tool_tokens)
    return Inputs(
        prompt_ids=np.concatenate([text[:, :before], middle, text[:, before:]], 1).astype(np.int32),
        pixel_values=draw.normal(
            size=(count, int(np.prod(workload.grid)), config.vision_config.patch_dim)
        ).astype(np.float32),
        tool_ids=draw.integers(10, TEXT_IDS, shape).astype(np.int32),
    )


def count_flops(workload: Workload, config: QwenVLConfig) -> float:
    """Operations that have to be made once: shared prompts and pictures are counted once."""
    rows, prompts = workload.num_episodes, workload.questions
    grids = np.asarray([workload.grid] * prompts)
    # The last token of an episode is drawn and never read.
    whole = forward_flops(
        config, [workload.episode_tokens - 1] * rows, NO_GRIDS, workload.num_sampled
    )
    again = forward_flops(config, [workload.prompt_tokens] * (rows - prompts), NO_GRIDS, 0)
    return whole - again + forward_flops(config, [], grids, 0)


def rollout_config(workload: Workload) -> ConfigDict:
    """The part of a config that the sampler reads."""
    return ConfigDict(
        {
            "slots": workload.slots or workload.num_episodes,
            "lanes": workload.lanes or workload.num_episodes,
            "budget": workload.episode_tokens,
            "decode_chunk": 16,
            "cache_dtype": "float32",
            "top_k": 0,
            "top_p": 1.0,
        }
    )


@dataclasses.dataclass(frozen=True)
class Played:
    """One pass over a workload.

    Attributes:
      sampled: tokens.
      seconds: of the whole pass.
      busy_sampled, busy_s: tokens and seconds before no more episodes were left than there are
        lanes; what follows is the tail, in which nobody takes the lane of one that waits.
    """

    sampled: int
    seconds: float
    busy_sampled: int
    busy_s: float


def play(policy: EnginePolicy, workload: Workload, inputs: Inputs) -> Played:
    """Samples every episode to its end; an episode that waits for a tool keeps its slot."""
    config, engine = policy.engine.config, policy.engine
    queue = collections.deque(range(workload.num_episodes))
    free = collections.deque(range(engine.slots))
    turn, following = np.zeros((2, workload.num_episodes), int)
    row_of: dict[int, int] = {}  # by slot
    waiting: collections.deque[tuple[float, int]] = collections.deque()  # (ready at, slot)
    num_left = workload.num_episodes
    sampled = num_queued = 0
    busy = None
    start = time.perf_counter()

    def submit(slot: int) -> None:
        row = row_of[slot]
        question, number = row // workload.group, int(turn[row])
        is_new = number == 0
        ids = inputs.prompt_ids[question] if is_new else inputs.tool_ids[number - 1, row]
        grids = np.asarray([workload.grid], np.int32) if is_new else NO_GRIDS
        positions, next_position = mrope_positions(ids, grids, config, start=int(following[row]))
        following[row] = next_position + workload.turn_tokens
        policy.submit(
            Request(
                slot=slot,
                ids=ids,
                positions=positions,
                next_position=next_position,
                pixel_values=inputs.pixel_values[question] if is_new else NO_PIXELS,
                image_grid_thw=grids,
                key=rng.turn_keys([(0, 0, question, row, number, 0)])[0],
                temperature=1.0,
                max_new_tokens=workload.turn_tokens,
                is_new=is_new,
                keep=lambda ids, start: None,
                view=None,
                share_key=question if is_new else None,
            )
        )

    while num_left:
        while queue and free:
            slot = free.popleft()
            row_of[slot] = queue.popleft()
            submit(slot)
            num_queued += 1
        if not num_queued and waiting:
            time.sleep(max(0.0, waiting[0][0] - time.perf_counter()))
        while waiting and waiting[0][0] <= time.perf_counter():
            submit(waiting.popleft()[1])
            num_queued += 1
        for found in policy.collect() if num_queued else ():
            num_queued -= 1
            sampled += len(found.ids)
            row = row_of[found.slot]
            turn[row] += 1
            if turn[row] < workload.turns:
                waiting.append((time.perf_counter() + workload.tool_s, found.slot))
                continue
            free.append(found.slot)
            num_left -= 1
            if busy is None and num_left <= engine.lanes:
                busy = sampled, time.perf_counter() - start
    return Played(sampled, time.perf_counter() - start, *busy)


def measure_tools(model: QwenVL, report: Callable[[str], None]) -> dict:
    """A row for WAITING: tokens a second with slow tools over those with instant ones.

    Both counted until no more episodes are left than lanes; the tail is a figure of its own, and so
    is the share over the whole of both, tails included.
    """
    inputs = make_prompts(WAITING, model.config)
    policy = EnginePolicy(model, banned(model.config), rollout_config(WAITING))
    instant = dataclasses.replace(WAITING, tool_s=0.0)
    play(policy, instant, inputs)  # compiles
    played = {}
    for name, workload in (("instant", instant), ("slow", WAITING)):
        one = played[name] = play(policy, workload, inputs)
        rate, tail = one.busy_sampled / one.busy_s, one.seconds - one.busy_s
        report(f"tools, {name}: {rate:.1f} tokens/s, tail {tail:.1f} s")
    rates = {name: one.busy_sampled / one.busy_s for name, one in played.items()}
    return {
        "workload": "tools",
        "ours_tokens_per_s": rates["slow"],
        "instant_tokens_per_s": rates["instant"],
        "share_of_instant": rates["slow"] / rates["instant"],
        "share_of_instant_with_tail": played["instant"].seconds / played["slow"].seconds,
        "tail_s": played["slow"].seconds - played["slow"].busy_s,
        "instant_tail_s": played["instant"].seconds - played["instant"].busy_s,
    }


def _measure_ours(
    model: QwenVL, workload: Workload, inputs: Inputs, report: Callable[[str], None]
) -> tuple[float, dict]:
    """Seconds of the quicker of two passes behind one that compiles, and what they counted."""
    policy = EnginePolicy(model, banned(model.config), rollout_config(workload))
    seconds = []
    for _ in range(3):
        policy.counts.clear()
        played = play(policy, workload, inputs)
        seconds.append(played.seconds)
        if played.sampled != workload.num_sampled:
            raise RuntimeError(f"{played.sampled} tokens sampled, not {workload.num_sampled}")
    n = policy.counts
    needed = workload.questions * workload.prompt_tokens
    needed += workload.num_episodes * (workload.turns - 1) * workload.tool_tokens
    rest = seconds[-1] - n["prefill_s"] - n["decode_s"]
    report(
        f"where the time goes: prefill {n['prefill_s']:.1f} s, decode {n['decode_s']:.1f} s, "
        f"host {rest:.1f} s"
    )
    return min(seconds[1:]), {
        "prefilled_share": n["prefilled"] / needed,
        "prefill_padding": 1 - n["prefilled"] / n["prefill_places"],
        "new_compiles": n["compiles"],
        "prefill_s": n["prefill_s"],
        "decode_s": n["decode_s"],
        "host_s": rest,
    }


def _seconds_of_peer(model: QwenVL, workload: Workload, inputs: Inputs) -> float:
    with tempfile.TemporaryDirectory() as folder:
        save_folder(model, folder)
        return rollout_peer.seconds(
            folder,
            prompt_ids=np.repeat(inputs.prompt_ids, workload.group, 0),
            pixel_values=np.repeat(inputs.pixel_values, workload.group, 0),
            grid=workload.grid,
            tool_ids=inputs.tool_ids,
            turn_tokens=workload.turn_tokens,
            banned=banned(model.config),
        )
