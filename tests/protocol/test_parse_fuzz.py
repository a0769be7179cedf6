"""The grammar against an independent one: a regular expression written from SPEC 2 alone."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from svrl_jax.protocol import parse
from svrl_jax.types import ACTIONS, HARD_VIOLATIONS, SOFT_VIOLATIONS

NUM_QUERIES = 3
NAMES = ("reason", "verify", "search", "text_search", "answer", "information")
FRAGMENTS = (
    *(f"<{n}>" for n in NAMES),
    *(f"</{n}>" for n in NAMES),
    *("<img>", "<search><img></search>", "<reason>why</reason>", "<verify> </verify>"),
    *("<verify>1,0</verify>", "<answer>x</answer>", "<Answer>", "<answer", ">", "</"),
    *(
        "aa",
        "b",
        "bb, cc",
        "aa, bb, cc",
        "q1",
        ",",
        " ",
        "\n",
        "1",
        "0",
        "1,0",
        "1, 0, 1",
        "é",
        "1\n",
    ),
    *("<text_search>aa, bb 1, cc</text_search>", "<text_search>aa, b</text_search>", "\ufffd"),
)
ANY_TAG = r"(?:</?(?:reason|verify|search|text_search|answer|information)>|<img>)"


def reference(items: int | None, regime: str) -> re.Pattern:
    """Full match = a turn that SPEC 2 allows (for the fragments above: no quotes in queries)."""
    plain = rf"(?:(?!{ANY_TAG})[\s\S])"
    reason = rf"<reason>(?!\s*</reason>){plain}+</reason>\s*"
    answer = rf"<answer>(?!\s*</answer>){plain}+</answer>"
    if regime == "direct":
        return re.compile(rf"{reason}{answer}\s*")
    count = items or 0
    mask = r"\s*" + r",".join([r"\s*[01]\s*"] * count)
    verify = rf"<verify>{mask}</verify>\s*"
    placeholder = r"(?i:q|query)\s*\d*\s*(?:,|</text_search>)"
    query = rf"\s*(?!{placeholder})(?=[^,<]*[^\W_])(?:(?!{ANY_TAG})[^,\s])(?:(?!{ANY_TAG})[^,])*"
    query += rf"(?:(?!{ANY_TAG})[^,\s])\s*"
    queries = r",".join([query] * NUM_QUERIES)
    text = rf"<text_search>{queries}</text_search>"
    image = r"<search><img></search>"
    image_turn = rf"{verify}{image}" if count else rf"(?:{verify})?{image}"
    return re.compile(rf"{reason}(?:{verify}(?:{answer}|{text})|{image_turn})\s*")


@st.composite
def nearly_valid(draw):
    """A valid turn with up to two fragments put in, taken out or replaced."""
    mask = draw(st.sampled_from(["", " ", "1", "0,1", "1, 0, 1"]))
    action = draw(
        st.sampled_from(
            [
                ["<answer>", "x", "</answer>"],
                ["<search>", "<img>", "</search>"],
                ["<text_search>", "aa", ",", "bb", ",", "cc", "</text_search>"],
            ]
        )
    )
    block = ["<verify>", mask, "</verify>"]
    verify = draw(st.sampled_from([block, block, []]))
    parts = ["<reason>", "why", "</reason>", *verify, *action]
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        at = draw(st.integers(0, len(parts)))
        parts[at : at + draw(st.integers(0, 1))] = draw(
            st.lists(st.sampled_from(FRAGMENTS), max_size=2)
        )
    return "".join(parts)


texts = st.one_of(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), nearly_valid())


@settings(max_examples=1500, deadline=None)
@given(texts, st.sampled_from([None, 0, 1, 2, 3]), st.sampled_from(parse.REGIMES))
def test_accepted_exactly_where_the_reference_accepts(text, items, regime):
    turn = parse.parse_turn(
        text, num_queries=NUM_QUERIES, items_to_verify=items, regime=regime, ended=False
    )
    is_allowed = reference(items, regime).fullmatch(text) is not None
    assert (turn.violations == ()) == is_allowed, (turn.violations, text)


@settings(max_examples=500, deadline=None)
@given(st.one_of(texts, st.text()), st.sampled_from([None, 0, 2]), st.booleans())
def test_every_string_has_a_reading(text, items, ended):
    turn = parse.parse_turn(
        text, num_queries=NUM_QUERIES, items_to_verify=items, regime="agent", ended=ended
    )
    assert set(turn.violations) <= {*SOFT_VIOLATIONS, *HARD_VIOLATIONS}
    assert len(set(turn.violations)) == len(turn.violations)
    assert turn.action in (*ACTIONS, None)
    assert turn.is_hard or turn.action is not None
    assert (turn.answer is not None) == (turn.action == "answer")
    if turn.action == "text_search" and not turn.is_hard:
        assert turn.proposals and all(map(parse.is_well_formed, turn.proposals))


@settings(max_examples=500, deadline=None)
@given(texts)
def test_the_end_of_an_action_does_not_depend_on_what_follows(text):
    end = parse.action_end(text)
    for length in range(len(text) + 1):
        expected = end if end is not None and length >= end else None
        assert parse.action_end(text[:length]) == expected


@settings(max_examples=300, deadline=None)
@given(texts, st.sampled_from([None, 2]))
def test_a_stopped_turn_reads_the_same_with_and_without_the_last_tokens_rest(text, items):
    end = parse.action_end(text)
    if end is None:
        return
    options = {"num_queries": NUM_QUERIES, "items_to_verify": items, "regime": "agent"}
    assert parse.parse_turn(text, ended=True, **options) == parse.parse_turn(
        text[:end], ended=True, **options
    )
