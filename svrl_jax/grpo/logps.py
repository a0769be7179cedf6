"""Rows of tokens -> log-prob and entropy of each policy token.

The one convention of the project, for sampler and trainer alike: raw logits divided by the sampling
temperature, banned ids left out of the softmax. No top-k, no top-p.

The head is applied to policy tokens only, in chunks that are computed again in the backward pass,
so memory follows the chunk and not T x V (2.5 GB of float32 for 4,096 tokens of a real vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from svrl_jax.types import TrainBatch

# Finite, because entropy is sum p log p and 0 * -inf is NaN; far below any logit, so that exp is 0.
MASKED_LOGIT = -1e30
# Elements of one block of logits (float32): 256 MiB. Below it there is nothing to gain from chunks.
CHUNK_ELEMENTS = 2**26


def kept_ids(vocab_size: int, banned_ids: Sequence[int]) -> np.ndarray:
    """bool[V], False at ids that are never sampled (picture ids, padded vocabulary rows).

    Raises:
      ValueError: a banned id lies outside the vocabulary, or none is kept.
    """
    keep = np.ones(vocab_size, bool)
    banned = np.asarray(list(banned_ids), np.int64)
    if banned.size and not (0 <= banned.min() and banned.max() < vocab_size):
        raise ValueError(f"banned ids must lie in [0, {vocab_size}), got {banned.tolist()}")
    keep[banned] = False
    if not keep.any():
        raise ValueError("every id is banned")
    return keep


def log_softmax_kept(logits: jax.Array, keep: np.ndarray, temperature: float) -> jax.Array:
    """Log-probs under the sampler's distribution.

    Args:
      logits: [..., V], raw, any float dtype.
      keep: bool[V], from `kept_ids`.
      temperature: above 0.
    Returns:
      float32[..., V]; about MASKED_LOGIT at ids that are not kept, whose gradient is exactly 0 (the
      mask comes before the softmax, so no inf or NaN reaches the backward pass).
    """
    scaled = jnp.where(keep, logits.astype(jnp.float32) / temperature, MASKED_LOGIT)
    return jax.nn.log_softmax(scaled, axis=-1)


def target_logps(
    logits: jax.Array, targets: jax.Array, keep: np.ndarray, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from.

    Args:
      logits: [N, V], raw.
      targets: int32[N].
      keep, temperature: as `log_softmax_kept`.
    Returns:
      logps float32[N], differentiable, and entropy float32[N] in nats, without gradient.
    """
    logps = log_softmax_kept(logits, keep, temperature)  # [N, V]
    entropy = jax.lax.stop_gradient(-(jnp.exp(logps) * logps).sum(axis=-1))
    return jnp.take_along_axis(logps, targets[:, None], axis=-1)[:, 0], entropy


def chunked_target_logps(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    keep: np.ndarray,
    temperature: float,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`target_logps` of `head(hidden)` without ever holding more than one chunk of logits.

    Args:
      head: [n, D] -> logits [n, V].
      hidden: [N, D].
      targets: int32[N].
      keep, temperature: as `log_softmax_kept`.
      chunk_tokens: positions a chunk; None chooses by CHUNK_ELEMENTS.
    Returns:
      logps and entropy, float32[N] each. One chunk is computed directly, several one after another
      and again in the backward pass.
    """

    def block(hidden, targets):
        return target_logps(head(hidden), targets, keep, temperature)

    num = hidden.shape[0]
    chunk = chunk_tokens or max(1, CHUNK_ELEMENTS // keep.size)
    if num <= chunk:
        return block(hidden, targets)
    padding = -num % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)
    again = jax.checkpoint(block, prevent_cse=False)  # a scan body needs no barrier
    logps, entropy = jax.lax.map(lambda pair: again(*pair), (hidden, targets))
    return logps.reshape(-1)[:num], entropy.reshape(-1)[:num]


def per_token_logps(
    model,
    batch: TrainBatch,
    plan,
    *,
    temperature: float,
    banned_ids: Sequence[int],
    num_positions: int,
    chunk_tokens: int | None = None,
    remat: str = "none",
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of each policy token of a microbatch.

    logps[b, i] belongs to ids[b, i]: hidden[b, i - 1] predicts it. For ids [7, 8, 9] with mask
    [0, 1, 1] the row is [0, log p(8 | 7), log p(9 | 7, 8)]. The first token of a row, and of each
    packed group, has no predictor and gets 0.

    Args:
      model: QwenVL.
      batch: rows; only arrays are read, so it may be traced.
      plan: VisionPlan of the batch's pictures, or None without pictures.
      temperature: above 0; that of the sampler.
      banned_ids: ids masked in the sampler.
      num_positions: static number of positions the head is applied to, at least the number of
        policy tokens. Policy tokens beyond it would silently get 0, so the caller counts them.
      chunk_tokens: see `chunked_target_logps`.
      remat: what layers keep for the backward pass, see `layers.scan_layers`.
    Returns:
      logps and entropy, float32[B, T] each, 0 where loss_mask is 0.
    Raises:
      ValueError: the temperature is not above 0 (greedy episodes carry no gradient).
    """
    if not temperature > 0:
        raise ValueError(f"log-probs need a temperature above 0, got {temperature}")
    image_embeds = None
    if plan is not None:
        image_embeds = model.encode_images(batch.pixel_values, plan, remat=remat)
    hidden = model(
        batch.ids,
        batch.positions,
        batch.group_id,
        batch.branch_id,
        image_embeds,
        None if plan is None else batch.image_index,
        remat=remat,
    )  # [B, T, D]
    has_predictor = jnp.pad(batch.group_id[:, 1:] == batch.group_id[:, :-1], ((0, 0), (1, 0)))
    wanted = ((batch.loss_mask > 0) & has_predictor).reshape(-1)  # [B * T]
    (index,) = jnp.nonzero(wanted, size=num_positions, fill_value=wanted.size)
    predictor = hidden.reshape(-1, hidden.shape[-1]).at[index - 1].get(mode="clip")  # [N, D]
    targets = batch.ids.reshape(-1).at[index].get(mode="clip")  # [N]
    vocab_size = jax.eval_shape(model.logits, predictor[:1]).shape[-1]
    keep = kept_ids(vocab_size, banned_ids)
    values = chunked_target_logps(
        model.logits, predictor, targets, keep, temperature, chunk_tokens
    )  # [N] each

    def spread(x):  # [N] -> [B, T]; fill positions lie past the end and are dropped
        return (
            jnp.zeros(wanted.shape, x.dtype).at[index].set(x, mode="drop").reshape(batch.ids.shape)
        )

    return spread(values[0]), spread(values[1])
