"""From logits to a token. Temperature, top-k and top-p are traced: changing them compiles nothing."""

import chex
import jax
import jax.numpy as jnp


def filter_logits(
    logits: jax.Array, *, temperature: float | jax.Array = 1.0, top_k: int | jax.Array = 0, top_p: float | jax.Array = 1.0
) -> jax.Array:
    """The logits of the distribution that is sampled: divided by the temperature, then top-k, then top-p of what is left.

    top-p keeps the smallest set of most likely tokens whose mass, renormalised after top-k, reaches p; the token that crosses p
    is kept, and so is the first. Ties go to the lowest id. Where both filters are off nothing is sorted. Temperature 0 leaves
    the logits as they are (`draw` then takes the largest).

    Args:
      logits:      [..., V].
      temperature: at least 0.
      top_k:       tokens kept; 0 is off.
      top_p:       mass kept, 0 to 1; 1 is off, 0 keeps one token.

    Returns:
      [..., V] float32; removed entries are -inf.

    Raises:
      ValueError: for a value out of range, where it is known at trace time.
    """
    for name, value, low, high in (
        ("temperature", temperature, 0, jnp.inf),
        ("top_k", top_k, 0, jnp.inf),
        ("top_p", top_p, 0, 1),
    ):
        if isinstance(value, (int, float)) and not low <= value <= high:
            raise ValueError(f"{name}={value}: must be between {low} and {high}")
    temperature, top_k, top_p = jnp.asarray(temperature, jnp.float32), jnp.asarray(top_k), jnp.asarray(top_p, jnp.float32)
    logits = jnp.asarray(logits, jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)

    def filtered(z):
        order = jnp.argsort(-z, axis=-1, stable=True)
        ranked = jnp.take_along_axis(z, order, axis=-1)
        rank = jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
        ranked = jnp.where((top_k == 0) | (rank < top_k), ranked, -jnp.inf)
        mass = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(mass, axis=-1) - mass
        ranked = jnp.where((top_p >= 1) | (before < top_p) | (rank == 0), ranked, -jnp.inf)
        return jnp.put_along_axis(jnp.full_like(z, -jnp.inf), order, ranked, axis=-1, inplace=False)

    return jax.lax.cond((top_k > 0) | (top_p < 1), filtered, lambda z: z, logits)


def draw(
    logits: jax.Array, keys: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its log-probability under the distribution it was drawn from.

    At temperature 0 it is the most likely token (the lowest id among equals), and its untempered log-probability.

    Args:
      logits:      [B, V].
      keys:        [B] PRNG keys, one a row, so that a row's token does not depend on its neighbours.
      temperature, top_k, top_p: scalars, see `filter_logits`.

    Returns:
      ([B] int32, [B] float32).
    """
    chex.assert_rank([logits, keys], [2, 1])
    z = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    token = jax.lax.cond(
        jnp.asarray(temperature) > 0,
        lambda: jax.vmap(jax.random.categorical)(keys, z).astype(jnp.int32),
        lambda: jnp.argmax(z, axis=-1).astype(jnp.int32),
    )
    chosen = jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(z, axis=-1)


def row_keys(key: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
    """The key of each row's token: a function of the iteration's key, the row's number and the token's index, of nothing else.

    Args:
      key:   the iteration's key.
      rows:  [B] int.
      index: [B] int, index of each row's token in its response.

    Returns:
      [B] keys.
    """
    return jax.vmap(lambda row, i: jax.random.fold_in(jax.random.fold_in(key, row), i))(rows, index)
