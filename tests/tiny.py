"""A tiny model whose every weight matters: with small weights a wrong rotary base or a dropped bias would go unseen."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models import qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.types import Params

MODEL = QwenConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
)


def model(**changes: Any) -> QwenConfig:
    """The tiny model with other fields."""
    return replace(MODEL, **changes)


def redrawn(seed: int, config: QwenConfig = MODEL, head: str = "lm_head", dtype: Any = np.float32) -> Params:
    """Its parameters: std 0.2, norm weights around 1, biases and heads not zero."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.Array) -> jax.Array:
        norm = "norm" in jax.tree_util.keystr(path)
        return jnp.asarray(rng.normal(norm, 0.3 if norm else 0.2, leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: qwen.init(jax.random.key(0), config, head=head)))
