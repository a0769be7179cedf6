"""A page's text and a question -> the page's own sentences nearest to it, without a model."""

from __future__ import annotations

import math
import re
from collections import Counter

_STOP = frozenset(
    "a an and are as at be by did do does for from had has have how in is it its of on or that the"
    " this to was were what when where which who whom whose why will with".split()
)
_ENDS = re.compile(r"(?<=[.!?])\s+(?=\S)|(?<=[。！？])|\n+")


def best_sentences(text: str, question: str, num_words: int) -> str:
    """The sentences that share the most and the rarest words with the question, in page order.

    Args:
      text: of a page; "" gives "".
      question: without a word in common, the page's beginning is given.
      num_words: at least 1; the last sentence is cut to it.
    """
    sentences = [s for part in _ENDS.split(text) if (s := " ".join(part.split()))]
    sentences = list(dict.fromkeys(sentences))  # menus repeat
    words = [_words(s) for s in sentences]
    wanted = _words(question)
    spread = Counter(w for found in words for w in found & wanted)
    weight = {w: math.log(1 + len(sentences) / n) for w, n in spread.items()}
    # A long sentence holds more words by chance; a heading of two words says nothing.
    scores = [
        sum(weight[w] for w in found & wanted) / (1 + 0.02 * len(found)) * min(1, len(found) / 4)
        for found in words
    ]
    ranked = sorted(range(len(sentences)), key=lambda i: (-scores[i], i))
    chosen, left = {}, num_words
    for i in ranked:
        if left <= 0 or (chosen and scores[i] <= 0):
            break
        kept = sentences[i].split()[:left]
        chosen[i], left = " ".join(kept), left - len(kept)
    if not any(scores[i] > 0 for i in chosen):
        return " ".join(" ".join(sentences).split()[:num_words])
    return " ".join(chosen[i] for i in sorted(chosen))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold())) - _STOP
