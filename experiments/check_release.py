"""check_release FOLDER: a released checkpoint's log-probs beside transformers', its speed and MFU.

Loads a real folder (Qwen2.5-VL 3B, 7B; Qwen3-VL 2B, 4B, 8B), runs rows of questions with pictures
through it, and prints tokens a second and the share of the device's peak. Where torch is installed
the same rows go through transformers, and the gap of the log-probs is printed.

    python -m experiments check_release ~/Qwen2.5-VL-7B-Instruct --rows=fvqa_test.parquet
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

import svrl_jax
from experiments import command_line
from svrl_jax.data import cells, tables
from svrl_jax.models.qwen_vl import QwenVLConfig
from svrl_jax.models.qwen_vl.flops import PEAK_FLOPS, forward_flops
from svrl_jax.models.qwen_vl.sharding import on_mesh
from svrl_jax.processing.processor import Inputs, Processor
from svrl_jax.training.mesh import make_mesh

TAKES_ARGUMENT = True


@dataclasses.dataclass(frozen=True)
class Row:
    """One question, its picture's bytes, and an answer to score."""

    question: str
    picture: bytes
    answer: str


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--rows, --num_rows, --dtype, --peak_tflops, --out."""
    flags.DEFINE_string(
        "rows", None, "FVQA rows: a parquet or JSON-lines file in its columns", flag_values=values
    )
    flags.DEFINE_integer("num_rows", 8, "rows to run", lower_bound=1, flag_values=values)
    flags.DEFINE_enum(
        "dtype",
        "bfloat16",
        ["bfloat16", "float32"],
        "of parameters",
        flag_values=values,
    )
    flags.DEFINE_float(
        "peak_tflops", None, "the device's peak, where it is not known by name", flag_values=values
    )
    flags.DEFINE_integer("tensor", 1, "devices that heads are split over", flag_values=values)
    flags.DEFINE_string("out", None, "a JSON file for the figures", flag_values=values)


def main(call: command_line.Call) -> int:
    """Runs the check; 0 unless the folder or the rows cannot be read."""
    if len(call.arguments) != 1 or not call.values.rows:
        raise command_line.UsageError(
            "name one model folder and rows: python -m experiments check_release FOLDER "
            "--rows=fvqa_test.parquet"
        )
    folder = pathlib.Path(call.arguments[0])
    if not (folder / "config.json").is_file():
        raise command_line.UsageError(f"{folder} holds no config.json: name a model folder")
    rows = read_rows(pathlib.Path(call.values.rows), call.values.num_rows)
    figures = check(folder, rows, call.values.dtype, call.values.peak_tflops, call.values.tensor)
    for name, value in figures.items():
        print(f"{name:<28} {_shown(value)}")
    if call.values.out:
        pathlib.Path(call.values.out).write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


def read_rows(path: pathlib.Path, num_rows: int) -> list[Row]:
    """The first readable rows of a file in FVQA's columns (prompt, images, reward_model).

    Raises:
      UsageError: none can be read.
    """
    found: list[Row] = []
    for row in tables.rows_of(path):
        if len(found) == num_rows:
            break
        if isinstance(row, str):
            continue
        found.append(
            Row(
                question=cells.question(row["prompt"]),
                picture=cells.picture_bytes(row["images"], [path.parent]),
                answer=cells.answers(row["reward_model"]["ground_truth"])[0],
            )
        )
    if not found:
        raise command_line.UsageError(f"{path} holds no readable row")
    return found


def check(
    folder: pathlib.Path, rows: Sequence[Row], dtype: str, peak_tflops: float | None, tensor: int
) -> dict[str, float | int | str | None]:
    """Figures by name; log-probs are of question, answer and template, in nats, over the raw
    distribution (temperature 1)."""
    mesh = None
    if jax.device_count() > 1:
        mesh = make_mesh(ConfigDict({"data": 1, "fsdp": -1, "tensor": tensor}))
    start = time.perf_counter()
    model, processor = svrl_jax.load(folder, dtype=dtype, mesh=mesh)
    jax.block_until_ready(jax.tree.leaves(model))
    load_s = time.perf_counter() - start
    batches = [inputs_of(processor, row) for row in rows]
    with on_mesh(mesh):
        ours = [logps(svrl_jax.logits(model, one), one) for one in batches]  # compiles
        start = time.perf_counter()
        for one in batches:
            svrl_jax.logits(model, one).block_until_ready()
        seconds = time.perf_counter() - start
    tokens = sum(int(one.lengths.sum()) for one in batches)
    flops = sum(
        forward_flops(model.config, one.lengths, one.image_grid_thw, one.prompt_ids.size)
        for one in batches
    )
    device = jax.devices()[0].device_kind
    peak = peak_tflops * 1e12 if peak_tflops else PEAK_FLOPS.get(device)
    figures: dict[str, float | int | str | None] = {
        "model": model.config.to_hf()["model_type"],
        "parameters": sum(x.size for x in jax.tree.leaves(model)),
        "dtype": dtype,
        "device": f"{jax.device_count()} x {device}",
        "rows": len(rows),
        "tokens": tokens,
        "pictures' tokens": sum(int(one.image_grid_thw.prod(axis=1).sum()) // 4 for one in batches),
        "load_s": load_s,
        "tokens_per_s": tokens / seconds,
        "tflops_per_s": flops / seconds / 1e12,
        "mfu": flops / seconds / (peak * jax.device_count()) if peak else None,
        "logp_mean": float(np.mean(np.concatenate(ours))),
    }
    if importlib.util.find_spec("torch") is None:
        return figures | {"gap": "not compared: torch is not installed"}
    theirs = reference_logps(folder, model.config, batches, dtype)
    gaps = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    return figures | {
        "logp_gap_mean": float(gaps.mean()),
        "logp_gap_p99": float(np.quantile(gaps, 0.99)),
        "logp_gap_max": float(gaps.max()),
    }


def inputs_of(processor: Processor, row: Row) -> Inputs:
    """A row's question, picture and answer as one finished conversation."""
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row.question}]},
        {"role": "assistant", "content": row.answer},
    ]
    return processor(messages, [row.picture], add_generation_prompt=False)


def logps(logits: jax.Array, inputs: Inputs) -> np.ndarray:
    """float32[n - 1], log-prob of each token of a one-row batch but the first."""
    logits = jax.nn.log_softmax(np.asarray(logits, np.float32)[0, :-1], axis=-1)
    ids = np.asarray(inputs.prompt_ids)[0, 1:]
    return np.asarray(np.take_along_axis(np.asarray(logits), ids[:, None], axis=-1)[:, 0])


def reference_logps(
    folder: pathlib.Path, config: QwenVLConfig, batches: Sequence[Inputs], dtype: str
) -> list[np.ndarray]:
    """The same by transformers and torch, which this project needs here alone."""
    torch, transformers = (importlib.import_module(n) for n in ("torch", "transformers"))
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=getattr(torch, dtype), device_map=None
    ).eval()
    found = []
    for one in batches:
        ids = torch.tensor(one.prompt_ids, dtype=torch.long)
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == config.image_token_id).long(),
                pixel_values=torch.tensor(one.pixel_values).to(model.dtype),
                image_grid_thw=torch.tensor(one.image_grid_thw, dtype=torch.long),
            ).logits
        found.append(logps(logits.float().numpy(), one))
    return found


def _shown(value: float | int | str | None) -> str:
    if value is None:
        return "unknown (give --peak_tflops)"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
