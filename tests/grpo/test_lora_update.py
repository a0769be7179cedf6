"""An update with adapters: they alone move, the reference is the policy without them."""

import jax
import numpy as np
from flax import nnx

from svrl_jax.grpo.update import init_state, reference_params, update
from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.models.qwen_vl.lora import add_lora
from svrl_jax.models.qwen_vl.sharding import path_name
from tests.grpo import tiny
from tests.grpo.test_update import ADVANTAGES, batch_of, spec_of


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves if path_name(path)}


def test_adapters_alone_are_trained_and_the_reference_is_free(sampled, config):
    model = add_lora(QwenVL(tiny.CONFIG, rngs=nnx.Rngs(0)), 2, 4.0, ("language_model.layers.*",))
    config.grpo.layout, config.grpo.row_tokens = "shared", 64
    spec, params = spec_of(model, config), nnx.split(model)[1]
    reference = reference_params(params, spec)
    for name, leaf in named(reference).items():
        assert name.endswith("lora_b") or np.shares_memory(leaf, named(params)[name])
    batch = batch_of(sampled, ADVANTAGES, config)
    state = init_state(params, spec)
    assert {n.rsplit(".")[-1] for n in named(state.opt_state)} == {"lora_a", "lora_b"}
    before = named(params)
    state, metrics, _ = update(state, reference, batch, spec)
    assert abs(metrics["kl"]) < 1e-8 and metrics["grad_norm_vision"] == 0
    state, metrics, _ = update(state, reference, batch, spec)
    assert metrics["kl"] > 1e-6  # against the policy as it was
    for name, leaf in named(state.params).items():
        moved = not np.array_equal(leaf, before[name])
        assert moved == (".lora_" in name), name


def test_a_reference_in_bfloat16(model, sampled, config):
    config.grpo.layout, config.grpo.row_tokens = "shared", 64
    config.grpo.ref_dtype = "bfloat16"
    spec, params = spec_of(model, config), nnx.split(model)[1]
    reference = reference_params(params, spec)
    assert {x.dtype.name for x in jax.tree.leaves(reference)} == {"bfloat16"}
    batch = batch_of(sampled, ADVANTAGES, config)
    _, metrics, _ = update(init_state(params, spec), reference, batch, spec)
    assert 0 <= metrics["kl"] < 1e-2
