"""The arrays of one episode, written once: prompt, sampled tokens and tool text go in, in order.

Ids are the truth. Nothing here is ever re-spelt: the next context is the old ids, the sampled ids
and the new tool ids, element for element, and the trainer receives the very same arrays.
"""

from __future__ import annotations

import numpy as np

from svrl_jax.models.qwen_vl import rope
from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.types import Episode, Prompt

NO_GRIDS = np.zeros((0, 3), np.int32)


class Transcript:
    """Grows by `append`; ids, loss mask, log-probs and positions always have one length.

    Attributes:
      next_position: M-RoPE position (all axes) of the next text token. Behind a picture it is less
        than the number of tokens: 5 text + a 2x2 picture + 3 text are 12 tokens and next is 10.
    """

    def __init__(self, prompt: Prompt, config: QwenVLConfig):
        self._config = config
        self._ids = [np.asarray(prompt.ids, np.int32)]
        self._positions = [np.asarray(prompt.positions, np.int32)]
        self._loss_mask = [np.zeros(len(prompt.ids), np.int32)]
        self._logps = [np.zeros(len(prompt.ids), np.float32)]
        self._pixel_values = [np.asarray(prompt.pixel_values, np.float32)]
        self._grids = [np.asarray(prompt.image_grid_thw, np.int32)]
        self.next_position = int(prompt.positions.max()) + 1
        self._check()

    @classmethod
    def of_episode(
        cls, prompt: Prompt, config: QwenVLConfig, episode: Episode, length: int
    ) -> Transcript:
        """The transcript as it stood when the episode had its first `length` tokens.

        Args:
          prompt: the episode's first message.
          length: at least the prompt's; no picture may be cut.
        """
        made = cls(prompt, config)
        merge = config.vision_config.merge_unit
        tokens = episode.image_grid_thw.prod(axis=-1, dtype=np.int64) // merge
        left = int((episode.ids[:length] == config.image_token_id).sum())
        grids = episode.image_grid_thw[: int((np.cumsum(tokens) <= left).sum())]
        made._ids = [episode.ids[:length]]
        made._positions = [episode.positions[:, :length]]
        made._loss_mask = [episode.loss_mask[:length]]
        made._logps = [episode.sampler_logps[:length]]
        made._pixel_values = [
            episode.pixel_values[: int(grids.prod(axis=-1, dtype=np.int64).sum())]
        ]
        made._grids = [grids]
        made.next_position = int(episode.positions[:, :length].max()) + 1
        made._check()
        return made

    def __len__(self) -> int:
        return sum(len(part) for part in self._ids)

    def append_sampled(self, ids: np.ndarray, logps: np.ndarray) -> None:
        """Appends policy tokens int32[n] (loss mask 1) with the sampler's log-probs float32[n]."""
        self._append(ids, np.ones(len(ids), np.int32), logps, NO_GRIDS)

    def append_environment(
        self,
        ids: np.ndarray,
        pixel_values: np.ndarray | None = None,
        image_grid_thw: np.ndarray = NO_GRIDS,
    ) -> None:
        """Appends tokens of the environment (loss mask 0, log-prob 0), with their pictures."""
        zeros = np.zeros(len(ids))
        self._append(ids, zeros.astype(np.int32), zeros.astype(np.float32), image_grid_thw)
        if pixel_values is not None and len(pixel_values):
            self._pixel_values.append(np.asarray(pixel_values, np.float32))

    def since(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int32[n] and positions int32[3, n] from index `start` on."""
        return np.concatenate(self._ids)[start:], np.concatenate(self._positions, axis=1)[:, start:]

    def pictures(self, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """pixel_values float32[L, C] and image_grid_thw int32[I, 3] from token `start` on.

        Args:
          start: index into the tokens, not inside a picture.
        """
        some = self._pixel_values
        pixel_values = some[0] if len(some) == 1 else np.concatenate(some)
        grids = np.concatenate(self._grids)
        if start:
            ids = np.concatenate(self._ids)[:start]
            before = int((ids == self._config.image_token_id).sum())
            patches = grids.prod(axis=-1, dtype=np.int64)
            count = before * self._config.vision_config.merge_unit
            grids = grids[int((np.cumsum(patches) <= count).sum()) :]
            pixel_values = pixel_values[count:]
        return pixel_values, grids

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names in `Episode`."""
        return {
            "ids": np.concatenate(self._ids),
            "loss_mask": np.concatenate(self._loss_mask),
            "positions": np.concatenate(self._positions, axis=1),
            "sampler_logps": np.concatenate(self._logps),
            "pixel_values": np.concatenate(self._pixel_values),
            "image_grid_thw": np.concatenate(self._grids),
        }

    def _append(self, ids, loss_mask, logps, grids) -> None:
        ids = np.asarray(ids, np.int32)
        positions, self.next_position = rope.mrope_positions(
            ids, grids, self._config, start=self.next_position
        )
        self._ids.append(ids)
        self._positions.append(positions)
        self._loss_mask.append(loss_mask)
        self._logps.append(np.asarray(logps, np.float32))
        if len(grids):
            self._grids.append(np.asarray(grids, np.int32))
        self._check()

    def _check(self) -> None:
        lengths = (
            len(self._ids[-1]),
            len(self._loss_mask[-1]),
            len(self._logps[-1]),
            self._positions[-1].shape[1],
        )
        if len(set(lengths)) != 1:
            raise ValueError(
                "an append must bring as many ids as mask entries, log-probs and positions; "
                f"got {lengths}"
            )
