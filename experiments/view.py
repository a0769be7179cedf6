"""view RUN [RUN ...]: a folder that a browser opens, to look at episodes and compare models.

A RUN is a run folder, a records file, or MMSearch-R1 traces; NAME=RUN names it. Runs meet by their
questions' ids. Open OUT/index.html from disk, or add --serve. The same command makes the page anew,
also while a run goes on.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from configs import base
from experiments import command_line
from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.protocol.prompts import PromptBuilder, read_prompt
from svrl_jax.rewards.answers import SCORERS
from svrl_jax.search.imported import pictures_by_id
from svrl_jax.viewer import build, runs, serve

TAKES_ARGUMENT = True


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--out, --serve, --port, --scorer, --tokens, --tokenizer, --pictures, --traces_policy."""
    flags.DEFINE_string("out", None, "folder of the page; new, or of this mode", flag_values=values)
    flags.DEFINE_bool("serve", False, "serve it on 127.0.0.1 until stopped", flag_values=values)
    flags.DEFINE_integer(
        "port", 8008, "of --serve; 0 takes a free one", lower_bound=0, upper_bound=65535,
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_enum(
        "scorer", "em", sorted(SCORERS), "of answers that were not scored", flag_values=values
    )
    flags.DEFINE_bool("tokens", True, "with the token view (it needs room)", flag_values=values)
    flags.DEFINE_string(
        "tokenizer", None, "folder that spells the tokens; default: the run's own policy. Traces "
        "are counted by it; default: the embedded policy's", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "pictures", None, "parquet in FVQA's row format with the pictures of traces",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "traces_policy", "MMSearch-R1", "name of the agent behind traces", flag_values=values
    )


def main(call: command_line.Call) -> int:
    """Builds the page, prints what it holds, and serves it if asked."""
    values = call.values
    if not call.arguments or not values.out:
        raise command_line.UsageError(
            "name runs and a folder: python -m experiments view RUN [RUN ...] --out=DIR"
        )
    found = runs.parse_runs(call.arguments)
    out = pathlib.Path(values.out)
    tokenizer = Tokenizer.from_folder(values.tokenizer) if values.tokenizer else None
    reader = _trace_reader(values) if any(r.kind == "traces" for r in found) else None

    def tokenizer_of(run: runs.Run) -> Tokenizer | None:
        if run.kind == "traces":
            return reader.builder.tokenizer
        return tokenizer or runs.tokenizer_of(run)

    built = build.build(
        out,
        build.read_all(found, lambda run: runs.read_sets(run, reader)),
        scorer=values.scorer,
        tokenizers=tokenizer_of if values.tokens else None,
        say=print,
    )
    for problem in built.problems:
        print(f"note: {problem}")
    print(
        f"{built.questions} questions, {built.episodes} episodes, {built.models} models, "
        f"{built.num_bytes / 1e6:.1f} MB: {out / 'index.html'}"
    )
    if values.serve:
        _serve(out, values.port)
    return 0


def _serve(out: pathlib.Path, port: int) -> None:
    try:
        server = serve.make_server(out, port)
    except OSError as error:
        raise command_line.UsageError(
            f"port {port} cannot be used ({error}): choose another --port"
        ) from error
    print(f"http://{serve.HOST}:{server.server_address[1]}/ (Ctrl-C stops)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _trace_reader(values: flags.FlagValues) -> runs.TraceReader:
    config = base.get_config()
    folder = values.tokenizer or config.pretrain.out
    texts = {"agent": config.prompt.agent_file, "direct": config.prompt.direct_file}
    builder = PromptBuilder(
        Tokenizer.from_folder(folder),
        ImageProcessor.from_folder(folder),
        QwenVLConfig.from_folder(folder),
        {regime: read_prompt(file) for regime, file in texts.items()},
    )
    return runs.TraceReader(
        builder=builder,
        rollout_config=config.rollout,
        search_config=config.search,
        pictures=pictures_by_id(values.pictures) if values.pictures else {},
        policy_name=values.traces_policy,
    )
