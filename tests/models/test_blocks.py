"""Every block against transformers', each on what the reference really fed it in one joined pass.

Where the reference permutes patches into windows, its rows are put back in our order first.
"""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from svrl_jax.models.qwen_vl import attend, attention_mask, mrope_positions, plan_vision
from svrl_jax.models.qwen_vl.rope import vision_rope
from svrl_jax.models.qwen_vl.vision import attend_segments
from svrl_jax.models.qwen_vl.vision_qwen3 import learned_positions
from tests.models.conftest import IMAGE, close, row

GRIDS = [(1, 4, 6), (1, 12, 10)]
IDS = row(3, GRIDS[0], 4, GRIDS[1], 6)


class Seen:
    """Inputs and outputs of the reference's submodules in one pass."""

    def __init__(self, pair):
        self.pair = pair
        self._calls = {}
        hooks = [
            module.register_forward_hook(self._keep(name), with_kwargs=True)
            for name, module in pair.torch_model.named_modules()
        ]
        with torch.no_grad():
            self.logits = pair.torch_model(
                input_ids=torch.tensor(IDS[None], dtype=torch.long),
                mm_token_type_ids=torch.tensor(IDS[None] == IMAGE, dtype=torch.long),
                pixel_values=torch.tensor(pair.pixels(GRIDS)),
                image_grid_thw=torch.tensor(GRIDS),
            ).logits.numpy()
        for hook in hooks:
            hook.remove()
        self.plan = plan_vision(np.asarray(GRIDS), pair.config.vision_config)
        self.order = np.arange(self.plan.num_patches)  # the reference's row i is our row order[i]
        if self.plan.windows is not None:
            self.order = self.plan.windows.patch[self.plan.windows.valid]

    def _keep(self, name):
        def hook(module, args, kwargs, output):
            first = args[0] if args else next(iter(kwargs.values()))
            output = output[0] if isinstance(output, tuple) else output
            if torch.is_tensor(first) and torch.is_tensor(output):
                self._calls[name] = (first.numpy().copy(), output.numpy().copy())

        return hook

    def __call__(self, name):
        """(first input, output), patches in our order."""
        first, output = self._calls[name]
        is_vision = name.startswith("model.visual.") and "patch_embed" not in name
        return (self._ours(first), self._ours(output)) if is_vision else (first, output)

    def _ours(self, x):
        order = self.order
        if len(x) * 4 == len(order):  # merged cells
            order = order[::4] // 4
        assert len(x) == len(order)
        put = np.empty_like(x)
        put[order] = x
        return put


@pytest.fixture(scope="module")
def seen(pair):
    return Seen(pair)


def layer_of(stack, index):
    graphdef, params = nnx.split(stack)
    return nnx.merge(graphdef, jax.tree.map(lambda p: p[index], params))


def test_text_blocks_equal_the_reference(pair, seen):
    model, name = pair.model.language_model, "model.language_model"
    positions = mrope_positions(IDS, np.asarray(GRIDS), pair.config)[0][:, None]
    group = np.zeros_like(IDS)[None]
    mask = attention_mask(group, group, group, group)
    cos, sin = model.angles(positions)

    def attention(part, x):
        return part.output(attend(*part.project(x, cos, sin), mask))

    ids, embeds = seen(f"{name}.embed_tokens")
    close(f"{pair.family} embed_tokens", model.embed_tokens(ids), embeds)
    for index in range(pair.config.text_config.num_hidden_layers):
        layer, at = layer_of(model.layers, index), f"{name}.layers.{index}"
        blocks = {
            "input_layernorm": layer.input_layernorm,
            "self_attn": lambda x, part=layer.self_attn: attention(part, x),
            "self_attn.q_proj": layer.self_attn.q_proj,
            "post_attention_layernorm": layer.post_attention_layernorm,
            "mlp": layer.mlp,
        }
        if pair.family == "qwen3_vl":
            blocks |= {"self_attn.q_norm": layer.self_attn.q_norm}
            blocks |= {"self_attn.k_norm": layer.self_attn.k_norm}
        for block, ours in blocks.items():
            x, expected = seen(f"{at}.{block}")
            assert expected.std() > 0.05
            close(f"{pair.family} text {index} {block}", ours(x), expected)
        x, expected = seen(at)
        close(
            f"{pair.family} text {index}",
            layer(x, cos, sin, lambda q, k, v: attend(q, k, v, mask)),
            expected,
        )
    x, expected = seen(f"{name}.norm")
    close(f"{pair.family} norm", model.norm(x), expected)
    x, expected = seen("lm_head")
    close(f"{pair.family} lm_head", pair.model.logits(x), expected)


def test_vision_blocks_equal_the_reference(pair, seen):
    tower, name = pair.model.visual, "model.visual"
    config, plan = pair.config.vision_config, seen.plan
    cos, sin = vision_rope(plan.position_hw, config.head_dim, config.rope_theta)
    x, expected = seen(f"{name}.patch_embed")
    close(f"{pair.family} patch_embed", tower.patch_embed(x, len(x)), expected)
    for index in range(config.depth):
        block, at = layer_of(tower.blocks, index), f"{name}.blocks.{index}"
        is_full = plan.windows is None or index in config.fullatt_block_indexes
        segments = plan.frames if is_full else plan.windows

        def attention(x, block=block, segments=segments):
            qkv = block.attn.project(x, cos, sin)
            return block.attn.proj(attend_segments(qkv, segments))

        parts = {"norm1": block.norm1, "attn": attention, "norm2": block.norm2, "mlp": block.mlp}
        for part, ours in parts.items():
            x, expected = seen(f"{at}.{part}")
            assert expected.std() > 0.05
            close(f"{pair.family} vision {index} {part}", ours(x), expected)
        x, expected = seen(at)
        choice = () if plan.windows is None else (np.bool_(is_full),)
        close(f"{pair.family} vision {index}", block(x, cos, sin, plan, *choice), expected)
    x, expected = seen(f"{name}.merger")
    close(f"{pair.family} merger", tower.merger(x), expected)


def test_learned_positions_and_deepstack_mergers_equal_the_reference(pair3, pairs):
    seen = Seen(pair3)
    tower, name = pair3.model.visual, "model.visual"
    _, embedded = seen(f"{name}.patch_embed")
    x, _ = seen(f"{name}.blocks.0")  # patch embedding plus learned positions
    found = learned_positions(tower.pos_embed, seen.plan.taps)
    assert np.abs(x - embedded).std() > 0.3
    close("qwen3_vl learned positions", found, x - embedded)
    for level, index in enumerate(pair3.config.vision_config.deepstack_visual_indexes):
        x, expected = seen(f"{name}.deepstack_merger_list.{level}")
        np.testing.assert_array_equal(x, seen(f"{name}.blocks.{index}")[1])
        merger = layer_of(tower.deepstack_merger_list, level)
        close(f"qwen3_vl deepstack merger {level}", merger(x), expected)


def test_levels_are_added_behind_the_first_layers_at_picture_tokens_only(pair3):
    """What a layer reads is what the one before it gave, plus that level's features."""
    seen = Seen(pair3)
    name = "model.language_model.layers"
    is_image = IDS == IMAGE
    levels = len(pair3.config.vision_config.deepstack_visual_indexes)
    assert levels < pair3.config.text_config.num_hidden_layers
    features = np.asarray(pair3.model.encode_images(pair3.pixels(GRIDS), seen.plan))
    features = np.split(features, 1 + levels, axis=1)[1:]
    for layer in range(levels):
        given, read = seen(f"{name}.{layer}")[1][0], seen(f"{name}.{layer + 1}")[0][0]
        np.testing.assert_array_equal(given[~is_image], read[~is_image])
        close(f"qwen3_vl level {layer}", features[layer], (read - given)[is_image])
