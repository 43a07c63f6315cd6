"""From scores to advantages: KL estimates, token rewards, generalised advantage estimation."""

import chex
import jax
import jax.numpy as jnp

from jax_ppo.ppo.masked import masked_mean, select

EXPONENT_LIMIT = 20.0


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, kind: str) -> jax.Array:
    """A per-token estimate of KL(policy || reference), with d = logprobs - ref_logprobs.

    k1 = d;  abs = |d|;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d  (J. Schulman, "Approximating KL divergence", 2020). The exponent
    is clamped to +-20, so that value and gradient stay finite.

    Args:
      logprobs, ref_logprobs: any equal shape, float32, in nats.
      kind: "k1", "k2", "k3" or "abs".

    Raises:
      ValueError: for another kind.
    """
    chex.assert_equal_shape([logprobs, ref_logprobs])
    d = logprobs - ref_logprobs
    estimates = {
        "k1": lambda: d,
        "abs": lambda: jnp.abs(d),
        "k2": lambda: 0.5 * d * d,
        "k3": lambda: jnp.expm1(-jnp.clip(d, -EXPONENT_LIMIT, EXPONENT_LIMIT)) + d,
    }
    if kind not in estimates:
        raise ValueError(f"kind {kind!r}: must be one of {', '.join(estimates)}")
    return estimates[kind]()


def last_token(mask: jax.Array) -> jax.Array:
    """[B, R] bool, True on the last generated token of each row."""
    index = jnp.arange(mask.shape[1])[None]
    return (index == jnp.max(jnp.where(mask != 0, index, -1), axis=1, keepdims=True)) & (mask != 0)


def token_rewards(scores: jax.Array, kl: jax.Array, mask: jax.Array, *, kl_coef: float | jax.Array) -> jax.Array:
    """r_t = -kl_coef * kl_t, plus the score on the last generated token (the end token, or the last one when truncated).

    Args:
      scores:  [B] float32.
      kl:      [B, R] float32.
      mask:    [B, R] bool.
      kl_coef: weight of the penalty.

    Returns:
      [B, R] float32, 0 at mask = 0.
    """
    chex.assert_rank([scores, kl, mask], [1, 2, 2])
    chex.assert_equal_shape([kl, mask])
    penalty = -kl_coef * select(jnp.asarray(kl, jnp.float32), mask)
    return select(penalty, mask) + jnp.where(last_token(mask), jnp.asarray(scores, jnp.float32)[:, None], 0.0)


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    gamma: float,
    lam: float,
    bootstrap: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438), as a reverse scan over R.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V.

    A masked token inside a row is skipped: the next value and the carried advantage pass through it unchanged.

    Args:
      rewards, values: [B, R] float32.
      mask:      [B, R] bool.
      gamma:     discount a token.
      lam:       0 is one-step TD, 1 is Monte Carlo.
      bootstrap: [B] float32, the value after the last token; default 0.

    Returns:
      (advantages, returns), both [B, R] float32 and 0 at mask = 0.
    """
    chex.assert_rank([rewards, values, mask], 2)
    chex.assert_equal_shape([rewards, values, mask])
    real = mask != 0
    rewards, values = select(rewards.astype(jnp.float32), real), select(values.astype(jnp.float32), real)
    last = jnp.zeros(rewards.shape[0]) if bootstrap is None else jnp.asarray(bootstrap, jnp.float32)

    def backward(carry, token):
        next_value, next_advantage = carry
        reward, value, here = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = jnp.where(here, value, next_value), jnp.where(here, advantage, next_advantage)
        return carry, jnp.where(here, advantage, 0.0)

    _, advantages = jax.lax.scan(backward, (last, jnp.zeros_like(last)), (rewards.T, values.T, real.T), reverse=True)
    return advantages.T, select(advantages.T + values, real)


def adapt_kl_coef(coef: float, kl: float, *, target: float, count: int, horizon: float = 10_000.0) -> float:
    """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon) (Ziegler et al., arXiv 1909.08593).

    Args:
      coef:    the coefficient of this iteration.
      kl:      mean over sequences of their mean KL, in nats.
      target:  the KL to hold.
      count:   responses of this iteration.
      horizon: responses over which the coefficient adapts.
    """
    return coef * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * count / horizon)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over real tokens, scalar; 0 where the returns do not vary."""
    centre = lambda x: select(x - masked_mean(x, mask), mask)  # noqa: E731
    spread = masked_mean(centre(returns) ** 2, mask)
    error = masked_mean(centre(select(returns, mask) - select(values, mask)) ** 2, mask)
    return jnp.where(spread > 0, 1.0 - error / jnp.where(spread > 0, spread, 1.0), 0.0)
