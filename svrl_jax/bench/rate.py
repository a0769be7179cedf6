"""The machine's own rate of float32 matrix products, measured beside every benchmark.

A share of that rate says more than tokens a second: it does not change with the machine.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

SIDE = 2048  # rows and columns of the measured product


def product_rate(side: int = SIDE, repeats: int = 5) -> float:
    """Operations a second of a float32 `side` x `side` x `side` product on the default device.

    Two operations a multiply-add. The quickest of `repeats` runs: others may use the machine too.

    Args:
      side: at least 1.
      repeats: at least 1, after one that compiles.
    """
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(side, side)), jnp.float32) for _ in range(2))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    product(a, b).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(a, b).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2.0 * side**3 / min(seconds)
