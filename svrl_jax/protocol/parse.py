"""Decoded text of a policy turn -> ParsedTurn: the grammar of a turn, total over all strings.

A turn is `<reason>...</reason>`, then `<verify>...</verify>` where required, then one action:
`<search><img></search>`, `<text_search>q1, ..., qk</text_search>` or `<answer>...</answer>`, with
nothing but white space between or behind. Sampler and reward read a turn through one scan
(`_scan`), so they cannot disagree about where it ends. Its rules, from left to right:

* A tag counts in its exact spelling only. `<Answer>` or `<answer >` is text.
* A reason runs from `<reason>` to the next `</reason>`. Nothing inside it acts: an action spelt
  there is `tag_in_reason`, and neither stops the sampler nor is executed. This holds for a second
  reason too.
* An action runs from its opening tag to its own closing tag; other tags inside belong to it. So a
  query that quotes `<answer>x</answer>` is an ill-formed query, never half a call and half an
  answer. A closing tag without an opening one is stray text.
* The verify block protects nothing: an action that opens inside an unclosed one is the action, and
  the mask is unreadable.
* The first action that is complete is the turn's action. The scan never looks past it, hence
  `action_end` of a prefix, once found, is that of every longer text.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import unicodedata
from collections.abc import Sequence

from svrl_jax.types import ParsedTurn

REGIMES = ("agent", "direct")
MIN_QUERY_CHARS, MAX_QUERY_CHARS = 2, 200

TAG = re.compile(r"</?(?:reason|verify|search|text_search|answer|information)>|<img>")
_ACTION_OF_TAG = {"answer": "answer", "search": "image_search", "text_search": "text_search"}
_VERIFY_TAG = re.compile(r"</?verify>")
_MASK = re.compile(r"\s*(?:[01]\s*(?:,\s*[01]\s*)*)?")
# The grammar's own placeholders, copied instead of filled in.
_PLACEHOLDER = re.compile(r"(?:q|query)\s*\d*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the blocks of a turn lie: character offsets (open, close) of opening and closing tags.

    `reasons` holds complete ones; `open_reason` is the offset behind a `<reason>` that never
    closes, or None. `action` is the tag name of the first complete action, or None;
    text[body[0]:body[1]] is what it holds and [start, end) the block with its tags.
    """

    reasons: tuple[tuple[re.Match, re.Match], ...]
    open_reason: int | None
    action: str | None
    start: int = 0
    end: int = 0
    body: tuple[int, int] = (0, 0)


def grammar_of(regime: str) -> str:
    """The grammar that a regime's turns obey, one of REGIMES: all with tools are `agent`."""
    return "direct" if regime == "direct" else "agent"


def action_end(text: str) -> int | None:
    """Character offset just behind the first complete action; None if there is none (yet).

    The sampler stops at the token that brings the decoded text to this offset; characters of that
    token behind it belong to nothing. Worked example: in "<reason>a <answer>b</answer></reason>" no
    action is complete, as the reason's text does not act; add "<answer>c</answer>" and the end is
    there.
    """
    layout = _scan(text)
    return None if layout.action is None else layout.end


def parse_turn(
    text: str, *, num_queries: int, items_to_verify: int | None, regime: str, ended: bool
) -> ParsedTurn:
    """Reads one policy turn. Raises on no text.

    Choices where a text breaks the grammar (soft ones let the episode go on with r_format 0):

    * `text_between`: anything outside the blocks up to the action, a block repeated or out of order
      included. White space before `<reason>` counts as such, since a turn begins with its reason.
    * `reason_empty`: no reason, or only white space in it. `reason_unclosed` (hard): `<reason>`
      opened outside an action and never closed; the episode cannot tell thought from act.
    * `mask_missing`: a required block is absent, unclosed, written twice, or not a list of 0 and 1;
      an optional one that is there and unreadable. `mask_length`: another length than
      `items_to_verify` (None counts as 0). Required before a text search and an answer always,
      before an image search only where there is something to verify. In the `direct` regime a block
      is `text_between`.
    * `tag_in_action`: a protocol tag inside an answer or a query list.
    * `query_count`: the proposals, or the well-formed ones among them, are not `num_queries`. An
      empty piece between two commas is an (ill-formed) proposal.
    * `no_action` (hard): no complete action, an empty answer, a `<search>` holding anything but
      `<img>`.
    * `no_usable_query` (hard): no well-formed proposal; or, in a text that was not stopped at its
      action, a second `</text_search>` behind the first: a query held the closing tag, what was
      meant cannot be told, so nothing of it is run.
    * `tool_not_allowed` (hard): a search in the `direct` regime.
    * `text_after_action`: text that was not stopped at its action and goes on behind it; it is cut.

    Args:
      text: decoded text of the turn, end id removed.
      num_queries: k, proposals of a text search.
      items_to_verify: items of the latest tool output; None if no tool was called yet.
      regime: `agent` or `direct` (reason and answer only).
      ended: True if generation was stopped because an action was complete, so that what stands
        behind it is the rest of one token and no violation; False if it ended by an end id, for
        want of budget, or was never stopped (remote policy, imported trace).
    Returns:
      ParsedTurn. `action` is None where none can be read; with another hard violation it names what
      was tried, which must not be executed.
    Raises:
      ValueError: unknown regime, which no text can cause.
    """
    if regime not in REGIMES:
        raise ValueError(f"regime must be one of {REGIMES}, got {regime!r}")
    layout = _scan(text)
    reason, violations = _read_reason(text, layout)
    if layout.action is None:
        hard = "no_action" if layout.open_reason is None else "reason_unclosed"
        return ParsedTurn(None, reason, violations=(hard, *violations))

    between, is_stray = _between(text, layout)
    action = _ACTION_OF_TAG[layout.action]
    is_required = action != "image_search" or bool(items_to_verify)
    if regime == "direct":
        mask, found = None, ["text_between"] if between.strip() else []
    else:
        mask, found = _read_mask(between, items_to_verify or 0, is_required)
    violations += ["text_between"] * is_stray + found

    tail = "" if ended else text[layout.end :]
    if tail.strip():
        violations.append("text_after_action")
    if regime == "direct" and action != "answer":
        violations.append("tool_not_allowed")
    act = _read_action(action, text[slice(*layout.body)], num_queries, is_torn=_is_torn(tail))
    violations += act.violations
    return dataclasses.replace(
        act, reason=reason, mask=mask, violations=tuple(dict.fromkeys(violations))
    )


def split_queries(text: str) -> list[str]:
    """Proposed queries in written order: split at commas, outer white space dropped.

    Double quotes are paired from left to right and protect the commas between them; an odd last one
    is an ordinary character. A run of white space with a line break in it becomes one space; all
    other characters stay, quotes included. A blank text holds no query; an empty piece is kept as
    "".
    """
    if not text.strip():
        return []
    quotes = [i for i, c in enumerate(text) if c == '"']
    last_paired = quotes[len(quotes) // 2 * 2 - 1] if len(quotes) > 1 else -1
    pieces, start, is_quoted = [], 0, False
    for i, character in enumerate(text):
        if character == '"' and i <= last_paired:
            is_quoted = not is_quoted
        elif character == "," and not is_quoted:
            pieces.append(text[start:i])
            start = i + 1
    pieces.append(text[start:])
    return [re.sub(r"\s+", _fold_line_break, piece.strip()) for piece in pieces]


def _fold_line_break(space: re.Match) -> str:
    return " " if re.search(r"[\r\n]", space.group()) else space.group()


def is_well_formed(query: str) -> bool:
    """2 to 200 characters, a letter or digit among them, no protocol tag, not `q1` or `query 1`."""
    return (
        MIN_QUERY_CHARS <= len(query) <= MAX_QUERY_CHARS
        and any(c.isalnum() for c in query)
        and TAG.search(query) is None
        and _PLACEHOLDER.fullmatch(query) is None
    )


def fold(query: str) -> str:
    """Form in which two queries count as the same: NFKC, casefold, only letters, marks and digits.

    Everything else (punctuation, symbols, white space) becomes one space between words; format
    characters such as the zero-width space vanish. "Capital  of Bhutan?" gives "capital of bhutan".
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", query).casefold())
    kept = (
        c if unicodedata.category(c)[0] in "LMN" else " "
        for c in text
        if unicodedata.category(c) != "Cf"
    )  # fmt: skip
    return " ".join("".join(kept).split())


def token_overlap(queries: Sequence[str]) -> float:
    """Mean over pairs of shared words / all words (Jaccard, after `fold`), in [0, 1].

    Reported beside the count of unique queries, as "x 1, x 2" is unique by that rule. NaN where
    there are fewer than two queries, so no pair.
    """
    words = [frozenset(fold(q).split()) for q in queries]
    pairs = list(itertools.combinations(words, 2))
    if not pairs:
        return math.nan
    return sum(len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs) / len(pairs)


def _scan(text: str) -> _Layout:
    reasons: list[tuple[re.Match, re.Match]] = []
    reason: re.Match | None = None  # open, not closed yet
    action: re.Match | None = None
    for tag in TAG.finditer(text):
        spelling = tag.group()
        if reason is not None:
            if spelling == "</reason>":
                reasons.append((reason, tag))
                reason = None
        elif action is not None:
            name = action.group()[1:-1]
            if spelling == f"</{name}>":
                span = (action.end(), tag.start())
                return _Layout(tuple(reasons), None, name, action.start(), tag.end(), span)
        elif spelling == "<reason>":
            reason = tag
        elif spelling[1:-1] in _ACTION_OF_TAG:
            action = tag
    return _Layout(tuple(reasons), None if reason is None else reason.end(), None)


def _read_reason(text: str, layout: _Layout) -> tuple[str, list[str]]:
    if layout.reasons:
        opening, closing = layout.reasons[0]
        inside = text[opening.end() : closing.start()]
    else:
        inside = "" if layout.open_reason is None else text[layout.open_reason :]
    violations = [] if inside.strip() else ["reason_empty"]
    if TAG.search(inside):
        violations.append("tag_in_reason")
    return inside.strip(), violations


def _between(text: str, layout: _Layout) -> tuple[str, bool]:
    """Text from the first reason to the action, and whether something stands out of place.

    A further reason is left in as an empty pair of tags, so that what it says is not read as a
    mask.
    """
    if not layout.reasons:
        return text[: layout.start], False
    (first_open, first_close), *others = layout.reasons
    pieces, position = [], first_close.end()
    for opening, closing in others:
        pieces += [text[position : opening.start()], "<reason></reason>"]
        position = closing.end()
    pieces.append(text[position : layout.start])
    return "".join(pieces), first_open.start() > 0


def _read_mask(
    between: str, num_items: int, is_required: bool
) -> tuple[tuple[int, ...] | None, list[str]]:
    before, opening, rest = between.partition("<verify>")
    content, closing, after = rest.partition("</verify>")
    has_block = bool(opening and closing)
    stray = before + after if has_block else between
    violations = ["text_between"] if stray.strip() else []
    # Two masks, or pieces of one, are no mask: choosing between them would be a repair.
    is_one_block = has_block and _VERIFY_TAG.search(stray) is None
    if not is_one_block or _MASK.fullmatch(content) is None:
        if is_required or has_block:
            violations.append("mask_missing")
        return None, violations
    mask = tuple(int(c) for c in content if c in "01")
    if len(mask) != num_items:
        violations.append("mask_length")
    return mask, violations


def _read_action(action: str, body: str, num_queries: int, is_torn: bool) -> ParsedTurn:
    if action == "image_search":
        if body != "<img>":
            return ParsedTurn(None, violations=("no_action",))
        return ParsedTurn(action)
    violations = ("tag_in_action",) if TAG.search(body) else ()
    if action == "answer":
        if not body.strip():
            return ParsedTurn(None, violations=("no_action",))
        return ParsedTurn(action, answer=body.strip(), violations=violations)
    queries = split_queries(body)
    proposals = () if is_torn else tuple(q for q in queries if is_well_formed(q))
    if not proposals:
        violations += ("no_usable_query",)
    elif not len(proposals) == len(queries) == num_queries:
        violations += ("query_count",)
    return ParsedTurn(
        action, proposals=proposals, num_proposals=len(queries), violations=violations
    )


def _is_torn(tail: str) -> bool:
    """Whether what follows a text search shows that one of its queries held the closing tag."""
    head, closing, _ = tail.partition("</text_search>")
    return bool(closing) and "<text_search>" not in head
