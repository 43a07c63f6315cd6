"""Statistics over the tokens that count. What stands at mask = 0, NaN included, changes no result and no gradient."""

import chex
import jax
import jax.numpy as jnp


def select(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x in float32 where the mask is non-zero, else 0. Apply it *before* arithmetic: the gradient of a masked NaN is NaN otherwise.

    Args:
      x:    any shape, any float.
      mask: the same shape, bool or number.
    """
    return jnp.where(jnp.asarray(mask) != 0, jnp.asarray(x, jnp.float32), 0.0)


def masked_sum(x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """sum(m x) in float32. The mask may hold weights."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(select(x, mask) * jnp.asarray(mask, jnp.float32), axis=axis)


def masked_mean(x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """sum(m x) / sum(m), and 0 where sum(m) = 0.

    Args:
      x:    any shape, float.
      mask: the same shape, bool or weights.
      axis: axes to reduce; default all.

    Returns:
      float32, of the remaining shape.
    """
    total = jnp.sum(jnp.asarray(mask, jnp.float32), axis=axis)
    return masked_sum(x, mask, axis) / jnp.where(total == 0, 1.0, total)


def masked_var(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Population variance over the masked entries, scalar float32; 0 where there are none."""
    centred = select(x, mask) - masked_mean(x, mask)
    return masked_mean(centred * centred, mask)


def masked_range(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest masked entry; (0, 0) where there are none."""
    chex.assert_equal_shape([x, mask])
    here = jnp.asarray(mask) != 0
    some = jnp.any(here)
    low, high = jnp.min(jnp.where(here, x, jnp.inf)), jnp.max(jnp.where(here, x, -jnp.inf))
    return jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)


def whiten(x: jax.Array, mask: jax.Array, *, eps: float = 1e-8) -> jax.Array:
    """(x - mean) * rsqrt(var + eps) over the masked entries, 0 elsewhere.

    The epsilon stands inside the root: dividing by std + eps turns the rounding noise of a constant into full-size values.

    Args:
      x:    any shape, float.
      mask: the same shape, bool.
      eps:  added to the variance.

    Returns:
      float32, the shape of x.
    """
    centred = select(x, mask) - masked_mean(x, mask)
    return select(centred * jax.lax.rsqrt(masked_var(x, mask) + eps), mask)
