"""The reward's factors, one by one: short runs of the quickstart that differ in the reward alone.

    python -m experiments sweep --config=configs/ablations.py --seeds=0,1,2 --workdir=runs/ablations

    full           the whole product
    outcome_only   r_acc alone: the GRPO search agent
    mmsearch_r1    r_acc with MMSearch-R1's flat factor 0.9 on answers that searched
    no_aware, no_count, no_qalign, no_salign    without that factor
    no_gate        the verification factors beside r_acc instead of multiplying it (score.py)

Format counts 0.1 in all. Two CPU cores, 20 steps of 16 x 8 episodes a run, then the 150 test
questions at T = 1 and greedily. At 20 steps the quickstart has unlearnt most of its needless
searches; the other figures are on their way.
"""

from ml_collections import ConfigDict

from configs import quickstart

_FACTORS = ("use_aware", "use_count", "use_qalign", "use_salign")
CHANGES = {
    "full": {},
    "outcome_only": dict.fromkeys(_FACTORS, False),
    "mmsearch_r1": dict.fromkeys(_FACTORS, False) | {"search_penalty": 0.1},
    "no_aware": {"use_aware": False},
    "no_count": {"use_count": False},
    "no_qalign": {"use_qalign": False},
    "no_salign": {"use_salign": False},
    "no_gate": {"gate": False},
}
WORDS = tuple(CHANGES)


def get_config(arg: str = "full") -> ConfigDict:
    """One of WORDS."""
    if arg not in CHANGES:
        raise ValueError(f"configs/ablations.py takes one of {', '.join(WORDS)}, got {arg!r}")
    config = quickstart.get_config()
    config.num_steps = 20
    config.save_every = 5  # a stopped sweep loses little
    config.keep_checkpoints = 1
    config.log_episodes = False
    config.data.draws_per_item = 1
    config.eval.splits = ("test",)
    config.eval.compare = False
    config.reward.update(CHANGES[arg])
    return config
