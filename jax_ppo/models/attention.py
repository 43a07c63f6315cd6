"""Scaled dot-product attention with grouped key-value heads, in float32 where the softmax is."""

import jax
import jax.numpy as jnp

# Below any real score, and finite: a query without a key yields a mean instead of NaN.
MASKED = -1e30
BLOCK = 512


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the keys that the mask allows.

    Args:
      q:    [B, T, K, G, H] queries; the G heads of a group share one key-value head.
      k, v: [B, S, K, H] keys and values.
      mask: [B, T, S] bool, True where query t may read key s.

    Returns:
      [B, T, K, G, H] in the dtype of v.
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def attend_cache(q: jax.Array, k: jax.Array, v: jax.Array, live: jax.Array) -> jax.Array:
    """The same for one query a row against a cache: softmax(q k^T / sqrt(H)) v over the live columns.

    Row and head lead every operand, and keys are stored as the product reads them, so that nothing is transposed: on a CPU twice
    to eight times as fast as `attend`.

    Args:
      q:    [B, K, G, H] queries.
      k:    [B, K, H, W] keys.
      v:    [B, K, W, H] values.
      live: [B, W] bool, True where row b may read column w.

    Returns:
      [B, K, G, H] in the dtype of v.
    """
    product = (((3,), (2,)), ((0, 1), (0, 1)))
    scores = jax.lax.dot_general(q, k, product, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(live[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jax.lax.dot_general(weights, v, product)


def packed(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, method: str = "auto") -> jax.Array:
    """Causal attention inside each segment of packed rows.

    Args:
      q:           [B, T, K, G, H].
      k, v:        [B, T, K, H].
      segment_ids: [B, T] int; a token reads the tokens before it, and itself, of its own segment.
      method:      "full" builds [B, K, G, T, T] scores; "blockwise" goes over BLOCK queries at a time, reads no key behind
                   the block, and keeps no scores for the backward pass; "auto" is blockwise for rows longer than two blocks.

    Returns:
      [B, T, K, G, H] in the dtype of v.
    """
    length = q.shape[1]
    if method == "auto":
        method = "blockwise" if length > 2 * BLOCK else "full"
    block = BLOCK if method == "blockwise" else length

    @jax.checkpoint
    def one_block(q, k, v, query_segments, key_segments, first):
        index = first + jnp.arange(q.shape[1])
        causal = index[:, None] >= jnp.arange(k.shape[1])[None, :]
        same = query_segments[:, :, None] == key_segments[:, None, :]
        return attend(q, k, v, causal[None] & same)

    outputs = []
    for first in range(0, length, block):
        last = min(first + block, length)
        here, seen = slice(first, last), slice(0, last)
        outputs.append(one_block(q[:, here], k[:, seen], v[:, seen], segment_ids[:, here], segment_ids[:, seen], first))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)
