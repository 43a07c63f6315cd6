"""Log-probabilities and entropies from hidden states, without ever holding tokens x vocabulary."""

import jax
import jax.numpy as jnp

# Elements of the largest logits block that exists at a time: 256 MB in float32.
BLOCK_ELEMENTS = 2**26


def token_logprobs(
    hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, *, temperature: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z / temperature)[target] and the entropy of softmax(z / temperature), with z = hidden W in float32.

    Columns are taken a few at a time; each block's logits are recomputed in the backward pass.

    Args:
      hidden:      [N, L, D], final hidden states.
      unembedding: [D, V].
      targets:     [N, L] int32, the token that follows each position.
      temperature: positive.

    Returns:
      (logprobs, entropy), both [N, L] float32, in nats.
    """
    count, length, _ = hidden.shape
    columns = max(1, min(length, BLOCK_ELEMENTS // (count * unembedding.shape[1])))
    blocks = -(-length // columns)
    columns = -(-length // blocks)
    room = blocks * columns - length

    @jax.checkpoint
    def block(part):
        x, target = part
        # Cast here, not before the loop: the gradients of the blocks are then summed in the dtype of the weights.
        weight = unembedding.astype(x.dtype)
        z = jnp.einsum("ncd,dv->ncv", x, weight, preferred_element_type=jnp.float32) / temperature
        log_total = jax.nn.logsumexp(z, axis=-1)
        chosen = jnp.take_along_axis(z, target[..., None], axis=-1)[..., 0]
        entropy = log_total - jnp.sum(jax.nn.softmax(z, axis=-1) * z, axis=-1)
        return chosen - log_total, entropy

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, room)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(count, blocks, columns, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(count, blocks * columns)[:, :length]

    logprobs, entropy = jax.lax.map(block, (split(hidden), split(targets)))
    return join(logprobs), join(entropy)
