"""Decoding on a double that says what it is told, and the distribution of the real model under padding and filters."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jax_ppo.models import qwen
from jax_ppo.rollout import decoding
from jax_ppo.rollout.sampling import draw

FIRST = 6  # the last token of every prompt


def sampling(ends, *, temperature=1.0, top_k=0, top_p=1.0, min_tokens=0, limit=1000):
    return decoding.Sampling(
        key=jax.random.key(0),
        temperature=jnp.float32(temperature),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
        end_ids=jnp.asarray(ends, jnp.int32),
        min_tokens=jnp.int32(min_tokens),
        limit=jnp.int32(limit),
    )


class Continued(NamedTuple):
    """What rows have drawn: their tokens, their log-probabilities, whether each ended, and the steps it took."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    ended: list[bool]
    steps: int


@pytest.fixture
def continued(monkeypatch):
    """Forces continuations: the model finds them in its cache and repeats them, as long as it is fed what it said.

    Where the token, the position or the column it is given is wrong, it says 1 instead. Second best is always 2.
    """

    def decode(weights, config, tokens, lengths, column, cache, *, dtype):
        script = cache[0][0][:, 0, 0].astype(jnp.int32)
        size = weights["size"]
        said = lambda i: jax.lax.dynamic_index_in_dim(script, i, axis=1, keepdims=False)  # noqa: E731
        fed = tokens == jnp.where(column == size, FIRST, said(column - size - 1))
        says = jnp.where(fed & (lengths == column), said(column - size), 1)
        return 100.0 * jax.nn.one_hot(says, 10) + 50.0 * jax.nn.one_hot(jnp.full_like(says, 2), 10), cache

    monkeypatch.setattr(decoding.qwen, "decode", decode)

    @partial(jax.jit, static_argnames=("size", "width"))
    def play(script, live, enough, chosen, size, width):
        slots, length = script.shape
        keys = jnp.pad(script[:, None, None].astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, width - length)))
        cache = [(keys, jnp.swapaxes(keys, 2, 3))]
        rows = decoding.Rows(
            token=jnp.full(slots, FIRST),
            length=jnp.full(slots, length),
            count=jnp.zeros(slots, jnp.int32),
            number=jnp.arange(slots),
            done=~live,
        )
        column = jnp.int32(length)
        return decoding.segment({"size": length}, None, cache, rows, column, enough, chosen, size=size, dtype=None)[1]

    def run(scripts, ends, *, live=None, enough=None, size=None, width=100, **how):
        script = np.array(scripts, np.int32)
        live = np.ones(len(script), bool) if live is None else np.array(live)
        enough = len(script) if enough is None else enough
        chosen = sampling(ends, **{"limit": script.shape[1], **how})
        drawn = jax.device_get(play(script, live, np.int32(enough), chosen, size or script.shape[1], width))
        cut = lambda x: [row[:n].tolist() for row, n in zip(x, drawn.count, strict=True)]  # noqa: E731
        return Continued(cut(drawn.tokens), cut(drawn.logprobs), drawn.ended.tolist(), int(drawn.steps))

    return run


def test_forced_continuations_end_at_any_of_several_ids(continued):
    drawn = continued([[7, 9, 5, 5], [9, 5, 5, 5], [7, 7, 7, 7], [7, 8, 9, 5]], ends=(9, 8))
    assert drawn.tokens == [[7, 9], [9], [7, 7, 7, 7], [7, 8]]
    assert drawn.ended == [True, True, False, True]
    np.testing.assert_allclose(np.concatenate(drawn.logprobs), 0.0, atol=1e-6)


def test_an_end_id_given_twice_is_an_end_id(continued):
    assert continued([[7, 9, 5, 5]], ends=(9, 9)).tokens == [[7, 9]]


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4), (1, 1, 1, 1), (3, 1, 2, 1)])
def test_rows_that_end_apart_are_those_decoded_alone(continued, lengths):
    scripts = [[7] * (n - 1) + [9] + [5] * (6 - n) for n in lengths]
    together = continued(scripts, ends=(9,))
    assert [len(tokens) for tokens in together.tokens] == list(lengths)
    assert together.steps == max(lengths)  # no token more than the longest row needs
    for b in range(4):
        alone = continued(scripts, ends=(9,), live=np.arange(4) == b)
        assert together.tokens[b] == alone.tokens[b]


def test_slots_without_a_row_draw_nothing(continued):
    drawn = continued([[7, 9, 5, 5], [7, 7, 7, 7]], ends=(9,), live=[True, False])
    assert drawn.steps == 2
    assert drawn.tokens == [[7, 9], []]
    assert drawn.ended == [True, False]


def test_a_segment_ends_when_it_is_long_enough_or_the_cache_is_full_or_enough_rows_are_done(continued):
    scripts = [[7, 9, 7, 7, 7, 7], [7, 7, 7, 9, 7, 7], [7, 7, 7, 7, 7, 7]]
    assert continued(scripts, ends=(9,), size=3).steps == 3
    assert continued(scripts, ends=(9,), width=6 + 5).steps == 5
    assert continued(scripts, ends=(9,), enough=1).steps == 2
    assert continued(scripts, ends=(9,), enough=2).steps == 4
    assert continued(scripts, ends=(9,)).steps == 6
    assert continued(scripts, ends=(9,), limit=5).steps == 5


def test_no_end_before_the_least_tokens(continued):
    """The end ids score highest from the start; the next best comes in their place, as the only one left."""
    drawn = continued([[9, 9, 9, 9, 9], [8, 8, 8, 8, 8]], ends=(8, 9), min_tokens=3)
    # What the double is fed is not what it wanted to say, so from then on it says 1, the highest that may be drawn.
    assert [tokens[0] for tokens in drawn.tokens] == [2, 2]
    assert all(not {8, 9} & set(tokens[:3]) for tokens in drawn.tokens)
    np.testing.assert_allclose([row[0] for row in drawn.logprobs], 0.0, atol=1e-6)
    assert continued([[7, 7, 7, 9, 5]], ends=(8, 9), min_tokens=3).tokens == [[7, 7, 7, 9]]


def numbered(slots, width):
    """A cache whose every entry says which slot and column it is from: keys [S, 1, 1, W], values [S, 1, W, 1]."""
    x = jnp.asarray(1000.0 * np.arange(slots)[:, None] + np.arange(width)[None])
    return x[:, None, None, :], -x[:, None, :, None]


def same(pair):
    """The numbers [S, W] of a cache whose keys and values agree."""
    keys, values = (np.asarray(x) for x in pair)
    np.testing.assert_array_equal(keys[:, 0, 0], -values[:, 0, :, 0])
    return keys[:, 0, 0]


@pytest.mark.parametrize(("start", "width"), [(3, 6), (0, 4), (5, 8), (-2, 12)])
def test_rows_keep_their_columns_in_order_when_they_move(start, width):
    source = np.array([[2, 0], [1, 1]], np.int32)  # two shards of three slots; two of each stay
    moved = same(decoding.arrange(numbered(6, 8), source, np.int32(start), width=width))
    assert moved.shape == (4, width)
    for slot, old in enumerate([2, 0, 4, 4]):
        for column in range(width):
            if 0 <= start + column < 8:
                assert moved[slot, column] == 1000 * old + start + column


def test_admitted_prompts_end_before_the_column_and_touch_nothing_else():
    fresh = np.arange(2 * 4 * 3).reshape(2, 4, 3) + 0.5
    stacked = fresh[:, :, None, None, :], -fresh[:, :, None, :, None]
    source = np.array([[-1, 1], [0, -1]], np.int32)
    expected = same(numbered(4, 9)).copy()
    expected[1, 4:7], expected[2, 4:7] = fresh[1, 1], fresh[1, 2]  # the second shard's first prompt is the third of all
    np.testing.assert_array_equal(same(decoding.admit(numbered(4, 9), stacked, np.int32(1), source, np.int32(7))), expected)


prefill = jax.jit(qwen.prefill, static_argnames=("config", "dtype"))
decode = jax.jit(qwen.decode, static_argnames=("config", "dtype"))


def logits_of_every_token(prompts, tokens, padded):
    """[B, T, V]: logits that come out while `tokens` are fed, with the prompts padded to `padded` columns."""
    params = tiny.redrawn(3)
    weights = qwen.decode_weights(params, tiny.MODEL, jnp.float32)
    rows = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[padded - len(prompt) + 1 :] = prompt[:-1]
    lengths = np.array([len(p) - 1 for p in prompts], np.int32)
    keys, vals = prefill(params, tiny.MODEL, rows, lengths, dtype=jnp.float32)
    # Exactly as many columns as tokens: the last one fills the cache.
    none, room = (0, 0), (0, tokens.shape[1])
    keys, vals = jnp.pad(keys, (none, none, none, none, room)), jnp.pad(vals, (none, none, none, room, none))
    cache = [(keys[i], vals[i]) for i in range(tiny.MODEL.num_hidden_layers)]
    fed = np.concatenate([[[p[-1]] for p in prompts], tokens[:, :-1]], axis=1).astype(np.int32)
    seen = []
    for t in range(tokens.shape[1]):
        z, cache = decode(weights, tiny.MODEL, fed[:, t], lengths + t, np.int32(padded + t), cache, dtype=jnp.float32)
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
