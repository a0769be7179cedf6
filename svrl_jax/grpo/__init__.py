"""Scored episodes -> advantages, rows, and an update of the policy."""

from svrl_jax.grpo.advantages import equal_groups, group_advantages, stack_totals
from svrl_jax.grpo.batch import StepBatch, make_batches
from svrl_jax.grpo.update import (
    TrainState,
    UpdateSpec,
    init_state,
    make_spec,
    reference_params,
    update,
)

__all__ = [
    "StepBatch",
    "TrainState",
    "UpdateSpec",
    "equal_groups",
    "group_advantages",
    "init_state",
    "make_batches",
    "make_spec",
    "reference_params",
    "stack_totals",
    "update",
]
