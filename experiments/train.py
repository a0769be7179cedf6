"""train: GRPO under the SVRL reward. The same command goes on with a stopped run."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags
from flax import nnx

from experiments import command_line
from svrl_jax import checkpoint, grpo
from svrl_jax import config as config_lib
from svrl_jax.analysis import figures, tables
from svrl_jax.models.qwen_vl import lora
from svrl_jax.models.qwen_vl.weights import save_folder
from svrl_jax.training import assemble, finish, loop, run_folder, task_source
from svrl_jax.training.labels import SearchFree
from svrl_jax.training.oracles import make_oracle
from svrl_jax.training.progress import Progress


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config and --workdir."""
    command_line.define_config(values, argv)
    command_line.define_workdir(values)


def main(call: command_line.Call) -> int:
    """Sets the run up, trains, exports, evaluates, shows."""
    config = command_line.config_of(call.values)
    config_lib.check(config, training=True)
    workdir = pathlib.Path(command_line.workdir_of(call.values))
    run_folder.check_workdir(workdir, config)
    splits = task_source.eval_splits(config)  # fails now rather than after the last step
    bench = assemble.assemble(config)
    spec = grpo.make_spec(
        bench.model,
        config.grpo,
        config.optim,
        temperature=config.rollout.temperature,
        budget=config.rollout.budget,
        banned_ids=bench.banned,
        remat=config.model.remat,
        mesh=bench.mesh,
    )
    folder = workdir / run_folder.CHECKPOINTS
    with checkpoint.Checkpoints(folder, keep=config.keep_checkpoints) as checkpoints:
        state, position = loop.restore(checkpoints, grpo.init_state(bench.initial_params, spec))
        bench.initial_params = grpo.reference_params(bench.initial_params, spec)
        nnx.update(bench.model, bench.initial_params)  # nobody else keeps another copy
        run = run_folder.RunFolder(workdir, config)  # only now: until here nothing is written
        start = int(state.step)
        run.start_at(start)
        oracle = make_oracle(bench, run.path)
        with Progress(config.num_steps, start) as progress:
            search_free = SearchFree(bench, run.path / "search_free.json", progress.say)
            if start:
                progress.say(f"going on from step {start} of {config.num_steps}")
            stream = task_source.train_stream(config, bench.builder, position, progress.say)
            state = loop.train(
                bench, run, checkpoints, state, spec, stream, search_free, oracle, progress
            )
            stream.close()
            checkpoints.wait()
            model = nnx.merge(nnx.split(bench.model)[0], state.params)
            if config.lora.rank:
                lora.save_adapter(model, run.path / "adapter", str(bench.folder))
                model = lora.merge_lora(model)
            save_folder(model, run.export, dtype="bfloat16", extra_files_from=bench.folder)
            figures.training_curves(
                run_folder.read_metrics(run.metrics), run.figures / "training.png"
            )
            if not splits:
                progress.say(f"{config.data.source} has no split to evaluate on")
            summary = finish.compare(
                bench, state.params, search_free, oracle, progress.say, run.path
            )
        run.write_json("summary.json", summary)
        (run.path / "summary.md").write_text(tables.as_markdown(summary), encoding="utf-8")
        progress.console.print(tables.as_screen(summary))
        progress.say(f"{run.path}: summary.json, summary.md, figures/training.png, export/")
    return 0
