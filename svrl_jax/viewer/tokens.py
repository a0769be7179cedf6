"""A Record's arrays -> the token view: text, loss mask, log-probs, sampler-trainer gap, advantage.

Log-probs are under the sampler's distribution on both sides (raw logits over the temperature,
banned ids masked).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.records import Record

MIN_RUN = 4  # as many equal tokens of the environment in a row, such as a picture's, become one
_BROKEN = "\ufffd"


@dataclasses.dataclass
class Vocabulary:
    """Spellings of single ids, read once.

    Attributes:
      tokenizer: of the run's policy; None where it is not known, and ids stand for themselves.
    """

    tokenizer: Tokenizer | None
    _known: dict[int, str] = dataclasses.field(default_factory=dict)

    def spell(self, token: int) -> str:
        """The token's text; U+FFFD where it holds a part of a character."""
        if token not in self._known:
            try:
                text = "" if self.tokenizer is None else self.tokenizer.decode([token])
            except ValueError:  # an id that no text gives
                text = ""
            self._known[token] = text or f"[{token}]"
        return self._known[token]

    def spell_all(self, ids: list[int]) -> list[str]:
        """Texts of ids in order; a character cut over several tokens stands at the first, and the
        others are empty.
        """
        out = [self.spell(i) for i in ids]
        if self.tokenizer is None:
            return out
        place = 0
        while place < len(ids):
            if _BROKEN in out[place]:
                for length in (2, 3, 4):
                    whole = self._decode(ids[place : place + length])
                    if whole and _BROKEN not in whole:
                        out[place : place + length] = [whole] + [""] * (length - 1)
                        place += length - 1
                        break
            place += 1
        return out

    def _decode(self, ids: list[int]) -> str:
        try:
            return self.tokenizer.decode(ids)
        except ValueError:
            return ""


def token_view(record: Record, vocabulary: Vocabulary) -> dict[str, Any]:
    """Arrays of one episode as JSON values.

    Returns:
      texts, counts (tokens that one entry stands for), mask (1 on policy tokens), all of one
      length; logps and gaps for policy tokens alone, in order (gap is trainer - sampler); each None
      where it was not recorded: an imported trace has no sampler log-probs (all are 0), and an
      episode that was not trained on has no trainer's. advantage: one number for all policy tokens,
      or None. spelt: whether texts are text or ids.
    """
    episode = record.episode
    ids = episode.ids.tolist()
    is_policy = episode.loss_mask == 1
    sampled = episode.sampler_logps[is_policy]
    has_logps = bool(sampled.size and np.any(sampled != 0))
    gaps = None
    if record.per_token_logps is not None and has_logps:
        gaps = record.per_token_logps[is_policy] - sampled
    places, counts = _fold_runs(episode.ids, ~is_policy)
    texts = vocabulary.spell_all(ids)
    return {
        "texts": [texts[i] for i in places.tolist()],
        "counts": counts.tolist(),
        "mask": episode.loss_mask[places].tolist(),
        "logps": _rounded(sampled) if has_logps else None,
        "gaps": None if gaps is None else _rounded(gaps),
        "advantage": None if record.advantage is None else round(float(record.advantage), 6),
        "spelt": vocabulary.tokenizer is not None,
    }


def _fold_runs(ids: np.ndarray, may_fold: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places of the entries, tokens that each stands for). Runs shorter than MIN_RUN stay as they
    are: two line ends in a row are no run.
    """
    goes_on = np.zeros(len(ids), bool)
    goes_on[1:] = (ids[1:] == ids[:-1]) & may_fold[1:] & may_fold[:-1]
    starts = np.flatnonzero(~goes_on)
    lengths = np.diff(starts, append=len(ids))
    run_lengths = np.repeat(lengths, lengths)  # of the run that a token lies in
    is_long = run_lengths >= MIN_RUN
    places = np.flatnonzero(~goes_on | ~is_long)
    return places, np.where(is_long, run_lengths, 1)[places]


def _rounded(values: np.ndarray) -> list[float | None]:
    """Four decimals; None for what is no number."""
    return [round(v, 4) if np.isfinite(v) else None for v in values.astype(float).tolist()]
