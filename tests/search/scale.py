"""Figures of index folders: python -m tests.search.scale 10000 100000

Passages are windows of 60 words drawn from the embedded encyclopedia; pictures are flags of random
colours. Prints one line a size: build seconds, megabytes, milliseconds of a query (median, 95%).
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
        start = time.perf_counter()
        call(argument)
        seconds.append(time.perf_counter() - start)
    return f"{np.median(seconds) * 1e3:.1f} ms ({np.quantile(seconds, 0.95) * 1e3:.1f})"


def main(sizes: list[int]) -> None:
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            text = stored.build(f"{folder}/t", passages(size))
            text_s = time.process_time() - start
            start = time.process_time()
            image = stored.build(f"{folder}/p", [], pictures(size))
            image_s = time.process_time() - start
            config = get_config().search
            config.index_folder = f"{folder}/t"
            tools = stored.IndexTools(config)
            titles = [d.title for d in sources.documents()[:: len(sources.documents()) // 200]]
            queries = milliseconds(
                lambda t, tools=tools: tools.text_search(f"What is {t}", None), titles
            )
            config.index_folder = f"{folder}/p"
            tools = stored.IndexTools(config)
            asked = [Task("t", "?", p, ("x",), "s", "c") for p, _ in pictures(100)]
            looks = milliseconds(tools.image_search, asked)
            sizes_mb = [sum(about["files"].values()) / 1e6 for about in (text, image)]
            print(
                f"{size} passages: {text_s:.1f} CPU s, {sizes_mb[0]:.1f} MB, {queries}; "
                f"{size} pictures: {image_s:.1f} CPU s, {sizes_mb[1]:.1f} MB, {looks}",
                flush=True,
            )


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]])
