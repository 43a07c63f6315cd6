"""Attention against loops in float64, forward and backward, and what it must never read or build.

The kernel of TPUs runs in interpret mode here, and in place of the one of cuDNN XLA's version of the same function: what
is prepared for both, and what is made of their results, is what runs on an accelerator.
"""

from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_ppo import sharding
from jax_ppo.models import attention

METHODS = ["full", "blockwise", "cudnn", "splash"]
# Three blocks of eight, the last one ragged; segments that begin inside a block and span blocks. 0 is padding.
LENGTH, BLOCK = 21, 8
SEGMENTS = np.array([[1] * 5 + [2] * 13 + [3] * 3, [0] * 4 + [1] * 17])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", BLOCK)


@pytest.fixture
def kernels(monkeypatch):
    """Makes every method run on a CPU."""
    monkeypatch.setattr(attention, "by_splash", partial(attention.by_splash, interpret=True))
    monkeypatch.setattr(attention, "by_cudnn", partial(attention.by_cudnn, implementation="xla"))


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def inputs():
    """q [B,T,K,G,H], k and v [B,T,K,H], and the weight of each output in a scalar."""
    q, out = draw(0, 2, LENGTH, 2, 3, 4), draw(1, 2, LENGTH, 2, 3, 4)
    return q, draw(2, 2, LENGTH, 2, 4), draw(3, 2, LENGTH, 2, 4), out


def loop(q, k, v, mask, d_out):
    """Outputs and gradients of sum(d_out * outputs), one query and head at a time, in float64. No key, no output."""
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    out, d_q, d_k, d_v = np.zeros_like(d_out), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = 1 / np.sqrt(q.shape[-1])
    for b, t, h, g in np.ndindex(q.shape[:4]):
        keys = np.flatnonzero(mask[b, t])
        if not len(keys):
            continue
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
    causal = (np.arange(length)[:, None] >= np.arange(length))[None]
    return (segments[:, :, None] == segments[:, None, :]) & causal & (segments != 0)[:, :, None]


def value_and_gradients(method, q, k, v, segments, d_out):
    """(out, dq, dk, dv) of sum(d_out * out), in float32."""

    def scalar(q, k, v):
        out = attention.packed(q, k, v, jnp.asarray(segments), method=method)
        return jnp.sum(out * d_out), out

    gradients, out = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(x, np.float32) for x in (out, *gradients)]


@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_packed_against_a_loop(small_blocks, kernels, method):
    q, k, v, d_out = inputs()
    results = value_and_gradients(method, q, k, v, SEGMENTS, d_out)
    for name, result, truth in zip(("out", "dq", "dk", "dv"), results, loop(q, k, v, may_read(SEGMENTS), d_out), strict=True):
        np.testing.assert_allclose(result, truth, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("length", "heads", "group", "size", "dtype", "tolerance"),
    [
        (300, 1, 2, 64, np.float32, 1e-5),  # three blocks, the last one with padding behind it
        (256, 2, 1, 128, np.float32, 1e-5),  # two blocks and no padding
        (131, 1, 7, 64, jnp.bfloat16, 0.02),  # an odd length, and the group of Qwen2.5-0.5B
    ],
)
def test_methods_agree_at_the_sizes_of_models(monkeypatch, kernels, method, length, heads, group, size, dtype, tolerance):
    """Against "full" in float32, from the same rounded inputs; the error is that of the largest entry."""
    monkeypatch.setattr(attention, "BLOCK", 128)
    q, d_out = draw(14, 2, length, heads, group, size, dtype=dtype), draw(15, 2, length, heads, group, size)
    k, v = draw(16, 2, length, heads, size, dtype=dtype), draw(17, 2, length, heads, size, dtype=dtype)
    segments = np.array([[1] * 50 + [2] * 70 + [3] * (length - 125) + [0] * 5, [0] * 3 + [4] * (length - 3)])
    results = value_and_gradients(method, q, k, v, segments, d_out)
    expected = value_and_gradients("full", *(x.astype(np.float32) for x in (q, k, v)), segments, d_out)
    for name, result, truth in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        assert np.abs(result - truth).max() < tolerance * np.abs(truth).max(), name


@pytest.mark.parametrize("method", METHODS)
def test_whatever_stands_in_padding_changes_nothing(small_blocks, kernels, method):
    """NaN included; a query of padding yields 0, and its gradients are 0."""
    q, k, v, d_out = inputs()
    padding = SEGMENTS == 0
    assert padding.any()
    clean = value_and_gradients(method, q, k, v, SEGMENTS, d_out)
    for x in (q, k, v):
        x[padding] = np.nan
    for name, result, expected in zip(
        ("out", "dq", "dk", "dv"), value_and_gradients(method, q, k, v, SEGMENTS, d_out), clean, strict=True
    ):
        np.testing.assert_array_equal(result, expected, err_msg=name)
        assert not result[padding].any(), name
        assert result[~padding].any(), name


@pytest.mark.parametrize("method", ["cudnn", "splash"])
def test_kernels_run_on_each_device_alone(kernels, method):
    """Rows over four devices and heads over two: the same numbers, and nothing is sent, forward or backward."""
    q, d_out = draw(18, 4, 40, 2, 2, 8), draw(19, 4, 40, 2, 2, 8)
    k, v = draw(20, 4, 40, 2, 8), draw(21, 4, 40, 2, 8)
    segments = np.repeat([[1] * 10 + [2] * 25 + [0] * 5, [1] * 40], 2, axis=0)
    expected = value_and_gradients(method, q, k, v, segments, d_out)
    mesh = sharding.make_mesh(2, 2, 2)
    place = NamedSharding(mesh, PartitionSpec(sharding.ROWS, None, "tensor"))

    def gradients(q, k, v, segments, d_out):
        out, backward = jax.vjp(lambda *x: attention.packed(*x, segments, method=method), q, k, v)
        return out, *backward(d_out)

    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, place) for x in (q, k, v)]
        rest = jax.device_put(segments, sharding.rows(mesh)), jax.device_put(d_out, place)
        program = jax.jit(gradients).lower(*arrays, *rest).compile()
        results = program(*arrays, *rest)
    assert all(x.sharding.is_equivalent_to(place, x.ndim) for x in results)
    assert not any(word in program.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    for result, truth in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, truth, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_show_causality(small_blocks, kernels, method):
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
