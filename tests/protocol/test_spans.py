import dataclasses

import numpy as np

from svrl_jax.protocol.spans import SPANS, token_spans
from svrl_jax.types import ParsedTurn, Turn
from tests.grpo import tiny

TEXT = "<reason>ein Blick: é</reason><verify> 1,0 </verify> <text_search>a, b</text_search>"


def test_every_byte_of_a_turn_belongs_to_its_block(builder):
    """With the tokenizer of the embedded policy, whose tokens cut characters and cross borders."""
    tokenizer = builder.tokenizer
    ids = tokenizer.encode_plain(TEXT)
    assert sum(map(tokenizer.num_bytes, ids)) == len(TEXT.encode("utf-8"))
    episode = dataclasses.replace(
        tiny.make_episode("t", 0, 0, (), tiny.NO_PICTURE, ((1, 0),)),
        ids=np.concatenate([[5, 6], ids, [7]]).astype(np.int32),
        turns=(Turn(TEXT, 2, 2 + len(ids), 3 + len(ids), ParsedTurn("text_search")),),
    )
    spans = token_spans(episode, tokenizer.num_bytes)
    assert spans[:2].tolist() == [0, 0] and spans[-1] == 0
    text = {name: "" for name in SPANS}
    for token, span in zip(ids, spans[2:-1], strict=True):
        text[SPANS[span]] += tokenizer.decode([token])
    assert text["mask"].startswith("<") or text["mask"].startswith("verify")
    assert "1,0" in text["mask"] and "a, b" in text["query"] and "Blick" in text["reason"]
    assert text["answer"] == "" and len(text["other"].strip()) == 0
