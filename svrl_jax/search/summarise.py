"""A document and a query -> the few words of the document nearest to the query."""

from __future__ import annotations

import re

_STOP = frozenset("a an and are at by for from in is of on or the to what which with".split())


def window(text: str, query: str, title: str, num_words: int) -> str:
    """The window of `num_words` words that holds most of the query's words, the first of equals.

    Words of the title count a tenth, since the title is shown anyway. A window is centred on a
    match.

    Args:
      text: document; "" gives "".
      query: its function words are ignored; without a match the text's beginning is returned.
      title: the document's title.
      num_words: at least 1.
    """
    words = text.split()
    if len(words) <= num_words:
        return " ".join(words)
    folded = [_fold(w) for w in words]
    in_title = {_fold(w) for w in title.split()}
    wanted = {_fold(w) for w in query.split()} - _STOP - {""}
    weight = {w: 0.1 if w in in_title else 1.0 for w in wanted}
    best, best_start = -1.0, 0
    for centre, word in enumerate(folded):
        if word not in weight:
            continue
        start = min(max(0, centre - num_words // 2), len(words) - num_words)
        score = sum(weight[w] for w in wanted & set(folded[start : start + num_words]))
        if score > best + 1e-9:
            best, best_start = score, start
    return " ".join(words[best_start : best_start + num_words])


def _fold(word: str) -> str:
    return re.sub(r"^\W+|\W+$|['’]s$", "", word.lower())
