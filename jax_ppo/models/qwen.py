"""Actor and critic as plain functions of their parameters.

The tree mirrors Hugging Face names, with the layers stacked on a leading axis:

    {"model": {"embed_tokens": {"weight" [V,D]}, "layers": {... [X,...]}, "norm": {"weight" [D]}},
     "lm_head": {"kernel" [D,V]}        actor, unless tied to the embedding
     "score":   {"kernel" [D,1]}}       critic

Training and scoring scan over the stacked layers. Decoding runs over a list of per-layer weights with one K and one V array a
layer, because slicing stacked weights inside the token loop would copy them for every token.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.models import attention, lora
from jax_ppo.models.layers import Attend, Layer, QwenConfig, RMSNorm, rotary
from jax_ppo.sharding import constrain
from jax_ppo.types import Params

# Keys [B, K, H, W] and values [B, K, W, H] of each layer.
Cache = list[tuple[jax.Array, jax.Array]]


def init(key: jax.Array, config: QwenConfig, *, head: str = "lm_head") -> Params:
    """Fresh parameters in float32: normal with std 1 / sqrt(inputs), norms 1, biases 0, the critic's head 0.

    Args:
      key:    PRNG key.
      config: the model.
      head:   "lm_head" for an actor, "score" for a critic.
    """
    embed_key, layer_key, head_key = jax.random.split(key, 3)
    x, rope = jnp.zeros((1, 1, config.hidden_size)), rotary(jnp.zeros((1, 1), jnp.int32), config)
    one_layer = lambda k: Layer(config).init(k, x, rope, lambda q, k, v: (q, None))["params"]  # noqa: E731
    normal = lambda k, *shape: config.hidden_size**-0.5 * jax.random.normal(k, shape)  # noqa: E731
    params: Params = {
        "model": {
            "embed_tokens": {"weight": normal(embed_key, config.vocab_size, config.hidden_size)},
            "layers": jax.vmap(one_layer)(jax.random.split(layer_key, config.num_hidden_layers)),
            "norm": {"weight": jnp.ones(config.hidden_size)},
        }
    }
    if head == "score":
        params["score"] = {"kernel": jnp.zeros((config.hidden_size, 1))}
    elif not config.tie_word_embeddings:
        params["lm_head"] = {"kernel": normal(head_key, config.hidden_size, config.vocab_size)}
    return params


def hidden_states(
    params: Params,
    config: QwenConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    dtype: Any,
    method: str = "auto",
    remat: bool = True,
    keep_cache: bool = False,
) -> tuple[jax.Array, Any]:
    """The last hidden state of every token, after the final norm.

    Args:
      params:      parameters of an actor or a critic.
      config:      the model.
      tokens:      [N, L] int32.
      positions:   [N, L] int32, within the own sequence.
      segment_ids: [N, L] int32; tokens read their own segment only. 0 is padding.
      dtype:       of activations and matmuls.
      method:      of attention, see `attention.packed`.
      remat:       keep only the input of each layer for the backward pass.
      keep_cache:  also return keys and values.

    Returns:
      [N, L, D] in `dtype`, and with `keep_cache` the pair of stacked keys and values, each [X, N, L, K, H], else None.
    """
    rope = rotary(positions, config)

    def attend(q, k, v):
        return attention.packed(q, k, v, segment_ids, method=method), (k, v) if keep_cache else None

    def body(x, layer):
        return _apply_layer(layer, config, x, rope, attend)

    x = constrain(embed(params, tokens, dtype), "rows", None, None)
    x, kept = jax.lax.scan(jax.checkpoint(body) if remat else body, x, params["model"]["layers"])
    return final_norm(params, config, x), kept


def embed(params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of the embedding, tokens.shape + [D]."""
    return params["model"]["embed_tokens"]["weight"].astype(dtype)[tokens]


def final_norm(params: Params, config: QwenConfig, x: jax.Array) -> jax.Array:
    """The norm behind the last layer."""
    normal: Any = RMSNorm(config.hidden_size, config.rms_norm_eps).apply({"params": params["model"]["norm"]}, x)
    return normal


def unembedding(params: Params) -> jax.Array:
    """The matrix from hidden state to logits, [D, V]: the head, or the embedding where they are tied."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["model"]["embed_tokens"]["weight"].T


def logits(
    params: Params,
    config: QwenConfig,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Logits of every position, for tests and for users; training never builds this array.

    Args:
      params:      parameters of an actor.
      config:      the model.
      tokens:      [B, T] int.
      positions:   [B, T] int; default 0, 1, 2, ...
      segment_ids: [B, T] int; default one segment a row. A padding token belongs to a segment of its own.

    Returns:
      [B, T, V] float32, computed in float32.
    """
    tokens = jnp.asarray(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if segment_ids is None:
        segment_ids = jnp.ones(tokens.shape, jnp.int32)
    # Nothing is padding here: a caller may count from 0.
    segment_ids = jnp.asarray(segment_ids) - jnp.min(segment_ids) + 1
    # Accelerators multiply float32 matrices in fewer bits unless told otherwise.
    with jax.default_matmul_precision("float32"):
        hidden, _ = hidden_states(params, config, tokens, positions, segment_ids, dtype=jnp.float32, remat=False)
        return hidden @ unembedding(params).astype(jnp.float32)


def values(params: Params, hidden: jax.Array) -> jax.Array:
    """The critic's scalar head, [..., D] -> [...] float32."""
    return (hidden.astype(jnp.float32) @ params["score"]["kernel"].astype(jnp.float32))[..., 0]


def decode_weights(params: Params, config: QwenConfig, dtype: Any) -> Params:
    """The actor's weights for the token loop: in compute dtype, `layers` a list, the unembedding [V, D] beside them.

    Adapters are folded into what they adapt. The head stays [V, D] as the embedding is stored, so a tied head is the same array
    and costs no memory.
    """
    cast = jax.tree.map(lambda w: w.astype(dtype), lora.fold(params))
    stacked = cast["model"]["layers"]
    layers = [jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(config.num_hidden_layers)]
    weights: Params = {"model": {**cast["model"], "layers": layers}}
    if "lm_head" in cast:
        weights["lm_head"] = cast["lm_head"]
    return weights


def prefill(
    params: Params, config: QwenConfig, tokens: jax.Array, lengths: jax.Array, *, dtype: Any, method: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of right-aligned prompts. There are no logits: `decode` reads the last token and says what follows.

    Args:
      params:  the actor's stacked parameters.
      config:  the model.
      tokens:  [C, P] int32, each row ending in the last column.
      lengths: [C] int32, may be 0.
      dtype:   of activations and cache.
      method:  of attention.

    Returns:
      Stacked keys [X, C, K, H, P] and values [X, C, K, P, H].
    """
    column = jnp.arange(tokens.shape[1])[None]
    first = (tokens.shape[1] - lengths)[:, None]
    real = column >= first
    positions = jnp.where(real, column - first, 0)
    _, (keys, vals) = hidden_states(
        params, config, tokens, positions, real.astype(jnp.int32), dtype=dtype, method=method, remat=False, keep_cache=True
    )
    return keys.transpose(0, 1, 3, 4, 2), vals.transpose(0, 1, 3, 2, 4)


def decode(
    weights: Params, config: QwenConfig, tokens: jax.Array, lengths: jax.Array, column: jax.Array, cache: Cache, *, dtype: Any
) -> tuple[jax.Array, Cache]:
    """Reads one token a row and says what comes next.

    Args:
      weights: from `decode_weights`.
      config:  the model.
      tokens:  [B] int32.
      lengths: [B] int32, tokens read before this one; also this token's position.
      column:  scalar int32, where every row's key and value are written. Row b's live columns are the last
               lengths[b] + 1 up to and including this one.
      cache:   keys [B, K, H, W] and values [B, K, W, H] of each layer.
      dtype:   of activations.

    Returns:
      Logits [B, V] float32, and the cache.
    """
    x = embed(weights, tokens, dtype)[:, None]
    rope = rotary(lengths[:, None], config)
    index = jnp.arange(cache[0][0].shape[3])[None]
    live = (index <= column) & (index >= column - lengths[:, None])
    updated = []
    for layer, (keys, vals) in zip(weights["model"]["layers"], cache, strict=True):

        def attend(q, k, v, keys=keys, vals=vals):
            keys = jax.lax.dynamic_update_slice(keys, k[:, 0, ..., None].astype(keys.dtype), (0, 0, 0, column))
            vals = jax.lax.dynamic_update_slice(vals, v[:, 0, :, None].astype(vals.dtype), (0, 0, column, 0))
            return attention.attend_cache(q[:, 0], keys, vals, live)[:, None], (keys, vals)

        x, kept = _apply_layer(layer, config, x, rope, attend)
        updated.append(kept)
    return next_logits(weights, final_norm(weights, config, x)[:, 0]), updated


def next_logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Logits [B, V] float32 from hidden states [B, D]."""
    if "lm_head" in params:
        return jnp.matmul(hidden, params["lm_head"]["kernel"].astype(hidden.dtype), preferred_element_type=jnp.float32)
    weight = params["model"]["embed_tokens"]["weight"].astype(hidden.dtype)
    return jnp.einsum("bd,vd->bv", hidden, weight, preferred_element_type=jnp.float32)


def _apply_layer(
    weights: Params, config: QwenConfig, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend
) -> tuple[jax.Array, Any]:
    out: Any = Layer(config).apply({"params": weights}, x, rope, attend)
    return out
