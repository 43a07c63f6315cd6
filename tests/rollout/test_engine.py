"""Sampling with a cache against a loop without one, and the same tokens however the rows are arranged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType

from jax_ppo import sharding
from jax_ppo.config import Config, ModelConfig
from jax_ppo.models import qwen
from jax_ppo.rollout.engine import Engine
from jax_ppo.steps import Steps
from jax_ppo.types import Problem, Prompts

LIMIT, WIDTH, PAD = 12, 10, 0
COUNT = 8


def one_device():
    return jax.make_mesh((1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])


class Player:
    """A tiny model on a mesh, ready to sample."""

    def __init__(self, mesh):
        self.mesh = mesh
        with jax.set_mesh(mesh):
            self.steps = Steps(Config(model=ModelConfig(compute_dtype="float32")), tiny.MODEL, tiny.MODEL, mesh)
            self.params = jax.device_put(tiny.redrawn(1), self.steps.actor.shardings)
            self.weights = self.steps.decode_weights(self.params)

    def sample(self, prompts, *, slots=8, segment=4, limit=LIMIT, ends=(63,), key=0, temperature=1.0):
        engine = Engine(self.steps.prefill, self.steps.decode, self.steps.widen, slots, WIDTH, limit, segment, ends, PAD)
        with jax.set_mesh(self.mesh):
            return engine.generate(self.params, self.weights, prompts, jax.random.key(key), temperature=temperature)


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
    calls = []

    def counted(*args):
        slots = alone.steps.decode(*args)
        calls.append(int(slots.count))
        return slots

    engine = Engine(alone.steps.prefill, counted, alone.steps.widen, 8, WIDTH, LIMIT, 4, tuple(range(64)), PAD)
    with jax.set_mesh(alone.mesh):
        rollout = engine.generate(alone.params, alone.weights, prompts, jax.random.key(0), temperature=1.0)
    assert calls == [1]
    assert rollout.lengths.tolist() == [1] * COUNT
    assert rollout.finished.all()


@pytest.mark.parametrize(("slots", "segment"), [(4, 4), (3, 4), (64, 4), (8, 1), (8, 64)])
def test_tokens_depend_on_neither_slots_nor_segments(alone, prompts, slots, segment):
    usual, other = alone.sample(prompts), alone.sample(prompts, slots=slots, segment=segment)
    np.testing.assert_array_equal(other.tokens, usual.tokens)
    np.testing.assert_array_equal(other.lengths, usual.lengths)
    np.testing.assert_allclose(other.logprobs, usual.logprobs, atol=1e-5)


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


def test_a_second_rollout_compiles_nothing(alone, prompts):
    alone.sample(prompts)
    compiled = []
    listener = lambda name, *_, **__: compiled.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        alone.sample(prompts, key=9, temperature=0.5)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not [name for name in compiled if "backend_compile" in name]


def test_the_host_sees_progress(alone, prompts):
    seen = []
    engine = Engine(alone.steps.prefill, alone.steps.decode, alone.steps.widen, 4, WIDTH, LIMIT, 4, (64,), PAD)
    with jax.set_mesh(alone.mesh):
        engine.generate(
            alone.params, alone.weights, prompts, jax.random.key(0), temperature=1.0, progress=lambda *x: seen.append(x)
        )
    assert seen[0] == (0, COUNT)
    assert all(total == COUNT for _, total in seen)


def test_the_prefill_holds_no_logits_of_the_prompt(alone):
    """With a vocabulary that outweighs everything else, B x P x V would show."""
    config = tiny.model(vocab_size=8192)
    shapes = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))
    tokens, lengths = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    program = jax.jit(lambda p, t, n: qwen.prefill(p, config, t, n, width=80, dtype=jnp.float32)).lower(shapes, tokens, lengths)
    assert program.compile().memory_analysis().temp_size_in_bytes < 8 * 64 * 8192 * 4 / 4
