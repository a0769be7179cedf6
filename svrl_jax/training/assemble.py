"""A config -> everything a run works with: policy folder, prompts, tools, sampler.

One flat place where the pieces meet; train, eval, ask and label all start here.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from svrl_jax.models.qwen_vl import QwenVL, QwenVLConfig
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.lora import add_lora
from svrl_jax.models.qwen_vl.sharding import place_params, sharding_of
from svrl_jax.models.qwen_vl.weights import load_weights
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.protocol.prompts import PromptBuilder, read_prompts
from svrl_jax.rollout import episodes as episodes_lib
from svrl_jax.rollout.figures import RolloutFigures
from svrl_jax.rollout.policy import TurnSampler
from svrl_jax.rollout.scheduler import EnginePolicy, banned_ids
from svrl_jax.rollout.tools import Tools
from svrl_jax.search.build import build_tools
from svrl_jax.training import task_source
from svrl_jax.training.mesh import mesh_of, sampler_params
from svrl_jax.types import Episode, Prompt, Task

_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


class PolicyFolderError(RuntimeError):
    """A policy folder that cannot be loaded; the message names it and what is wrong."""


@dataclasses.dataclass
class Bench:
    """What a run works with.

    Attributes:
      config: the whole config.
      folder: the initial policy's Hugging Face folder.
      model_config: sizes of the initial policy; they fix positions and picture tokens.
      model: the initial policy; None where its weights were not asked for.
      initial_params: its parameters, `nnx.split(model)[1]`, or None.
      mesh: devices that parameters are spread over; None is the default device.
      tokenizer, builder, tools: text to ids, task to prompt, the two searches.
      banned: ids that no policy may draw.
      sampler: the engine, or None; `set_params` before use.
    """

    config: ConfigDict
    folder: pathlib.Path
    model_config: QwenVLConfig
    model: QwenVL | None
    initial_params: Any
    mesh: Mesh | None
    tokenizer: Tokenizer
    builder: PromptBuilder
    tools: Tools
    banned: tuple[int, ...]
    sampler: EnginePolicy | None

    def run(
        self,
        tasks: Sequence[Task],
        policy: TurnSampler,
        *,
        step: int,
        group_size: int,
        prompts: Sequence[Prompt] | None = None,
        regime: str = "agent",
        temperature: float = 1.0,
        query_choice: str = "first",
        policy_name: str = "policy",
        progress: Callable[[int, int], None] | None = None,
        first_sample: int = 0,
        on_episode: Callable[[Episode], None] | None = None,
        tools: Tools | None = None,
        attempt: int = 0,
        figures: RolloutFigures | None = None,
        rollout: ConfigDict | None = None,
    ) -> list[list[Episode]]:
        """Episodes [P][G] of the tasks; see `rollout.episodes.run_episodes`.

        Args:
          prompts: of the tasks under the regime, where they were built ahead; None builds them.
          tools, rollout: instead of the bench's own and of `config.rollout`.
        """
        return episodes_lib.run_episodes(
            tasks,
            self.builder.build_all(tasks, regime) if prompts is None else prompts,
            policy,
            None if regime == "direct" else tools or self.tools,
            self.tokenizer,
            self.model_config,
            rollout or self.config.rollout,
            self.config.search,
            seed=self.config.seed,
            step=step,
            group_size=group_size,
            regime=regime,
            temperature=temperature,
            query_choice=query_choice,
            policy_name=policy_name,
            progress=progress,
            first_sample=first_sample,
            on_episode=on_episode,
            attempt=attempt,
            figures=figures,
            processor=self.builder.processor,
        )


def policy_folder(path: str | None) -> pathlib.Path:
    """The initial policy's folder: as given, or relative to the checkout.

    Raises:
      FileNotFoundError: there is none; names the key and the command that makes the shipped one.
    """
    if not path:
        raise FileNotFoundError("config.model.folder is not set: name a Hugging Face folder")
    for candidate in (pathlib.Path(path), _CHECKOUT / path):
        if (candidate / "config.json").is_file():
            return candidate
    raise FileNotFoundError(
        f"config.model.folder={path!r} holds no config.json: name a Hugging Face folder, or make "
        "the embedded one with `make pretrain`"
    )


def load_policy(folder: pathlib.Path, config: ConfigDict, mesh: Mesh | None = None) -> QwenVL:
    """The model of a Hugging Face folder.

    Args:
      config: config.model (`param_dtype`, `compute_dtype` and `attention` are read).
      mesh: devices to spread the parameters over; None is the default device.
    Raises:
      PolicyFolderError: broken files, or weights that do not fit their config.json.
    """
    try:
        sharding = None if mesh is None else sharding_of(mesh)
        model, _ = load_weights(folder, jnp.dtype(config.param_dtype), sharding)
    except ValueError as error:
        raise PolicyFolderError(
            f"the policy folder {folder} cannot be loaded ({error}): fetch or make it again, or "
            "name another one"
        ) from error
    model.set_execution(Execution(config.attention, config.compute_dtype))
    return model


def policy_params(bench: Bench, folder: pathlib.Path) -> Any:
    """Parameters of another policy, for the bench's sampler.

    Raises:
      PolicyFolderError: broken files, or a model of other sizes or with another tokenizer than
        config.model.folder, by which prompts and programs are made.
    """
    config = bench.config.model
    model = load_policy(folder, config)
    name = "tokenizer.json"
    if model.config != bench.model.config or (
        (folder / name).read_bytes() != (bench.folder / name).read_bytes()
    ):
        raise PolicyFolderError(
            f"the policy folder {folder} has other sizes or another tokenizer than "
            f"config.model.folder={config.folder}: name it as --config.model.folder too"
        )
    return nnx.split(with_adapters(model, bench.config.lora))[1]


def with_adapters(model: QwenVL, config: ConfigDict) -> QwenVL:
    """The model with fresh adapters where `config.lora` asks for them; they change nothing yet."""
    return add_lora(model, config.rank, config.alpha, config.targets) if config.rank else model


def text_side(config: ConfigDict) -> tuple[Tokenizer, PromptBuilder, QwenVLConfig]:
    """What makes prompts and ids, without a policy's weights: those files need not be there."""
    folder = policy_folder(config.model.folder)
    tokenizer, model_config = Tokenizer.from_folder(folder), QwenVLConfig.from_folder(folder)
    return tokenizer, _builder(config, folder, tokenizer, model_config), model_config


def assemble(config: ConfigDict, *, has_weights: bool = True) -> Bench:
    """Loads and builds everything; see Bench.

    Args:
      has_weights: False leaves model and sampler out, as for a served policy: the folder need only
        hold the tokenizer's and the processor's files and config.json.
    """
    tools = build_tools(config)  # first: a missing key is known before weights are read
    folder = policy_folder(config.model.folder)
    if not has_weights:
        tokenizer, builder, model_config = text_side(config)
        return Bench(
            config, folder, model_config, None, None, None, tokenizer, builder, tools, (), None
        )
    mesh = mesh_of(config)
    model = with_adapters(load_policy(folder, config.model, mesh), config.lora)
    prepare = functools.partial(sampler_params, dtype=config.model.compute_dtype)
    graphdef, params = nnx.split(model)
    params = place_params(params, mesh)  # adapters too
    tokenizer = Tokenizer.from_folder(folder)
    banned = banned_ids(model.config, len(tokenizer))
    return Bench(
        config=config,
        folder=folder,
        model_config=model.config,
        model=model,
        initial_params=params,
        mesh=mesh,
        tokenizer=tokenizer,
        builder=_builder(config, folder, tokenizer, model.config),
        tools=tools,
        banned=banned,
        sampler=EnginePolicy(
            nnx.merge(graphdef, prepare(params)),
            banned,
            config.rollout,
            prepare,
            pausing=episodes_lib.pausing_ids(tokenizer),
        ),
    )


def _builder(
    config: ConfigDict, folder: pathlib.Path, tokenizer: Tokenizer, model_config: QwenVLConfig
) -> PromptBuilder:
    return PromptBuilder(
        tokenizer,
        ImageProcessor.from_folder(folder),
        model_config,
        read_prompts(config.prompt),
        max_picture_pixels=config.data.max_picture_pixels,
        max_tokens=task_source.max_prompt_tokens(config),
    )
