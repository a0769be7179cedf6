"""Adapters in the linear maps: nothing at first, then W + s B A, merged or as PEFT reads them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.models.qwen_vl.lora import add_lora, has_lora, merge_lora, save_adapter
from svrl_jax.models.qwen_vl.sharding import logical_axes, path_name
from tests.grpo import tiny

TARGETS = ("language_model.layers.*", "visual.blocks.*.qkv")


def make_model(rank=0):
    model = QwenVL(tiny.CONFIG, rngs=nnx.Rngs(0))
    return add_lora(model, rank, 2.0 * rank, TARGETS) if rank else model


def with_random_b(model):
    rng = np.random.default_rng(0)
    params = nnx.split(model)[1]

    def one(path, leaf):
        is_b = path_name(path).endswith("lora_b")
        return leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32) if is_b else leaf

    return nnx.merge(nnx.split(model)[0], jax.tree_util.tree_map_with_path(one, params))


def hidden(model):
    ids = np.random.default_rng(1).integers(0, 50, (1, 9))
    zeros, positions = np.zeros_like(ids), np.broadcast_to(np.arange(9), (3, 1, 9))
    with jax.default_matmul_precision("highest"):
        return np.asarray(model(jnp.asarray(ids), jnp.asarray(positions), zeros, zeros))


@pytest.fixture(scope="module")
def adapted():
    return with_random_b(make_model(rank=3))


def test_a_fresh_adapter_changes_nothing():
    model = make_model(rank=3)
    assert has_lora(model) and not has_lora(make_model())
    np.testing.assert_array_equal(hidden(model), hidden(make_model()))
    names = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(nnx.split(model)[1])}
    assert "language_model.layers.mlp.up_proj.lora_a" in names
    assert "visual.blocks.attn.qkv.lora_b" in names
    assert "visual.blocks.attn.proj.lora_a" not in names


def test_merged_weights_compute_the_same(adapted):
    merged = merge_lora(adapted)
    assert not has_lora(merged) and has_lora(adapted)
    assert np.abs(hidden(adapted) - hidden(make_model())).max() > 1e-2
    np.testing.assert_allclose(hidden(merged), hidden(adapted), atol=1e-5)
    plain = nnx.split(make_model())[1]
    assert jax.tree.structure(nnx.split(merged)[1]) == jax.tree.structure(plain)


def test_adapters_are_split_as_their_weights_are():
    assert logical_axes("language_model.layers.mlp.up_proj.lora_a") == (None, None, "embed")
    assert logical_axes("language_model.layers.mlp.up_proj.lora_b") == (None, "mlp", None)
    assert logical_axes("language_model.layers.self_attn.o_proj.lora_a") == (None, None, "heads")


def test_peft_files_hold_every_layer(adapted, tmp_path):
    save_adapter(adapted, tmp_path, "base")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6.0, "LORA")
    name = "model.language_model.layers.1.mlp.down_proj"
    assert name in config["target_modules"]
    a = tensors[f"base_model.model.{name}.lora_A.weight"]
    b = tensors[f"base_model.model.{name}.lora_B.weight"]
    own = adapted.language_model.layers.mlp.down_proj
    np.testing.assert_array_equal(a, own.lora_a[...][1])
    np.testing.assert_array_equal(b, own.lora_b[...][1])
    assert len(tensors) == 2 * (7 * 2 + 2)  # seven maps a text layer, one a vision block
    with pytest.raises(ValueError, match="no adapters"):
        save_adapter(make_model(), tmp_path)


def test_peft_loads_them_and_computes_the_same(adapted, tmp_path):
    """transformers' model with the adapter on, against ours."""
    peft = pytest.importorskip("peft")
    import torch
    import transformers

    from svrl_jax.models.qwen_vl.weights import save_folder

    save_folder(make_model(), tmp_path / "base", dtype="float32")
    save_adapter(adapted, tmp_path / "adapter", str(tmp_path / "base"))
    base = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    ).eval()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 50, (1, 9)))
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.numpy()
    expected = np.asarray(adapted.logits(jnp.asarray(hidden(adapted))))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("rank", "targets", "match"),
    [(0, TARGETS, "rank is 0"), (2, ("language_model.layer.*",), "names no linear map")],
)
def test_adapters_that_cannot_be_are_an_error(rank, targets, match):
    with pytest.raises(ValueError, match=match):
        add_lora(QwenVL(tiny.CONFIG, rngs=nnx.Rngs(0)), rank, 1.0, targets)
