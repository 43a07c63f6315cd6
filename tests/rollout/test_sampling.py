"""The distribution that is sampled, against tables worked out by hand and against frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.rollout.sampling import draw, filter_logits, row_keys


def kept(probabilities, **filters):
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(np.asarray(probabilities, np.float64)), jnp.float32)
    return np.flatnonzero(np.isfinite(np.asarray(filter_logits(logits, **filters)))).tolist()


@pytest.mark.parametrize(
    ("probabilities", "top_p", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], 0.85, [0, 1, 2]),
        ([0.5, 0.3, 0.15, 0.05], 1.0, [0, 1, 2, 3]),
        ([0.05, 0.15, 0.3, 0.5], 0.6, [2, 3]),
        ([1.0, 0.0, 0.0, 0.0], 0.9, [0]),
        ([0.25] * 4, 0.5, [0, 1]),
        ([0.999999, 1e-6, 0, 0], 0.1, [0]),
        ([0.5, 0.3, 0.15, 0.05], 0.0, [0]),
    ],
)
def test_top_p_keeps_the_smallest_prefix_that_reaches_it(probabilities, top_p, expected):
    assert kept(probabilities, top_p=top_p) == expected


def test_top_p_counts_in_float32_whatever_the_logits_are():
    assert int(jnp.isfinite(filter_logits(jnp.zeros(1024, jnp.bfloat16), top_p=0.9)).sum()) == 922


def test_everything_off_changes_no_bit():
    logits = jax.random.normal(jax.random.key(0), (3, 1000)) * 4
    np.testing.assert_array_equal(filter_logits(logits), logits)


def test_top_k_first_then_top_p_of_what_is_left():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert kept(probabilities, top_k=2) == [0, 1]
    z = filter_logits(jnp.log(jnp.array(probabilities)), top_k=2)
    np.testing.assert_allclose(jax.nn.softmax(z)[:2], [0.625, 0.375], rtol=1e-6)
    # Of the renormalised [.625, .375] the first reaches .6 alone; of all four it would not.
    assert kept(probabilities, top_k=2, top_p=0.6) == [0]
    assert kept([0.25] * 4, top_k=3) == [0, 1, 2]


def test_the_temperature_divides():
    z = filter_logits(jnp.array([2.0, 1.0, 0.0]), temperature=0.5)
    np.testing.assert_allclose(jax.nn.log_softmax(z), [-0.142932, -2.142932, -4.142932], atol=1e-6)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 1.5}, {"top_p": -1.0}, {"top_k": -1}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        filter_logits(jnp.zeros(4), **wrong)


def scalars(temperature=1.0, top_k=0, top_p=1.0):
    return {"temperature": jnp.float32(temperature), "top_k": jnp.int32(top_k), "top_p": jnp.float32(top_p)}


jitted = jax.jit(draw)


@pytest.mark.parametrize("filters", [{"temperature": 0.7}, {"temperature": 1.5, "top_k": 3}, {"top_p": 0.8}])
def test_frequencies_are_the_softmax(filters):
    count, logits = 20_000, jnp.array([1.5, 0.3, -0.4, 1.0, -2.0])
    tokens, logprobs = jitted(
        jnp.broadcast_to(logits, (count, 5)),
        row_keys(jax.random.key(3), jnp.arange(count), jnp.full(count, 7)),
        **scalars(**filters),
    )
    # The truth in float64, by sorting in numpy.
    z = np.asarray(logits, np.float64) / filters.get("temperature", 1.0)
    order = np.argsort(-z)
    p = np.exp(z) / np.exp(z).sum()
    keep = order[: filters.get("top_k", 5)]
    mass = np.cumsum(p[order]) - p[order]
    keep = [i for i, before in zip(order, mass, strict=True) if i in keep and before < filters.get("top_p", 1.0)]
    p = np.array([p[i] if i in keep else 0.0 for i in range(5)])
    p /= p.sum()
    frequency = np.bincount(np.asarray(tokens), minlength=5) / count
    assert np.all(np.abs(frequency - p) <= 4 * np.sqrt(p * (1 - p) / count))
    np.testing.assert_allclose(logprobs, np.log(p[np.asarray(tokens)]), atol=1e-5)


def test_temperature_zero_takes_the_largest_and_the_lowest_of_equals():
    logits = jnp.array([[2.0, 1.0, 0.0], [0.0, 3.0, 3.0]])
    for seed in range(3):
        tokens, logprobs = jitted(logits, jax.random.split(jax.random.key(seed), 2), **scalars(0.0))
        assert tokens.tolist() == [0, 1]
        assert float(logprobs[0]) == pytest.approx(-0.407606, abs=1e-6)


def test_a_row_is_drawn_alike_in_any_company():
    logits = jax.random.normal(jax.random.key(0), (6, 50))
    rows, order = jnp.array([5, 9, 2, 40, 7, 0]), jnp.array([3, 0, 5, 1, 4, 2])
    keys = lambda rows: row_keys(jax.random.key(1), rows, jnp.full(6, 3))  # noqa: E731
    together, _ = jitted(logits, keys(rows), **scalars())
    moved, _ = jitted(logits[order], keys(rows[order]), **scalars())
    assert moved.tolist() == together[order].tolist()
    assert len({tuple(jax.random.key_data(k).tolist()) for k in keys(rows)}) == 6


def test_other_temperatures_and_filters_compile_nothing():
    logits, keys = jnp.zeros((2, 11)), lambda: jax.random.split(jax.random.key(0), 2)
    jitted(logits, keys(), **scalars())
    before = jitted._cache_size()
    for filters in ({"temperature": 0.3}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.5}):
        jitted(logits, keys(), **scalars(**filters))
    assert jitted._cache_size() == before
