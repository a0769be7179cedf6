r"""record: look into a record of searches, export it, or fill it.

python -m experiments record stats FILE
python -m experiments record export FILE --out=ROWS.jsonl
python -m experiments record import FILE --rows=ROWS.jsonl
python -m experiments record import FILE --traces=TRACES.jsonl --pictures=FVQA.parquet \
    --config=CONFIG
python -m experiments record import FILE --fvqa_cache=CACHE.pkl --pictures=FVQA.parquet \
    --config=CONFIG
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from svrl_jax.data.traces import read_traces
from svrl_jax.search import exchange, fvqa_cache, imported
from svrl_jax.search.build import record_settings
from svrl_jax.search.record import SearchRecord

TAKES_ARGUMENT = True


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--out, --rows, --traces, --fvqa_cache, --pictures, --config."""
    command_line.define_config(values, argv)
    for name, text in (
        ("out", "export: JSON lines to write"),
        ("rows", "import: JSON lines that export wrote"),
        (
            "traces",
            "import: traces of MMSearch-R1, replayed by --config",
        ),
        ("fvqa_cache", "import: FVQA's published image-search cache, replayed by --config"),
        ("pictures", "import: parquet with the pictures of the questions"),
    ):
        flags.DEFINE_string(name, None, text, flag_values=values)


def main(call: command_line.Call) -> int:
    """stats, export or import."""
    values = call.values
    if len(call.arguments) != 2 or call.arguments[0] not in ("stats", "export", "import"):
        raise command_line.UsageError("write: record stats|export|import FILE")
    what, path = call.arguments
    if what == "import":
        return _import(values, path)
    record = SearchRecord(path, "replay")
    if what == "stats":
        for (tool, failure), count in record.counts().items():
            print(f"{tool:<13} {failure or 'answered':<14} {count}")
        print(f"snapshot {record.snapshot()}, {pathlib.Path(path).stat().st_size} bytes")
        return 0
    if not values.out:
        raise command_line.UsageError("name the file to write: --out=ROWS.jsonl")
    print(f"wrote {exchange.export_rows(record, values.out)} rows to {values.out}")
    return 0


def _import(values: flags.FlagValues, path: str) -> int:
    if sum(v is not None for v in (values.rows, values.traces, values.fvqa_cache)) != 1:
        raise command_line.UsageError(
            "name one thing to import: --rows=FILE, --traces=FILE or --fvqa_cache=FILE"
        )
    if values.rows is not None:
        record = SearchRecord(path, "record")
        print(f"{exchange.import_rows(record, values.rows)} rows; snapshot {record.snapshot()}")
        return 0
    if values.pictures is None:
        raise command_line.UsageError("name the questions' pictures: --pictures=FVQA.parquet")
    config = command_line.config_of(values).search
    settings = record_settings(config)
    keys = imported.picture_keys_by_id(values.pictures)
    # Sources are read whole before the record is touched.
    if values.traces is not None:
        traces = list(read_traces(values.traces))
        counts = imported.import_traces(SearchRecord(path, "record"), traces, keys, settings)
    else:
        px = config.thumbnail_px
        limits = {"max_pixels": config.max_picture_pixels, "thumbnail_px": px}
        entries = list(fvqa_cache.read_cache(values.fvqa_cache, **limits))
        counts = imported.import_fvqa_cache(
            SearchRecord(path, "record"), entries, keys, settings.image, px
        )
    record = SearchRecord(path, "replay")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    print(f"snapshot {record.snapshot()}")
    return 0
