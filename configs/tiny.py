"""Every part of the whole path at its smallest: for tests, and for trying a change in a minute.

    python -m experiments pretrain --config=configs/tiny.py
    python -m experiments train --config=configs/tiny.py --workdir=runs/tiny

One CPU core, about two minutes. The policy (60 thousand parameters) hardly learns to read; the
figures mean nothing.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(arg: str = "") -> ConfigDict:
    """The quickstart made small. `arg` takes no word."""
    if arg:
        raise ValueError(f"configs/tiny.py takes no argument, got {arg!r}")
    config = quickstart.get_config()
    config.num_steps = 3
    config.save_every = 1

    config.data.prompts_per_step = 2
    config.data.draws_per_item = 1
    config.model.folder = "runs/tiny_policy"

    config.rollout.group_size = 2
    config.rollout.budget = 224
    config.rollout.max_turn_tokens = 48
    config.rollout.lanes = 4
    config.rollout.slots = 4

    config.reward.search_free_samples = 0
    config.grpo.drop_equal_groups = False  # groups are often equal here, and steps must count
    config.grpo.microbatch_rows = 4
    config.grpo.length_buckets = (224,)
    config.optim.learning_rate = 1e-3
    config.optim.weight_decay = 0.1  # so that parameters move even where no episode is right

    config.eval.num_items = 2

    config.pretrain.out = "runs/tiny_policy"
    config.pretrain.vocab_size = 600
    config.pretrain.hidden_size = 32
    config.pretrain.num_layers = 2
    config.pretrain.num_heads = 2
    config.pretrain.num_kv_heads = 1
    config.pretrain.mlp_size = 48
    config.pretrain.vision_hidden_size = 32
    config.pretrain.vision_depth = 1
    config.pretrain.vision_heads = 2
    config.pretrain.vision_mlp_size = 48
    config.pretrain.row_tokens = 256
    config.pretrain.rows = 4
    config.pretrain.learning_rate = 1e-2
    phases = config.pretrain.phases
    for phase, steps in zip(
        (phases[name] for name in sorted(phases)), (5, 20, 5, 5, 80), strict=True
    ):
        phase.steps = steps
    return config
