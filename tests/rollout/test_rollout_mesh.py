"""Episodes of one device under a 4x2 mesh: the same scores, and a rate of how often free sampling
differs; and an engine spread over two devices of a host."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("rollout_mesh_program.py")


@pytest.fixture(scope="module")
def report():
    run = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


def test_recorded_episodes_score_the_same_on_a_mesh(report, record_property):
    assert report["devices"] == 8 and report["episodes"] == 12 and report["sampled"] > 20
    assert report["gap"] < 1e-5 and report["recorded_gap"] < 1e-5
    # Rounding differs, so a draw near a border may: a rate, not an equality.
    record_property("divergence_rate", report["divergence_rate"])
    assert report["divergence_rate"] <= 0.25


def test_an_engine_on_two_devices_draws_what_one_draws(report):
    assert report["pair_heads"] == [1, 1]  # of two: the caches are spread too, and stay so
    assert report["pair_same"] == report["episodes"] and report["pair_gap"] < 1e-5
