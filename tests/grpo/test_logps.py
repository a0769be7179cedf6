import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svrl_jax.grpo.logps import chunked_target_logps, kept_ids, log_softmax_kept, target_logps


@pytest.mark.case("A-J3")
def test_masked_log_softmax_has_a_finite_gradient():
    keep = np.array([True, True, False])
    x = jnp.array([1.0, 1.0, 100.0])
    f = lambda x: jnp.where(keep, log_softmax_kept(x, keep, 1.0), 0.0).sum()  # noqa: E731
    value, grad = jax.value_and_grad(f)(x)
    np.testing.assert_allclose(value, 2 * np.log(0.5), rtol=1e-6)
    assert np.isfinite(grad).all() and float(grad[2]) == 0.0
    # The entropy reads the masked entry too, and 0 * -inf would be NaN.
    entropy = target_logps(x[None], jnp.array([0]), keep, 1.0)[1]
    np.testing.assert_allclose(entropy, np.log(2), rtol=1e-6)


def test_temperature_and_bans_by_hand():
    logits = jnp.array([[2.0, 0.0, 9.0, 1.0]])
    keep = kept_ids(4, [2])
    logps, entropy = target_logps(logits, jnp.array([3]), keep, 0.5)
    scaled = np.exp(np.array([4.0, 0.0, 2.0]))
    p = scaled / scaled.sum()
    np.testing.assert_allclose(logps, [np.log(p[2])], rtol=1e-6)
    np.testing.assert_allclose(entropy, [-(p * np.log(p)).sum()], rtol=1e-6)


@pytest.mark.parametrize("banned", [[4], [-1], [0, 1, 2, 3]])
def test_impossible_bans_are_refused(banned):
    with pytest.raises(ValueError, match="bann"):
        kept_ids(4, banned)


@pytest.mark.case("A-J5")
@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_chunks_change_neither_value_nor_gradient(chunk):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(10, 6)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(17, 6)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 16, 10))
    keep = kept_ids(17, [16])

    def f(hidden, weight, chunk):
        logps, entropy = chunked_target_logps(
            lambda h: h @ weight.T, hidden, targets, keep, 0.7, chunk
        )
        return (logps * jnp.arange(10.0)).sum(), (logps, entropy)

    whole = jax.value_and_grad(f, (0, 1), has_aux=True)(hidden, weight, None)
    parts = jax.value_and_grad(f, (0, 1), has_aux=True)(hidden, weight, chunk)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.case("A-J5")
def test_memory_follows_the_chunk_in_forward_and_backward():
    tokens, vocab, width = 4096, 8192, 8

    def f(hidden, weight, chunk):
        targets = jnp.zeros(tokens, jnp.int32)
        head = lambda h: h @ weight.T  # noqa: E731
        return chunked_target_logps(head, hidden, targets, kept_ids(vocab, []), 1.0, chunk)[0].sum()

    def peak(chunk):
        shapes = [jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (tokens, vocab)]
        step = jax.jit(jax.grad(lambda h, w: f(h, w, chunk), (0, 1)))
        return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = tokens * vocab * 4
    assert peak(tokens) >= logits
    assert peak(128) < logits / 8
