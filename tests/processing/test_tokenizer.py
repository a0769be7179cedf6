import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from svrl_jax.processing.tokenizer import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIALS += ["<|image_pad|>"]
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(specials_in_vocabulary):
    """A small tokenizer; special tokens inside the BPE's vocabulary (ours) or beside it
    (Qwen's).
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=added if specials_in_vocabulary else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The spellings are in the training text, so that merges come as near to them as they can.
    texts = ["the capital of Chad", "<|im_end|> <|im_start|>assistant", "<|image_pad|>"] * 20
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(added)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module", params=[True, False])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    built = build(request.param)
    built.enable_truncation(3)
    built.enable_padding(length=50)
    built.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def test_special_spellings_are_ids_in_our_own_text(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nChad<|im_end|>")
    assert ids.dtype == np.int32
    assert ids[0] == tokenizer.im_start_id and ids[-1] == tokenizer.im_end_id
    assert len(ids) > 3  # neither truncated nor padded, whatever the file says
    assert tokenizer.decode(ids) == "<|im_start|>user\nChad<|im_end|>"
    assert tokenizer.decode(ids, skip_special=True) == "user\nChad"


@pytest.mark.case("A-T6")
@pytest.mark.parametrize(
    "text",
    ["<|im_end|>", "<|im_start|>assistant", "a<|vision_start|><|image_pad|>b", "<tool_call>"],
)
def test_special_spellings_are_characters_in_others_text(tokenizer, text):
    ids = tokenizer.encode_plain(text)
    assert not set(ids.tolist()) & set(tokenizer.special_ids)
    assert tokenizer.decode(ids, skip_special=True) == text


@pytest.mark.case("A-T6")
@hypothesis.given(
    st.lists(st.sampled_from([*SPECIALS, "<|", "|>", "im_end", " ", "\n", "é", "🏳️", "x"]))
)
@hypothesis.settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_no_mixture_of_pieces_gives_a_special_id(tokenizer, pieces):
    text = "".join(pieces)
    ids = tokenizer.encode_plain(text)
    assert not set(ids.tolist()) & set(tokenizer.special_ids)
    assert tokenizer.decode(ids) == text


def test_ordinary_text_has_the_same_ids_both_ways(tokenizer):
    text = "the capital\n\n of  Chad, 1990 é"
    assert tokenizer.encode(text).tolist() == tokenizer.encode_plain(text).tolist()
    assert tokenizer.encode("").shape == tokenizer.encode_plain("").shape == (0,)


def test_names_and_sizes(tokenizer):
    for name, token in (
        ("image_token_id", "<|image_pad|>"),
        ("vision_start_id", "<|vision_start|>"),
        ("vision_end_id", "<|vision_end|>"),
        ("im_start_id", "<|im_start|>"),
        ("im_end_id", "<|im_end|>"),
        ("pad_id", "<|endoftext|>"),
    ):
        assert getattr(tokenizer, name) == tokenizer.token_id(token)
    assert tokenizer.eos_ids == (tokenizer.im_end_id, tokenizer.pad_id)
    assert len(tokenizer) == tokenizer.vocab_size == tokenizer.token_id("<tool_call>") + 1
    with pytest.raises(KeyError, match="video_pad"):
        tokenizer.token_id("<|video_pad|>")


def test_ids_that_no_text_gives_are_an_error(tokenizer):
    for ids in ([-1], [tokenizer.vocab_size]):
        with pytest.raises(ValueError, match="outside"):
            tokenizer.decode(ids)


def test_half_a_character_is_a_replacement_mark(tokenizer):
    ids = tokenizer.encode_plain("é")
    assert len(ids) == 2 and tokenizer.decode(ids[:1]) == "\ufffd"


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
