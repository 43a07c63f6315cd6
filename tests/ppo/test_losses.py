"""The clipped losses against tables worked out by hand, loops in float64 and derivatives from calculus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.ppo.losses import aggregation_total, aggregation_weights, policy_loss, value_loss

RATIOS = np.array([0.5, 0.9, 1.1, 1.5, 4, 4, 0.5, 1.5])
ADVANTAGES = np.array([1.0, 1, 1, 1, 1, -1, -1, -1])
NO_DUAL = np.array([-0.5, -0.9, -1.1, -1.2, -1.2, 4, 0.8, 1.5])
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
# One program a shape instead of one an operation, which is most of the time these tests take.
fast_policy_loss = jax.jit(policy_loss, static_argnames="dual_clip")
fast_value_loss = jax.jit(value_loss, static_argnames="clip")


def table(**options: float | None) -> tuple[np.ndarray, dict[str, float]]:
    """The loss of each item of the table, one call an item, and the metrics of all items together."""
    old = np.float32(np.linspace(-3, -1, 8))
    new = old + np.float32(np.log(RATIOS))
    item = lambda i: fast_policy_loss(new[i : i + 1], old[i : i + 1], ADVANTAGES[i : i + 1], np.ones(1), **{**CLIP, **options})[0]  # noqa: E731
    loss, metrics = fast_policy_loss(new, old, ADVANTAGES, np.ones(8), **{**CLIP, **options})
    items = np.array([item(i) for i in range(8)])
    np.testing.assert_allclose(loss, items.mean(), rtol=1e-6)
    return items, {name: float(value) for name, value in metrics.items()}


def test_policy_table() -> None:
    items, metrics = table()
    np.testing.assert_allclose(items, NO_DUAL, rtol=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(0.175, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.375
    assert metrics["actor/pg_clipfrac_lower"] == 0
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.2733968, abs=1e-6)
    assert metrics["actor/ratio/min"] == pytest.approx(0.5, rel=1e-6)
    assert metrics["actor/ratio/max"] == pytest.approx(4, rel=1e-6)


def test_policy_table_with_dual_clip() -> None:
    items, metrics = table(dual_clip=3.0)
    np.testing.assert_allclose(items, np.where(np.arange(8) == 5, 3, NO_DUAL), rtol=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(0.05, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.375
    assert metrics["actor/pg_clipfrac_lower"] == 0.125


def test_policy_table_with_clip_higher() -> None:
    items, metrics = table(dual_clip=3.0, clip_high=0.28)
    np.testing.assert_allclose(items, [-0.5, -0.9, -1.1, -1.28, -1.28, 3, 0.8, 1.5], rtol=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize(("dual_clip", "flat"), [(None, [3, 4, 6]), (3.0, [3, 4, 5, 6])])
def test_policy_gradient_is_zero_exactly_on_clipped_items(dual_clip: float | None, flat: list[int]) -> None:
    """Elsewhere it is -A rho: d rho / d logp = rho."""
    old = jnp.zeros(8)
    loss = lambda x: fast_policy_loss(x, old, ADVANTAGES, jnp.ones(8), dual_clip=dual_clip, total=1.0, **CLIP)[0]  # noqa: E731
    gradient = np.asarray(jax.grad(loss)(jnp.float32(np.log(RATIOS))))
    np.testing.assert_array_equal(np.flatnonzero(gradient == 0), flat)
    expected = np.where(np.isin(np.arange(8), flat), 0, -ADVANTAGES * RATIOS)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_policy_gradient_at_ratio_1_is_that_of_reinforce() -> None:
    """The two branches of the maximum tie there; half of each is still all of it."""
    advantages = jnp.float32([2, -3, 0, 0.5])
    logprobs = jnp.float32([-1, -2, -3, -4])
    loss = lambda x: fast_policy_loss(x, logprobs, advantages, jnp.ones(4), total=1.0, dual_clip=3.0, **CLIP)[0]  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(logprobs), -advantages)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_extreme_ratios_are_finite(advantage: float, log_ratio: float) -> None:
    def loss(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return fast_policy_loss(x, jnp.zeros(1), jnp.array([advantage]), jnp.ones(1), **CLIP)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array([log_ratio]))
    rho = np.exp(np.sign(log_ratio) * 20)
    expected = max(-advantage * rho, -advantage * np.clip(rho, 0.8, 1.2))
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-12)
    assert np.isfinite(gradient).all()
    assert all(np.isfinite(m) for m in metrics.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1000.0])
def test_policy_loss_ignores_what_is_masked(bad: float) -> None:
    """In value, metrics and gradient, for all three inputs, and also for a row without any token."""
    rng = np.random.default_rng(0)
    mask = jnp.array([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    # Log-ratios small enough that not every token is clipped.
    clean = [jnp.float32(rng.normal(0, 0.1, (3, 3))) for _ in range(3)]
    dirty = [jnp.where(mask == 1, x, bad) for x in clean]

    def loss(logprobs: jax.Array, old: jax.Array, advantages: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return fast_policy_loss(logprobs, old, advantages, mask, dual_clip=3.0, **CLIP)

    run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    expected, result = run(*clean), run(*dirty)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    for gradient in result[1]:
        assert not np.any(gradient * (1 - mask))
        assert np.any(gradient)


def test_only_masked_tokens_give_0() -> None:
    bad, mask = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3))
    for loss in (lambda x: fast_policy_loss(x, bad, bad, mask, **CLIP), lambda x: fast_value_loss(x, bad, bad, mask, clip=0.2)):
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(bad)
        assert float(value) == 0
        assert all(float(m) == 0 for m in metrics.values())
        np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("mode", "norm", "expected"),
    [
        ("token-mean", 1, 2.5),
        ("seq-mean-token-mean", 1, 3),
        ("seq-mean-token-sum", 1, 5),
        ("seq-mean-token-sum-norm", 4, 1.25),
    ],
)
def test_aggregation_by_hand(mode: str, norm: float, expected: float) -> None:
    """Token losses [[1, 2, 3], [4]]: with rho = 1 the loss of a token is -A."""
    x, mask = jnp.array([[1.0, 2, 3], [4, jnp.nan, jnp.nan]]), jnp.array([[1, 1, 1], [1, 0, 0]])
    weights, total = aggregation_weights(mask, mode, norm=norm), aggregation_total(4.0, 2.0, mode)
    loss, _ = fast_policy_loss(jnp.zeros((2, 3)), jnp.zeros((2, 3)), -x, weights, total=total, **CLIP)
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_aggregation_of_rows_without_tokens() -> None:
    weights = aggregation_weights(jnp.zeros((2, 3), bool), "seq-mean-token-mean")
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))
    assert aggregation_total(0.0, 0.0, "token-mean") == aggregation_total(0.0, 0.0, "seq-mean-token-sum") == 1


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 0.5), ("seq-mean-token-mean", 0.0)])
def test_micro_batches_of_unequal_rows_add_up(mode: str, expected: float) -> None:
    """Rows of 2 and 6 tokens, A = +1 and -1, rho = 1. A mean of the means of micro-batches would be 0 in both modes."""
    mask = jnp.arange(6)[None] < jnp.array([[2], [6]])
    advantages = jnp.broadcast_to(jnp.array([[1.0], [-1.0]]), (2, 6))
    weights, total = aggregation_weights(mask, mode), aggregation_total(8.0, 2.0, mode)

    def loss(logprobs: jax.Array, rows: slice) -> jax.Array:
        parts = logprobs[rows], jnp.zeros((2, 6))[rows], advantages[rows], weights[rows]
        return fast_policy_loss(*parts, total=total, **CLIP)[0]

    cuts = [[slice(0, 2)], [slice(0, 1), slice(1, 2)]]
    results = [[jax.value_and_grad(loss)(jnp.zeros((2, 6)), rows) for rows in cut] for cut in cuts]
    for parts in results:
        assert sum(float(value) for value, _ in parts) == pytest.approx(expected, abs=1e-6)
        gradient = sum(np.asarray(g) for _, g in parts)
        per_token = 1 / 8 if mode == "token-mean" else np.array([[1 / 4], [1 / 12]])
        np.testing.assert_allclose(gradient, np.where(mask, -np.asarray(advantages) * per_token, 0), atol=1e-7)


def test_value_loss_by_hand() -> None:
    args = [jnp.array(x, jnp.float32) for x in ([1, 0, 2], [0, 0.2, 1], [1, 1, 0], [1, 1, 1])]
    loss, metrics = fast_value_loss(*args, clip=0.5, total=1.0)
    assert float(loss) == pytest.approx(0.875 * 3)
    loss, metrics = fast_value_loss(*args, clip=0.5)
    assert float(loss) == pytest.approx(0.875)
    assert float(metrics["critic/vf_loss"]) == float(loss)
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(1 / 3)
    assert float(metrics["critic/vpred_mean"]) == 1
    # Plain: 1/2 (0 + 1 + 4) / 3.
    loss, metrics = fast_value_loss(*args)
    assert float(loss) == pytest.approx(2.5 / 3)
    assert float(metrics["critic/vf_clipfrac"]) == 0


def test_value_gradient_is_zero_exactly_on_clipped_items() -> None:
    """V_old = 0, clip 1/2. Beyond the range on the side away from the return the plain error is larger and pulls back."""
    values = jnp.array([0.3, 1.0, 1.0, -1.0, -0.5001])
    returns = jnp.array([1.0, 0.9, 0.0, 0.0, -1.0])
    # Item 1 passed its return while the clipped value has not; item 4 is clipped on the way to its return.
    loss = lambda v: fast_value_loss(v, jnp.zeros(5), returns, jnp.ones(5), clip=0.5, total=1.0)  # noqa: E731
    gradient, metrics = jax.grad(loss, has_aux=True)(values)
    np.testing.assert_allclose(gradient, [-0.7, 0, 1.0, -1.0, 0], rtol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(gradient == 0), [1, 4])
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(2 / 5)


def test_values_inside_the_range_are_not_counted_as_clipped() -> None:
    """V_old + (V - V_old) is not V in float32; that must not show as clipping."""
    rng = np.random.default_rng(0)
    values, old, returns = np.float32(rng.uniform(-0.09, 0.09, (3, 1000)))
    assert np.mean(old + (values - old) != values) > 0.1
    assert float(fast_value_loss(values, old, returns, jnp.ones(1000), clip=0.2)[1]["critic/vf_clipfrac"]) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_value_loss_ignores_what_is_masked(bad: float) -> None:
    rng = np.random.default_rng(1)
    mask = jnp.array([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    clean = [jnp.float32(rng.normal(size=(3, 3))) for _ in range(3)]
    dirty = [jnp.where(mask == 1, x, bad) for x in clean]
    run = jax.value_and_grad(lambda *x: fast_value_loss(*x, mask, clip=0.5), argnums=(0, 1, 2), has_aux=True)
    expected, result = run(*clean), run(*dirty)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert not np.any(result[1][0] * (1 - mask))


def test_random_losses_against_a_loop() -> None:
    """Both losses with weights and every option, item by item in float64."""
    rng = np.random.default_rng(2)
    new, old, advantages, values, old_values, returns = rng.normal(0, 0.7, (6, 5, 7))
    weights = np.where(rng.random((5, 7)) < 0.7, rng.uniform(0.1, 2, (5, 7)), 0)
    policy, value = 0.0, 0.0
    for i in np.ndindex(5, 7):
        rho, a = np.exp(new[i] - old[i]), advantages[i]
        item = max(-a * rho, -a * min(max(rho, 1 - 0.1), 1 + 0.3))
        policy += weights[i] * (min(item, -a * 1.5) if a < 0 else item)
        near = old_values[i] + min(max(values[i] - old_values[i], -0.4), 0.4)
        value += 0.5 * weights[i] * max((values[i] - returns[i]) ** 2, (near - returns[i]) ** 2)
    ours, _ = fast_policy_loss(
        *jnp.float32([new, old, advantages, weights]), clip_low=0.1, clip_high=0.3, dual_clip=1.5, total=13.0
    )
    np.testing.assert_allclose(ours, policy / 13, rtol=1e-5)
    ours, _ = fast_value_loss(*jnp.float32([values, old_values, returns, weights]), clip=0.4, total=13.0)
    np.testing.assert_allclose(ours, value / 13, rtol=1e-5)
