"""The clipped losses (Schulman et al., arXiv 1707.06347) and how token losses become one number."""

import chex
import jax
import jax.numpy as jnp

from jax_ppo.ppo.advantages import EXPONENT_LIMIT
from jax_ppo.ppo.masked import masked_mean, masked_range, masked_sum, select


def aggregation_weights(mask: jax.Array, mode: str, *, norm: float = 1.0) -> jax.Array:
    """Weights w such that an aggregated loss is sum(w x) / sequences-or-tokens, see `aggregation_total`.

    Args:
      mask: [B, R] bool.
      mode: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", or "seq-mean-token-sum-norm", which divides by `norm`.
      norm: a constant length, in tokens.

    Returns:
      [B, R] float32.
    """
    weights = jnp.asarray(mask, jnp.float32)
    if mode == "seq-mean-token-mean":
        return weights / jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    return weights / norm if mode == "seq-mean-token-sum-norm" else weights


def aggregation_total(tokens: float, sequences: float, mode: str) -> float:
    """What the weighted sum is divided by: the tokens of the whole minibatch, or its sequences."""
    return max(tokens if mode == "token-mean" else sequences, 1.0)


def average(x: jax.Array, mask: jax.Array, total: float | jax.Array | None) -> jax.Array:
    """sum(m x) / total, scalar float32; the masked mean where `total` is None."""
    return masked_mean(x, mask) if total is None else masked_sum(x, mask) / total


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    total: float | jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped surrogate, sum(m L) / total, with rho = exp(clip(logprobs - old_logprobs, +-20)) and

    L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), and for A < 0 at most -A dual_clip (arXiv 1912.09729).

    Args:
      logprobs, old_logprobs: [B, R] (or any equal shape) float32.
      advantages: the same shape.
      mask:       the same shape, bool or weights of the tokens.
      clip_low, clip_high: the clip range around 1.
      dual_clip:  bound for negative advantages, above 1; None is off.
      total:      what the sum is divided by; default sum(mask). Give the count of the whole minibatch, so that the result does
                  not depend on how the minibatch is cut.

    Returns:
      The loss, and the metrics: means over the tokens given here, and the smallest and largest ratio.
    """
    chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
    real = mask != 0
    log_ratio = select(logprobs, real) - select(old_logprobs, real)
    advantages = select(advantages, real)
    ratio = jnp.exp(jnp.clip(log_ratio, -EXPONENT_LIMIT, EXPONENT_LIMIT))
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(plain, clipped)
    bounded = jnp.zeros_like(real)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
    value = average(loss, mask, total)
    low, high = masked_range(ratio, real)
    return value, {
        "actor/pg_loss": value,
        "actor/pg_clipfrac": masked_mean((clipped > plain).astype(jnp.float32), real),
        "actor/pg_clipfrac_lower": masked_mean(bounded.astype(jnp.float32), real),
        "actor/ppo_kl": masked_mean(-log_ratio, real),
        "actor/ppo_kl_k3": masked_mean(ratio - 1.0 - jnp.clip(log_ratio, -EXPONENT_LIMIT, EXPONENT_LIMIT), real),
        "actor/ratio/min": low,
        "actor/ratio/max": high,
    }


def value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    *,
    clip: float | None = None,
    total: float | jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """1/2 sum(m max((V - R)^2, (Vc - R)^2)) / total, with Vc = V_old + clip(V - V_old, +-clip).

    Args:
      values, old_values, returns: [B, R] (or any equal shape) float32.
      mask:  the same shape, bool or weights.
      clip:  clip range; None leaves the plain squared error.
      total: what the sum is divided by; default sum(mask).

    Returns:
      The loss, and the metrics, means over the tokens given here.
    """
    chex.assert_equal_shape([values, old_values, returns, mask])
    real = mask != 0
    values, old_values, returns = (select(x, real) for x in (values, old_values, returns))
    plain = (values - returns) ** 2
    loss, clipped = plain, jnp.zeros_like(plain)
    if clip is not None:
        # Written so that a value inside the range comes back bit for bit; it would be counted as clipped otherwise.
        near = (jnp.clip(values, old_values - clip, old_values + clip) - returns) ** 2
        loss, clipped = jnp.maximum(plain, near), (near > plain).astype(jnp.float32)
    value = 0.5 * average(loss, mask, total)
    return value, {
        "critic/vf_loss": value,
        "critic/vf_clipfrac": masked_mean(clipped, real),
        "critic/vpred_mean": masked_mean(values, real),
    }
