"""ask: one picture and one question; prints the episode, turn by turn."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.processing.images import load_picture
from svrl_jax.training import assemble
from svrl_jax.types import Episode, Task


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --picture, --picture_url, --question, --policy, --regime, --temperature, --seed."""
    command_line.define_config(values, argv)
    for name, text in (
        ("picture", "a picture file"),
        ("question", "the question"),
        ("picture_url", "public address of the same picture, which a live image search needs"),
        ("policy", "Hugging Face folder that answers; default: config.model.folder"),
    ):
        flags.DEFINE_string(name, None, text, flag_values=values)
    flags.DEFINE_enum(
        "regime", "agent", ["agent", "direct"], "tools allowed, or none", flag_values=values
    )
    flags.DEFINE_float("temperature", 0.0, "0 is greedy", lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=0, flag_values=values)


def main(call: command_line.Call) -> int:
    """Asks and prints."""
    config = command_line.config_of(call.values)
    config_lib.check(config, training=False)
    if not call.values.question or not call.values.picture:
        raise command_line.UsageError("give --picture=FILE and --question=TEXT")
    path = pathlib.Path(call.values.picture)
    if not path.is_file():
        raise command_line.UsageError(f"--picture: {str(path)!r} is not a file")
    data = path.read_bytes()
    load_picture(data)  # before anything is built
    bench = assemble.assemble(config)
    policy = assemble.policy_folder(call.values.policy or config.model.folder)
    bench.sampler.set_params(assemble.policy_params(bench, policy))
    task = Task(
        "ask", call.values.question, data, ("",), "ask", "", picture_url=call.values.picture_url
    )
    [[episode]] = bench.run(
        [task],
        bench.sampler,
        step=call.values.seed,
        group_size=1,
        regime=call.values.regime,
        temperature=call.values.temperature,
        query_choice=config.eval.query_choice,
        policy_name="ask",
    )
    print(show(episode))
    return 0


def show(episode: Episode) -> str:
    """The episode as plain text."""
    lines = []
    for number, turn in enumerate(episode.turns, start=1):
        lines.append(f"--- turn {number}, policy ({turn.stop - turn.start} tokens)")
        lines.append(turn.text)
        if turn.parsed.violations:
            lines.append(f"    violations: {', '.join(turn.parsed.violations)}")
        if turn.call is not None:
            query = f" {turn.call.query!r}" if turn.call.query else ""
            lines.append(f"--- {turn.call.tool}{query}: {turn.call.status}")
            lines += [
                f"    #{i} {item.title}: {item.text}" for i, item in enumerate(turn.call.items, 1)
            ]
    lines.append(
        f"--- {episode.end_reason}; {len(episode.ids)} tokens, {len(episode.calls)} tool calls"
    )
    lines.append(f"answer: {episode.answer}")
    return "\n".join(lines)
