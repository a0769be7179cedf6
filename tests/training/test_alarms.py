"""Each alarm is triggered once, and not by a healthy run."""

import pytest

from configs.base import get_config
from svrl_jax.training import alarms

HEALTHY = {
    "sr": 0.6, "mask_constant_share": 0.7, "policy_tokens": 100.0, "entropy": 0.8,
    "logp_gap_mean": 1e-5, "kl": 0.01, "skipped_updates": 0,
}  # fmt: skip
BAD = {
    "sr_collapse": {"sr": 0.0}, "constant_mask": {"mask_constant_share": 1.0},
    "length_growth": {"policy_tokens": 210.0}, "entropy_collapse": {"entropy": 0.01},
    "sampler_gap": {"logp_gap_mean": 0.2}, "kl": {"kl": 0.9},
    "skipped_updates": {"skipped_updates": 1},
}  # fmt: skip


def test_a_healthy_run_raises_nothing():
    config = get_config().alarms
    assert set(BAD) == set(alarms.WATCHED)
    assert alarms.check([HEALTHY] * 50, config) == {}
    assert alarms.check([], config) == {}


@pytest.mark.parametrize("name", BAD)
def test_an_alarm_needs_its_steps_in_a_row(name):
    config = get_config().alarms
    bad, before = HEALTHY | BAD[name], [HEALTHY] * 6
    steps = config[name].steps
    assert alarms.check(before + [bad] * (steps - 1), config) == {}
    assert alarms.check(before + [bad] * (steps - 1) + [HEALTHY], config) == {}
    raised = alarms.check(before + [bad] * steps, config)
    assert list(raised) == [name]
    figure = alarms.WATCHED[name][0]
    assert figure in raised[name] and f"config.alarms.{name}.threshold" in raised[name]
    unknown = {**bad, figure: None}
    assert alarms.check(before + [bad] * (steps - 1) + [unknown], config) == {}


@pytest.mark.parametrize("action", ["off", "warn", "stop"])
def test_actions(action):
    config = get_config().alarms
    config.kl.action, config.kl.steps = action, 1
    raised = alarms.check([HEALTHY | {"kl": 0.9}], config)
    assert (raised == {}) == (action == "off")
    assert len(alarms.stops(raised, config)) == (action == "stop")


def test_length_growth_waits_for_its_measure():
    config = get_config().alarms
    config.length_growth.steps = 1
    lines = [HEALTHY] * config.first_steps
    assert alarms.check(lines, config) == {}
    assert alarms.check([*lines, HEALTHY | {"policy_tokens": 201.0}], config)
