"""Rotary embedding against complex numbers and published figures, and the norm against float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jax_ppo.models.layers import RMSNorm, Yarn, rotary, rotary_frequencies, rotate

CONFIG = tiny.model(rope_theta=1e6, tie_word_embeddings=True)
LONG = Yarn(factor=4.0, original_max_position_embeddings=32768)


def test_rotation_is_a_product_of_complex_numbers():
    """(x_i, x_{i+H/2}) is one complex number; position p multiplies it by exp(i p theta^(-2i/H))."""
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 500, (2, 5))
    x = rng.normal(size=(2, 5, 2, 3, 8)).astype(np.float32)
    turn = np.exp(1j * positions[..., None] * 1e6 ** (-np.arange(4) / 4))[:, :, None, None]
    expected = (x[..., :4] + 1j * x[..., 4:]) * turn
    result = rotate(jnp.asarray(x), *rotary(jnp.asarray(positions), CONFIG))
    np.testing.assert_allclose(result, np.concatenate([expected.real, expected.imag], -1), atol=2e-4)


def test_scores_depend_on_the_distance_only():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(query_position, key_position):
        turned = [rotate(jnp.asarray(x), *rotary(jnp.array([[p]]), CONFIG)) for x, p in ((q, query_position), (k, key_position))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(8, 3)) > 1e-2


def test_rotation_keeps_dtype_and_rank():
    x = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
    result = rotate(x, *rotary(jnp.arange(3)[None], CONFIG))
    assert result.dtype == jnp.bfloat16
    assert result.shape == x.shape


def test_frequencies_without_scaling():
    frequency, factor = rotary_frequencies(CONFIG)
    np.testing.assert_allclose(frequency, [1.0, 10**-1.5, 10**-3.0, 10**-4.5], rtol=1e-7)
    assert frequency.dtype == np.float32
    assert factor == 1.0


def test_yarn_by_published_figures():
    config = dataclasses.replace(CONFIG, head_dim=128, yarn=LONG)
    frequency, factor = rotary_frequencies(config)
    plain = 1e6 ** (-np.arange(64) / 64)
    assert frequency[0] == 1.0
    assert frequency[30] == pytest.approx(0.00106436, rel=1e-5)
    assert frequency[30] / plain[30] == pytest.approx(0.69118, rel=1e-5)
    assert frequency[63] == pytest.approx(3.102344e-07, rel=1e-6)
    assert factor == pytest.approx(1.138629, abs=1e-6)
    # The ramp runs from pair 23 to pair 40: the last that keeps its frequency, the first that has a quarter of it.
    np.testing.assert_allclose(frequency[:24], plain[:24], rtol=1e-6)
    np.testing.assert_allclose(frequency[40:], plain[40:] / 4, rtol=1e-6)
    between = frequency[24:40] / plain[24:40]
    assert np.all((between > 0.2501) & (between < 0.9999))


def test_yarn_of_a_small_head():
    config = dataclasses.replace(CONFIG, yarn=Yarn(factor=4.0, original_max_position_embeddings=64))
    np.testing.assert_allclose(rotary_frequencies(config)[0], [1.0, 0.00790569, 0.00025, 7.90569e-06], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [({}, 0.1 * math.log(4) + 1), ({"attention_factor": 1.0}, 1.0), ({"attention_factor": 0.7}, 0.7), ({"factor": 1.0}, 1.0)],
)
def test_yarn_multiplies_cos_and_sin_at_every_length(changes, factor):
    config = dataclasses.replace(CONFIG, yarn=dataclasses.replace(LONG, **changes))
    cos, sin = rotary(jnp.array([[0, 1, 2, 40000]]), config)
    np.testing.assert_allclose(cos[0, 0], factor, rtol=1e-6)
    np.testing.assert_allclose(jnp.hypot(cos, sin), factor, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norm_against_float64(dtype):
    """Also from bfloat16: only the result is rounded to it, not the squares and their mean."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(2, 3, 64)) * 100.0, dtype)
    weight = jnp.asarray(1 + 0.3 * rng.normal(size=64), jnp.float32)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * np.asarray(weight, np.float64)
    result = jax.jit(RMSNorm(64, 1e-3).apply)({"params": {"weight": weight}}, x)
    assert result.dtype == dtype
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=1e-6 if dtype == jnp.float32 else 2**-8)


def test_epsilon_is_inside_the_root():
    result = RMSNorm(4, 0.25).apply({"params": {"weight": jnp.ones(4)}}, jnp.full((1, 1, 4), 1e-6))
    np.testing.assert_allclose(result, 1e-6 / 0.5, rtol=1e-5)
