"""From scores to advantages: KL estimates, token rewards, generalised advantage estimation."""

import chex
import jax
import jax.numpy as jnp

from jax_ppo.ppo.masked import masked_mean, masked_var, select

EXPONENT_LIMIT = 20.0


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, kind: str) -> jax.Array:
    """A per-token estimate of KL(policy || reference), with d = logprobs - ref_logprobs.

    k1 = d;  abs = |d|;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d  (J. Schulman, "Approximating KL divergence", 2020). In k3, d is at
    least -20, so that value and gradient stay finite; below, the gradient is 0, for that of the exponential is beyond use.

    Args:
      logprobs, ref_logprobs: any equal shape, in nats.
      kind: "k1", "k2", "k3" or "abs".

    Returns:
      float32, the same shape.

    Raises:
      ValueError: for another kind.
    """
    chex.assert_equal_shape([logprobs, ref_logprobs])
    d = jnp.asarray(logprobs, jnp.float32) - jnp.asarray(ref_logprobs, jnp.float32)
    above = jnp.maximum(d, -EXPONENT_LIMIT)
    estimates = {
        "k1": lambda: d,
        "abs": lambda: jnp.abs(d),
        "k2": lambda: 0.5 * d * d,
        "k3": lambda: jnp.expm1(-above) + above,
    }
    if kind not in estimates:
        raise ValueError(f"kind {kind!r}: must be one of {', '.join(estimates)}")
    return estimates[kind]()


def last_token(mask: jax.Array) -> jax.Array:
    """[B, R] bool, True on the last generated token of each row."""
    index = jnp.arange(mask.shape[1])[None]
    return index == jnp.max(jnp.where(mask != 0, index, -1), axis=1, keepdims=True)


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
    return jnp.where(last_token(mask), jnp.asarray(scores, jnp.float32)[:, None], 0.0) - kl_coef * select(kl, mask)


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    gamma: float,
    lam: float | jax.Array,
    bootstrap: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438), as a reverse scan over R.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V.

    A masked token inside a row is skipped: the next value and the carried advantage pass through it unchanged.

    Args:
      rewards, values: [B, R] float32.
      mask:      [B, R] bool.
      gamma:     discount a token.
      lam:       0 is one-step TD, 1 is Monte Carlo; a number, or [B] for each row its own.
      bootstrap: [B] float32, the value after the last token; default 0.

    Returns:
      (advantages, returns), both [B, R] float32 and 0 at mask = 0.
    """
    chex.assert_rank([rewards, values, mask], 2)
    chex.assert_equal_shape([rewards, values, mask])
    real = mask != 0
    rewards, values = select(rewards, real), select(values, real)
    last = jnp.zeros(rewards.shape[0]) if bootstrap is None else jnp.asarray(bootstrap, jnp.float32)

    def backward(carry, token):
        next_value, next_advantage = carry
        reward, value, here = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = jnp.where(here, value, next_value), jnp.where(here, advantage, next_advantage)
        return carry, jnp.where(here, advantage, 0.0)

    _, advantages = jax.lax.scan(backward, (last, jnp.zeros_like(last)), (rewards.T, values.T, real.T), reverse=True)
    return advantages.T, advantages.T + values


def length_lambda(mask: jax.Array, alpha: float) -> jax.Array:
    """lambda = 1 - 1 / (alpha l), l the length of the response, at least 0 (Yue et al., arXiv 2504.05118).

    Args:
      mask:  [B, R] bool.
      alpha: above 0; the larger, the further an end reward reaches back.

    Returns:
      [B] float32, from 0 to 1; 0 for an empty row.
    """
    length = jnp.sum(mask != 0, axis=1)
    return jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(length, 1)), 0.0)


def group_advantages(returns: jax.Array, samples: int, kind: str) -> jax.Array:
    """What a response is worth beside the other responses to its prompt, without a critic.

    rloo: return - mean of the others' (Ahmadian et al., arXiv 2402.14740).
    grpo: (return - mean) / (std + 1e-6), the population's std (Shao et al., arXiv 2402.03300).

    Args:
      returns: [B] float32; the responses to one prompt stand in a row.
      samples: responses a prompt, at least 2.
      kind:    "rloo" or "grpo".

    Returns:
      [B] float32.

    Raises:
      ValueError: for another kind, or fewer than 2 samples.
    """
    if samples < 2:
        raise ValueError(f"samples={samples}: must be at least 2, a response is compared with the others")
    groups = jnp.asarray(returns, jnp.float32).reshape(-1, samples)
    centred = groups - jnp.mean(groups, axis=1, keepdims=True)
    kinds = {
        "rloo": lambda: centred * samples / (samples - 1),
        "grpo": lambda: centred / (jnp.std(groups, axis=1, keepdims=True) + 1e-6),
    }
    if kind not in kinds:
        raise ValueError(f"kind {kind!r}: must be one of {', '.join(kinds)}")
    return kinds[kind]().reshape(-1)


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
    """1 - Var(returns - values) / Var(returns) over real tokens, scalar; 0 where the returns vary by no more than rounding."""
    spread, size = masked_var(returns, mask), masked_mean(select(returns, mask) ** 2, mask)
    varies = spread > 1e-10 * size
    error = masked_var(select(returns, mask) - select(values, mask), mask)
    return jnp.where(varies, 1.0 - error / jnp.where(varies, spread, 1.0), 0.0)
