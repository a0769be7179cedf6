"""The grammar of a turn, as tables of strings."""

import math

import pytest

from svrl_jax.protocol import parse

R, V0, A = "<reason>r</reason>", "<verify> </verify>", "<answer>x</answer>"
IMAGE = "<search><img></search>"
TEXT = "<text_search>aa, bb, cc, dd, ee</text_search>"


def read(text, *, items=None, ended=None, regime="agent", num_queries=5):
    """Parses as the environment would: stopped at the action where the text ends there."""
    ended = parse.action_end(text) == len(text) if ended is None else ended
    return parse.parse_turn(
        text, num_queries=num_queries, items_to_verify=items, regime=regime, ended=ended
    )


@pytest.mark.parametrize(
    "text, items, action, mask",
    [
        (R + V0 + A, None, "answer", ()),
        (R + "<verify></verify>" + A, 0, "answer", ()),
        (R + V0 + TEXT, None, "text_search", ()),
        (R + IMAGE, None, "image_search", None),
        (R + IMAGE, 0, "image_search", None),
        (R + V0 + IMAGE, None, "image_search", ()),
        (R + "<verify>1</verify>" + IMAGE, 1, "image_search", (1,)),
        (R + "<verify>1,0,1</verify>" + A, 3, "answer", (1, 0, 1)),
        (R + "<verify> 0, 1\n,1 </verify>" + TEXT, 3, "text_search", (0, 1, 1)),
        (R + "\n" + V0 + " \n\t" + A + "\n", None, "answer", ()),
        ("<reason>a < b > c <b> <Answer></reason>" + V0 + A, None, "answer", ()),
        (R + V0 + "<answer> 5 < 6\nlines </answer>", None, "answer", ()),
    ],
)
def test_turns_that_the_grammar_allows(text, items, action, mask):
    turn = read(text, items=items)
    assert turn.violations == ()
    assert (turn.action, turn.mask) == (action, mask)


@pytest.mark.parametrize(
    "text, items, violations",
    [
        # the mask
        (R + A, None, {"mask_missing"}),
        (R + TEXT, None, {"mask_missing"}),
        (R + IMAGE, 2, {"mask_missing"}),
        (R + "<verify>1</verify>" + A, 2, {"mask_length"}),
        (R + V0 + A, 2, {"mask_length"}),
        (R + "<verify>1,1</verify>" + A, None, {"mask_length"}),
        (R + "<verify>1</verify>" + IMAGE, None, {"mask_length"}),
        (R + "<verify>1,2</verify>" + A, 2, {"mask_missing"}),
        (R + "<verify>1 0</verify>" + A, 2, {"mask_missing"}),
        (R + "<verify>1,0,</verify>" + A, 2, {"mask_missing"}),
        (R + "<verify>10</verify>" + A, 2, {"mask_missing"}),
        (R + "<verify>yes</verify>" + IMAGE, None, {"mask_missing"}),
        (R + "<verify>1,0" + A, 2, {"mask_missing", "text_between"}),
        (R + "<verify>1</verify><verify>1</verify>" + A, 1, {"mask_missing", "text_between"}),
        (R + "<verify>1</verify></verify>" + A, 1, {"mask_missing", "text_between"}),
        ("<verify>1</verify>" + R + A, 1, {"mask_missing", "text_between"}),
        # the reason
        (V0 + A, None, {"reason_empty"}),
        ("<reason> \n</reason>" + V0 + A, None, {"reason_empty"}),
        ("<reason>a <img> b</reason>" + V0 + A, None, {"tag_in_reason"}),
        ("<reason>a" + A + "b</reason>" + V0 + A, None, {"tag_in_reason"}),
        ("<reason>a <verify>1</verify></reason>" + A, 1, {"tag_in_reason", "mask_missing"}),
        ("<reason>a<reason>b</reason>" + V0 + A, None, {"tag_in_reason"}),
        (R + "</reason>" + V0 + A, None, {"text_between"}),
        (R + R + V0 + A, None, {"text_between"}),
        ("abc</reason>" + V0 + A, None, {"reason_empty", "text_between"}),
        # around the blocks
        ("so " + R + V0 + A, None, {"text_between"}),
        ("\n" + R + V0 + A, None, {"text_between"}),
        (R + "so" + V0 + A, None, {"text_between"}),
        (R + V0 + "so" + A, None, {"text_between"}),
        (R + V0 + "<information>x</information>" + A, None, {"text_between"}),
        (R + V0 + "</answer>" + A, None, {"text_between"}),
        # the action
        (R + V0 + "<answer><answer>x</answer>", None, {"tag_in_action"}),
        (R + V0 + f"<answer>{IMAGE}</answer>", None, {"tag_in_action"}),
        (R + V0 + "<text_search>aa, bb, cc, dd</text_search>", None, {"query_count"}),
        (R + V0 + "<text_search>aa, bb, cc, dd, ee, ff</text_search>", None, {"query_count"}),
        (R + V0 + "<text_search>aa, bb, cc, dd, e</text_search>", None, {"query_count"}),
        (R + V0 + "<text_search>aa, bb, cc, dd, ee,</text_search>", None, {"query_count"}),
        (
            R + V0 + "<text_search>aa, bb, cc, dd, e <img></text_search>",
            None,
            {"query_count", "tag_in_action"},
        ),
    ],
)
def test_soft_violations_are_named_and_the_action_stands(text, items, violations):
    turn = read(text, items=items)
    assert set(turn.violations) == violations
    assert turn.action is not None and not turn.is_hard


@pytest.mark.parametrize(
    "text, violation, action",
    [
        ("", "no_action", None),
        (R, "no_action", None),
        (R + V0 + "Paris", "no_action", None),
        (R + V0 + "<answer>x", "no_action", None),
        (R + V0 + "x</answer>", "no_action", None),
        (R + V0 + "<answer>x</text_search>", "no_action", None),
        (R + V0 + "<answer></answer>", "no_action", None),
        (R + V0 + "<answer> \n</answer>", "no_action", None),
        (R + "<search>cat</search>", "no_action", None),
        (R + "<search> <img> </search>", "no_action", None),
        (R + "<search></search>", "no_action", None),
        ("<reason>r" + V0 + A, "reason_unclosed", None),
        (R + "<reason>again" + V0 + A, "reason_unclosed", None),
        (R + V0 + "<text_search></text_search>", "no_usable_query", "text_search"),
        (
            R + V0 + "<text_search>q1, q2, Q3, query 4</text_search>",
            "no_usable_query",
            "text_search",
        ),
        (R + V0 + "<text_search>?!, ..., a</text_search>", "no_usable_query", "text_search"),
    ],
)
def test_hard_violations_end_the_episode(text, violation, action):
    turn = read(text)
    assert violation in turn.violations and turn.is_hard
    assert turn.action == action and turn.answer is None and turn.proposals == ()


def test_direct_regime_allows_reason_and_answer_only():
    assert read(R + " " + A, regime="direct").violations == ()
    assert read(R + V0 + A, regime="direct").violations == ("text_between",)
    turn = read(R + V0 + TEXT, regime="direct")
    assert "tool_not_allowed" in turn.violations and turn.is_hard
    assert read(R + IMAGE, regime="direct").violations == ("tool_not_allowed",)
    with pytest.raises(ValueError, match="regime"):
        read(R + A, regime="rag")


def test_reading_keeps_the_words():
    turn = read("<reason> why\nnot </reason>" + V0 + "<answer> New  York </answer>")
    assert (turn.reason, turn.answer) == ("why\nnot", "New  York")
    turn = read(R + V0 + "<text_search>aa, e, bb</text_search>")
    assert (turn.proposals, turn.num_proposals) == (("aa", "bb"), 3)


@pytest.mark.case("A-R2")
def test_many_tags_text_behind_and_lone_closing_tags_are_violations():
    assert read(R * 3 + V0 + A).violations == ("text_between",)
    assert read(R + V0 + A + " done").violations == ("text_after_action",)
    assert read(R + V0 + A + A).violations == ("text_after_action",)
    assert read(R + V0 + "</verify>" + A).violations == ("text_between", "mask_missing")
    assert read(R + "\n" + V0 + "\n" + A).violations == ()


@pytest.mark.case("A-R1")
def test_no_answer_tag_is_no_answer():
    assert read(R + V0 + A).answer == "x"
    assert read(R + V0 + "Beijing").answer is None


@pytest.mark.case("A-R10")
def test_a_closing_tag_inside_a_query_leaves_nothing_half_run():
    # The rule: an action ends at its first closing tag. A whole text shows that a query was torn.
    torn = read(R + V0 + "<text_search>what does </text_search> mean, bb</text_search>")
    assert torn.is_hard and torn.proposals == ()
    assert set(torn.violations) == {"text_after_action", "no_usable_query"}
    # Another action's tags do not end it; the query that holds them is ill-formed.
    quoted = read(R + V0 + "<text_search>what is <answer>x</answer>, bb</text_search>")
    assert quoted.action == "text_search" and quoted.proposals == ("bb",)
    # A second, whole call behind the first is no sign of a torn one.
    assert not read(R + V0 + TEXT + TEXT).is_hard


@pytest.mark.case("A-R11")
@pytest.mark.parametrize(
    "text, queries",
    [
        ('"Smith, The Rock", 2001 film', ['"Smith, The Rock"', "2001 film"]),
        ("it's 5\" tall, second", ["it's 5\" tall", "second"]),
        ("one\n  two,three \r\n four", ["one two", "three four"]),
        ('a "b, c" d, e "f, g', ['a "b, c" d', 'e "f', "g"]),
        ("a  b,\tc", ["a  b", "c"]),
        ("a,,b,", ["a", "", "b", ""]),
        ("  \n", []),
        ("", []),
    ],
)
def test_queries_split_at_commas_outside_double_quotes(text, queries):
    assert parse.split_queries(text) == queries


@pytest.mark.case("A-R12")
@pytest.mark.parametrize("call", [TEXT.replace("bb", "b\nb"), TEXT, IMAGE])
@pytest.mark.parametrize("behind", ["", " ok", "\n"])
def test_sampler_and_reward_detect_the_same_call(call, behind):
    text = R + V0 + call + behind
    end = parse.action_end(text)
    assert text[:end] == R + V0 + call
    whole, stopped = read(text, ended=False), read(text, ended=True)
    cut = read(text[:end], ended=True)
    assert whole.action == stopped.action == cut.action is not None
    assert whole.proposals == stopped.proposals == cut.proposals
    assert stopped.violations == cut.violations == ()
    assert whole.violations == (("text_after_action",) if behind.strip() else ())


@pytest.mark.parametrize(
    "text, kept",
    [
        (R + V0 + A + "!", R + V0 + A),
        (A + R, A),
        ("</answer>" + A, "</answer>" + A),
        (R + "<verify>1" + A + "</verify>", R + "<verify>1" + A),
        (R + "<answer><search><img></search></answer>", R + f"<answer>{IMAGE}</answer>"),
        ("<reason>" + A + "</reason>" + TEXT, "<reason>" + A + "</reason>" + TEXT),
        ("<reason>" + A, None),
        (R + A[:-1], None),
        (R + "<answer>" + TEXT, None),
    ],
)
def test_action_end_is_the_first_complete_action_outside_a_reason(text, kept):
    end = parse.action_end(text)
    assert (None if end is None else text[:end]) == kept


@pytest.mark.parametrize(
    "query, is_good",
    [
        ("ab", True),
        ("a", False),
        ("a" * 200, True),
        ("a" * 201, False),
        ("--", False),
        ("日本", True),
        ("q1", False),
        ("Query 12", False),
        ("Audi Q5", True),
        ("query language", True),
        ("x <img> y", False),
        ("x </answer>", False),
        ("x <b> y", True),
    ],
)
def test_well_formed_queries(query, is_good):
    assert parse.is_well_formed(query) is is_good


@pytest.mark.parametrize(
    "left, right, is_same",
    [
        ("Capital  of Bhutan?", "capital of bhutan", True),
        ("ｃａｐｉｔａｌ of Bhutan", "capital of Bhutan", True),
        ("capital-of Bhutan |", "capital of Bhutan", True),
        ("cap\u200bital of Bhutan", "capital of Bhutan", True),
        ("STRASSE", "straße", True),
        ("capital of Bhutan 1", "capital of Bhutan 2", False),
        ("Malé", "Male", False),
    ],
)
def test_fold_decides_which_queries_are_the_same(left, right, is_same):
    assert (parse.fold(left) == parse.fold(right)) is is_same


def test_token_overlap_shows_what_uniqueness_does_not():
    assert parse.token_overlap(["x 1", "x 2"]) == pytest.approx(1 / 3)
    assert parse.token_overlap(["a b", "A b!", "c d"]) == pytest.approx(1 / 3)
    assert parse.token_overlap(["a", "b"]) == 0.0
    assert math.isnan(parse.token_overlap(["a"]))


def test_long_hostile_text_is_read_in_linear_time():
    for piece in ("<verify>", "<reason>", "<answer>", '"', ",", " ", "1,", "1 "):
        text = R + piece * 100_000
        assert parse.action_end(text) is None
        read(R + "<verify>" + piece * 100_000 + TEXT + A, items=3)
        read(R + V0 + f"<text_search>{piece * 100_000}</text_search>", items=3)
