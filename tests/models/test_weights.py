import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from svrl_jax.models.qwen_vl.weights import load_weights, save_folder
from tests.models.conftest import CLASSES, reference_model, row

# How each family's own files spell (vision, text, head), and the other layouts.
OWN = {
    "qwen2_5_vl": ("visual.", "model.", "lm_head."),
    "qwen3_vl": ("model.visual.", "model.language_model.", "lm_head."),
}
WRAPPED = ("visual.", "language_model.model.", "language_model.lm_head.")


def params_of(model):
    return {
        ".".join(map(str, path)): np.asarray(param[...])
        for path, param in nnx.to_flat_state(nnx.state(model))
    }


def same(a, b):
    a, b = params_of(a), params_of(b)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def tensors(pair):
    return load_file(pair.folder / "model.safetensors")


@pytest.fixture
def hf_config(pair):
    return json.loads((pair.folder / "config.json").read_text())


def rename(tensors, old, new):
    renamed = {}
    for name, tensor in tensors.items():
        found, prefix = next(p for p in zip(old, new, strict=True) if name.startswith(p[0]))
        renamed[prefix + name[len(found) :]] = tensor
    assert len(renamed) == len(tensors)
    return renamed


def text_key(pair, rest):
    return OWN[pair.family][1] + rest


def vision_key(pair, rest):
    return OWN[pair.family][0] + rest


@pytest.mark.case("A-M13")
@pytest.mark.parametrize("prefixes", [*OWN.values(), WRAPPED])
def test_three_layouts_give_the_same_parameters(pair, tensors, hf_config, tmp_path, prefixes):
    write(tmp_path, rename(tensors, OWN[pair.family], prefixes), hf_config)
    model, config = load_weights(tmp_path)
    assert config == pair.config and same(model, pair.model)


@pytest.mark.case("A-M13")
def test_every_unmatched_name_is_listed(pair, tensors, hf_config, tmp_path):
    norm, bias = text_key(pair, "norm.weight"), vision_key(pair, "blocks.2.attn.qkv.bias")
    embed, other = text_key(pair, "embed_tokens.weight"), text_key(pair, "layers.0.router.weight")
    del tensors[norm], tensors[bias]
    tensors[other] = np.ones(4, np.float32)
    tensors[embed] = tensors[embed][:-1]
    write(tmp_path, tensors, hf_config)
    with pytest.raises(ValueError) as error:
        load_weights(tmp_path)
    for part in (
        f"missing from the files: {norm}, {bias}",
        f"unknown to the model: {other}",
        f"{embed} is [127, 64], the config says [128, 64]",
    ):
        assert part in str(error.value)


@pytest.mark.case("A-M13")
def test_a_layer_too_many_is_an_error(pair, tensors, hf_config, tmp_path):
    tensors[text_key(pair, "layers.3.input_layernorm.weight")] = np.ones(64, np.float32)
    write(tmp_path, tensors, hf_config)
    with pytest.raises(ValueError, match=r"unknown to the model: \S*layers\.3"):
        load_weights(tmp_path)


def test_a_tensor_given_twice_is_an_error(pair, tensors, hf_config, tmp_path):
    tensors["language_model.model.norm.weight"] = np.ones(64, np.float32)
    write(tmp_path, tensors, hf_config)
    with pytest.raises(ValueError, match=r"both mean language_model\.norm\.weight"):
        load_weights(tmp_path)


def test_an_integer_tensor_is_an_error(pair, tensors, hf_config, tmp_path):
    name = text_key(pair, "norm.weight")
    tensors[name] = tensors[name].astype(np.int8)
    write(tmp_path, tensors, hf_config)
    with pytest.raises(ValueError, match=r"norm\.weight is I8; this loader reads BF16, F16, F32"):
        load_weights(tmp_path)


@pytest.mark.case("A-M12")
@pytest.mark.parametrize("family", CLASSES)
def test_a_tied_head_is_the_embeddings(family, tmp_path):
    reference = reference_model(family, tie_word_embeddings=True)
    reference.tie_weights()
    reference.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model, config = load_weights(tmp_path)
    assert config.tie_word_embeddings and model.lm_head is None
    hidden = jax.random.normal(jax.random.key(0), (3, 64))
    embeddings = np.asarray(model.language_model.embed_tokens.weight[...])
    np.testing.assert_allclose(model.logits(hidden), hidden @ embeddings.T, atol=1e-5)
    save_folder(model, tmp_path / "again", "float32")
    assert "lm_head.weight" not in load_file(tmp_path / "again" / "model.safetensors")


@pytest.mark.case("A-M12")
def test_an_untied_head_is_its_own(pair, tensors, hf_config, tmp_path):
    tensors["lm_head.weight"] = tensors[text_key(pair, "embed_tokens.weight")] + 1
    write(tmp_path, tensors, hf_config)
    model, _ = load_weights(tmp_path)
    hidden = jax.random.normal(jax.random.key(0), (3, 64))
    expected = np.asarray(hidden) @ tensors["lm_head.weight"].T
    np.testing.assert_allclose(model.logits(hidden), expected, atol=1e-4)


@pytest.mark.case("A-M12")
def test_an_untied_head_that_is_missing_is_named(tensors, hf_config, tmp_path):
    del tensors["lm_head.weight"]
    write(tmp_path, tensors, hf_config)
    with pytest.raises(ValueError, match=r"missing from the files: lm_head\.weight"):
        load_weights(tmp_path)


@pytest.mark.case("A-M12")
def test_a_tied_model_with_another_head_is_an_error(pair, tensors, hf_config, tmp_path):
    hf_config["tie_word_embeddings"] = True
    write(tmp_path, tensors, hf_config)
    with pytest.raises(ValueError, match="differs from"):
        load_weights(tmp_path)
    tensors["lm_head.weight"] = tensors[text_key(pair, "embed_tokens.weight")]
    write(tmp_path, tensors, hf_config)
    assert load_weights(tmp_path)[0].lm_head is None


@pytest.mark.case("A-M14")
def test_missing_files_are_named_before_anything_is_read(pair, tmp_path):
    save_folder(pair.model, tmp_path, "float32", max_shard_bytes=100_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 2 and same(load_weights(tmp_path)[0], pair.model)
    extra = tmp_path / "other.safetensors"
    save_file({"x": np.zeros(1, np.float32)}, extra)
    with pytest.warns(UserWarning, match=r"other\.safetensors"):
        assert same(load_weights(tmp_path)[0], pair.model)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=shards[1].name):
        load_weights(tmp_path)


@pytest.mark.case("A-M14")
def test_an_empty_folder_is_an_error(pair, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(pair.config.to_hf()))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_weights(tmp_path)


def test_a_broken_file_is_named(pair, hf_config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    whole = (pair.folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
        load_weights(tmp_path)


@pytest.mark.parametrize("on_disk", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("in_memory", [jnp.bfloat16, jnp.float32])
def test_dtypes_on_disk_and_in_memory(pair25, tmp_path, on_disk, in_memory):
    save_folder(pair25.model, tmp_path, on_disk)
    model, _ = load_weights(tmp_path, in_memory)
    expected = {
        name: value.astype(on_disk).astype(in_memory)
        for name, value in params_of(pair25.model).items()
    }
    found = params_of(model)
    assert all(found[name].dtype == in_memory for name in found)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_transformers_reads_shards_that_we_write(pair, tmp_path):
    """Layers in their order, tensors bit for bit."""
    save_folder(pair.model, tmp_path, "float32", max_shard_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors = {}
    for shard in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / shard)
        assert sum(t.nbytes for t in part.values()) <= 200_000
        assert all(index["weight_map"][name] == shard for name in part)
        tensors |= part
    written = load_file(pair.folder / "model.safetensors")
    assert tensors.keys() == written.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert all(np.array_equal(tensors[name], written[name]) for name in written)
    again = CLASSES[pair.family][1].from_pretrained(tmp_path, dtype=torch.float32)
    for (name, a), b in zip(again.named_parameters(), pair.torch_model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_parameters_go_where_they_are_told(pair):
    """Every parameter is asked for once by its name and shape, and lands in that sharding."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    asked = {}

    def sharding(name, shape):
        spec = PartitionSpec(*(None, "tensor", "fsdp")[-len(shape) :])
        asked[name] = shape
        return NamedSharding(mesh, spec)

    model, _ = load_weights(pair.folder, sharding=sharding)
    assert same(model, pair.model)
    assert asked == {name: value.shape for name, value in params_of(model).items()}
    for path, param in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        assert param[...].sharding.is_equivalent_to(sharding(name, param.shape), param.ndim)


def test_transformers_reads_what_we_write(pair, tmp_path):
    save_folder(pair.model, tmp_path, "float32")
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(load_file(pair.folder / "model.safetensors"))
    again, report = CLASSES[pair.family][1].from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor(row(11)[None], dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, pair.torch_model(ids).logits)


def test_companion_files_are_copied(pair, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        save_folder(pair.model, tmp_path / "out", extra_files_from=source)
    (source / "tokenizer.json").write_text("{}")
    save_folder(pair.model, tmp_path / "out", extra_files_from=source)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ValueError, match="float8"):
        save_folder(pair.model, tmp_path / "out", "float8")
