"""index: documents and pictures of your own -> a folder that config.search.kind=index searches.

python -m experiments index --source=DOCUMENTS.jsonl --pictures=FOLDER --out=DIR
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Sequence

from absl import flags

from experiments import command_line
from svrl_jax.data import tables
from svrl_jax.search import stored


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--source, --pictures, --out, --embedding."""
    flags.DEFINE_list(
        "source", [], "parquet, JSON or JSON lines with text and, where known, id, title, link",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "pictures", None, "folder of pictures with metadata.jsonl: file, title and, where known, "
        "id, link, text", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("out", None, "folder to make", flag_values=values)
    flags.DEFINE_string(
        "embedding", "colours", "of pictures: colours; tower:FOLDER, a policy's vision tower; or "
        "module:function from uint8[H, W, 3] to float32[D]", flag_values=values,
    )  # fmt: skip


def main(call: command_line.Call) -> int:
    """Builds the folder and says what it holds."""
    values = call.values
    if not values.out:
        raise command_line.UsageError("name the folder to make: --out=DIR")
    if not values.source and not values.pictures:
        raise command_line.UsageError("name --source=FILES, --pictures=FOLDER, or both")
    start = time.perf_counter()
    pictures = _pictures(pathlib.Path(values.pictures)) if values.pictures else ()
    about = stored.build(
        values.out, _documents(values.source), pictures, embedding=values.embedding
    )
    size = sum(about["files"].values())
    print(
        f"wrote {values.out}: {about['num_documents']} documents, {about['num_pictures']} "
        f"pictures, {size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s; search it by "
        f"--config.search.kind=index --config.search.index_folder={values.out}"
    )
    return 0


def _documents(paths: Sequence[str]) -> Iterator[dict]:
    for path in paths:
        for number, row in enumerate(tables.rows_of(pathlib.Path(path))):
            if isinstance(row, str):
                raise stored.IndexBuildError(f"{path}, row {number}: {row}")
            yield row


def _pictures(folder: pathlib.Path) -> Iterator[tuple[bytes, dict]]:
    for number, row in enumerate(tables.rows_of(folder / "metadata.jsonl")):
        if isinstance(row, str) or not row.get("file"):
            raise stored.IndexBuildError(f"{folder}/metadata.jsonl, row {number}: no `file` in it")
        yield (folder / row["file"]).read_bytes(), row
