"""pretrain: makes the embedded default's initial policy and its labels again (config.pretrain)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from absl import flags
from flax import nnx

from experiments import command_line, label
from svrl_jax.models.qwen_vl import QwenVL, QwenVLConfig
from svrl_jax.models.qwen_vl.weights import load_weights, save_folder
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.protocol.prompts import PromptBuilder, read_prompts
from svrl_jax.search.local import LocalTools
from svrl_jax.training import fingerprint, labels, pretrain, run_folder, tiny_policy
from svrl_jax.training.demos import DemoMaker


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config."""
    command_line.define_config(values, argv)


def main(call: command_line.Call) -> int:
    """Trains from random weights and writes `config.pretrain.out`: a Hugging Face folder, made.json
    (what made it, and what it belongs to) and search_free.json."""
    config = command_line.config_of(call.values)
    out = pathlib.Path(config.pretrain.out)
    started = run_folder.environment()  # before: the checkout may move on while this runs
    texts = read_prompts(config.prompt)
    tools = LocalTools(config.search, config.data.picture_width_px, config.data.picture_height_px)
    tiny_policy.write_folder(out, config.pretrain, texts.values())
    model_config = QwenVLConfig.from_folder(out)
    builder = PromptBuilder(
        Tokenizer.from_folder(out), ImageProcessor.from_folder(out), model_config, texts
    )
    maker = DemoMaker(builder, tools, config, config.pretrain.seed)
    model = _start(model_config, config.pretrain)
    model = pretrain.pretrain(model, maker, config.pretrain, print)
    save_folder(model, out, dtype="bfloat16")
    made = {
        "command": call.text,
        "seed": config.pretrain.seed,
        "commit": started["commit"],
        "packages": started["packages"],
        "fingerprint": fingerprint.of_policy_inputs(config, out),
        "pretrain": run_folder.to_json_value(config.pretrain.to_dict()),
    }
    (out / "made.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    with config.unlocked():
        config.model.folder = str(out)
    label.make(config, out / labels.SHIPPED_NAME, train_draws=2)
    print(f"wrote {out}")
    return 0


def _start(model_config: QwenVLConfig, config) -> QwenVL:
    """Random weights, or those kept after the phase before `start_at`."""
    names = sorted(config.phases)
    before = names[: names.index(pretrain.phases_to_run(config)[0])]
    if not before:
        return QwenVL(model_config, rngs=nnx.Rngs(config.seed))
    if not config.keep_phases:
        raise ValueError(
            f"pretrain.start_at={config.start_at} needs the weights after {before[-1]}: name their "
            "folder with --config.pretrain.keep_phases"
        )
    folder = pathlib.Path(config.keep_phases) / before[-1]
    model, kept = load_weights(folder)
    if kept != model_config:
        raise ValueError(f"{folder} holds a model of other sizes than config.pretrain gives")
    return model
