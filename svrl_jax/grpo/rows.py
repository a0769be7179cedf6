"""Episodes of a step -> which of them stand together in a row of fixed length.

Three layouts, one loss:

    single   an episode a row, padded to a bucket
    packed   whole episodes one behind another
    shared   a group's prompt once, its episodes' continuations behind it; several such pieces a row

A piece is what may share a prompt. Worked example of a `shared` row, prompt p of two tokens and
continuations a b, c d e, then another question's q with f:

    ids        p p a b c d e q f
    group_id   0 0 0 0 0 0 0 1 1      attention: same group, and same branch or branch 0
    branch_id  0 0 1 1 2 2 2 0 0      a piece of one episode needs no branches
    position   0 1 2 3 2 3 4 0 1      the episodes' own: each goes on behind its prompt
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from svrl_jax.types import Episode

LAYOUTS = ("single", "packed", "shared")

# Numbers of the episodes that share one prompt; a row is a tuple of pieces.
Piece = tuple[int, ...]
Row = tuple[Piece, ...]


def plan_rows(
    groups: Sequence[Sequence[int]], episodes: Sequence[Episode], layout: str, row_tokens: int
) -> list[Row]:
    """Lays whole episodes out in rows.

    Args:
      groups: numbers of the kept episodes of each question.
      episodes: by number.
      layout: one of LAYOUTS.
      row_tokens: tokens of a packed row; not read where the layout is `single`.
    Returns:
      Rows, fullest first. The same episodes give the same rows.
    Raises:
      ValueError: an unknown layout; an episode longer than a row; a group whose prompts differ.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"grpo.layout {layout!r} is none of {', '.join(LAYOUTS)}")
    if layout == "single":
        alone = [((number,),) for group in groups for number in group]
        return sorted(alone, key=lambda row: -len(episodes[row[0][0]].ids))
    pieces: list[Piece] = []
    for group in groups:
        for number in group:
            if len(episodes[number].ids) > row_tokens:
                raise ValueError(
                    f"an episode of {len(episodes[number].ids)} tokens is longer than "
                    f"grpo.row_tokens={row_tokens}, which must be at least rollout.budget"
                )
        if layout == "packed":
            pieces += [(number,) for number in group]
        elif group:
            _check_prompts(group, episodes)
            pieces += _cut_group(group, episodes, row_tokens)
    return _first_fit(pieces, episodes, row_tokens)


def piece_tokens(piece: Piece, episodes: Sequence[Episode]) -> int:
    """Tokens of a piece: its prompt once, and what each episode has behind it."""
    prompt = episodes[piece[0]].prompt_length
    return prompt + sum(len(episodes[n].ids) - prompt for n in piece)


def row_length(row: Row, episodes: Sequence[Episode]) -> int:
    """Tokens of a row."""
    return sum(piece_tokens(piece, episodes) for piece in row)


def _cut_group(group: Sequence[int], episodes: Sequence[Episode], row_tokens: int) -> list[Piece]:
    """As few pieces as first-fit finds, each within a row; the prompt is repeated in each."""
    prompt = episodes[group[0]].prompt_length
    rest = {n: len(episodes[n].ids) - prompt for n in group}
    return [
        tuple(piece)
        for piece in _bins(sorted(group, key=lambda n: -rest[n]), rest, row_tokens - prompt)
    ]


def _first_fit(pieces: list[Piece], episodes: Sequence[Episode], row_tokens: int) -> list[Row]:
    size = {piece: piece_tokens(piece, episodes) for piece in pieces}
    rows = _bins(sorted(pieces, key=lambda piece: -size[piece]), size, row_tokens)
    rows.sort(key=lambda row: -sum(size[p] for p in row))
    return [tuple(row) for row in rows]


def _bins(items: list, size: dict, room: int) -> list[list]:
    """First-fit in the given order."""
    bins: list[list] = []
    left: list[int] = []
    for item in items:
        place = next((i for i, n in enumerate(left) if n >= size[item]), None)
        if place is None:
            bins.append([])
            left.append(room)
            place = len(bins) - 1
        bins[place].append(item)
        left[place] -= size[item]
    return bins


def _check_prompts(group: Sequence[int], episodes: Sequence[Episode]) -> None:
    first = episodes[group[0]]
    length = first.prompt_length
    for number in group[1:]:
        other = episodes[number]
        if (
            other.prompt_length != length
            or not np.array_equal(other.ids[:length], first.ids[:length])
            or not np.array_equal(other.positions[:, :length], first.positions[:, :length])
        ):
            raise ValueError(
                f"episodes {first.sample} and {other.sample} of task {first.task_id!r} do not have "
                "the same prompt, so they cannot share it: set grpo.layout to 'packed'"
            )
