"""Scaled dot-product attention with grouped key-value heads, in float32 where the softmax is.

Training and scoring read packed rows through `packed`, by XLA anywhere or by a kernel of one platform; which kernel runs is
found out before by `jax_ppo.probe`, because nothing here may try.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ppo.sharding import MESH_AXES

# Below any real score, and finite: a query without a key yields a mean instead of NaN.
MASKED = -1e30
BLOCK = 512
# The kernel for TPUs works on multiples of this many queries and keys.
LANES = 128


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
      segment_ids: [B, T] int; a token reads the tokens before it, and itself, of its own segment. 0 is padding: whatever
                   stands there, even NaN, is neither read nor differentiated, and yields 0.
      method:      "full" builds [B, K, G, T, T] scores; "blockwise" goes over BLOCK queries at a time, reads no key behind
                   the block, and keeps no scores for the backward pass; "auto" is one of these, see `by_xla`; "cudnn" and
                   "splash" are `by_cudnn` and `by_splash`, on each device for its own rows and heads.

    Returns:
      [B, T, K, G, H] in the dtype of v.
    """
    real = (segment_ids != 0)[:, :, None, None]
    # Not by the mask alone: a weight of 0 times NaN is NaN.
    q, k, v = jnp.where(real[..., None], q, 0), jnp.where(real, k, 0), jnp.where(real, v, 0)
    if method == "cudnn":
        return on_each_device(by_cudnn, q, k, v, segment_ids)
    if method == "splash":
        return on_each_device(by_splash, q, k, v, segment_ids)
    block = BLOCK if by_xla(method, q.shape[1]) == "blockwise" else q.shape[1]
    return in_blocks(q, k, v, segment_ids, block)


def by_xla(method: str, length: int) -> str:
    """What "auto" is for rows of this length: blockwise beyond two blocks, else full. Other methods stay what they are."""
    if method != "auto":
        return method
    return "blockwise" if length > 2 * BLOCK else "full"


def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int) -> jax.Array:
    """`packed`, over `block` queries at a time and the keys up to the last of them."""

    @jax.checkpoint
    def one_block(q, k, v, query_segments, key_segments, first):
        index = first + jnp.arange(q.shape[1])
        causal = index[:, None] >= jnp.arange(k.shape[1])[None, :]
        same = query_segments[:, :, None] == key_segments[:, None, :]
        return attend(q, k, v, causal[None] & same)

    outputs = []
    for first in range(0, q.shape[1], block):
        last = min(first + block, q.shape[1])
        here, seen = slice(first, last), slice(0, last)
        outputs.append(one_block(q[:, here], k[:, seen], v[:, seen], segment_ids[:, here], segment_ids[:, seen], first))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def on_each_device(kernel: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Calls kernel(q, k, v, segment_ids) where the rows and heads are, because nobody partitions the inside of a kernel.

    Args:
      kernel: what one device does.
      arrays: q [B, T, K, G, H], k and v [B, T, K, H], segment_ids [B, T]. In a mesh its row axes must divide B, and its
              "tensor" axis K; without one, the kernel is simply called.

    Returns:
      [B, T, K, G, H].
    """
    if jax.sharding.get_abstract_mesh().empty:
        return kernel(*arrays)
    heads = PartitionSpec(MESH_AXES["rows"], None, MESH_AXES["heads"])
    specs = (heads, heads, heads, PartitionSpec(MESH_AXES["rows"]))
    # A kernel does not say along which axes its results vary, so this is not checked.
    return jax.shard_map(kernel, in_specs=specs, out_specs=heads, check_vma=False)(*arrays)


def by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, implementation: str = "cudnn") -> jax.Array:
    """`packed` by the fused kernel of cuDNN, in bfloat16 or float16.

    Segments are a mask [B, 1, T, T], shared by the heads and read as a bias; scores are never stored. JAX 0.10 has no public
    way to tell this kernel about segments in less memory.

    Args:
      q, k, v, segment_ids: as for `packed`; finite.
      implementation: of `jax.nn.dot_product_attention`; tests take "xla", which runs anywhere.

    Raises:
      Exception: of several types, from JAX, where the kernel does not exist or does not take this dtype or head size.
    """
    rows, length, heads, group, size = q.shape
    # In the backward pass the kernel takes even lengths only.
    q, k, v, segment_ids = (pad_columns(x, 2) for x in (q, k, v, segment_ids))
    out = jax.nn.dot_product_attention(
        q.reshape(rows, -1, heads * group, size),
        k,
        v,
        mask=segment_ids[:, None, :, None] == segment_ids[:, None, None, :],
        is_causal=True,
        implementation=implementation,  # type: ignore[call-overload]
    )
    return out.reshape(q.shape)[:, :length]


def by_splash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`packed` by the splash kernel of Pallas for TPUs, which skips what lies behind the diagonal and stores no scores.

    Args:
      q, k, v, segment_ids: as for `packed`; finite.
      interpret: run the kernel operation by operation, on any platform; for tests.

    Raises:
      Exception: of several types, from JAX, where the kernel does not exist or does not compile.
    """
    # Experimental, so a version of JAX may come without it; whoever asks for another method does not need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, length, heads, group, size = q.shape
    # As few blocks as BLOCK allows, all of one size, so that little is padded.
    count = -(-length // BLOCK)
    block = -(-length // (count * LANES)) * LANES
    q, k, v, segment_ids = (pad_columns(x, count * block) for x in (q, k, v, segment_ids))
    width = count * block
    mask = splash.MultiHeadMask([splash.CausalMask((width, width))] * (heads * group))
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    kernel = splash.make_splash_mha_single_device(mask=mask, block_sizes=sizes, interpret=interpret)

    def one_row(q, k, v, segments):
        return kernel(q, k, v, segment_ids=splash.SegmentIds(segments, segments))

    # Heads lead inside the kernel, which does not scale.
    q = (q * size**-0.5).reshape(rows, width, heads * group, size).swapaxes(1, 2)
    out = jax.vmap(one_row)(q, k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids)
    return out.swapaxes(1, 2).reshape(rows, width, heads, group, size)[:, :length]


def pad_columns(x: jax.Array, multiple: int) -> jax.Array:
    """Zeros behind [B, T, ...], until `multiple` divides T. A segment id of 0 is padding."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x
