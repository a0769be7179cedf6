"""Rows of tokens -> log-prob and entropy of each trained policy token.

The one convention of the project, for sampler and trainer alike: raw logits divided by the sampling
temperature, banned ids left out of the softmax. No top-k, no top-p.

The head is applied to policy tokens only, and to a block of the vocabulary at a time under a
running softmax; the backward pass computes each block again from the saved log-sum-exp. So neither
pass holds more than [tokens, block] (full logits are 2.5 GB of float32 for 4,096 tokens of a real
vocabulary), the head's weights are read once a pass, and on a mesh each block is gathered, and its
gradient scattered, once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from svrl_jax.models.qwen_vl.sharding import constrain
from svrl_jax.types import TrainBatch

# Finite, because entropy is sum p log p and 0 * -inf is NaN; far below any logit, so that exp is 0.
MASKED_LOGIT = -1e30
# Elements of one block of logits on a device (float32): 2 MiB stay in a CPU's cache; an accelerator
# wants larger products.
BLOCK_ELEMENTS = {"cpu": 2**19, "other": 2**25}
# A block has at least this many ids, and a multiple of it.
BLOCK_UNIT = 1024
# Sums over a block are kept apart in as many lanes to the end: a sum along the innermost axis is
# one long chain of additions on a CPU.
LANES = 128


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
    """Log-probs under the sampler's distribution, all of them: what `head_logps` is held against.

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


def head_logps(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    keep: np.ndarray,
    temperature: float,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from.

    Args:
      hidden: float[B, M, D].
      weight: float[V, D] of the head; products are in hidden's dtype with float32 sums.
      targets: int32[B, M], ids that are kept.
      keep, temperature: as `log_softmax_kept`.
      block: ids of a block; None chooses by BLOCK_ELEMENTS. The result does not depend on it.
    Returns:
      logps float32[B, M], differentiable by hidden and weight, and entropy float32[B, M] in nats,
      without gradient.
    """
    # A second copy of a boolean table costs nothing, and as an argument it is no constant of a
    # vocabulary's length in the program.
    return _head_logps(hidden, weight, targets, jnp.asarray(keep), float(temperature), block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _head_logps(hidden, weight, targets, keep, temperature, block):
    return _head_forward(hidden, weight, targets, keep, temperature, block)[0]


def _head_forward(hidden, weight, targets, keep, temperature, block):
    blocks = _Blocks(hidden, weight, keep, temperature, block)

    def meet(carry, number):
        top, total, weighted, found = carry  # [B, M, W, lanes]
        ids, _, logits = blocks.logits(number, hidden)
        is_target = targets[..., None, None] == ids
        found = found + blocks.lanes(jnp.where(is_target, logits, 0.0)).sum(-2)
        logits = blocks.lanes(logits)  # [B, M, W, v / lanes, lanes]
        new_top = jnp.maximum(top, logits.max(-2))
        shifted = logits - new_top[..., None, :]
        share = jnp.exp(shifted)
        shrink = jnp.exp(top - new_top)
        # sum of share * shifted under the new top, from that under the old one
        weighted = shrink * (weighted + (top - new_top) * total) + (share * shifted).sum(-2)
        total = shrink * total + share.sum(-2)
        return (new_top, total, weighted, found), None

    zeros = jnp.zeros((*targets.shape, blocks.ways, blocks.num_lanes), jnp.float32)
    start = (jnp.full_like(zeros, 2 * MASKED_LOGIT), zeros, zeros, zeros)
    (top, total, weighted, found), _ = jax.lax.scan(meet, start, jnp.arange(blocks.count))
    # The lanes' softmaxes joined.
    whole_top = top.max((-2, -1), keepdims=True)
    shrink = jnp.exp(top - whole_top)
    weighted = (shrink * (weighted + (top - whole_top) * total)).sum((-2, -1))
    total = (shrink * total).sum((-2, -1))
    lse = whole_top[..., 0, 0] + jnp.log(total)
    entropy = jnp.log(total) - weighted / total
    return (found.sum((-2, -1)) - lse, entropy), (hidden, weight, targets, keep, lse)


def _head_backward(temperature, block, saved, d_out):
    hidden, weight, targets, keep, lse = saved
    blocks = _Blocks(hidden, weight, keep, temperature, block)
    slope = (d_out[0] / temperature)[..., None, None]  # entropy has no gradient

    def meet(carry, number):
        d_hidden, d_weight = carry
        ids, table, logits = blocks.logits(number, hidden)
        share = jnp.exp(logits - lse[..., None, None])  # 0 where not kept, or seen before
        d_logits = slope * ((targets[..., None, None] == ids) - share)
        # A target is kept, so what is not kept has gradient 0.
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden += jnp.einsum("bmwv,wvd->bmd", d_logits, table, preferred_element_type=jnp.float32)
        d_table = jnp.einsum("bmwv,bmd->wvd", d_logits, hidden, preferred_element_type=jnp.float32)
        return (d_hidden, blocks.add(d_weight, number, d_table)), None

    d_weight = jnp.zeros(blocks.table.shape, jnp.float32)
    start = (jnp.zeros(hidden.shape, jnp.float32), blocks.spread(d_weight))
    (d_hidden, d_weight), _ = jax.lax.scan(meet, start, jnp.arange(blocks.count))
    d_weight = d_weight.reshape(weight.shape).astype(weight.dtype)
    return d_hidden.astype(hidden.dtype), d_weight, None, None


_head_logps.defvjp(_head_forward, _head_backward)


class _Blocks:
    """The vocabulary as [ways, V / ways], cut along the second axis.

    `ways` is the number of devices that the vocabulary is split over, so that every block lies
    evenly on all of them. The last block begins earlier instead of being shorter; what an earlier
    one has seen already is masked.
    """

    def __init__(self, hidden, weight, keep, temperature, block: int | None):
        mesh = jax.sharding.get_abstract_mesh()
        sizes = {} if mesh.empty else dict(mesh.shape)
        vocab, width = weight.shape
        tensor = sizes.get("tensor", 1)
        self.ways = tensor if vocab % tensor == 0 else 1
        self.length = vocab // self.ways
        rows = sizes.get("data", 1) * sizes.get("fsdp", 1)
        tokens = max(1, int(np.prod(hidden.shape[:-1])) // rows)
        if block is None:
            platform = jax.default_backend()
            elements = BLOCK_ELEMENTS.get(platform, BLOCK_ELEMENTS["other"])
            block = max(1, elements // tokens // BLOCK_UNIT) * BLOCK_UNIT
        self.block = min(block, self.length)
        self.count = -(-self.length // self.block)
        self.table = weight.reshape(self.ways, self.length, width)
        self.keep = keep.reshape(self.ways, self.length)
        self.scale = 1.0 / temperature
        self.dtype = hidden.dtype
        self.num_lanes = LANES if self.block % LANES == 0 else 1

    def lanes(self, x):
        """[..., v] -> [..., v / lanes, lanes]."""
        return x.reshape(*x.shape[:-1], -1, self.num_lanes)

    def start(self, number):
        return jnp.minimum(number * self.block, self.length - self.block)

    def logits(self, number, hidden):
        """(ids int32[W, v], weights [W, v, D], scaled and masked logits float32[B, M, W, v])."""
        start = self.start(number)
        table = jax.lax.dynamic_slice_in_dim(self.table, start, self.block, 1).astype(self.dtype)
        table = constrain(table, "vocab", None, None)
        places = start + jnp.arange(self.block)
        ids = jnp.arange(self.ways)[:, None] * self.length + places
        keep = jax.lax.dynamic_slice_in_dim(self.keep, start, self.block, 1)
        is_new = keep & (places >= number * self.block)
        logits = jnp.einsum("bmd,wvd->bmwv", hidden, table, preferred_element_type=jnp.float32)
        logits = constrain(logits, "batch", None, "vocab", None)
        ids = jnp.where(is_new, ids, -1)
        return ids, table, jnp.where(is_new, logits * self.scale, MASKED_LOGIT)

    def add(self, d_weight, number, d_table):
        """Adds a block's gradient in place."""
        start = self.start(number)
        d_table = constrain(d_table, "vocab", None, "embed")
        old = jax.lax.dynamic_slice_in_dim(d_weight, start, self.block, 1)
        return self.spread(jax.lax.dynamic_update_slice_in_dim(d_weight, old + d_table, start, 1))

    def spread(self, d_weight):
        """Where the gradient lies: as the weights do."""
        return constrain(d_weight, "vocab", None, "embed")


def per_token_logps(
    model,
    batch: TrainBatch,
    plan,
    *,
    temperature: float,
    banned_ids: Sequence[int],
    block: int | None = None,
    remat: str = "none",
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of each trained token of a microbatch.

    logps[b, m] belongs to ids[b, target_index[b, m]] and is read off the output at
    predictor_index[b, m]. For one episode of ids [7, 8, 9] with mask [0, 1, 1]: targets 1 and 2,
    predictors 0 and 1, and the row is [log p(8 | 7), log p(9 | 7, 8)].

    Args:
      model: QwenVL.
      batch: rows; only arrays are read, so it may be traced.
      plan: VisionPlan of the batch's pictures, or None without pictures.
      temperature: above 0; that of the sampler.
      banned_ids: ids masked in the sampler.
      block: see `head_logps`.
      remat: what layers keep for the backward pass, see `layers.scan_layers`.
    Returns:
      logps and entropy, float32[B, M] each, 0 where loss_mask is 0.
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
    predictors = jnp.take_along_axis(hidden, batch.predictor_index[..., None], axis=1)  # [B, M, D]
    predictors = constrain(predictors, "batch", None, None)
    targets = jnp.take_along_axis(batch.ids, batch.target_index, axis=1)  # [B, M]
    weight = model.head_weight()
    keep = kept_ids(weight.shape[0], banned_ids)
    logps, entropy = head_logps(predictors, weight, targets, keep, temperature, block)
    is_real = batch.loss_mask > 0
    return jnp.where(is_real, logps, 0.0), jnp.where(is_real, entropy, 0.0)
