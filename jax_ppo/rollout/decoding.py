"""The device half of sampling: prompts in, one segment of tokens after the other out."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jax_ppo.models import qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.rollout.sampling import draw, row_keys
from jax_ppo.sharding import constrain
from jax_ppo.types import Params


@struct.dataclass
class Sampling:
    """How tokens are drawn; traced.

    key:         the iteration's PRNG key.
    temperature, top_k, top_p: see `jax_ppo.rollout.sampling.filter_logits`.
    end_ids:     [E] int32, ids that end a response.
    pad_id:      what stands behind the end.
    """

    key: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    end_ids: jax.Array
    pad_id: jax.Array


@struct.dataclass
class Slots:
    """Rows in the middle of being decoded. All rows have drawn the same number of tokens.

    cache:    keys and values of each layer, [B, W, K, H].
    prompts:  [B] int32, prompt lengths.
    rows:     [B] int32, the number each row's randomness is derived from.
    column:   scalar int32, the cache column the next token is written to.
    count:    scalar int32, tokens drawn so far.
    tokens:   [B, R] int32.
    logprobs: [B, R] float32.
    lengths:  [B] int32, tokens drawn up to and including the end token.
    done:     [B] bool, an end token was drawn, or nothing was asked of this row.
    """

    cache: qwen.Cache
    prompts: jax.Array
    rows: jax.Array
    column: jax.Array
    count: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    done: jax.Array


def prefill(
    params: Params,
    config: QwenConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    live: jax.Array,
    sampling: Sampling,
    *,
    width: int,
    limit: int,
    dtype: Any,
    method: str,
) -> Slots:
    """Reads the prompts and draws the first token of each response.

    Args:
      params:   the actor's stacked parameters.
      config:   the model.
      tokens:   [B, P] int32, right-aligned.
      lengths:  [B] int32.
      rows:     [B] int32.
      live:     [B] bool, False for rows that only fill the batch.
      sampling: how to draw.
      width:    columns of the cache.
      limit:    R, the longest response.
      dtype:    of activations and cache.
      method:   of attention.
    """
    logits, cache = qwen.prefill(params, config, tokens, lengths, width=width, dtype=dtype, method=method)
    batch = tokens.shape[0]
    slots = Slots(
        cache=cache,
        prompts=lengths,
        rows=rows,
        column=jnp.asarray(tokens.shape[1], jnp.int32),
        count=jnp.zeros((), jnp.int32),
        tokens=jnp.full((batch, limit), sampling.pad_id, jnp.int32),
        logprobs=jnp.zeros((batch, limit), jnp.float32),
        lengths=jnp.zeros(batch, jnp.int32),
        done=~live,
    )
    return _take(slots, logits, sampling)


def segment(weights: Params, config: QwenConfig, slots: Slots, sampling: Sampling, *, dtype: Any) -> Slots:
    """Decodes until every row is done or the cache or the response is full.

    Args:
      weights:  from `qwen.decode_weights`.
      config:   the model.
      slots:    from `prefill` or an earlier segment.
      sampling: how to draw.
      dtype:    of activations.
    """
    width, limit = slots.cache[0][0].shape[1], slots.tokens.shape[1]

    def going(s: Slots) -> jax.Array:
        return (s.column < width) & (s.count < limit) & ~jnp.all(s.done)

    def one_token(s: Slots) -> Slots:
        previous = jax.lax.dynamic_index_in_dim(s.tokens, s.count - 1, axis=1, keepdims=False)
        read = s.prompts + s.count - 1
        logits, cache = qwen.decode(weights, config, previous, read, s.column, s.cache, dtype=dtype)
        return _take(replace(s, cache=cache, column=s.column + 1), logits, sampling)

    return jax.lax.while_loop(going, one_token, slots)


def widen(slots: Slots, *, width: int) -> Slots:
    """Gives the cache more columns."""
    room = ((0, 0), (0, width - slots.cache[0][0].shape[1]), (0, 0), (0, 0))
    return replace(slots, cache=jax.tree.map(lambda x: jnp.pad(x, room), slots.cache))


def _take(slots: Slots, logits: jax.Array, sampling: Sampling) -> Slots:
    """Draws one token a row and notes it, unless the row is done."""
    logits = constrain(logits, "rows", None)
    keys = row_keys(sampling.key, slots.rows, slots.count)
    token, logprob = draw(logits, keys, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    token = jnp.where(slots.done, sampling.pad_id, token)
    logprob = jnp.where(slots.done, 0.0, logprob)
    ended = jnp.any(token[:, None] == sampling.end_ids[None], axis=1)
    return replace(
        slots,
        count=slots.count + 1,
        tokens=jax.lax.dynamic_update_slice(slots.tokens, token[:, None], (0, slots.count)),
        logprobs=jax.lax.dynamic_update_slice(slots.logprobs, logprob[:, None], (0, slots.count)),
        lengths=slots.lengths + (~slots.done).astype(jnp.int32),
        done=slots.done | ended,
    )
