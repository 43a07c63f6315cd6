"""From logits to a token. Temperature, top-k and top-p are traced: changing them compiles nothing."""

import chex
import jax
import jax.numpy as jnp

BLOCK = 512


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
    highest = jnp.max(z, axis=-1, keepdims=True)
    weights = jnp.exp(z - highest)
    token = jax.lax.cond(
        jnp.asarray(temperature) > 0,
        lambda: choose(weights, jax.vmap(jax.random.uniform)(keys)),
        lambda: jnp.argmax(z, axis=-1).astype(jnp.int32),
    )
    chosen = jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0]
    return token, chosen - highest[:, 0] - jnp.log(jnp.sum(weights, axis=-1))


def choose(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first entry whose cumulative weight exceeds uniform x the sum: entry i with probability weights_i / sum.

    One random number a row instead of one an entry, and sums of blocks before entries, so that the weights are read once.

    Args:
      weights: [B, V] float32, not negative, one of them positive. An entry of weight 0 is never chosen.
      uniform: [B] float32, from 0 to below 1.

    Returns:
      [B] int32.
    """

    def first_above(w: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.cumsum(w, axis=-1)
        # Rounding may bring a threshold to the sum, which no entry exceeds, or below 0, which one of weight 0 would.
        threshold = jnp.clip(threshold, 0.0, jnp.nextafter(total[:, -1], 0.0))
        index = jnp.argmax(total > threshold[:, None], axis=-1)
        before = jnp.where(index > 0, jnp.take_along_axis(total, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0], 0.0)
        return index, threshold - before

    size = weights.shape[1]
    blocks = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(weights.shape[0], -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    block, rest = first_above(sums, uniform * jnp.sum(sums, axis=-1))
    inside, _ = first_above(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], rest)
    return (block * BLOCK + inside).astype(jnp.int32)


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
