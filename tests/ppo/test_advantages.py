"""KL estimates, token rewards and GAE against loops in float64 and against numbers worked out by an independent program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.ppo.advantages import (
    adapt_kl_coef,
    explained_variance,
    gae,
    group_advantages,
    kl_estimate,
    last_token,
    length_lambda,
    token_rewards,
)
from jax_ppo.ppo.masked import whiten

KINDS = ("k1", "k2", "k3", "abs")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.5, -0.5, 0, 3]),
        ("abs", [0.5, 0.5, 0, 3]),
        ("k2", [0.125, 0.125, 0, 4.5]),
        ("k3", [0.1065307, 0.1487213, 0, 2.0497871]),
    ],
)
def test_kl_by_hand(kind: str, expected: list[float]) -> None:
    d = jnp.array([0.5, -0.5, 0, 3])
    np.testing.assert_allclose(kl_estimate(d - 1.0, jnp.full(4, -1.0), kind), expected, atol=2e-7)


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", [1, -1]), ("k2", [0.5, 0.5]), ("k3", [0.367879, 0.718282]), ("abs", [1, 1])]
)
def test_kl_sign(kind: str, expected: list[float]) -> None:
    """The policy comes first: more likely under the policy than under the reference is positive."""
    result = kl_estimate(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -1.0]), kind)
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_is_unbiased(kind: str) -> None:
    """Its mean under the policy is the exact KL(policy || reference)."""
    policy, reference = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    exact = np.sum(policy * np.log(policy / reference))
    np.testing.assert_allclose(exact, 0.510826, atol=1e-6)
    estimate = kl_estimate(jnp.float32(np.log(policy)), jnp.float32(np.log(reference)), kind)
    np.testing.assert_allclose(np.sum(policy * np.asarray(estimate)), exact, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_to_itself_is_exactly_0(kind: str) -> None:
    logprobs = jnp.float32(-np.random.default_rng(0).exponential(3, 1000))
    np.testing.assert_array_equal(kl_estimate(logprobs, logprobs, kind), np.zeros(1000))


@pytest.mark.parametrize(
    ("kind", "values", "gradients"),
    [
        ("k1", [-100, 100], [1, 1]),
        ("abs", [100, 100], [-1, 1]),
        ("k2", [5000, 5000], [-100, 100]),
        # exp(20) - 1 - 20, and no push further away from the reference where the exponent is cut off.
        ("k3", [485165174.4, 99], [0, 1]),
    ],
)
def test_kl_far_away_is_finite_in_value_and_gradient(kind: str, values: list[float], gradients: list[float]) -> None:
    estimate = lambda x: kl_estimate(x, jnp.zeros_like(x), kind)  # noqa: E731
    x = jnp.array([-100.0, 100.0])
    np.testing.assert_allclose(estimate(x), values, rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(estimate(x)))(x), gradients)


def test_kl_gradients() -> None:
    """1, d and 1 - exp(-d) by calculus."""
    d = np.linspace(-15, 15, 21)
    for kind, expected in (("k1", np.ones(21)), ("k2", d), ("k3", 1 - np.exp(-d))):
        gradient = jax.grad(lambda x, kind=kind: jnp.sum(kl_estimate(x, jnp.zeros_like(x), kind)))(jnp.float32(d))
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_kl_of_bfloat16_is_taken_in_float32() -> None:
    logprobs, reference = jnp.array([-3.0, -11.0], jnp.bfloat16), jnp.array([-3.015625, -11.0625], jnp.bfloat16)
    result = kl_estimate(logprobs, reference, "k3")
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, [np.exp(-d) - 1 + d for d in (0.015625, 0.0625)], rtol=1e-3)


def test_kl_refuses_another_kind() -> None:
    with pytest.raises(ValueError, match=r"kind 'k4': must be one of k1, abs, k2, k3"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), "k4")


def test_last_token() -> None:
    mask = jnp.array([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0]])
    np.testing.assert_array_equal(last_token(mask), [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 1, 0]])


def test_score_sits_on_the_end_token_or_on_the_last_one() -> None:
    """[7, 7, END, pad, pad]; a truncated response; one token; and a row that has none."""
    mask = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    result = token_rewards(jnp.array([1, 2, -0.5, 7]), jnp.zeros((4, 5)), mask, kl_coef=0.1)
    np.testing.assert_array_equal(result, [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [-0.5, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_fractional_scores_survive() -> None:
    """Rewards are float32 even when the scores come as something else."""
    result = token_rewards(np.array([0.25, 1.0]), np.zeros((2, 2)), np.ones((2, 2), np.int32), kl_coef=0.0)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, [[0, 0.25], [0, 1]])


def test_kl_penalty_of_each_token() -> None:
    kl = kl_estimate(jnp.array([[-1.0, -2, jnp.nan]]), jnp.array([[-2.0, -1, 5]]), "k1")
    result = token_rewards(jnp.array([1.0]), kl, jnp.array([[1, 1, 0]]), kl_coef=0.1)
    np.testing.assert_allclose(result, [[-0.1, 1.1, 0]], atol=1e-7)


def test_padding_of_the_kl_has_no_gradient() -> None:
    mask = jnp.array([[1, 1, 0]])
    gradient = jax.grad(lambda kl: jnp.sum(token_rewards(jnp.ones(1), kl, mask, kl_coef=0.5)))(jnp.array([[1.0, 2, jnp.nan]]))
    np.testing.assert_array_equal(gradient, [[-0.5, -0.5, 0]])


NAN = np.nan
TABLE_REWARDS, TABLE_VALUES = [[0, 0, 1, 0], [0, 5, 0, 0.5]], [[0.2, 0.4, 0.6, 9], [0.1, 7, 0.3, 0.2]]
TABLE_MASK = [[1, 1, 1, 0], [1, 0, 1, 1]]


@pytest.mark.parametrize("outside", [None, NAN, np.inf, -1e30])
def test_gae_table_with_padding_and_a_gap(outside: float | None) -> None:
    rewards, values, mask = (np.array(x, np.float32) for x in (TABLE_REWARDS, TABLE_VALUES, TABLE_MASK))
    if outside is not None:
        rewards, values = (np.where(mask == 1, x, np.float32(outside)) for x in (rewards, values))
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(advantages, [[0.46816, 0.428, 0.4, 0], [0.23912, 0, 0.096, 0.3]], atol=1e-6)
    np.testing.assert_allclose(returns, [[0.66816, 0.828, 1, 0], [0.33912, 0, 0.396, 0.5]], atol=1e-6)
    white = whiten(advantages, mask)
    np.testing.assert_allclose(white, [[1.1498059, 0.8341359, 0.6140473, 0], [-0.6505191, 0, -1.7754865, -0.1719836]], atol=1e-5)


@pytest.mark.parametrize("padding", [9, NAN])
@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1, 0.95, [0.43675, 0.565, 0.7]),
        (1, 1, [0.5, 0.6, 0.7]),
        (1, 0, [-0.1, -0.1, 0.7]),
        (0, 0.95, [-0.5, -0.4, 0.7]),
        (0.99, 0.95, [0.4183067, 0.55535, 0.7]),
    ],
)
def test_gae_of_one_response(gamma: float, lam: float, expected: list[float], padding: float) -> None:
    rewards, values = jnp.array([[0, 0, 1, padding, padding]]), jnp.array([[0.5, 0.4, 0.3, padding, padding]])
    advantages, returns = gae(rewards, values, jnp.array([[1, 1, 1, 0, 0]]), gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, [[*expected, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(returns, [[a + v for a, v in zip(expected, (0.5, 0.4, 0.3), strict=True)] + [0, 0]], atol=1e-6)


def test_a_leak_of_the_padding_would_show() -> None:
    """The number that a scan without a mask gives, which is far from the right one."""
    everything = jnp.ones((1, 5))
    rewards, values = jnp.array([[0.0, 0, 1, 0, 0]]), jnp.array([[0.5, 0.4, 0.3, 9, 9]])
    leaked, _ = gae(rewards, values, everything, gamma=1.0, lam=0.95)
    assert abs(float(leaked[0, 0]) - 0.43675) > 0.5


@pytest.mark.parametrize(("bootstrap", "expected"), [(None, [-0.46575, -0.385, -0.3]), (0.6, [0.07575, 0.185, 0.3])])
def test_gae_of_a_truncated_response(bootstrap: float | None, expected: list[float]) -> None:
    last = None if bootstrap is None else jnp.array([bootstrap])
    advantages, returns = gae(
        jnp.zeros((1, 4)), jnp.array([[0.5, 0.4, 0.3, NAN]]), jnp.array([[1, 1, 1, 0]]), gamma=1.0, lam=0.95, bootstrap=last
    )
    np.testing.assert_allclose(advantages, [[*expected, 0]], atol=1e-6)
    np.testing.assert_allclose(returns, [[a + v for a, v in zip(expected, (0.5, 0.4, 0.3), strict=True)] + [0]], atol=1e-6)


def test_value_and_reward_are_those_of_the_same_token() -> None:
    """With gamma = lambda = 1 the advantage of token t is the score minus its own value (10 x position here)."""
    values = 10.0 * jnp.arange(1, 6, dtype=jnp.float32)[None]
    mask = jnp.array([[1, 1, 1, 0, 0]])
    advantages, _ = gae(token_rewards(jnp.ones(1), jnp.zeros((1, 5)), mask, kl_coef=0.0), values, mask, gamma=1.0, lam=1.0)
    np.testing.assert_array_equal(advantages, [[-9, -19, -29, 0, 0]])


def by_definition(r: np.ndarray, v: np.ndarray, last: float, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the real tokens of one response, as a double loop in float64."""
    following = [*v[1:], last]
    delta = [r[t] + gamma * following[t] - v[t] for t in range(len(r))]
    return np.array([sum((gamma * lam) ** k * delta[t + k] for k in range(len(r) - t)) for t in range(len(r))])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_gae_against_the_double_sum(gamma: float, lam: float, dtype: type) -> None:
    """Random masks with gaps at the start, in the middle and at the end, and an empty row."""
    rng = np.random.default_rng(3)
    rewards, values, last = rng.normal(size=(6, 9)), rng.normal(size=(6, 9)), rng.normal(size=6)
    mask = rng.random((6, 9)) < 0.6
    mask[0], mask[1] = True, False
    expected = np.zeros((6, 9))
    for b in range(6):
        expected[b, mask[b]] = by_definition(rewards[b, mask[b]], values[b, mask[b]], last[b], gamma, lam)
    dirty = [np.where(mask, x, NAN).astype(np.float32) for x in (rewards, values)]
    advantages, returns = gae(*dirty, mask.astype(dtype), gamma=gamma, lam=lam, bootstrap=jnp.float32(last))
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), atol=1e-5)
    # Monte Carlo returns do not depend on the values at all.
    if lam == 1:
        other, _ = gae(dirty[0], jnp.zeros((6, 9)), mask, gamma=gamma, lam=1.0, bootstrap=jnp.float32(last))
        np.testing.assert_allclose(returns, other, atol=1e-5)


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.2, 0.00100512), (0.05, 0.00099488), (0.1, 0.001), (9.0, 0.00100512), (0.0, 0.00099488)]
)
def test_adaptive_coefficient(kl: float, expected: float) -> None:
    np.testing.assert_allclose(adapt_kl_coef(0.001, kl, target=0.1, count=256), expected, rtol=1e-9)


def test_adaptive_coefficient_inside_the_clip() -> None:
    """KL 10 % above the target, as many responses as the horizon is long: 10 % more."""
    np.testing.assert_allclose(adapt_kl_coef(0.5, 1.1, target=1.0, count=20, horizon=20.0), 0.55, rtol=1e-12)


def test_explained_variance_against_numpy() -> None:
    rng = np.random.default_rng(0)
    returns, mask = rng.normal(5, 1, (4, 6)), rng.random((4, 6)) < 0.7
    values = returns + rng.normal(1, 0.5, (4, 6))
    dirty = [np.where(mask, x, NAN).astype(np.float32) for x in (values, returns)]
    expected = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
    np.testing.assert_allclose(explained_variance(*dirty, mask), expected, rtol=1e-5)


def test_explained_variance_of_special_critics() -> None:
    returns, mask = jnp.array([0.0, 1, 1, 0]), jnp.ones(4)
    assert float(explained_variance(returns, returns, mask)) == 1
    assert float(explained_variance(returns + 3, returns, mask)) == 1
    assert float(explained_variance(jnp.full(4, 0.3), returns, mask)) == pytest.approx(0, abs=1e-6)
    assert float(explained_variance(1 - returns, returns, mask)) == pytest.approx(-3)


@pytest.mark.parametrize("constant", [0.0, 0.7, -1.3, 1.0])
def test_explained_variance_is_0_where_the_returns_do_not_vary(constant: float) -> None:
    """Neither NaN, nor -1e12 because the float32 mean of 0.7 is not quite 0.7."""
    values = jnp.float32(np.random.default_rng(0).normal(size=1000))
    assert float(explained_variance(values, jnp.full(1000, constant), jnp.ones(1000))) == 0
    assert float(explained_variance(values, values, jnp.zeros(1000))) == 0


def test_lambda_grows_with_the_length() -> None:
    mask = np.arange(200)[None] < np.array([[200], [100], [40], [20], [10], [0]])
    np.testing.assert_allclose(length_lambda(mask, 0.05), [0.9, 0.8, 0.5, 0.0, 0.0, 0.0], atol=1e-6)


def test_each_row_may_have_its_own_lambda() -> None:
    rewards, values, mask = (
        jnp.array([[0.0, 0, 1, 0, 0]] * 2),
        jnp.array([[0.5, 0.4, 0.3, 9, 9]] * 2),
        jnp.array([[1, 1, 1, 0, 0]] * 2),
    )
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=jnp.array([0.95, 0.0]))
    np.testing.assert_allclose(advantages[:, :3], [[0.43675, 0.565, 0.7], [-0.1, -0.1, 0.7]], atol=1e-6)


def test_a_response_beside_the_others_to_its_prompt() -> None:
    scores = jnp.array([1.0, 0, 0, 1, 3, 0])
    np.testing.assert_allclose(group_advantages(scores, 3, "rloo"), [1, -0.5, -0.5, -0.5, 2.5, -2], atol=1e-6)
    first, second = np.sqrt(2) / 3, np.std([1, 3, 0])
    expected = [2 / 3 / first, -1 / 3 / first, -1 / 3 / first, -1 / 3 / second, 5 / 3 / second, -4 / 3 / second]
    np.testing.assert_allclose(group_advantages(scores, 3, "grpo"), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_equal_responses_teach_nothing(kind: str) -> None:
    """0.7 is no float32: what rounding leaves must not be blown up."""
    assert np.abs(group_advantages(jnp.full(1000, 0.7), 10, kind)).max() < 0.1
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(jnp.zeros(4), 1, kind)
    with pytest.raises(ValueError, match="one of rloo, grpo"):
        group_advantages(jnp.zeros(4), 2, "mean")
