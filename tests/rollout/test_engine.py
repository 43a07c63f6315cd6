"""Sampling with a cache against a loop without one, and the same tokens however the rows are arranged."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType

from jax_ppo import sharding
from jax_ppo.config import Config, ModelConfig, RolloutConfig
from jax_ppo.models import qwen
from jax_ppo.rollout.engine import Engine, ladder
from jax_ppo.steps import Steps
from jax_ppo.types import Problem, Prompts

LIMIT, WIDTH, PAD = 12, 10, 0
COUNT = 8


def one_device():
    return jax.make_mesh((1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])


class Player:
    """A tiny model on a mesh, ready to sample."""

    def __init__(self, mesh, *, segment=4):
        self.mesh, self.segment = mesh, segment
        rollout = RolloutConfig(max_response_tokens=LIMIT, segment=segment)
        with jax.set_mesh(mesh):
            self.steps = Steps(Config(model=ModelConfig(compute_dtype="float32"), rollout=rollout), tiny.MODEL, tiny.MODEL, mesh)
            self.params = jax.device_put(tiny.redrawn(1), self.steps.actor.shardings)
            self.weights = self.steps.decode_weights(self.params)

    def engine(self, *, slots=8, ends=(63,), **programs):
        shards = sharding.row_shards(self.mesh)
        return Engine(replace(self.steps.rollout, **programs), shards, slots, WIDTH, LIMIT, self.segment, ends, PAD)

    def sample(self, prompts, *, slots=8, ends=(63,), key=0, temperature=1.0, engine=None, **how):
        engine = engine or self.engine(slots=slots, ends=ends)
        with jax.set_mesh(self.mesh):
            return engine.generate(self.params, self.weights, prompts, jax.random.key(key), temperature=temperature, **how)


def watched(function, calls, note):
    """The same function, which notes something of each call."""

    def call(*args, **more):
        calls.append(note(*args, **more))
        return function(*args, **more)

    return call


@pytest.fixture(scope="module")
def alone():
    return Player(one_device())


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    lengths = [1, 10, 3, 7, 5, 2, 9, 4]
    return Prompts([Problem("", "")] * COUNT, [rng.integers(1, 60, n).astype(np.int32) for n in lengths], np.arange(COUNT))


full = jax.jit(qwen.logits, static_argnums=1)


def uncached(params, sequence):
    """Logits of the next token, from a full forward pass over the sequence; padded so that one program serves all."""
    tokens = np.zeros((1, WIDTH + LIMIT), np.int32)
    tokens[0, : len(sequence)] = sequence
    return np.asarray(full(params, tiny.MODEL, tokens))[0, len(sequence) - 1]


@pytest.fixture(scope="module")
def truth(alone, prompts):
    """Greedy continuations without a cache."""
    params, found = tiny.redrawn(1), []
    for prompt in prompts.tokens:
        sequence = prompt.tolist()
        for _ in range(LIMIT):
            sequence.append(int(uncached(params, sequence).argmax()))
        found.append(sequence[len(prompt) :])
    return np.array(found)


def test_greedy_tokens_are_those_of_the_full_forward(alone, prompts, truth):
    rollout = alone.sample(prompts, ends=(64,), temperature=0.0)
    np.testing.assert_array_equal(rollout.tokens, truth)
    assert rollout.lengths.tolist() == [LIMIT] * COUNT
    assert not rollout.finished.any()


def test_behaviour_logprobs_are_those_of_the_full_forward(alone, prompts):
    rollout = alone.sample(prompts, ends=(64,), temperature=0.7, key=5)
    params = tiny.redrawn(1)
    for b, prompt in enumerate(prompts.tokens):
        sequence = np.concatenate([prompt, rollout.tokens[b]])
        padded = np.zeros((1, WIDTH + LIMIT), np.int32)
        padded[0, : len(sequence)] = sequence
        z = np.asarray(full(params, tiny.MODEL, padded), np.float64)[0] / 0.7
        logprobs = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
        expected = [logprobs[len(prompt) - 1 + t, token] for t, token in enumerate(rollout.tokens[b])]
        np.testing.assert_allclose(rollout.logprobs[b], expected, atol=1e-5)


def test_any_end_id_ends_and_stays(alone, prompts, truth):
    # The end ids are tokens that the greedy continuations do contain, at different places.
    ends = (int(truth[0, 0]), int(truth[1, 5]))
    rollout = alone.sample(prompts, ends=ends, temperature=0.0)
    for b in range(COUNT):
        hits = np.flatnonzero(np.isin(truth[b], ends))
        length = hits[0] + 1 if hits.size else LIMIT
        assert rollout.lengths[b] == length
        assert rollout.finished[b] == bool(hits.size)
        np.testing.assert_array_equal(rollout.tokens[b, :length], truth[b, :length])
        assert (rollout.tokens[b, length:] == PAD).all()
        assert (rollout.logprobs[b, length:] == 0).all()
    assert rollout.lengths[0] == 1
    assert rollout.mask.sum() == rollout.lengths.sum()


def test_all_rows_ending_at_once_decode_nothing_more(alone, prompts):
    steps = []
    segment = alone.steps.rollout.segment

    def counted(*args):
        cache, drawn = segment(*args)
        steps.append(int(drawn.steps))
        return cache, drawn

    rollout = alone.sample(prompts, engine=alone.engine(ends=tuple(range(64)), segment=counted))
    assert steps == [1]
    assert rollout.lengths.tolist() == [1] * COUNT
    assert rollout.finished.all()


@pytest.mark.parametrize("slots", [1, 3, 4, 64])
def test_tokens_do_not_depend_on_the_slots(alone, prompts, slots):
    usual, other = alone.sample(prompts), alone.sample(prompts, slots=slots)
    np.testing.assert_array_equal(other.tokens, usual.tokens)
    np.testing.assert_array_equal(other.lengths, usual.lengths)
    np.testing.assert_array_equal(other.finished, usual.finished)
    np.testing.assert_allclose(other.logprobs, usual.logprobs, atol=1e-5)


@pytest.mark.parametrize("segment", [1, 64])
def test_tokens_do_not_depend_on_the_segments(alone, prompts, segment):
    """One look at every token, and none before the end: no row is ever moved."""
    usual, other = alone.sample(prompts), Player(one_device(), segment=segment).sample(prompts)
    np.testing.assert_array_equal(other.tokens, usual.tokens)
    np.testing.assert_allclose(other.logprobs, usual.logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def many(prompts):
    """Forty rows of five prompts, eight times each."""
    return Prompts([Problem("", "")] * 40, [prompts.tokens[i] for i in (1, 2, 4, 6, 7) for _ in range(8)], np.arange(40))


def test_rows_leave_enter_and_move_without_changing_a_token(alone, many):
    """With ends that come early and late, the cache is moved to other sizes, and seats are given twice."""
    ends = tuple(range(10, 20))
    straight = alone.sample(many, slots=40, ends=ends)
    moves, heights = [], []
    engine = alone.engine(
        slots=32,
        ends=ends,
        arrange=watched(alone.steps.rollout.arrange, moves, lambda pair, source, start, width: (source.size, width)),
        segment=watched(alone.steps.rollout.segment, heights, lambda weights, cache, *_: cache[0][0].shape[0]),
    )
    rollout = alone.sample(many, engine=engine)
    assert len(set(straight.lengths.tolist())) > 3
    assert 8 in heights and 32 in heights, "the last rows move into fewer slots"
    assert moves
    np.testing.assert_array_equal(rollout.tokens, straight.tokens)
    np.testing.assert_array_equal(rollout.lengths, straight.lengths)
    np.testing.assert_allclose(rollout.logprobs, straight.logprobs, atol=1e-5)


def test_samples_of_one_prompt_share_its_prefill(alone, many):
    lines = []
    prefill = watched(alone.steps.rollout.prefill, lines, lambda params, tokens, lengths: int((lengths > 0).sum()))
    shared = alone.sample(many, engine=alone.engine(slots=40, prefill=prefill))
    assert sum(lines) == 5
    for b in (0, 7, 23, 39):
        single = Prompts(many.problems[:1], [many.tokens[b]], many.rows[b : b + 1])
        np.testing.assert_array_equal(alone.sample(single).tokens[0], shared.tokens[b])


def test_no_end_before_the_least_tokens_and_no_token_behind_the_limit(alone, prompts):
    ends = tuple(range(20, 60))
    rollout = alone.sample(prompts, ends=ends, min_tokens=5, limit=7)
    assert rollout.lengths.min() >= 6 and rollout.lengths.max() == 7
    assert not np.isin(rollout.tokens[:, :5], ends).any()
    np.testing.assert_array_equal(rollout.finished, np.isin(rollout.tokens[np.arange(COUNT), rollout.lengths - 1], ends))
    for wrong in ({"limit": 0}, {"limit": LIMIT + 1}, {"min_tokens": 8, "limit": 7}):
        with pytest.raises(ValueError, match="limit"):
            alone.sample(prompts, **wrong)


def test_the_listener_hears_every_token(alone, prompts):
    heard = [[] for _ in range(COUNT)]
    rollout = alone.sample(prompts, slots=3, listen=lambda b, tokens: heard[b].extend(tokens))
    assert heard == [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths, strict=True)]


def test_tokens_travel_with_their_row(alone, prompts):
    usual = alone.sample(prompts)
    order = [3, 0, 7, 1, 6, 5, 2, 4]
    moved = Prompts(prompts.problems, [prompts.tokens[i] for i in order], prompts.rows[order])
    np.testing.assert_array_equal(alone.sample(moved).tokens, usual.tokens[order])
    single = Prompts([Problem("", "")], [prompts.tokens[6]], prompts.rows[6:7])
    np.testing.assert_array_equal(alone.sample(single).tokens[0], usual.tokens[6])


def test_other_keys_other_tokens(alone, prompts):
    first, again, other = alone.sample(prompts), alone.sample(prompts), alone.sample(prompts, key=1)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens[:, 0] != other.tokens[:, 0]).any()
    # The same prompt in two rows is answered twice, independently.
    twice = Prompts([Problem("", "")] * 8, [prompts.tokens[1]] * 8, np.arange(8))
    assert len(set(map(tuple, alone.sample(twice).tokens.tolist()))) > 1


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_tokens_do_not_depend_on_the_mesh(alone, prompts, shape):
    usual, player = alone.sample(prompts), Player(sharding.make_mesh(*shape))
    sharded = player.sample(prompts)
    np.testing.assert_array_equal(sharded.tokens, usual.tokens)
    # Five rows divide neither into eight slots nor into the shards of the rows.
    few = Prompts(prompts.problems[:5], prompts.tokens[:5], prompts.rows[:5])
    np.testing.assert_array_equal(player.sample(few).tokens, usual.tokens[:5])
    np.testing.assert_allclose(sharded.logprobs, usual.logprobs, atol=1e-5)


@pytest.fixture
def compiled():
    """What XLA has compiled since the fixture was asked for."""
    names = []
    listener = lambda name, *_, **__: names.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield names
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_no_rollout_compiles(many, compiled, shape):
    """Whatever its lengths, sizes and filters, once the engine has compiled."""
    player = Player(one_device() if shape == (1, 1, 1) else sharding.make_mesh(*shape))
    engine, seen = player.engine(slots=32 * sharding.row_shards(player.mesh), ends=tuple(range(10, 20))), []
    with jax.set_mesh(player.mesh):
        engine.compile(player.params, player.weights, progress=lambda *x: seen.append(x))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    many = Prompts(many.problems * 4, many.tokens * 4, np.arange(160))
    compiled.clear()
    for key in range(5):
        player.sample(many, engine=engine, key=key, temperature=0.5)
    player.sample(many, engine=engine, temperature=0.0)
    short = [tokens[:2] for tokens in many.tokens]
    player.sample(Prompts(many.problems, short, many.rows), engine=engine, min_tokens=LIMIT)
    assert not compiled


def test_the_host_sees_progress(alone, prompts):
    seen = []
    alone.sample(prompts, slots=4, progress=lambda *x: seen.append(x))
    done = [x for x, _ in seen]
    assert done == sorted(done) and done[-1] == COUNT
    assert all(total == COUNT for _, total in seen)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_no_row_leaves_its_shard(shape):
    """Neither moving rows about nor admitting prompts talks to another device."""
    mesh = sharding.make_mesh(*shape)
    shards = sharding.row_shards(mesh)
    with jax.set_mesh(mesh):
        programs = Steps(Config(model=ModelConfig(compute_dtype="float32")), tiny.MODEL, tiny.MODEL, mesh).rollout
        pair = programs.empty(32, 24)[0]
        some = lambda columns: jnp.zeros((shards, columns), jnp.int32)  # noqa: E731
        prompts = np.zeros((2 * shards, 8), np.int32)
        fresh = programs.prefill(jax.tree.map(jnp.zeros_like, tiny.redrawn(0)), prompts, prompts[:, 0])
        moving = programs.arrange.lower(pair, some(8 // shards), np.int32(3), width=16).compile().as_text()
        entering = programs.admit.lower(pair, fresh, np.int32(0), some(32 // shards), np.int32(9)).compile().as_text()
    for text in (moving, entering):
        assert "fusion" in text
        for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert collective not in text


def test_the_prefill_holds_no_logits(alone):
    """With a vocabulary that outweighs everything else, C x P x V would show."""
    config = tiny.model(vocab_size=8192)
    shapes = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))
    tokens, lengths = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    program = jax.jit(lambda p, t, n: qwen.prefill(p, config, t, n, dtype=jnp.float32)).lower(shapes, tokens, lengths)
    assert program.compile().memory_analysis().temp_size_in_bytes < 8 * 64 * 8192 * 4 / 4


def test_sizes_come_from_short_ladders():
    assert ladder(32, 256) == [32, 64, 128, 256]
    assert ladder(32, 40) == [40]
    assert ladder(32, 48) == [32, 48]
    assert ladder(40, 40) == [40]
    programs: Any = None
    engine = Engine(programs, 4, 256, 200, 512, 64, (0,), 0)
    assert engine.heights == [64, 256]
    assert engine.widths == [264, 528, 712]
    assert engine.prompt_widths == [32, 64, 128, 200]
    assert engine.prefill_rows == 4 * 10
