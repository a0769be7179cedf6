"""Figures of index folders: python -m tests.search.scale 10000 100000

Passages are windows of 60 words drawn from the embedded encyclopedia; pictures are flags of random
colours. Prints two lines a size: build time, megabytes, time of a query (median, 95%), both of CPU.
"""

import sys
import tempfile
import time

import numpy as np

from configs.base import get_config
from svrl_jax.data import sources
from svrl_jax.search import stored
from svrl_jax.types import Task
from tests.data.published_files import encode


def passages(count: int):
    rng = np.random.default_rng(0)
    documents = sources.documents()
    for number in range(count):
        document = documents[int(rng.integers(len(documents)))]
        words = document.text.split()
        start = int(rng.integers(max(1, len(words) - 60)))
        text = " ".join(words[start : start + 60]) or document.title
        yield {"id": str(number), "title": document.title, "text": text, "link": document.link}


def pictures(count: int):
    rng = np.random.default_rng(1)
    for number in range(count):
        blocks = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        yield encode(np.kron(blocks, np.ones((8, 8, 1), np.uint8))), {"title": f"picture {number}"}


def milliseconds(call, arguments) -> str:
    seconds = []
    for argument in arguments:
        start = time.thread_time()
        call(argument)
        seconds.append(time.thread_time() - start)
    return f"a query {np.median(seconds) * 1e3:.1f} ms ({np.quantile(seconds, 0.95) * 1e3:.1f})"


def main(sizes: list[int]) -> None:
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            titles = [d.title for d in sources.documents()[:: len(sources.documents()) // 200]]
            questions = [f"What is {title}" for title in titles]
            tools = measured(f"{folder}/t", f"{size} passages", passages(size))
            print(milliseconds(lambda query, of=tools: of.text_search(query, None), questions))
            tasks = [Task("t", "?", p, ("x",), "s", "c") for p, _ in pictures(100)]
            tools = measured(f"{folder}/p", f"{size} pictures", [], pictures(size))
            print(milliseconds(tools.image_search, tasks), flush=True)


def measured(folder: str, what: str, *rows) -> stored.IndexTools:
    start = time.process_time()
    about = stored.build(folder, *rows)
    seconds = time.process_time() - start
    print(f"{what}: {seconds:.1f} CPU s, {sum(about['files'].values()) / 1e6:.1f} MB, ", end="")
    config = get_config().search
    config.index_folder = folder
    return stored.IndexTools(config)


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]])
