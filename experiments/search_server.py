"""search-server: serves the searches of a config over HTTP, for all hosts of a run.

SEARCH_SERVER_TOKEN=... SERPER_API_KEY=... python -m experiments search-server --config=CONFIG \
    --config.search.kind=live
SEARCH_SERVER_TOKEN=... python -m experiments train --config=CONFIG --config.search.kind=server \
    --config.search.server.endpoint=http://127.0.0.1:8100
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.search import build, wire
from svrl_jax.search.errors import SearchSetupError


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --host, --port."""
    command_line.define_config(values, argv)
    flags.DEFINE_string(
        "host", "127.0.0.1", "address to listen at; 0.0.0.0 for other machines", flag_values=values
    )
    flags.DEFINE_integer(
        "port", 8100, "0 takes a free one", lower_bound=0, upper_bound=65535, flag_values=values
    )


def main(call: command_line.Call) -> int:
    """Serves until it is interrupted."""
    try:
        import uvicorn  # late: an extra

        from svrl_jax.search import server
    except ImportError as error:
        raise SearchSetupError(
            f"the package {error.name!r} is missing: pip install -e '.[server]'"
        ) from error
    config = command_line.config_of(call.values)
    config_lib.check(config, training=False)
    if config.search.kind == "server":
        raise command_line.UsageError(
            "config.search.kind is 'server': a server needs searches of its own, such as live"
        )
    token = os.environ.get(wire.TOKEN)
    if not token:
        raise SearchSetupError(
            f"the environment variable {wire.TOKEN} is not set: choose a secret, and set it here "
            "and where the runs start"
        )
    tools = build.build_tools(config)
    app = server.make_app(tools, lambda: build.describe(config.search, tools), token)
    found = build.describe(config.search, tools)
    print(f"serving {found} at http://{call.values.host}:{call.values.port}", flush=True)
    # Its access log would hold one line a search.
    uvicorn.run(
        app, host=call.values.host, port=call.values.port, access_log=False, log_level="warning"
    )
    return 0
