"""The four calls, against transformers on random tiny folders."""

import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import jax
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import svrl_jax
from svrl_jax import api
from svrl_jax.processing.images import QWEN3_VL, ImageProcessor
from svrl_jax.processing.processor import Inputs, Processor
from svrl_jax.rollout.scheduler import banned_ids
from tests.conftest import compiler
from tests.processing.test_images import encoded, picture

IMAGE = {"type": "image"}
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ONE = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "capital of this?"}]}]
TWO = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "and"}, IMAGE]},
]
NONE = [{"role": "user", "content": "hello"}]
PICTURES = [picture(56, 84), picture(60, 90, 1), picture(112, 40, 2)]


def reference_class(family):
    if family == "qwen3_vl":
        return transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
    return transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration


def reference_config(family, vocab_size, ids):
    is_new = family == "qwen3_vl"
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2] if is_new else [2, 3, 3],
        },
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 40,
        "out_hidden_size": 48,
    }
    if is_new:
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
        text["rope_parameters"]["mrope_interleaved"] = True
    else:
        vision |= {"fullatt_block_indexes": [1]}
    return reference_class(family)[0](
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """These programs run for milliseconds and compile for seconds."""
    with compiler(is_quick=True):
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, untrained_folder, tmp_path_factory):
    return make_folder(request.param, untrained_folder, tmp_path_factory.mktemp(request.param))


def make_folder(family, untrained_folder, folder):
    """A random model of the family, saved by transformers, beside the small tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(untrained_folder / name, folder / name)
    processor = QWEN3_VL if family == "qwen3_vl" else ImageProcessor()
    processor = ImageProcessor(**{**vars(processor), "min_pixels": 3136, "max_pixels": 8192})
    processor.save(folder, family)
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    torch.manual_seed(0)
    # More rows than the tokenizer has ids, as in the releases.
    model = reference_class(family)[1](reference_config(family, 640, ids)).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            scale = 0.2 if param.ndim == 1 else param[0].numel() ** -0.5
            is_norm = param.ndim == 1 and name.endswith("weight")
            param.copy_(torch.randn_like(param) * scale + (1.0 if is_norm else 0.0))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    with jax.default_matmul_precision("highest"):
        yield svrl_jax.load(folder)


@pytest.fixture(scope="module")
def reference(folder):
    kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def their_inputs(inputs: Inputs, row: int, image_token_id: int):
    """One row as transformers takes it; its pictures cut out of the batch."""
    ids = np.asarray(inputs.prompt_ids)
    counts = (ids == image_token_id).sum(axis=1)
    sizes = inputs.image_grid_thw.prod(axis=1) // 4
    owner = np.searchsorted(np.cumsum(counts), np.cumsum(sizes))
    grids = inputs.image_grid_thw[owner == row]
    rows = np.repeat(owner, sizes * 4) == row
    real = torch.tensor(ids[row : row + 1, : inputs.lengths[row]], dtype=torch.long)
    found = {
        "input_ids": real,
        "attention_mask": torch.ones_like(real),
        "mm_token_type_ids": (real == image_token_id).long(),
    }
    if len(grids):
        found["pixel_values"] = torch.tensor(inputs.pixel_values[rows])
        found["image_grid_thw"] = torch.tensor(grids, dtype=torch.long)
    return found


def test_inputs_are_right_padded_rows(loaded):
    _, processor = loaded
    inputs = processor([ONE, NONE, TWO], [PICTURES[:1], [], PICTURES[1:]])
    rows, longest = inputs.prompt_ids.shape
    assert rows == 3 and longest == inputs.lengths.max()
    assert inputs.prompt_ids.dtype == inputs.positions.dtype == inputs.lengths.dtype == np.int32
    assert inputs.pixel_values.dtype == np.float32 and inputs.image_grid_thw.shape == (3, 3)
    assert len(inputs.pixel_values) == inputs.image_grid_thw.prod(axis=1).sum()
    for row, (messages, images) in enumerate(
        [(ONE, PICTURES[:1]), (NONE, []), (TWO, PICTURES[1:])]
    ):
        alone = processor(messages, images)
        length = inputs.lengths[row]
        assert alone.prompt_ids.shape == (1, length)
        np.testing.assert_array_equal(inputs.prompt_ids[row, :length], alone.prompt_ids[0])
        np.testing.assert_array_equal(inputs.positions[:, row, :length], alone.positions[:, 0])
        assert (inputs.prompt_ids[row, length:] == processor.tokenizer.pad_id).all()
    assert len(jax.tree.leaves(inputs)) == 5


def test_pictures_come_as_bytes_path_or_picture(loaded, tmp_path):
    _, processor = loaded
    data = encoded(PICTURES[0])
    (tmp_path / "a.png").write_bytes(data)
    found = [processor(ONE, [p]) for p in (PICTURES[0], data, tmp_path / "a.png")]
    for other in found[1:]:
        np.testing.assert_array_equal(other.pixel_values, found[0].pixel_values)


@pytest.mark.parametrize(
    ("messages", "images", "match"),
    [
        (ONE, [], "conversation 0: 1 placeholders for 0 pictures"),
        ([NONE, ONE], [[], PICTURES[:2]], "conversation 1: 1 placeholders for 2 pictures"),
        ([ONE, NONE], [PICTURES[:1]], "2 conversations and 1 lists"),
        (ONE, PICTURES[0], "a list"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], [], "`images`"),
        ([], [], "no message"),
    ],
)
def test_mistakes_are_named(loaded, messages, images, match):
    if isinstance(images, Image.Image):
        messages, images = [messages], [images]
    with pytest.raises(ValueError, match=match):
        loaded[1](messages, images)


def test_logits_equal_transformers(loaded, reference):
    model, processor = loaded
    inputs = processor([ONE, NONE, TWO], [PICTURES[:1], [], PICTURES[1:]])
    with jax.default_matmul_precision("highest"):
        found = svrl_jax.logits(model, inputs)
    assert found.shape == (3, inputs.prompt_ids.shape[1], 640) and found.dtype == np.float32
    for row in range(3):
        with torch.no_grad():
            expected = reference(**their_inputs(inputs, row, processor.tokenizer.image_token_id))
        expected = expected.logits[0].numpy()
        assert expected.std() > 0.1
        np.testing.assert_allclose(found[row, : len(expected)], expected, atol=1e-4)


def test_greedy_text_equals_transformers(loaded, reference):
    model, processor = loaded
    messages, images = [ONE, NONE, TWO], [PICTURES[:1], [], PICTURES[1:]]
    inputs = processor(messages, images)
    banned = banned_ids(model.config, len(processor.tokenizer))
    with jax.default_matmul_precision("highest"):
        texts = svrl_jax.generate(model, processor, messages, images, max_new_tokens=12)
        single = svrl_jax.generate(model, processor, TWO, PICTURES[1:], max_new_tokens=12)
    assert single == texts[2]
    for row in range(3):
        given = their_inputs(inputs, row, processor.tokenizer.image_token_id)
        ids = reference.generate(
            **given,
            max_new_tokens=12,
            do_sample=False,
            suppress_tokens=list(banned),
            eos_token_id=list(processor.tokenizer.eos_ids),
        )[0, inputs.lengths[row] :]
        assert len(ids) >= 2
        assert texts[row] == processor.tokenizer.decode(ids.numpy(), skip_special=True)


def test_a_prompt_prefilled_in_pieces_gives_the_same(loaded):
    model, processor = loaded
    inputs = processor([ONE, NONE, TWO], [PICTURES[:1], [], PICTURES[1:]])
    options = {"max_new_tokens": 2, "temperature": 0.0, "seed": 0, "eos_ids": [], "banned": ()}
    whole = api.generate_ids(model, inputs, **options)
    assert inputs.prompt_ids.shape[1] > 32
    pieces = api.generate_ids(model, inputs, prefill_tokens=16, **options)
    assert [row.tolist() for row in pieces] == [row.tolist() for row in whole]


def test_draws_follow_the_seed_and_end_at_an_end_id(loaded):
    model, processor = loaded
    options = {"max_new_tokens": 8, "temperature": 1.0}
    texts = [svrl_jax.generate(model, processor, NONE, seed=s, **options) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    inputs = processor([NONE, NONE])
    options |= {"seed": 0, "banned": ()}
    free = api.generate_ids(model, inputs, eos_ids=[], **options)
    assert [len(row) for row in free] == [8, 8] and free[0].tolist() != free[1].tolist()
    stop = int(free[0][3])
    stopped = api.generate_ids(model, inputs, eos_ids=[stop], **options)[0]
    first = free[0].tolist().index(stop)
    assert stopped.tolist() == free[0][: first + 1].tolist()
    for bad in ({"max_new_tokens": 0}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match="max_new_tokens must be"):
            svrl_jax.generate(model, processor, NONE, **bad)


def test_parameters_have_the_dtype_asked_for(folder):
    model, _ = svrl_jax.load(str(folder), dtype="bfloat16")
    assert model.language_model.norm.weight.dtype == jax.numpy.bfloat16


def test_files_of_two_models_are_an_error(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "mixed")
    other = QWEN3_VL if ImageProcessor.from_folder(folder).patch_size == 14 else ImageProcessor()
    other.save(tmp_path / "mixed")
    with pytest.raises(ValueError, match="two models"):
        Processor.from_folder(tmp_path / "mixed")


class NotFound(BaseHTTPRequestHandler):
    """A hub that has no repository."""

    def do_GET(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def empty_hub():
    server = HTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_repository_that_is_not_there_is_said(empty_hub):
    with pytest.raises(api.ModelNotFoundError, match="'someone/no-such-model' is neither"):
        api.fetch("someone/no-such-model", endpoint=empty_hub)


def test_no_network_is_said():
    with pytest.raises(api.ModelNotFoundError, match="hub cannot be reached"):
        api.fetch("someone/no-such-model", endpoint="http://127.0.0.1:9")


def test_a_name_that_is_no_id_is_said():
    with pytest.raises(api.ModelNotFoundError, match=r"'runs/no/such folder' is no folder"):
        svrl_jax.load("runs/no/such folder")


def test_importing_the_package_is_light():
    code = "import svrl_jax, sys; print(sorted({'jax', 'flax', 'numpy', 'PIL'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert {"load", "logits", "generate"} <= set(dir(svrl_jax))
    with pytest.raises(AttributeError, match="lode"):
        svrl_jax.lode  # noqa: B018
