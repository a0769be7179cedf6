"""The product rate is a rate: it does not grow with the number of runs."""

from svrl_jax.bench.rate import product_rate


def test_the_rate_is_operations_a_second():
    rate = product_rate(side=256, repeats=3)
    assert 1e8 < rate < 1e15
