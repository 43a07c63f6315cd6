"""Attention against loops in float64, forward and backward, and what it must never read or build."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.models import attention

# Three blocks of eight, the last one ragged; segments that begin inside a block and span blocks. 0 is padding, a segment like
# the others.
LENGTH, BLOCK = 21, 8
SEGMENTS = np.array([[1] * 5 + [2] * 13 + [3] * 3, [0] * 4 + [1] * 17])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", BLOCK)


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def inputs():
    """q [B,T,K,G,H], k and v [B,T,K,H], and the weight of each output in a scalar."""
    q, out = draw(0, 2, LENGTH, 2, 3, 4), draw(1, 2, LENGTH, 2, 3, 4)
    return q, draw(2, 2, LENGTH, 2, 4), draw(3, 2, LENGTH, 2, 4), out


def loop(q, k, v, mask, d_out):
    """Outputs and gradients of sum(d_out * outputs), one query and head at a time, in float64."""
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    out, d_q, d_k, d_v = np.zeros_like(d_out), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = 1 / np.sqrt(q.shape[-1])
    for b, t, h, g in np.ndindex(q.shape[:4]):
        keys = np.flatnonzero(mask[b, t])
        scores = k[b, keys, h] @ q[b, t, h, g] * scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, t, h, g] = weights @ v[b, keys, h]
        d_weights = v[b, keys, h] @ d_out[b, t, h, g]
        d_scores = weights * (d_weights - weights @ d_weights) * scale
        d_v[b, keys, h] += np.outer(weights, d_out[b, t, h, g])
        d_k[b, keys, h] += np.outer(d_scores, q[b, t, h, g])
        d_q[b, t, h, g] += d_scores @ k[b, keys, h]
    return out, d_q, d_k, d_v


def may_read(segments):
    length = segments.shape[1]
    return (segments[:, :, None] == segments[:, None, :]) & (np.arange(length)[:, None] >= np.arange(length))[None]


@pytest.mark.parametrize("method", ["full", "blockwise", "auto"])
def test_packed_against_a_loop(small_blocks, method):
    q, k, v, d_out = inputs()

    def scalar(q, k, v):
        out = attention.packed(q, k, v, jnp.asarray(SEGMENTS), method=method)
        return jnp.sum(out * d_out), out

    gradients, out = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    expected = loop(q, k, v, may_read(SEGMENTS), d_out)
    for name, result, truth in zip(("out", "dq", "dk", "dv"), (out, *gradients), expected, strict=True):
        np.testing.assert_allclose(result, truth, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("method", ["full", "blockwise"])
def test_gradients_show_causality(small_blocks, method):
    """Output t moves with the values of its own segment up to t, and with no other."""
    q, k, v, _ = inputs()

    def outputs(v):
        return attention.packed(q, k, v, jnp.asarray(SEGMENTS), method=method).sum((2, 3, 4))

    jacobian = jax.jit(jax.jacrev(outputs))(v)  # [B, T, B, S, K, H]
    moves = np.abs(jacobian).sum((4, 5)) > 0
    expected = np.zeros_like(moves)
    for b in range(2):
        expected[b, :, b] = may_read(SEGMENTS)[b]
    np.testing.assert_array_equal(moves, expected)


def test_attend_against_a_loop():
    """Fewer queries than keys, and a mask without structure."""
    q, k, v = draw(4, 2, 3, 2, 2, 8), draw(5, 2, 7, 2, 8), draw(6, 2, 7, 2, 8)
    mask = np.random.default_rng(7).random((2, 3, 7)) < 0.5
    mask[:, :, 0] = True
    out, *_ = loop(q, k, v, mask, np.ones(q.shape))
    np.testing.assert_allclose(jax.jit(attention.attend)(q, k, v, mask), out, atol=1e-5)


def test_a_query_without_keys_is_finite():
    q, k, v = draw(8, 1, 2, 1, 1, 4), draw(9, 1, 3, 1, 4), draw(10, 1, 3, 1, 4)
    mask = np.array([[[False] * 3, [True, False, False]]])

    def scalar(q, k, v):
        out = attention.attend(q, k, v, mask)
        return jnp.sum(out[:, 1] ** 2), out

    gradients, out = jax.grad(scalar, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert all(np.all(np.isfinite(x)) for x in (out, *gradients))
    np.testing.assert_allclose(out[0, 1, 0, 0], v[0, 0, 0], rtol=1e-6)
    assert np.all(gradients[2][0, 1:] == 0), "a masked value got a gradient"


def test_scores_of_any_size_stay_finite():
    q, k, v = 1e4 * draw(11, 1, 4, 1, 1, 4), 1e4 * draw(12, 1, 4, 1, 4), draw(13, 1, 4, 1, 4)
    assert np.all(np.isfinite(attention.packed(q, k, v, jnp.ones((1, 4), int))))


def test_softmax_is_float32_inside_bfloat16():
    """One large score among 512: adding the small weights one by one in bfloat16 would stop at the first."""
    q = jnp.ones((1, 1, 1, 1, 1), jnp.bfloat16)
    k = jnp.ones((1, 512, 1, 1), jnp.bfloat16).at[0, 0].set(6.0)
    v = jnp.zeros((1, 512, 1, 1), jnp.bfloat16).at[0, 0].set(1.0)
    out = attention.attend(q, k, v, jnp.ones((1, 1, 512), bool))
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0, 0, 0, 0]) == pytest.approx(np.exp(6) / (np.exp(6) + 511 * np.exp(1)), rel=2**-8)


def arrays(jaxpr):
    """Shapes of everything that a program computes, also inside its loops and checkpoints."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from arrays(inner)


@pytest.mark.parametrize(("length", "square"), [(16, True), (17, False)])
def test_long_rows_are_read_in_blocks(small_blocks, length, square):
    """Up to two blocks "auto" builds the [T, T] scores, beyond it does not, in neither direction."""
    q, k = jnp.ones((1, length, 1, 1, 4)), jnp.ones((1, length, 1, 4))
    scalar = lambda q: attention.packed(q, k, k, jnp.ones((1, length), int)).sum()  # noqa: E731
    shapes = list(arrays(jax.make_jaxpr(jax.grad(scalar))(q).jaxpr))
    assert len(shapes) > 20
    assert any(shape.count(length) == 2 for shape in shapes) == square


def test_the_backward_pass_keeps_no_scores():
    """Between the passes only inputs are kept: four blocks keep less than the scores of one."""
    length = 4 * attention.BLOCK
    q, k = jnp.ones((1, length, 1, 1, 4)), jnp.ones((1, length, 1, 4))
    _, backward = jax.eval_shape(
        lambda q, k, v: jax.vjp(lambda *x: attention.packed(*x, jnp.ones((1, length), int)), q, k, v), q, k, k
    )
    kept = sum(x.size for x in jax.tree.leaves(backward))
    assert 0 < kept < attention.BLOCK * length / 4


def test_a_cache_is_attended_to_like_any_keys():
    """Whatever stands in the columns that are not live."""
    rng = np.random.default_rng(0)
    rows, kv, group, size, width = 3, 2, 3, 8, 12
    q = rng.normal(size=(rows, kv, group, size)).astype(np.float32)
    k, v = rng.normal(size=(2, rows, kv, width, size)).astype(np.float32)
    live = np.array([[2 <= w < 7 for w in range(width)], [w == 3 for w in range(width)], [True] * width])
    dead = ~live[:, None, :, None]
    there = attention.attend_cache(q, np.where(dead, 1e4, k).swapaxes(2, 3), np.where(dead, -1e4, v), live)
    expected = attention.attend(q[:, None], k.swapaxes(1, 2), v.swapaxes(1, 2), live[:, None])
    np.testing.assert_allclose(there, expected[:, 0], atol=1e-5)
