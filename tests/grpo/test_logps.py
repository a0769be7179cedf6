import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svrl_jax.grpo.logps import head_logps, kept_ids, log_softmax_kept


def plain(hidden, weight, targets, keep, temperature):
    """Log-probs and entropy from whole logits."""
    logps = log_softmax_kept(hidden @ weight.T, keep, temperature)
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    return jnp.take_along_axis(logps, targets[..., None], -1)[..., 0], entropy


@pytest.mark.case("A-J3")
def test_masked_log_softmax_has_a_finite_gradient():
    keep = np.array([True, True, False])
    x = jnp.array([1.0, 1.0, 100.0])
    f = lambda x: jnp.where(keep, log_softmax_kept(x, keep, 1.0), 0.0).sum()  # noqa: E731
    value, grad = jax.value_and_grad(f)(x)
    np.testing.assert_allclose(value, 2 * np.log(0.5), rtol=1e-6)
    assert np.isfinite(grad).all() and float(grad[2]) == 0.0
    # The same through the head, whose entropy reads the masked entry too: 0 * -inf would be NaN.
    one, eye, targets = jnp.ones((1, 2, 1)), x[:, None], jnp.array([[0, 1]])
    g = lambda w: head_logps(one, w, targets, keep, 1.0)[0].sum()  # noqa: E731
    value, grad = jax.value_and_grad(g)(eye)
    np.testing.assert_allclose(value, 2 * np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [0.0, 0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(head_logps(one, eye, targets, keep, 1.0)[1], np.log([[2.0, 2.0]]))


def test_temperature_and_bans_by_hand():
    logits = jnp.array([[2.0], [0.0], [9.0], [1.0]])
    keep = kept_ids(4, [2])
    logps, entropy = head_logps(jnp.ones((1, 1, 1)), logits, jnp.array([[3]]), keep, 0.5)
    scaled = np.exp(np.array([4.0, 0.0, 2.0]))
    p = scaled / scaled.sum()
    np.testing.assert_allclose(logps, [[np.log(p[2])]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[-(p * np.log(p)).sum()]], rtol=1e-6)


@pytest.mark.parametrize("banned", [[4], [-1], [0, 1, 2, 3]])
def test_impossible_bans_are_refused(banned):
    with pytest.raises(ValueError, match="bann"):
        kept_ids(4, banned)


@pytest.mark.case("A-J5")
@pytest.mark.parametrize("block", [1, 5, 6, 17, 100])
def test_blocks_change_neither_value_nor_gradient(block):
    """Blocks that divide the vocabulary and that do not, one of them banned altogether."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 5, 6)), jnp.float32)
    weight = jnp.asarray(3 * rng.normal(size=(17, 6)), jnp.float32)
    targets = jnp.asarray(rng.integers(6, 16, (2, 5)))
    keep = kept_ids(17, [0, 1, 2, 3, 4, 5, 16])

    def f(head, hidden, weight):
        logps, entropy = head(hidden, weight)
        return (logps * jnp.arange(10.0).reshape(2, 5)).sum(), (logps, entropy)

    def blocked(hidden, weight):
        return head_logps(hidden, weight, targets, keep, 0.7, block)

    def whole(hidden, weight):
        return plain(hidden, weight, targets, keep, 0.7)

    found = jax.value_and_grad(f, (1, 2), has_aux=True)(blocked, hidden, weight)
    expected = jax.value_and_grad(f, (1, 2), has_aux=True)(whole, hidden, weight)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert (np.asarray(found[1][1])[:6] == 0).all()


def test_products_in_bfloat16_have_float32_sums():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 7, 64)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(300, 64)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 300, (1, 7)))
    keep = kept_ids(300, [])
    logps, entropy = head_logps(hidden, weight, targets, keep, 1.0, 128)
    rounded = weight.astype(jnp.bfloat16).astype(jnp.float32)
    expected = plain(hidden.astype(jnp.float32), rounded, targets, keep, 1.0)
    assert logps.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logps, expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-4)


@pytest.mark.case("A-J5")
def test_memory_follows_the_block_in_forward_and_backward():
    tokens, width = 4096, 8

    def temporary(vocab, block):
        def f(hidden, weight):
            targets = jnp.zeros((1, tokens), jnp.int32)
            return head_logps(hidden, weight, targets, kept_ids(vocab, []), 1.0, block)[0].sum()

        shapes = [
            jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, tokens, width), (vocab, width))
        ]
        step = jax.jit(jax.grad(f, (0, 1)))
        return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = tokens * 8192 * 4
    assert temporary(8192, 8192) >= logits
    assert temporary(8192, None) < logits / 2
    assert temporary(151_936, None) < 1.2 * temporary(32_768, None) + 151_936 * width * 4
