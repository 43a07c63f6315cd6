"""The device half of sampling: prompts into a cache, rows moved about in it, one segment of tokens after the other out of it."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.stages import Wrapped

from jax_ppo.models import qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.rollout.sampling import draw, row_keys
from jax_ppo.sharding import constrain
from jax_ppo.types import Params


@struct.dataclass
class Sampling:
    """How tokens are drawn; traced, so that another value compiles nothing.

    key:         the iteration's PRNG key.
    temperature, top_k, top_p: see `jax_ppo.rollout.sampling.filter_logits`.
    end_ids:     [E] int32, ids that end a response.
    min_tokens:  tokens of a response before which no end id is drawn.
    limit:       tokens of the longest response.
    """

    key: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    end_ids: jax.Array
    min_tokens: jax.Array
    limit: jax.Array


@struct.dataclass
class Rows:
    """What the token loop needs to know of each slot's row, beside its cache. Each is [S].

    token:  int32, the last token, whose key and value are not in the cache yet.
    length: int32, tokens in the cache; the position of `token`.
    count:  int32, response tokens drawn.
    number: int32, from which the row's randomness is derived.
    done:   bool; an end id was drawn, or the limit is reached, or nothing is asked of this slot.
    """

    token: jax.Array
    length: jax.Array
    count: jax.Array
    number: jax.Array
    done: jax.Array


@struct.dataclass
class Drawn:
    """What a segment brings to the host.

    tokens:   [S, M] int32; row b has drawn as many as its count has grown.
    logprobs: [S, M] float32.
    count:    [S] int32, of the whole response.
    ended:    [S] bool, the last of them is an end id.
    steps:    scalar int32, columns of the cache that were written.
    """

    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    ended: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class Programs:
    """The jitted functions that `jax_ppo.rollout.engine` runs.

    empty:   (slots, width) -> cache of zeros.
    prefill: (params, tokens, lengths) -> stacked keys and values, see `qwen.prefill`.
    arrange, admit, segment: as the functions of this module, on the parameters of one model.
    """

    empty: Wrapped
    prefill: Wrapped
    arrange: Wrapped
    admit: Wrapped
    segment: Wrapped


def segment(
    weights: Params,
    config: QwenConfig,
    cache: qwen.Cache,
    rows: Rows,
    column: jax.Array,
    enough: jax.Array,
    sampling: Sampling,
    *,
    size: int,
    dtype: Any,
) -> tuple[qwen.Cache, Drawn]:
    """Draws up to `size` tokens a row; ends early where the cache is full, or enough rows are done.

    Args:
      weights:  from `qwen.decode_weights`.
      config:   the model.
      cache:    keys [S, K, H, W] and values [S, K, W, H] of each layer; row b's are in the length[b] columns before `column`.
      rows:     of the slots.
      column:   scalar int32, where the next key is written, the same for every row.
      enough:   scalar int32, rows done at which to stop; S waits for all.
      sampling: how to draw.
      size:     M.
      dtype:    of activations.

    Returns:
      The cache after the segment, and what was drawn.
    """
    slots, width = cache[0][0].shape[0], cache[0][0].shape[3]
    drawn = Drawn(
        tokens=jnp.zeros((slots, size), jnp.int32),
        logprobs=jnp.zeros((slots, size), jnp.float32),
        count=rows.count,
        ended=jnp.zeros(slots, bool),
        steps=jnp.zeros((), jnp.int32),
    )

    def going(state: tuple[qwen.Cache, Rows, Drawn]) -> jax.Array:
        _, rows, drawn = state
        return (drawn.steps < size) & (column + drawn.steps < width) & (jnp.sum(rows.done) < enough)

    def one_token(state: tuple[qwen.Cache, Rows, Drawn]) -> tuple[qwen.Cache, Rows, Drawn]:
        cache, rows, drawn = state
        logits, cache = qwen.decode(weights, config, rows.token, rows.length, column + drawn.steps, cache, dtype=dtype)
        token, logprob, ends = _draw(constrain(logits, "rows", None), rows, sampling)
        live = (~rows.done).astype(jnp.int32)
        count = rows.count + live
        ended = drawn.ended | (ends & ~rows.done)
        drawn = Drawn(
            tokens=jax.lax.dynamic_update_slice(drawn.tokens, token[:, None], (0, drawn.steps)),
            logprobs=jax.lax.dynamic_update_slice(drawn.logprobs, logprob[:, None], (0, drawn.steps)),
            count=count,
            ended=ended,
            steps=drawn.steps + 1,
        )
        rows = replace(
            rows, token=token, length=rows.length + live, count=count, done=rows.done | ends | (count >= sampling.limit)
        )
        return cache, rows, drawn

    cache, _, drawn = jax.lax.while_loop(going, one_token, (cache, rows, drawn))
    return cache, drawn


def _draw(logits: jax.Array, rows: Rows, sampling: Sampling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A token a row, its log-probability, and whether it is an end id."""

    def without_ends(z: jax.Array) -> jax.Array:
        early = rows.count < sampling.min_tokens
        return z.at[:, sampling.end_ids].add(jnp.where(early, -jnp.inf, 0.0)[:, None])

    logits = jax.lax.cond(sampling.min_tokens > 0, without_ends, lambda z: z, logits)
    keys = row_keys(sampling.key, rows.number, rows.count)
    token, logprob = draw(logits, keys, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return token, logprob, jnp.any(token[:, None] == sampling.end_ids[None], axis=1)


def arrange(pair: tuple[jax.Array, jax.Array], source: jax.Array, start: jax.Array, *, width: int) -> tuple[jax.Array, jax.Array]:
    """Moves the rows of one layer's cache to other slots and other columns.

    Args:
      pair:   keys [S, K, H, W] and values [S, K, W, H].
      source: [shards, S' / shards] int32; which slot of the same shard each new slot takes over. No row leaves its shard.
      start:  scalar int32; column `start` becomes column 0. May be negative.
      width:  W' of the new cache. What a column holds that lies outside of the old cache is arbitrary.

    Returns:
      Keys [S', K, H, W'] and values [S', K, W', H].
    """
    columns = start + jnp.arange(width)
    keys, vals = (_taken(x, source) for x in pair)
    return jnp.take(keys, columns, axis=3, mode="clip"), jnp.take(vals, columns, axis=2, mode="clip")


def admit(
    pair: tuple[jax.Array, jax.Array], fresh: tuple[jax.Array, jax.Array], layer: jax.Array, source: jax.Array, column: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gives prefilled prompts their place in one layer's cache, in the columns just before `column`.

    Args:
      pair:   keys [S, K, H, W] and values [S, K, W, H].
      fresh:  the stacked ones of the prompts, [X, C, K, H, P] and [X, C, K, P, H], from `qwen.prefill`; P is at most `column`.
      layer:  scalar int32.
      source: [shards, S / shards] int32; which prompt of the same shard a slot takes, or -1 where it keeps its row.
      column: scalar int32.

    Returns:
      The pair with the new rows.
    """
    enters = (source >= 0).reshape(-1)[:, None, None, None]
    first = column - fresh[0].shape[4]

    def entered(x: jax.Array, stacked: jax.Array, place: tuple[Any, ...]) -> jax.Array:
        new = _taken(jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False), source).astype(x.dtype)
        before = jax.lax.dynamic_slice(x, place, new.shape)
        return jax.lax.dynamic_update_slice(x, jnp.where(enters, new, before), place)

    return entered(pair[0], fresh[0], (0, 0, 0, first)), entered(pair[1], fresh[1], (0, 0, first, 0))


def _taken(x: jax.Array, source: jax.Array) -> jax.Array:
    """Rows of x [S, K, ...] by their index within their shard, as `source` [shards, S' / shards] says; [S', K, ...]."""
    shards = constrain(x.reshape(source.shape[0], -1, *x.shape[1:]), "rows", None, "heads", None, None)
    taken = jax.vmap(lambda rows, index: rows[index])(shards, source)
    return taken.reshape(-1, *x.shape[1:])
