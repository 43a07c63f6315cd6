"""The parts of a Qwen2 / Qwen2.5 / Qwen3 decoder layer, as Linen modules that hold parameters and nothing else."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.sharding import constrain

# (q [B,T,K,G,H], k [B,T,K,H], v [B,T,K,H]) -> (mixed values [B,T,K,G,H], whatever the caller wants to keep, such as a cache).
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of the rotary frequencies (arXiv 2309.00071), static: applied at every length."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class QwenConfig:
    """The shape of a model, as its config.json states it.

    attention_bias: q, k and v have biases (Qwen2). qk_norm: q and k are normalised per head before RoPE (Qwen3).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    yarn: Yarn | None = None

    @property
    def group(self) -> int:
        """G: query heads per key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


def rotary(positions: jax.Array, config: QwenConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position x frequency, each [B, T, H/2] float32, times YaRN's factor.

    Args:
      positions: [B, T] int, position of each token in its own sequence.
      config:    the model.
    """
    frequency, scale = rotary_frequencies(config)
    angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotary_frequencies(config: QwenConfig) -> tuple[np.ndarray, float]:
    """Frequencies [H/2] float32 in radians a token, and the factor on cos and sin.

    frequency_i = theta^(-2i/H). With YaRN, pair i keeps its frequency where it turns often within the original context, has
    it divided by `factor` where it turns less than once, is blended in between, and the factor is 0.1 ln(factor) + 1.

    Constants, so they are worked out on the host in float64: an accelerator's power function is off by more than the last bit,
    which the position multiplies.
    """
    size, yarn = config.head_dim, config.yarn
    plain = config.rope_theta ** (-np.arange(0, size, 2) / size)
    if yarn is None:
        return plain.astype(np.float32), 1.0

    def pair(turns: float) -> float:
        ratio = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    scale = yarn.attention_factor if yarn.attention_factor is not None else 0.1 * math.log(max(yarn.factor, 1.0)) + 1.0
    return (plain * (1.0 - ramp) + plain / yarn.factor * ramp).astype(np.float32), scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x_i, x_{i+H/2}) of x [B, T, ..., H] by the angles of cos and sin [B, T, H/2]."""
    shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, computed in float32."""

    size: int
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (self.size,))
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normal * jax.lax.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)


class Linear(nn.Module):
    """x W (+ x A B) (+ b), in the dtype of x. The kernel is [in, out]; A and B are those of `jax_ppo.models.lora`."""

    inputs: int
    outputs: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(self.inputs**-0.5), (self.inputs, self.outputs))
        # As one matrix: on a CPU the gradients of a product over three axes take three times as long.
        shape, x = x.shape, x.reshape(-1, self.inputs)
        y = x @ kernel.astype(x.dtype)
        if self.has_variable("params", "lora_a"):
            first: jax.Array = self.get_variable("params", "lora_a")
            second: jax.Array = self.get_variable("params", "lora_b")
            y = y + (x @ first.astype(x.dtype)) @ second.astype(x.dtype)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.outputs,))
            y = y + bias.astype(x.dtype)[None]
        return y.reshape(*shape[:-1], self.outputs)


class Attention(nn.Module):
    """Projections, optional q/k norm, rotary embedding; what is attended to is the caller's business."""

    config: QwenConfig

    @nn.compact
    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> tuple[jax.Array, Any]:
        c, (batch, length, width) = self.config, x.shape
        kv = c.num_key_value_heads * c.head_dim
        q = Linear(width, kv * c.group, c.attention_bias, name="q_proj")(x)
        k = Linear(width, kv, c.attention_bias, name="k_proj")(x)
        v = Linear(width, kv, c.attention_bias, name="v_proj")(x)
        q = q.reshape(batch, length, c.num_key_value_heads, c.group, c.head_dim)
        k = k.reshape(batch, length, c.num_key_value_heads, c.head_dim)
        v = v.reshape(batch, length, c.num_key_value_heads, c.head_dim)
        if c.qk_norm:
            q = RMSNorm(c.head_dim, c.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(c.head_dim, c.rms_norm_eps, name="k_norm")(k)
        mixed, kept = attend(rotate(q, *rope), rotate(k, *rope), v)
        return Linear(kv * c.group, width, name="o_proj")(mixed.reshape(batch, length, kv * c.group)), kept


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    config: QwenConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, hidden = self.config.hidden_size, self.config.intermediate_size
        gate = Linear(width, hidden, name="gate_proj")(x)
        up = Linear(width, hidden, name="up_proj")(x)
        return Linear(hidden, width, name="down_proj")(nn.silu(gate) * up)


class Layer(nn.Module):
    """One decoder layer: x + attention(norm(x)), then + mlp(norm(.)).

    Args of the call:
      x:      [B, T, D].
      rope:   cos and sin, each [B, T, H/2].
      attend: mixes values; see `Attend`.

    Returns:
      [B, T, D], and what `attend` kept.
    """

    config: QwenConfig

    @nn.compact
    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> tuple[jax.Array, Any]:
        c = self.config
        normal = RMSNorm(c.hidden_size, c.rms_norm_eps, name="input_layernorm")(x)
        mixed, kept = Attention(c, name="self_attn")(normal, rope, attend)
        x = constrain(x + mixed, "rows", None, None)
        normal = RMSNorm(c.hidden_size, c.rms_norm_eps, name="post_attention_layernorm")(x)
        return constrain(x + MLP(c, name="mlp")(normal), "rows", None, None), kept
