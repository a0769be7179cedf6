"""100,000 small rows through `prepare` and one epoch, each in a process of its own: rows a second
and memory. Run by tests/data/test_scale.py, or by hand:

    python -m tests.data.scale FOLDER [ROWS]
"""

import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.data import published_files as files

BATCH = 32
MARKS = (0.2, 0.6, 1.0)  # shares of the rows at which memory is read


def main(folder: pathlib.Path, num_rows: int = 100_000) -> dict[str, dict]:
    """Both figures, by stage."""
    write_source(folder / "in" / "fvqa_train.parquet", num_rows)
    found = {}
    for stage in ("prepare", "epoch"):
        command = [sys.executable, "-m", "tests.data.scale", str(folder), stage]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[stage] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_source(path: pathlib.Path, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    pictures = [files.encode(rng.integers(0, 255, (112, 168, 3), np.uint8)) for _ in range(64)]
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = None
    for start in range(0, num_rows, 1000):
        rows = [
            files.fvqa_row(i, images=[{"bytes": pictures[i % 64], "path": None}])
            for i in range(start, min(start + 1000, num_rows))
        ]
        table = pa.Table.from_pylist(rows, None if writer is None else writer.schema)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def own_mb() -> float:
    """Resident memory that is the process's own; mapped pages of files are the system's to drop."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024 / 1e6


class Meter:
    """Reads memory at MARKS."""

    def __init__(self):
        self.memory: dict[float, float] = {}
        self.start = time.perf_counter(), time.process_time()

    def at(self, done: int, total: int) -> None:
        for mark in MARKS:
            if mark not in self.memory and done >= mark * total:
                self.memory[mark] = own_mb()

    def figures(self, rows: int) -> dict:
        seconds = time.perf_counter() - self.start[0]
        cpu_seconds = time.process_time() - self.start[1]
        return {
            "rows": rows,
            "rows_per_s": rows / seconds,
            "rows_per_cpu_s": rows / cpu_seconds,  # on a machine that others use too
            "own_mb": [self.memory[mark] for mark in MARKS],
        }


def run_prepare(folder: pathlib.Path) -> dict:
    from svrl_jax.data import prepare

    meter = Meter()
    made = prepare.prepare(
        "fvqa", str(folder / "in"), folder, say=str,
        progress=lambda split, done, total: meter.at(done, total),
    )  # fmt: skip
    return meter.figures(made["splits"]["train"]["tasks"])


def run_epoch(folder: pathlib.Path) -> dict:
    from svrl_jax.data.pipeline import TaskStream, fit_rows
    from svrl_jax.data.prepared import Prepared
    from svrl_jax.models.qwen_vl import QwenVLConfig
    from svrl_jax.processing.images import ImageProcessor
    from svrl_jax.processing.tokenizer import Tokenizer
    from svrl_jax.protocol.prompts import PromptBuilder, read_prompt

    policy = pathlib.Path(__file__).parents[2] / "svrl_jax/data/quickstart"
    text = read_prompt("svrl_jax/protocol/prompts/agent_short.txt")
    builder = PromptBuilder(
        Tokenizer.from_folder(policy), ImageProcessor.from_folder(policy),
        QwenVLConfig.from_folder(policy), {"agent": text}, max_tokens=4096,
    )  # fmt: skip
    rows = Prepared(folder / "fvqa").split("train")
    opened = time.perf_counter()
    fit = fit_rows(rows, lambda question, size: builder.measure(question, size, "agent"))
    measured = time.perf_counter() - opened
    stream = TaskStream(
        rows, fit.kept, lambda task: builder.build(task, "agent"), seed=0, batch_size=BATCH,
        read_threads=2, prefetch_batches=4,
    )  # fmt: skip
    meter, seen = Meter(), set()
    whole = len(rows) - len(rows) % BATCH
    while stream.position < whole:
        tasks, prompts = next(stream)
        assert all(t.id == p.task_id for t, p in zip(tasks, prompts, strict=True))
        seen.update(t.id for t in tasks)
        meter.at(stream.position, whole)
    stream.close()
    assert len(seen) == whole
    return meter.figures(whole) | {"measure_s": measured}


if __name__ == "__main__":
    where, what = pathlib.Path(sys.argv[1]), (sys.argv[2:] or ["100000"])[0]
    stages = {"prepare": run_prepare, "epoch": run_epoch}
    print(json.dumps(stages[what](where) if what in stages else main(where, int(what))))
