"""Token log-probabilities and entropies against numpy in float64, in value and gradient, however they are cut into blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.ppo import logprobs as module
from jax_ppo.ppo.logprobs import token_logprobs


def of_logits(logits: list[float], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of every token, and the entropy, of these logits: one position a token, hidden state 1."""
    vocab = len(logits)
    result = token_logprobs(
        jnp.ones((1, vocab, 1)), jnp.array([logits], jnp.float32), jnp.arange(vocab)[None], temperature=temperature
    )
    return np.asarray(result[0][0]), np.asarray(result[1][0])


def test_temperature_by_hand() -> None:
    logprobs, entropy = of_logits([2, 1, 0], 0.5)
    np.testing.assert_allclose(logprobs, [-0.142932, -2.142932, -4.142932], atol=1e-6)
    np.testing.assert_allclose(entropy, [0.441057] * 3, atol=1e-6)
    logprobs, entropy = of_logits([2, 1, 0], 1.0)
    np.testing.assert_allclose(logprobs, [-0.407606, -1.407606, -2.407606], atol=1e-6)
    np.testing.assert_allclose(entropy, [0.832396] * 3, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_uniform_over_the_vocabulary_of_qwen(dtype: type) -> None:
    """The softmax is in float32 whatever the network computes in; bfloat16 would say -11.9375."""
    vocab = 151_936
    logprobs, entropy = token_logprobs(
        jnp.ones((1, 2, 1), dtype), jnp.ones((1, vocab)), jnp.array([[0, vocab - 1]], jnp.int32), temperature=1.0
    )
    assert logprobs.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, [[-11.931214] * 2], atol=2e-6)
    np.testing.assert_allclose(entropy, [[11.931214] * 2], atol=2e-5)


def test_huge_logits_stay_finite() -> None:
    logprobs, entropy = of_logits([1e4, 0, -1e4], 1.0)
    np.testing.assert_array_equal(logprobs, [0, -1e4, -2e4])
    np.testing.assert_array_equal(entropy, [0, 0, 0])


def truth(hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The same position by position in float64."""
    logprobs, entropy = np.zeros(targets.shape), np.zeros(targets.shape)
    for index, target in np.ndenumerate(targets):
        z = hidden[index].astype(np.float64) @ weight.astype(np.float64) / temperature
        p = np.exp(z - z.max())
        p /= p.sum()
        logprobs[index], entropy[index] = np.log(p[target]), -np.sum(p * np.log(p))
    return logprobs, entropy


def random_case() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden [3, 7, 5], unembedding [5, 11], targets [3, 7]."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(3, 7, 5)), rng.normal(size=(5, 11)), rng.integers(0, 11, (3, 7))


# Columns of a block: 1, 2 (the last one cut), 3, 7, and more than there are.
@pytest.mark.parametrize("elements", [1, 3 * 11, 2 * 3 * 11, 3 * 3 * 11, 7 * 3 * 11, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_any_blocks_against_float64(elements: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    hidden, weight, targets = random_case()
    result = token_logprobs(jnp.float32(hidden), jnp.float32(weight), jnp.int32(targets), temperature=temperature)
    for ours, theirs in zip(result, truth(hidden, weight, targets, temperature), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("elements", [1, 2 * 3 * 11, 10**6])
def test_gradients_by_hand(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """d log p[a] / dz_i = [i = a] - p_i and dH / dz_i = -p_i (log p_i + H), carried back through z = h W / T."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    hidden, weight, targets = random_case()
    rng, temperature = np.random.default_rng(1), 0.7
    a, b = rng.normal(size=(2, 3, 7))

    def total(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        logprobs, entropy = token_logprobs(hidden, weight, jnp.int32(targets), temperature=temperature)
        return jnp.sum(logprobs * jnp.float32(a) + entropy * jnp.float32(b))

    ours = jax.grad(total, argnums=(0, 1))(jnp.float32(hidden), jnp.float32(weight))
    d_hidden, d_weight = np.zeros(hidden.shape), np.zeros(weight.shape)
    for index, target in np.ndenumerate(targets):
        z = hidden[index] @ weight / temperature
        p = np.exp(z) / np.exp(z).sum()
        d_z = a[index] * (np.eye(11)[target] - p) - b[index] * p * (np.log(p) - np.sum(p * np.log(p)))
        d_hidden[index] = weight @ d_z / temperature
        d_weight += np.outer(hidden[index], d_z) / temperature
    np.testing.assert_allclose(ours[0], d_hidden, atol=1e-5)
    np.testing.assert_allclose(ours[1], d_weight, atol=1e-5)


def test_more_blocks_cost_no_precision_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights' gradient is off by the rounding of bfloat16 products, and not by that of their sum over the blocks as well."""
    rng = np.random.default_rng(0)
    hidden, weight, a = (jnp.float32(rng.normal(size=s)) for s in ((2, 128, 16), (16, 256), (2, 128)))
    targets = jnp.int32(rng.integers(0, 256, (2, 128)))

    def gradient(dtype: type, blocks: int) -> np.ndarray:
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 2 * 128 * 256 // blocks)
        total = lambda w: jnp.sum(a * token_logprobs(hidden.astype(dtype), 0.1 * w, targets, temperature=1.0)[0])  # noqa: E731
        result = jax.jit(jax.grad(total))(weight)
        assert result.dtype == jnp.float32
        return np.asarray(result)

    exact = gradient(jnp.float32, 1)
    errors = [np.linalg.norm(gradient(jnp.bfloat16, blocks) - exact) / np.linalg.norm(exact) for blocks in (1, 64)]
    assert 1e-4 < errors[0] < 1e-2
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("backward", [False, True])
def test_tokens_times_vocabulary_never_exists(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled program has less scratch memory than half of the logits would need; in one block it has more than all."""
    count, length, width, vocab = 4, 64, 8, 16_384
    logits = count * length * vocab * 4

    def temporary(elements: int) -> int:
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)

        def total(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
            return jnp.sum(token_logprobs(hidden, weight, targets, temperature=1.0)[0])

        shapes = ((count, length, width), jnp.float32), ((width, vocab), jnp.float32), ((count, length), jnp.int32)
        function = jax.grad(total, argnums=(0, 1)) if backward else total
        compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary(count * length * vocab // 8) < logits / 2
    assert temporary(count * length * vocab) >= logits
