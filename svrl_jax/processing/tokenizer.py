"""Text <-> token ids, by the `tokenizer.json` of a model folder.

Two ways in, and the difference is a safety rule: `encode` gives special tokens for their spellings
and is for our own templates; `encode_plain` treats `<|im_end|>` and the like as ordinary characters
and is for every text that others wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np
import tokenizers

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"


class Tokenizer:
    """Byte-level BPE with Qwen's special tokens.

    Attributes:
      vocab_size: used ids; the model's embedding may have more rows, which no text gives.
      eos_ids: ids that end a turn, the chat's end first.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        tokenizer.no_truncation()  # a file may carry either setting; ids must be exact
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        # Without added tokens nothing but the bytes' own merges is left to match a spelling.
        plain = json.loads(tokenizer.to_str())
        self._added = {token["id"] for token in plain["added_tokens"]}
        plain["added_tokens"] = []
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_ids = (self.im_end_id, self.pad_id)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> Tokenizer:
        """Reads `folder/tokenizer.json`; raises FileNotFoundError or ValueError naming it."""
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} is missing: a model folder needs a tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
        return cls(tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """Text of our own templates -> int32[T]; spellings of special tokens give their ids."""
        return _array(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> np.ndarray:
        """Untrusted text -> int32[T] without any special id; decodes to the same characters (NFC).

        Raises:
          ValueError: the vocabulary can spell a special token from ordinary bytes.
        """
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._added.isdisjoint(ids):
            raise ValueError("this tokenizer's merges reach a special token's id")
        return _array(ids)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """Ids -> text; bytes that form no character become U+FFFD.

        Args:
          skip_special: leave special tokens out.
        Raises:
          ValueError: an id that no text gives (an unused embedding row, or padding below 0).
        """
        ids = np.asarray(ids, np.int64).reshape(-1)
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(bad):
            raise ValueError(f"ids {bad[:5].tolist()} are outside [0, {self.vocab_size})")
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special)

    def num_bytes(self, token_id: int) -> int:
        """Bytes of a token's text: a byte-level token is spelt with one character a byte."""
        return len(self._tokenizer.id_to_token(token_id) or "")

    def token_id(self, token: str) -> int:
        """The id of one token by its spelling; raises KeyError if there is none."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise KeyError(f"the tokenizer has no token {token!r}")
        return found

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def image_token_id(self) -> int:
        """The placeholder that stands once a merged cell."""
        return self.token_id(IMAGE_PAD)

    @property
    def vision_start_id(self) -> int:
        """Stands before a picture."""
        return self.token_id(VISION_START)

    @property
    def vision_end_id(self) -> int:
        """Stands behind a picture."""
        return self.token_id(VISION_END)

    @property
    def im_start_id(self) -> int:
        """Begins a message."""
        return self.token_id(IM_START)

    @property
    def im_end_id(self) -> int:
        """Ends a message."""
        return self.token_id(IM_END)

    @property
    def pad_id(self) -> int:
        """Fills rows; also one of the end ids, so masks never follow from it."""
        return self.token_id(ENDOFTEXT)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Every added token, sorted; a policy may sample none of them but the end ids."""
        return tuple(sorted(self._added))


def _array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, np.int32).reshape(-1)
