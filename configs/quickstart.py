"""SVRL on a laptop, no network: a Qwen2.5-VL of 1.3M parameters learns when to search and what to
trust.

    make quickstart          or:  python -m experiments train --config=configs/quickstart.py

Two CPU cores, under 6 GiB, about 10 minutes. The initial policy ships with the package; its bad
habits (needless searches, masks of ones, repeated queries) and their rates are in
`config.pretrain`.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    """The quickstart. `arg` takes no word."""
    if arg:
        raise ValueError(f"configs/quickstart.py takes no argument, got {arg!r}")
    config = base.get_config()
    config.num_steps = 70
    config.save_every = 20

    config.data.prompts_per_step = 16
    config.data.draws_per_item = 2

    config.prompt.agent_file = "svrl_jax/protocol/prompts/agent_short.txt"
    config.prompt.direct_file = "svrl_jax/protocol/prompts/direct_short.txt"
    config.model.folder = "svrl_jax/data/quickstart"

    config.rollout.group_size = 8
    config.rollout.lanes = 32  # on two cores, more only read more cache at a time
    config.rollout.budget = 448
    config.rollout.max_turn_tokens = 80
    config.rollout.answer_reserve = 40

    config.search.image_top_k = 3
    config.search.text_top_k = 3
    config.search.image_items = "titles"
    config.search.show_links = False
    config.search.summary_words = 14

    config.grpo.kl_coef = 0.005
    config.grpo.drop_equal_groups = True
    config.grpo.microbatch_rows = 8
    config.grpo.layout = "single"  # prompts of 38 tokens: nothing to gain from sharing them
    config.grpo.length_buckets = (128, 256, 448)
    # At 4e-4 the reward fell again after 18 steps and KL passed 0.1: noise drove the weights.
    config.optim.learning_rate = 1.5e-4
    config.optim.b2 = 0.99
    return config
