"""The training loop: SVRL as the method reads (SPEC 2 to 4, arXiv:2609.08025)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from svrl_jax import checkpoint, grpo
from svrl_jax.data.pipeline import TasksAlone, TaskStream
from svrl_jax.protocol.spans import token_spans
from svrl_jax.records import Record
from svrl_jax.rewards.oracle import Oracle
from svrl_jax.training import alarms, draw, finish
from svrl_jax.training import labels as labels_lib
from svrl_jax.training import mesh as mesh_lib
from svrl_jax.training import metrics as metrics_lib
from svrl_jax.training.assemble import Bench
from svrl_jax.training.progress import Progress
from svrl_jax.training.run_folder import RunFolder, read_metrics


def train(
    bench: Bench,
    run: RunFolder,
    checkpoints: checkpoint.Checkpoints,
    state: grpo.TrainState,
    spec: grpo.UpdateSpec,
    tasks_stream: TaskStream | TasksAlone,
    search_free: labels_lib.SearchFree,
    oracle: Oracle,
    progress: Progress,
) -> grpo.TrainState:
    """Trains from `state.step` to `config.num_steps` and returns the last state.

    Every step is written before the next begins; checkpoints hold the state, the data position and
    the config together, so the same command goes on where a stopped run's last checkpoint was.

    Raises:
      AlarmStop: an alarm whose action is `stop`; the step is written and saved before.
    """
    config = bench.config
    rate = metrics_lib.machine_rate()
    lines = read_metrics(run.metrics)
    for step in range(int(state.step), config.num_steps):
        clock = metrics_lib.Clock()
        tasks, prompts = next(tasks_stream)  # [P] Task, [P] Prompt
        clock.lap("data")
        free = search_free.of(tasks)  # [P] bool; may sample from the initial policy
        clock.lap("labels")
        bench.sampler.set_params(state.params)
        drawn = draw.draw_groups(  # [P][G] Episode and Score, equal groups drawn again
            bench, tasks, prompts, free, oracle, step, clock, progress.rollout
        )
        episodes, scores, valid = drawn.episodes, drawn.scores, drawn.valid
        advantages = grpo.group_advantages(  # float32[P, G]
            drawn.totals,
            valid,
            objective=config.grpo.objective,
            equal_tolerance=config.grpo.equal_tolerance,
        )
        batch = grpo.make_batches(  # rows of static shapes
            episodes,
            advantages,
            valid,
            config.grpo,
            merge_size=bench.model.config.vision_config.spatial_merge_size,
            image_token_id=bench.model.config.image_token_id,
            pad_id=bench.tokenizer.pad_id,
            spans=[[token_spans(e, bench.tokenizer.num_bytes) for e in g] for g in episodes],
            min_rows=mesh_lib.row_ways(spec.mesh),
        )
        clock.lap("batch")
        state, figures, logps = grpo.update(state, bench.initial_params, batch, spec)
        clock.lap("update")
        figures |= {"resampled_groups": drawn.num_resampled, **drawn.speed}
        line = metrics_lib.of_step(episodes, scores, figures, clock, rate)
        lines.append(line)
        raised = alarms.check(lines, config.alarms)
        line |= {f"alarm_{name}": int(name in raised) for name in alarms.WATCHED}
        records = _records(episodes, tasks, scores, advantages, logps)
        run.write(step, line, records if config.log_episodes else None)
        progress.step(step, line)
        for sentence in raised.values():
            progress.say(sentence)
        must_stop = alarms.stops(raised, config.alarms)
        done = step + 1
        if config.eval.every and done % config.eval.every == 0:
            rows = finish.evaluate_policy(bench, state.params, search_free, oracle, "policy")
            run.write_eval(done, finish.figures_of(rows))
        if done % config.save_every == 0 or done == config.num_steps or must_stop:
            checkpoints.save(
                done,
                state,
                data_position=tasks_stream.position,
                config=run.config,
                host={"saved": time.strftime("%Y-%m-%dT%H:%M:%S")},
            )
        if must_stop:
            checkpoints.wait()
            raise alarms.AlarmStop(f"stopped after step {done}: " + "; ".join(must_stop))
    return state


def restore(
    checkpoints: checkpoint.Checkpoints, state: grpo.TrainState
) -> tuple[grpo.TrainState, int]:
    """The newest finished checkpoint's state and data position; (`state`, 0) if there is none."""
    found = checkpoints.restore(state)
    return (state, 0) if found is None else (found.state, found.data_position)


def _records(
    episodes, tasks, scores, advantages: np.ndarray, logps: Sequence[Sequence]
) -> list[Record]:
    return [
        Record(
            episode=episode,
            task=task,
            score=scores[p][g],
            advantage=float(advantages[p, g]),
            per_token_logps=logps[p][g],
        )
        for p, task in enumerate(tasks)
        for g, episode in enumerate(episodes[p])
    ]
