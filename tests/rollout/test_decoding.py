"""Decoding on a double that says what it is told, and the distribution of the real model under padding and filters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jax_ppo.models import qwen
from jax_ppo.rollout import decoding
from jax_ppo.rollout.sampling import draw

PAD = 0


def sampling(ends, *, temperature=1.0, top_k=0, top_p=1.0):
    return decoding.Sampling(
        key=jax.random.key(0),
        temperature=jnp.float32(temperature),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
        end_ids=jnp.asarray(ends, jnp.int32),
        pad_id=jnp.int32(PAD),
    )


@pytest.fixture
def continued(monkeypatch):
    """Forces continuations: the model reads them as its prompt and repeats them, as long as it is fed what it said.

    Where the token, the position or the column it is given is wrong, it says 1 instead.
    """

    def logits(script, index, right):
        said = jax.lax.dynamic_index_in_dim(script, index, axis=1, keepdims=False)
        return 100.0 * jax.nn.one_hot(jnp.where(right, said, 1), 10)

    def prefill(params, config, tokens, lengths, *, width, dtype, method):
        script = tokens[:, :, None, None].astype(jnp.float32)
        room = ((0, 0), (0, width - tokens.shape[1]), (0, 0), (0, 0))
        return logits(tokens, 0, lengths == tokens.shape[1]), [(jnp.pad(script, room), jnp.pad(script, room))]

    def decode(weights, config, tokens, lengths, column, cache, *, dtype):
        size = weights["size"]
        script = cache[0][0][:, :size, 0, 0].astype(jnp.int32)
        index = column - size + 1
        fed = tokens == jax.lax.dynamic_index_in_dim(script, index - 1, axis=1, keepdims=False)
        return logits(script, index, fed & (lengths == column)), cache

    monkeypatch.setattr(decoding.qwen, "prefill", prefill)
    monkeypatch.setattr(decoding.qwen, "decode", decode)

    @jax.jit
    def play(tokens, live, chosen):
        count, size = tokens.shape
        filled = jnp.full(count, size, jnp.int32)
        rows, room = jnp.arange(count), {"width": 2 * size, "limit": size}
        slots = decoding.prefill({}, None, tokens, filled, rows, live, chosen, **room, dtype=None, method="")
        return decoding.segment({"size": size}, None, slots, chosen, dtype=None)

    def run(scripts, ends, *, live=None):
        tokens = np.array(scripts, np.int32)
        live = np.ones(len(tokens), bool) if live is None else np.array(live)
        return jax.device_get(play(tokens, live, sampling(ends)))

    return run


def test_forced_continuations_end_at_any_of_several_ids(continued):
    slots = continued([[7, 9, 5, 5], [9, 5, 5, 5], [7, 7, 7, 7], [7, 8, 9, 5]], ends=(9, 8))
    assert slots.lengths.tolist() == [2, 1, 4, 2]
    assert slots.done.tolist() == [True, True, False, True]
    assert slots.tokens.tolist() == [[7, 9, PAD, PAD], [9, PAD, PAD, PAD], [7, 7, 7, 7], [7, 8, PAD, PAD]]
    np.testing.assert_allclose(slots.logprobs, 0.0, atol=1e-6)


def test_an_end_id_given_twice_is_an_end_id(continued):
    assert continued([[7, 9, 5, 5]], ends=(9, 9)).lengths.tolist() == [2]


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4), (1, 1, 1, 1), (3, 1, 2, 1)])
def test_rows_that_end_apart_are_those_decoded_alone(continued, lengths):
    scripts = [[7] * (n - 1) + [9] + [5] * (6 - n) for n in lengths]
    together = continued(scripts, ends=(9,))
    assert together.lengths.tolist() == list(lengths)
    assert together.count == max(lengths)  # no token more than the longest row needs
    for b in range(4):
        alone = continued(scripts, ends=(9,), live=np.arange(4) == b)
        assert together.tokens[b].tolist() == alone.tokens[b].tolist()
        assert (together.tokens[b, lengths[b] :] == PAD).all()


def test_rows_that_only_fill_the_batch_draw_nothing(continued):
    slots = continued([[7, 9, 5, 5], [7, 7, 7, 7]], ends=(9,), live=[True, False])
    assert slots.count == 2
    assert slots.lengths.tolist() == [2, 0]
    assert slots.tokens[1].tolist() == [PAD] * 4


def test_the_pad_of_a_finished_row_is_no_end_and_no_token(continued):
    """Where the pad id is an end id as well, drawing it still counts once."""
    slots = continued([[7, PAD, 5, 5], [7, 7, 7, 9]], ends=(PAD, 9))
    assert slots.lengths.tolist() == [2, 4]
    assert slots.done.all()


prefill = jax.jit(qwen.prefill, static_argnames=("config", "width", "dtype", "method"))
decode = jax.jit(qwen.decode, static_argnames=("config", "dtype"))


def logits_of_every_token(prompts, tokens, padded):
    """[B, T, V]: logits that prefill and decode give while `tokens` are fed, with the prompts padded to `padded` columns."""
    params = tiny.redrawn(3)
    weights = qwen.decode_weights(params, tiny.MODEL, jnp.float32)
    rows = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[padded - len(prompt) :] = prompt
    lengths = np.array([len(p) for p in prompts], np.int32)
    z, cache = prefill(params, tiny.MODEL, rows, lengths, width=padded + tokens.shape[1], dtype=jnp.float32)
    seen = [z]
    for t in range(tokens.shape[1] - 1):
        z, cache = decode(weights, tiny.MODEL, tokens[:, t], lengths + t, np.int32(padded + t), cache, dtype=jnp.float32)
        seen.append(z)
    return np.stack(seen, axis=1)


@pytest.mark.parametrize("padded", [8, 16])
def test_padding_moves_no_logit(padded):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 64, n) for n in (3, 8)]
    tokens = rng.integers(1, 64, (2, 6)).astype(np.int32)
    together = logits_of_every_token(prompts, tokens, padded)
    for b, prompt in enumerate(prompts):
        sequence = np.concatenate([prompt, tokens[b, :-1]])
        truth = np.asarray(qwen.logits(tiny.redrawn(3), tiny.MODEL, sequence[None]))[0, len(prompt) - 1 :]
        np.testing.assert_allclose(together[b], truth, atol=1e-4 * truth.std())
        alone = logits_of_every_token([prompt], tokens[b : b + 1], len(prompt))
        np.testing.assert_allclose(together[b], alone[0], atol=1e-4 * truth.std())


@pytest.mark.parametrize(
    ("filters", "logprob"),
    [({"temperature": 0.5}, -0.142932), ({}, -0.407606), ({"top_p": 0.8}, -0.313262), ({"temperature": 1e-8}, 0.0)],
)
def test_the_logprob_is_that_of_the_distribution_drawn_from(filters, logprob):
    chosen = sampling((9,), **filters)
    keys = jax.random.split(jax.random.key(1), 200)
    rows = jnp.broadcast_to(jnp.array([2.0, 1.0, 0.0]), (200, 3))
    tokens, logprobs = draw(rows, keys, temperature=chosen.temperature, top_k=chosen.top_k, top_p=chosen.top_p)
    assert (tokens == 0).any()
    np.testing.assert_allclose(logprobs[tokens == 0], logprob, atol=1e-6)
