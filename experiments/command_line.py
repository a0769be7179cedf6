"""Flags of a mode -> a checked config; known mistakes -> one sentence."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from absl import flags
from ml_collections import ConfigDict, config_flags

from svrl_jax.analysis.ablations import ReadmeError
from svrl_jax.checkpoint import CheckpointError
from svrl_jax.config import ConfigError
from svrl_jax.data.prepare import PrepareError
from svrl_jax.data.prepared import PreparedError
from svrl_jax.data.sources import MissingDataError
from svrl_jax.data.tables import TableError
from svrl_jax.data.traces import TraceError
from svrl_jax.evals.consensus import EmbeddingError
from svrl_jax.processing.images import PictureError
from svrl_jax.records import RecordError
from svrl_jax.rollout.remote import PolicyStopped
from svrl_jax.search.errors import SearchSetupError, SearchStopped
from svrl_jax.search.fvqa_cache import CacheError
from svrl_jax.search.imported import ImportedError
from svrl_jax.search.record import SearchRecordError
from svrl_jax.search.stored import IndexBuildError
from svrl_jax.training.alarms import AlarmStop
from svrl_jax.training.assemble import PolicyFolderError
from svrl_jax.training.mesh import MeshError
from svrl_jax.training.run_folder import RunFolderError
from svrl_jax.viewer.runs import ViewError


@dataclasses.dataclass(frozen=True)
class Call:
    """One command.

    Attributes:
      values: parsed flags.
      arguments: what was typed without a flag; () unless the mode takes arguments.
      text: the command as typed, for records.
    """

    values: flags.FlagValues
    arguments: tuple[str, ...]
    text: str


class UsageError(Exception):
    """A command that cannot run as typed; the message is the whole story."""


_KNOWN = (
    AlarmStop, UsageError, ConfigError, CheckpointError, MissingDataError, PictureError,
    RecordError,
    RunFolderError, MeshError, PolicyFolderError, PrepareError, PreparedError, TableError,
    FileNotFoundError, IndexBuildError, ImportedError, SearchRecordError, SearchSetupError,
    SearchStopped, TraceError, CacheError, EmbeddingError, ReadmeError, PolicyStopped,
    ViewError,
)  # fmt: skip


def run(module: ModuleType, argv: Sequence[str]) -> int:
    """Parses a mode's flags and runs it.

    Args:
      module: has `define_flags(values, argv)` and `main(call) -> int`.
      argv: program and mode, then flags.
    Returns:
      0, the mode's own status, or 2 after a known mistake.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    values = flags.FlagValues()
    module.define_flags(values, argv)
    flags.DEFINE_bool("help", False, "list the flags", flag_values=values)
    command = shlex.join(["python", "-m", "experiments", argv[0].split()[-1], *argv[1:]])
    try:
        rest = _parse(values, argv)
        if values.help:
            print((module.__doc__ or "").strip() + "\n" + values.get_help())
            return 0
        if rest and not getattr(module, "TAKES_ARGUMENT", False):
            raise UsageError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
        return module.main(Call(values, tuple(rest), command))
    except _KNOWN as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def define_config(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config=FILE[:WORD] and --config.a.b=value, locked.

    Args:
      argv: what will be parsed; the config's own flags are made from it.
    """
    config_flags.DEFINE_config_file(
        "config", None, "config file, with :WORD for its argument", lock_config=True,
        sys_argv=list(argv), flag_values=values,
    )  # fmt: skip


def define_workdir(values: flags.FlagValues) -> None:
    """--workdir=DIR."""
    flags.DEFINE_string(
        "workdir",
        None,
        "the run's folder; default: runs/ and the config's name",
        flag_values=values,
    )


def config_of(values: flags.FlagValues) -> ConfigDict:
    """The parsed config; UsageError if none was named."""
    if values.config is None:
        raise UsageError("name a config: --config=configs/quickstart.py")
    return values.config


def workdir_of(values: flags.FlagValues) -> str:
    """The workdir as named, else runs/ and the config file's name (and its :WORD)."""
    if values.workdir:
        return values.workdir
    config_of(values)
    name = pathlib.PurePath(values["config"].config_filename).name
    return str(pathlib.PurePath("runs", name.replace(".py", "").replace(":", "_")))


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses; returns the positional arguments.

    config_flags reports a wrong key, file or value by whatever Python raised; here it is a
    sentence.
    """
    try:
        return values(list(argv))[1:]
    except flags.Error as error:
        raise UsageError(str(error)) from error
    except (AttributeError, KeyError) as error:
        raise UsageError(_wrong_key(error, argv)) from error
    except OSError as error:
        raise UsageError(_unreadable_config(error, argv)) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"the config cannot be read: {error}") from error


def _unreadable_config(error: OSError, argv: Sequence[str]) -> str:
    path = (_config_file(argv) or "").split(":")[0]
    if not os.path.isfile(path):
        return f"config file {path!r} does not exist"
    return f"config file {path!r} cannot be read: {error}"


def _config_file(argv: Sequence[str]) -> str | None:
    return next((a.split("=", 1)[1] for a in argv if a.startswith("--config=")), None)


def _wrong_key(error: Exception, argv: Sequence[str]) -> str:
    typed = [m.group(1) for a in argv if (m := re.match(r"--(?:no)?config\.([\w.]+)", a))]
    message = " ".join(str(error).split()).strip("'\"")
    known = _known_keys(_config_file(argv))
    wrong = [k for k in typed if known and k not in known]
    if not wrong:
        return f"the config cannot be read: {message}"
    near = difflib.get_close_matches(wrong[0], known, n=1, cutoff=0.5)
    hint = f"; did you mean config.{near[0]}?" if near else ""
    return f"config has no key {wrong[0]!r}{hint} (configs/base.py lists every key)"


def _known_keys(config_file: str | None) -> list[str]:
    if config_file is None:
        return []
    values, argv = flags.FlagValues(), ["program", f"--config={config_file}"]
    define_config(values, argv)
    try:
        values(argv)
    except Exception:  # the file itself is at fault; the first message says so
        return []
    return list(_flatten(values.config))


def _flatten(config: ConfigDict, prefix: str = ""):
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _flatten(value, f"{prefix}{key}.")
        yield f"{prefix}{key}"
