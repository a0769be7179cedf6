"""Policy tokens of an episode -> the part of a turn that each belongs to: for metrics."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from svrl_jax.types import Episode

SPANS = ("other", "reason", "mask", "query", "answer")
_BLOCK = re.compile(r"<(reason|verify|search|text_search|answer)>.*?</\1>", re.DOTALL)
_SPAN_OF_TAG = {
    "reason": "reason", "verify": "mask", "search": "query", "text_search": "query",
    "answer": "answer",
}  # fmt: skip


def token_spans(episode: Episode, num_bytes: Callable[[int], int]) -> np.ndarray:
    """Number in SPANS of each token; a block's tags belong to it.

    A token that lies across a border belongs to the part in which it begins. What stands in no
    complete block, and every token that is not the policy's, is `other`.

    Args:
      episode: its turns' texts are what its ids decode to.
      num_bytes: bytes of a token's text.
    Returns:
      int32[T].
    """
    spans = np.zeros(len(episode.ids), np.int32)
    for turn in episode.turns:
        ids = episode.ids[turn.start : turn.stop]
        starts = np.cumsum([0, *(num_bytes(int(i)) for i in ids)])[:-1]
        for block in _BLOCK.finditer(turn.text):
            first, last = (len(turn.text[:at].encode("utf-8")) for at in block.span())
            inside = (starts >= first) & (starts < last)
            number = SPANS.index(_SPAN_OF_TAG[block.group(1)])
            spans[turn.start : turn.stop][inside] = number
    return spans
