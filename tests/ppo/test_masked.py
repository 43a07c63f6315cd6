"""Masked statistics against numpy in float64 on the entries that count, and against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.ppo.masked import masked_mean, masked_range, masked_sum, masked_var, select, whiten

BAD = [np.nan, np.inf, -np.inf, 1e30]


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """x [7, 11] with rubbish at mask = 0, and its bool mask; row 2 has no entry at all."""
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(3, 2, (7, 11)), rng.random((7, 11)) < 0.6
    mask[2] = False
    return np.where(mask, x, rng.choice(BAD, x.shape)).astype(np.float32), mask


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_mean_sum_and_variance_against_numpy(dtype: type) -> None:
    x, mask = random_case(0)
    real = x[mask].astype(np.float64)
    m = mask.astype(dtype)
    np.testing.assert_allclose(masked_sum(x, m), real.sum(), rtol=1e-6)
    np.testing.assert_allclose(masked_mean(x, m), real.mean(), rtol=1e-6)
    np.testing.assert_allclose(masked_var(x, m), real.var(), rtol=1e-5)
    assert (float(masked_range(x, m)[0]), float(masked_range(x, m)[1])) == (real.min(), real.max())


def test_reduces_over_the_axis_that_is_asked_for() -> None:
    x, mask = random_case(1)
    for axis, rows, masks in ((1, x, mask), (0, x.T, mask.T)):
        expected = [row[m].astype(np.float64).mean() if m.any() else 0.0 for row, m in zip(rows, masks, strict=True)]
        np.testing.assert_allclose(masked_mean(x, mask, axis=axis), expected, rtol=1e-5)


def test_weights() -> None:
    x, w = jnp.array([1.0, 2.0, 4.0, np.nan]), jnp.array([0.5, 1.0, 2.5, 0.0])
    assert float(masked_sum(x, w)) == 12.5
    assert float(masked_mean(x, w)) == 12.5 / 4


def test_nothing_counts() -> None:
    x, mask = jnp.full((3, 2), np.nan), jnp.zeros((3, 2))
    assert [float(f(x, mask)) for f in (masked_sum, masked_mean, masked_var)] == [0, 0, 0]
    assert [float(v) for v in masked_range(x, mask)] == [0, 0]
    np.testing.assert_array_equal(whiten(x, mask), np.zeros((3, 2)))
    np.testing.assert_array_equal(masked_mean(x, mask, axis=0), [0, 0])


@pytest.mark.parametrize(("x", "expected"), [([1, 2, 3], [-1.224745, 0, 1.224745]), ([5], [0]), ([], [])])
def test_whiten_by_hand(x: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(whiten(jnp.array(x, jnp.float32), jnp.ones(len(x))), expected, atol=1e-6)


@pytest.mark.parametrize("value", [0.7, -1.3, 1e-3, 1.0])
@pytest.mark.parametrize("count", [10, 333, 1000])
def test_whitening_a_constant_does_not_blow_up_rounding_noise(value: float, count: int) -> None:
    """std + 1e-8 in the place of the root gives -0.96 for 1000 x 0.7."""
    x = jnp.full(count, value, jnp.float32)
    assert np.abs(whiten(x, jnp.ones(count))).max() < 1e-2


def test_whitened_entries_have_mean_0_and_variance_1() -> None:
    x, mask = random_case(2)
    white = np.asarray(whiten(x, mask), np.float64)
    real = x[mask].astype(np.float64)
    np.testing.assert_allclose(white[mask], (real - real.mean()) / real.std(), atol=1e-5)
    assert not white[~mask].any()


def test_whiten_adds_eps_to_the_variance() -> None:
    """Two values 1 apart have variance 1/4."""
    np.testing.assert_allclose(whiten(jnp.array([0.0, 1.0]), jnp.ones(2), eps=0.75), [-0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_masked_changes_no_value_and_no_gradient(bad: float) -> None:
    clean = jnp.array([[1.0, 2.0, 0.0], [0.5, 0.0, 0.0]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0]])
    dirty = jnp.where(mask == 1, clean, bad)

    def statistics(x: jax.Array) -> jax.Array:
        square = select(x, mask) ** 2
        return masked_mean(x, mask) + masked_var(x, mask) + masked_sum(square, mask) + jnp.sum(whiten(x, mask) * clean)

    expected, result = jax.value_and_grad(statistics)(clean), jax.value_and_grad(statistics)(dirty)
    assert float(result[0]) == float(expected[0])
    np.testing.assert_array_equal(result[1], expected[1])
    assert not np.any(result[1] * (1 - mask))


def test_selecting_before_arithmetic_is_what_keeps_the_gradient_clean() -> None:
    """The trap this module exists for, and the way around it."""
    x, mask = jnp.array([1.0, 1000.0]), jnp.array([True, False])
    late = jax.grad(lambda x: jnp.sum(jnp.where(mask, jnp.exp(x), 0.0)))(x)
    early = jax.grad(lambda x: masked_sum(jnp.exp(select(x, mask)), mask))(x)
    assert np.isnan(late[1])
    np.testing.assert_allclose(early, [np.e, 0], rtol=1e-6)


def test_statistics_of_bfloat16_are_taken_in_float32() -> None:
    x = jnp.full(1001, 1.0078125, jnp.bfloat16)
    assert masked_mean(x, jnp.ones(1001)).dtype == jnp.float32
    np.testing.assert_allclose(masked_sum(x, jnp.ones(1001)), 1001 * 1.0078125, rtol=1e-6)


def test_mean_does_not_broadcast_a_mask_of_another_shape() -> None:
    with pytest.raises(AssertionError):
        masked_mean(jnp.ones((2, 3)), jnp.ones(3))
