"""A finished Episode (and the oracle's labels) -> the six factors of the reward, each in [0, 1].

The table of SPEC 3, one pure function a row. How they are switched and multiplied is `score.py`'s
business. All are defined for every episode, whatever ended it.
"""

from __future__ import annotations

from collections.abc import Sequence

from svrl_jax.protocol import parse
from svrl_jax.rewards import answers
from svrl_jax.types import Episode, OracleLabels, Turn


def r_acc(episode: Episode, golds: Sequence[str], scorer: str) -> float:
    """Score of the final answer; 0 where there is none.

    Only what the policy itself answered is looked at (`Episode.answer`): an `<answer>` in the
    prompt or in a search result is not part of it.

    Raises:
      answers.UnreadableGold: every gold is blank.
    """
    return answers.score_answer(episode.answer, golds, scorer)


def r_aware(episode: Episode, search_free: bool | None, scale: float) -> float:
    """`scale` (lambda) if the instance is labelled search_free and any tool was called, else 1.

    None (no label) is "not labelled search_free", so 1; `score_groups` refuses such groups.
    """
    return scale if search_free and episode.has_searched else 1.0


def r_count(episode: Episode, num_queries: int, floor: float) -> float:
    """Query diversity: mean over text-search turns of max(floor, min(1, unique proposals / k)).

    Unique after `parse.fold`, well-formed proposals only. A text-search turn is one whose action is
    a text search, executed or not. 1 where there was none.
    """
    shares = [
        max(floor, min(1.0, len({parse.fold(q) for q in turn.parsed.proposals}) / num_queries))
        for turn in text_search_turns(episode)
    ]
    return _mean(shares)


def r_qalign(episode: Episode, labels: OracleLabels, floor: float, over: str) -> float:
    """floor + (1 - floor) * mean of the oracle's 0/1 for the queries; 1 where there were none.

    Args:
      episode: see above.
      labels: of this episode.
      floor: value when every query is bad.
      over: `executed`: the mean over executed text searches of that query's label; `all`: the mean
        over text-search turns of the mean over the turn's well-formed proposals, 0 for a turn with
        none.
    Raises:
      ValueError: unknown `over`, or labels of another episode (counts differ).
    """
    check_labels(episode, labels)
    if over == "executed":
        shares = [float(label) for label in labels.queries]
    elif over == "all":
        shares = [_mean(turn, empty=0.0) for turn in labels.proposals]
    else:
        raise ValueError(f"qalign_over must be 'executed' or 'all', got {over!r}")
    return floor + (1.0 - floor) * _mean(shares)


def r_salign(episode: Episode, labels: OracleLabels, floor: float) -> float:
    """floor + (1 - floor) * mean over verified tool outputs of the agreement with the oracle.

    See `mask_agreements` for what counts. 1 where no output with items was verified.

    Raises:
      ValueError: labels of another episode (counts differ).
    """
    return floor + (1.0 - floor) * _mean(mask_agreements(episode, labels))


def mask_agreements(episode: Episode, labels: OracleLabels) -> list[float]:
    """For each verified tool output, the share of its items on which mask and oracle agree.

    The mask of an output stands in the *next* turn. A turn behind the output that has no mask, an
    unreadable one or one of the wrong length scores 0, also when it broke off half way: a mask was
    due. An output behind which the episode ended before the policy wrote anything (no room left)
    was never to be verified and is skipped, as is one without items. Neither kind of episode has an
    answer, so under the gate the choice moves a statistic, not a reward.

    Raises:
      ValueError: labels of another episode, or a turn whose `items_to_verify` is not the number of
        items shown before it.
    """
    check_labels(episode, labels)
    wanted = iter(labels.items)
    shares = []
    for turn, following in zip(episode.turns, (*episode.turns[1:], None)):
        if turn.call is None:
            continue
        oracle = next(wanted)
        if following is None or not oracle:
            continue
        if following.items_to_verify != len(oracle):
            raise ValueError(
                f"episode {episode.task_id!r}: {len(oracle)} items were shown, but the next turn's "
                f"items_to_verify is {following.items_to_verify}"
            )
        mask = following.parsed.mask
        if mask is None or len(mask) != len(oracle):
            shares.append(0.0)
        else:
            shares.append(sum(m == o for m, o in zip(mask, oracle)) / len(oracle))
    return shares


def r_format(episode: Episode) -> float:
    """1 if the episode was answered and no turn broke the grammar in any way, else 0.

    Limits on tool calls and the budget are in it through `end_reason`. A tool that failed is not
    the policy's fault and costs nothing here.
    """
    return float(episode.end_reason == "answered" and not episode.violations)


def text_search_turns(episode: Episode) -> tuple[Turn, ...]:
    """Turns whose action is a text search, executed or not."""
    return tuple(t for t in episode.turns if t.parsed.action == "text_search")


def check_labels(episode: Episode, labels: OracleLabels) -> None:
    """Raises ValueError if the labels' counts are not those of the episode."""
    expected = (
        [len(c.items) for c in episode.calls],
        sum(c.tool == "text_search" for c in episode.calls),
        [len(t.parsed.proposals) for t in text_search_turns(episode)],
    )
    given = (
        [len(items) for items in labels.items],
        len(labels.queries),
        [len(proposals) for proposals in labels.proposals],
    )
    for name, wanted, got in zip(("items", "queries", "proposals"), expected, given):
        if wanted != got:
            raise ValueError(
                f"oracle labels do not belong to episode {episode.task_id!r} (sample "
                f"{episode.sample}): {name} should count {wanted}, got {got}"
            )


def _mean(values: Sequence[float], empty: float = 1.0) -> float:
    return sum(values) / len(values) if values else empty
