"""A resolved config -> errors that name the keys and the remedy, before anything is built."""

from __future__ import annotations

from ml_collections import ConfigDict

from svrl_jax.rewards.answers import SCORERS
from svrl_jax.search.providers import IMAGE_PROVIDERS, TEXT_PROVIDERS
from svrl_jax.search.record import MODES as RECORD_MODES

_CHOICES = {
    "rollout.query_choice": ("random", "first"),
    "eval.query_choice": ("random", "first"),
    "eval.filter": ("model", "words"),
    "reward.oracle": ("rule", "model", "policy"),
    "search.image_items": ("full", "titles"),
    "search.kind": ("local", "index", "live", "server"),
    "search.text_provider": TEXT_PROVIDERS,
    "search.image_provider": IMAGE_PROVIDERS,
    "search.page_reader": ("fetch", "jina", "none"),
    "search.summariser": ("sentences", "model"),
    "search.unread_pages": ("snippet", "drop"),
    "search.record_mode": ("off", *RECORD_MODES),
    "reward.scorer": SCORERS,
    "reward.qalign_over": ("executed", "all"),
    "reward.search_free_source": ("greedy", "rate", "category"),
    "grpo.objective": ("dr_grpo", "grpo", "dapo", "gspo"),
    "grpo.kl_estimator": ("k1", "k2", "k3"),
    "grpo.ref_dtype": ("float32", "bfloat16"),
    "grpo.layout": ("single", "packed", "shared"),
    "rollout.cache_dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.attention": ("auto", "dense", "blockwise", "pallas", "cudnn"),
    "model.remat": ("none", "dots", "layer"),
}
_FRACTIONS = (
    "reward.w_format", "reward.search_free_scale", "reward.count_floor", "reward.qalign_floor",
    "reward.salign_floor", "reward.search_penalty", "reward.search_free_rate",
)  # fmt: skip
_AT_LEAST_ONE = (
    "num_steps", "save_every", "keep_checkpoints", "data.prompts_per_step", "data.draws_per_item",
    "data.max_picture_pixels", "data.max_prompt_tokens", "data.prefetch_batches",
    "rollout.budget", "rollout.max_turn_tokens", "rollout.num_queries", "rollout.lanes",
    "rollout.slots", "rollout.decode_chunk", "search.image_top_k", "search.text_top_k",
    "search.summary_words", "search.page_chars", "search.page_max_bytes",
    "search.max_picture_pixels", "search.thumbnail_px", "grpo.inner_steps", "grpo.microbatch_rows",
    "grpo.minibatches", "grpo.row_tokens",
)  # fmt: skip


class ConfigError(ValueError):
    """A config that cannot run; the message names the keys and the remedy."""


def check(config: ConfigDict, *, training: bool) -> None:
    """Raises ConfigError on the first rule that the config breaks.

    Args:
      config: the whole config.
      training: also check what only training needs.
    """
    for key, allowed in _CHOICES.items():
        value = _get(config, key)
        if value not in allowed:
            raise ConfigError(f"config.{key} is {value!r}; it must be one of {allowed}")
    for key in _FRACTIONS:
        if not 0.0 <= _get(config, key) <= 1.0:
            raise ConfigError(f"config.{key} is {_get(config, key)}; it must lie in [0, 1]")
    for key in _AT_LEAST_ONE:
        if _get(config, key) < 1:
            raise ConfigError(f"config.{key} is {_get(config, key)}; it must be at least 1")
    if config.data.source == "world" and config.data.split != "train":
        raise ConfigError(
            f"config.data.split is {config.data.split!r}, but config.data.source is 'world', which "
            "trains on 'train': name a prepared folder as the source"
        )
    _check_rollout(config)
    _check_search(config)
    if training:
        _check_training(config)


def _check_rollout(config: ConfigDict) -> None:
    rollout = config.rollout
    if rollout.top_k < 0 or not 0.0 < rollout.top_p <= 1.0 or rollout.tool_picture_pixels < 0:
        raise ConfigError(
            f"config.rollout.top_k is {rollout.top_k}, top_p {rollout.top_p}, tool_picture_pixels "
            f"{rollout.tool_picture_pixels}: they must be 0 or more, in (0, 1], and 0 or more"
        )
    for name in ("tool_timeout_s", "episode_tools_timeout_s"):
        if rollout[name] < 0:
            raise ConfigError(f"config.rollout.{name} is {rollout[name]}; it must be 0 or more")
    if rollout.temperature < 0:
        raise ConfigError(
            f"config.rollout.temperature is {rollout.temperature}; it must be 0 or more"
        )
    if rollout.slots < rollout.lanes:
        raise ConfigError(
            f"config.rollout.slots ({rollout.slots}) is below config.rollout.lanes "
            f"({rollout.lanes}): a lane needs a slot, raise slots"
        )
    if rollout.answer_reserve + rollout.max_turn_tokens > rollout.budget:
        raise ConfigError(
            f"config.rollout.budget ({rollout.budget}) has no room for a turn "
            f"(config.rollout.max_turn_tokens {rollout.max_turn_tokens}) and the answer "
            f"(config.rollout.answer_reserve {rollout.answer_reserve}): raise budget"
        )
    unknown = set(config.eval.scorers) - {*SCORERS, "judge"}
    if unknown:
        known = ", ".join((*SCORERS, "judge"))
        raise ConfigError(f"config.eval.scorers has {sorted(unknown)}; known: {known}")
    if config.eval.samples < 1:
        raise ConfigError(f"config.eval.samples is {config.eval.samples}; it must be at least 1")
    if not config.eval.modes:
        raise ConfigError("config.eval.modes is empty; name at least one")
    unknown = set(config.eval.modes) - {"sampled", "greedy"}
    if unknown:
        raise ConfigError(f"config.eval.modes has {sorted(unknown)}; known: sampled, greedy")
    unknown = set(config.eval.splits) - {"train", "test", "ood"}
    if unknown and config.data.source == "world":  # a prepared folder's own are checked on opening
        raise ConfigError(f"config.eval.splits has {sorted(unknown)}; known: train, test, ood")


def _check_search(config: ConfigDict) -> None:
    search = config.search
    for name in ("record_mode", "thumbnails"):
        if search.kind != "live" and search[name] not in ("off", False):
            raise ConfigError(
                f"config.search.{name} is {search[name]!r}, but config.search.kind is "
                f"{search.kind!r}, which asks nobody: set it back, or kind to live"
            )
    if search.kind == "index" and not search.index_folder:
        raise ConfigError("config.search.index_folder is not set: name what `index` made")
    if (search.record_mode == "off") != (search.record_file == ""):
        raise ConfigError(
            f"config.search.record_mode is {search.record_mode!r} and config.search.record_file "
            f"{search.record_file!r}: set both, or neither ('off' and '')"
        )
    if search.kind == "live" and search.image_provider == "none":
        if config.rollout.max_image_searches:
            raise ConfigError(
                "config.search.image_provider is 'none', but config.rollout.max_image_searches is "
                f"{config.rollout.max_image_searches}: name a provider, or set it to 0"
            )
    for key in ("max_calls", "max_usd", "max_retries", "max_wait_s", "max_redirects"):
        if search[key] < 0:
            raise ConfigError(f"config.search.{key} is {search[key]}; it must be 0 or more")
    for name in ("serper", "serpapi", "tavily", "jina", "chat", "server"):
        provider = search[name]
        if provider.per_minute <= 0 or provider.concurrency < 1 or provider.usd_per_call < 0:
            raise ConfigError(
                f"config.search.{name}: per_minute must be above 0, concurrency at least 1, "
                "usd_per_call 0 or more"
            )


def _check_training(config: ConfigDict) -> None:
    if config.rollout.temperature == 0:
        raise ConfigError(
            "config.rollout.temperature is 0: all episodes of a group would be equal; "
            "set it above 0 to train"
        )
    if config.rollout.top_k or config.rollout.top_p < 1.0:
        raise ConfigError(
            f"config.rollout.top_k is {config.rollout.top_k} and config.rollout.top_p "
            f"{config.rollout.top_p}: tokens would be drawn from a truncated distribution and "
            "weighted by the whole one, which biases the gradient; set them to 0 and 1 to train"
        )
    if config.rollout.group_size < 2:
        raise ConfigError(
            f"config.rollout.group_size is {config.rollout.group_size}: a group of one has no "
            "advantage; set it to 2 or more"
        )
    if config.grpo.layout != "single" and config.grpo.row_tokens < config.rollout.budget:
        raise ConfigError(
            f"config.grpo.row_tokens ({config.grpo.row_tokens}) is below config.rollout.budget "
            f"({config.rollout.budget}): a row holds whole episodes, raise it"
        )
    longest = max(config.grpo.length_buckets)
    if config.grpo.layout == "single" and longest < config.rollout.budget:
        raise ConfigError(
            f"config.grpo.length_buckets end at {longest}, below config.rollout.budget "
            f"({config.rollout.budget}): add a bucket of at least the budget"
        )
    if config.reward.search_free_source == "rate" and config.reward.search_free_samples < 1:
        raise ConfigError(
            "config.reward.search_free_source is 'rate' but config.reward.search_free_samples is "
            "0: set it to 1 or more"
        )
    if config.grpo.layout != "single" and config.model.attention == "cudnn":
        raise ConfigError(
            f"config.model.attention is 'cudnn', which knows no packing, but config.grpo.layout is "
            f"{config.grpo.layout!r}: set the one to 'auto' or the other to 'single'"
        )
    if config.grpo.minibatches > config.data.prompts_per_step:
        raise ConfigError(
            f"config.grpo.minibatches ({config.grpo.minibatches}) is above "
            f"config.data.prompts_per_step ({config.data.prompts_per_step}): groups stay whole"
        )
    for name, alarm in config.alarms.items():
        if name == "first_steps":
            continue
        if alarm.action not in ("off", "warn", "stop") or alarm.steps < 1:
            raise ConfigError(
                f"config.alarms.{name}: action {alarm.action!r} must be one of off, warn, stop, "
                f"and steps {alarm.steps} at least 1"
            )
    if config.lora.rank < 0 or (config.lora.rank and not config.lora.targets):
        raise ConfigError("config.lora.rank must be 0 or more, and config.lora.targets not empty")
    if config.grpo.max_resamples < 0 or config.grpo.importance_cap < 0:
        raise ConfigError(
            "config.grpo.max_resamples and config.grpo.importance_cap must be 0 or more"
        )
    if config.grpo.kl_coef < 0 or config.optim.learning_rate <= 0:
        raise ConfigError(
            "config.grpo.kl_coef must be 0 or more and config.optim.learning_rate above 0"
        )


def _get(config: ConfigDict, dotted: str):
    for name in dotted.split("."):
        config = config[name]
    return config
