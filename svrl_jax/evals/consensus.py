"""Several answers to one question -> one: exact majority, else nearest-neighbour consensus."""

from __future__ import annotations

import collections
import hashlib
import importlib
from collections.abc import Callable, Sequence

import numpy as np

from svrl_jax.rewards.answers import normalise

# Texts -> float[n, D], of any length; nearer means more alike under the cosine.
Embedding = Callable[[Sequence[str]], np.ndarray]

_WIDTH = 512
_SENTENCES = "sentence-transformers/"


class EmbeddingError(RuntimeError):
    """An embedding that cannot be had; names the remedy."""


def aggregate(answers: Sequence[str | None], embed: Embedding) -> tuple[str | None, str]:
    """The answer that many answers come to.

    Args:
      answers: in order; None where there was none. They do not vote.
      embed: used only where no normalised answer has more than half of the votes.
    Returns:
      (the answer as first written, how: `majority`, `consensus` or `none`). Consensus takes the
      answer whose mean cosine to all the others is highest, the first of equals.
    """
    given = [a for a in answers if a is not None and a.strip()]
    if not given:
        return None, "none"
    forms = [normalise(a) for a in given]
    form, votes = collections.Counter(forms).most_common(1)[0]
    if 2 * votes > len(given):
        return given[forms.index(form)], "majority"
    vectors = np.asarray(embed(forms), np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(norms == 0, 1.0, norms)
    near = vectors @ vectors.T
    nearness = (near.sum(axis=1) - np.diag(near)) / max(len(given) - 1, 1)
    return given[int(np.argmax(np.round(nearness, 9)))], "consensus"


def embedding_of(name: str) -> Embedding:
    """What `config.eval.embedding` names.

    Args:
      name: "" for `by_letters`; `sentence-transformers/MODEL` (extra `embeddings`); or
        `module:function`.
    Raises:
      EmbeddingError: it cannot be imported.
    """
    if not name:
        return by_letters
    try:
        if name.startswith(_SENTENCES):
            library = importlib.import_module("sentence_transformers")
            return library.SentenceTransformer(name).encode
        module, _, function = name.partition(":")
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise EmbeddingError(
            f"config.eval.embedding {name!r} cannot be had ({error}): write module:function, or "
            "pip install -e '.[embeddings]' for sentence-transformers/MODEL"
        ) from error


def by_letters(texts: Sequence[str]) -> np.ndarray:
    """float64[n, 512]: counts of hashed runs of three letters, the text's edges marked.

    Light and local: near in spelling, not in meaning ("1,500 m" and "1500 metres" are near, "USA"
    and "America" are not).
    """
    out = np.zeros((len(texts), _WIDTH))
    for row, text in zip(out, texts, strict=True):
        marked = f"^{text}$"
        for i in range(max(len(marked) - 2, 1)):
            digest = hashlib.blake2s(marked[i : i + 3].encode(), digest_size=4).digest()
            row[int.from_bytes(digest, "big") % _WIDTH] += 1.0
    return out
