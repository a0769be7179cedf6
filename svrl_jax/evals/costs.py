"""A group of cases -> what a question costs: tokens, calls, seconds, money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from svrl_jax.evals.cases import Case, Group

# Keys of config.search that hold the price of a tool's call, by tool.
TOOLS = ("image_search", "text_search")


def prices(config) -> dict[str, float]:
    """US dollars of a call of each tool, and of a million tokens in and out.

    Args:
      config: the whole config; embedded and index searches cost nothing.
    """
    search, live = config.search, config.search.kind == "live"
    names = {"image_search": search.image_provider, "text_search": search.text_provider}
    found = {
        tool: search[name].usd_per_call if live and name != "none" else 0.0
        for tool, name in names.items()
    }
    return found | {
        "million_in": config.eval.usd_per_million_in,
        "million_out": config.eval.usd_per_million_out,
    }


def cost_of(group: Group) -> dict[str, float | None]:
    """Means over the group's episodes.

    Returns:
      generated: tokens that the policy wrote; read: tokens of all its contexts, each turn's whole
      (what a server bills without a cache); image_searches, text_searches: calls; tool_s: seconds
      that its tools took; seconds: wall time of the evaluation over its episodes (they run side by
      side); usd: by the prices of its config. None where there are no episodes.
    """
    cases, usd = group.cases, group.about["usd"]
    if not cases:
        return dict.fromkeys(
            ("generated", "read", "image_searches", "text_searches", "tool_s", "seconds", "usd")
        )
    n = len(cases)
    calls = {tool: _calls(cases, tool) for tool in TOOLS}
    generated = sum(int(c.episode.loss_mask.sum()) for c in cases)
    read = sum(t.start for c in cases for t in c.episode.turns)
    money = sum(calls[tool] * usd[tool] for tool in TOOLS)
    served = group.about["served"]  # what a server says it read and wrote, where it does
    bill = served.get("prompt_tokens") or read, served.get("completion_tokens") or generated
    money += (bill[0] * usd["million_in"] + bill[1] * usd["million_out"]) / 1e6
    return {
        "generated": generated / n,
        "read": read / n,
        "image_searches": calls["image_search"] / n,
        "text_searches": calls["text_search"] / n,
        "tool_s": sum(call.seconds for c in cases for call in c.episode.calls) / n,
        "seconds": group.about["seconds"] / n,
        "usd": money / n,
    }


def _calls(cases: Sequence[Case], tool: str) -> int:
    return sum(call.tool == tool for c in cases for call in c.episode.calls)


def free() -> Mapping[str, float]:
    """The prices of what costs nothing."""
    return dict.fromkeys((*TOOLS, "million_in", "million_out"), 0.0)
