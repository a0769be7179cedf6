"""The rank file in dashscope's wheel -> the tokenizers of Qwen2.5-VL and Qwen3-VL, exactly.

The wheel (Apache-2.0) is installed without its dependencies and never imported: only its data file
`dashscope/resources/qwen.tiktoken` is read. The vocabulary and the merges made from it are byte for
byte the published `vocab.json` and `merges.txt` (their hashes are checked). Special tokens are not
taken from that package, whose own list differs.
"""

import base64
import hashlib
import importlib.util
import json
import pathlib

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

RANKS_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
VOCAB_SHA256 = "ca10d7e9fb3ed18575dd1e277a2579c16d108e32f27439684afa0e10b1440910"
MERGES_SHA256 = "599bab54075088774b1733fde865d5bd747cbcc7a547c5bc12610e874e26f5e3"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_RANKS = 151_643
_MARK = "<|{}|>".format
SPECIAL = [  # 151643 and on
    *map(_MARK, ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end")),
    *map(_MARK, ("box_start", "box_end", "quad_start", "quad_end", "vision_start", "vision_end")),
    *map(_MARK, ("vision_pad", "image_pad", "video_pad")),
]
PLAIN = {  # added, but not special; 151657 and on
    "qwen2_5_vl": [
        *("<tool_call>", "</tool_call>"),
        *map(_MARK, ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
    ]
}
PLAIN["qwen3_vl"] = [
    *PLAIN["qwen2_5_vl"], "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip


def rank_file() -> pathlib.Path | None:
    """The installed rank file, None without the wheel."""
    found = importlib.util.find_spec("dashscope")
    path = found and pathlib.Path(found.origin).parent / "resources" / "qwen.tiktoken"
    return path if path and path.is_file() else None


def read_ranks(path: pathlib.Path) -> dict[bytes, int]:
    """Token bytes -> rank; the file must be the known one."""
    data = path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == RANKS_SHA256
    pairs = (line.split() for line in data.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def vocab_and_merges(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """What `vocab.json` and `merges.txt` hold, in the printable alphabet of byte-level BPE."""
    letters = _alphabet()
    spelt = {token: "".join(letters[b] for b in token) for token in ranks}
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        if len(token) > 1:
            left, right = _last_pair(token, ranks)
            merges.append((spelt[left], spelt[right]))
    return vocab, merges


def check_published(vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Compares both files' bytes with the hashes of the published ones."""
    text = json.dumps(vocab, ensure_ascii=False, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == VOCAB_SHA256
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    assert hashlib.sha256(lines.encode()).hexdigest() == MERGES_SHA256


def make_tokenizer(vocab, merges, family: str) -> tokenizers.Tokenizer:
    """The family's tokenizer with its added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in PLAIN[family]])
    return tokenizer


def _alphabet() -> list[str]:
    """Printable letter of each byte: itself where printable, else 256, 257, ... in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(b if b in printable else next(rest)) for b in range(256)]


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that the token's own merge joins."""
    own = ranks[token]
    cuts = [
        i
        for i in range(1, len(token))
        if ranks.get(token[:i], own) < own and ranks.get(token[i:], own) < own
    ]
    if len(cuts) == 1:
        return token[: cuts[0]], token[cuts[0] :]
    parts = [token[i : i + 1] for i in range(len(token))]  # several: merge as encoding would
    while len(parts) > 2:
        found = [ranks.get(a + b, own) for a, b in zip(parts, parts[1:])]
        best = min(range(len(found)), key=found.__getitem__)
        assert found[best] < own
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]
