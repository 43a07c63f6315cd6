"""Actor and critic: logits of transformers, padding and packing that change nothing, and a cache that agrees with the whole."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo import sharding
from jax_ppo.models import attention, hf, qwen
from jax_ppo.models.layers import Yarn

MODELS = ("qwen2_tied", "qwen2_untied", "qwen2_yarn", "qwen3")
ROWS, LENGTH = 2, 24
LIMIT = 1e-4  # of the standard deviation of the logits

jitted = jax.jit(qwen.logits, static_argnames="config")
init = jax.jit(qwen.init, static_argnames=("config", "head"))


def full(params, config, tokens, positions=None, segment_ids=None):
    """Logits of [2, 24] tokens; always the same arguments, so that each model compiles once."""
    positions = np.arange(LENGTH) if positions is None else positions
    segment_ids = np.ones(LENGTH) if segment_ids is None else segment_ids
    whole = [np.broadcast_to(x, (ROWS, LENGTH)).astype(np.int32) for x in (tokens, positions, segment_ids)]
    return np.asarray(jitted(params, config, whole[0], positions=whole[1], segment_ids=whole[2]))


@pytest.fixture(params=MODELS)
def model(request, golden):
    """Parameters, configuration and the logits of transformers for a tiny model whose every weight matters."""
    config = hf.load_config(golden(request.param))
    with np.load(golden(request.param) / "logits.npz") as file:
        return hf.load_params(golden(request.param), config, dtype="float32"), config, dict(file)


@pytest.fixture
def untied(golden):
    config = hf.load_config(golden("qwen2_untied"))
    return hf.load_params(golden("qwen2_untied"), config, dtype="float32"), config


def error(result, expected):
    """The largest difference, in standard deviations."""
    return float(np.max(np.abs(np.asarray(result) - expected)) / np.std(expected))


def test_logits_of_transformers(model):
    params, config, truth = model
    assert error(full(params, config, truth["tokens"]), truth["logits"]) < LIMIT


def test_logits_of_one_sequence_a_row_need_no_more_than_tokens(untied, golden):
    with np.load(golden("qwen2_untied") / "logits.npz") as truth:
        result = qwen.logits(*untied, truth["tokens"].tolist())
        assert result.dtype == jnp.float32
        assert error(result, truth["logits"]) < LIMIT


def test_left_padding(model):
    """Padding is a segment of its own; positions count real tokens."""
    params, config, truth = model
    real = truth["real"]
    result = full(params, config, truth["tokens"], np.maximum(real.cumsum(1) - 1, 0), real)
    assert error(result[real], truth["padded_logits"][real]) < LIMIT
    assert error(truth["logits"][real], truth["padded_logits"][real]) > 0.1, "the padding of the golden is invisible"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen2_tied", {"rope_theta": 1e4}),
        ("qwen3", {"rope_theta": 1e4}),
        ("qwen3", {"rms_norm_eps": 1e-3}),
        ("qwen2_yarn", {"yarn": None}),
        ("qwen2_yarn", {"yarn": Yarn(factor=4.0, original_max_position_embeddings=64, attention_factor=1.0)}),
        ("qwen2_yarn", {"yarn": Yarn(factor=4.0, original_max_position_embeddings=256)}),
    ],
)
def test_a_wrong_configuration_is_seen(golden, name, change):
    """The comparison above could not tell right from wrong if any of these passed it."""
    config = hf.load_config(golden(name))
    wrong = dataclasses.replace(config, **change)
    assert wrong != config
    with np.load(golden(name) / "logits.npz") as file:
        result = full(hf.load_params(golden(name), config, dtype="float32"), wrong, file["tokens"])
        assert error(result, file["logits"]) > 20 * LIMIT


def test_every_parameter_is_seen(model):
    """Setting any one tensor to what a fresh model has moves the logits."""
    params, config, truth = model
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    for i, (path, leaf) in enumerate(leaves):
        plain = np.full(leaf.shape, "norm" in jax.tree_util.keystr(path), np.float32)
        changed = tree.unflatten([plain if i == j else x for j, (_, x) in enumerate(leaves)])
        assert error(full(changed, config, truth["tokens"]), truth["logits"]) > 20 * LIMIT, jax.tree_util.keystr(path)


def test_packed_sequences_do_not_see_each_other(model):
    """Two sequences and padding in a row, against rows that begin with one of them; what follows it there cannot matter."""
    params, config, truth = model
    row = truth["tokens"][0]
    segments = np.array([1] * 10 + [2] * 9 + [0] * 5)
    positions = np.array([*range(10), *range(9), *range(5)])
    packed = full(params, config, row, positions, segments)[0]
    alone = full(params, config, np.stack([row, np.roll(row, -10)]))
    assert error(packed[:10], alone[0, :10]) < LIMIT
    assert error(packed[10:19], alone[1, :9]) < LIMIT


def test_segments_may_be_counted_from_0(model):
    """In `logits` nothing is padding, unlike in training."""
    params, config, truth = model
    segments = np.array([0] * 10 + [1] * 14)
    from_0, from_1 = (full(params, config, truth["tokens"], segment_ids=x) for x in (segments, segments + 1))
    np.testing.assert_array_equal(from_0, from_1)


def test_a_token_moves_nothing_before_it(model):
    params, config, truth = model
    changed = truth["tokens"].copy()
    changed[:, 11] = (changed[:, 11] + 1) % config.vocab_size
    moved = np.abs(full(params, config, changed) - full(params, config, truth["tokens"])).max(-1) > 0
    np.testing.assert_array_equal(moved, np.broadcast_to(np.arange(LENGTH) >= 11, moved.shape))


@pytest.mark.parametrize(("method", "remat"), [("full", False), ("blockwise", True)])
def test_gradient_is_the_slope(untied, monkeypatch, method, remat):
    """Along one direction in all parameters, against a difference quotient."""
    monkeypatch.setattr(attention, "BLOCK", 5)
    params, config = untied
    rng = np.random.default_rng(0)
    tokens, positions = rng.integers(0, 64, (2, 12)), np.tile(np.arange(12), (2, 1))
    weight = jnp.asarray(rng.normal(size=(2, 12, 32)), jnp.float32)
    direction = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)

    def scalar(params):
        ones = np.ones_like(tokens)
        hidden, kept = qwen.hidden_states(params, config, tokens, positions, ones, dtype=jnp.float32, method=method, remat=remat)
        assert kept is None
        return jnp.mean(hidden * weight)

    along = jax.jit(lambda step: scalar(jax.tree.map(lambda p, d: p + step * d, params, direction)))
    slope = float(jax.jit(jax.grad(along))(0.0))
    assert slope == pytest.approx(float(along(2e-4) - along(-2e-4)) / 4e-4, rel=5e-3)
    assert abs(slope) > 1e-2


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("method", ["cudnn", "splash"])
def test_kernels_in_a_network_on_a_mesh(untied, monkeypatch, method, remat):
    """Scanned, rematerialised and differentiated on eight devices, against full attention on one."""
    monkeypatch.setattr(attention, "by_splash", partial(attention.by_splash, interpret=True))
    monkeypatch.setattr(attention, "by_cudnn", partial(attention.by_cudnn, implementation="xla"))
    params, config = untied
    rng = np.random.default_rng(1)
    tokens, positions = rng.integers(0, 64, (4, 20)), np.tile([*range(8), *range(9), 0, 0, 0], (4, 1))
    segments = np.tile([1] * 8 + [2] * 9 + [0] * 3, (4, 1))
    weight = jnp.asarray(rng.normal(size=(4, 20, 32)) * (segments != 0)[..., None], jnp.float32)

    def scalar(params, tokens, positions, segments, method):
        states = partial(qwen.hidden_states, dtype=jnp.float32, method=method, remat=remat)
        return jnp.sum(states(params, config, tokens, positions, segments)[0] * weight)

    gradient = jax.jit(jax.value_and_grad(scalar), static_argnames="method")
    value, expected = gradient(params, tokens, positions, segments, method="full")
    mesh = sharding.make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, sharding.parameter_specs(params, mesh))
        rows = jax.device_put((tokens, positions, segments), sharding.rows(mesh))
        there, results = gradient(placed, *rows, method=method)
    assert float(there) == pytest.approx(float(value), rel=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    for result, truth in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, truth, atol=1e-5 * largest)


# --- Decoding -------------------------------------------------------------------------------------------------------------

LENGTHS = np.array([1, 2, 3, 5, 8, 11, 12, 12], np.int32)
NEW = 8

prefill = jax.jit(qwen.prefill, static_argnames=("config", "dtype", "method"))
decode = jax.jit(qwen.decode, static_argnames=("config", "dtype"))
decode_weights = jax.jit(qwen.decode_weights, static_argnames=("config", "dtype"))


def decoded(params, config, tokens, prompt_width, width, dtype=jnp.float32):
    """Logits [B, NEW + 1, V] after the prompt and after each of NEW given tokens."""
    prompts = np.full((len(LENGTHS), prompt_width), 63, np.int32)
    for row, length in enumerate(LENGTHS):
        prompts[row, prompt_width - length + 1 :] = tokens[row, : length - 1]
    keys, vals = prefill(params, config, prompts, LENGTHS - 1, dtype=dtype)
    # The first token decoded is the last one of the prompt.
    none, room = (0, 0), (0, width - prompt_width)
    keys, vals = jnp.pad(keys, (none, none, none, none, room)), jnp.pad(vals, (none, none, none, room, none))
    assert keys.shape == (config.num_hidden_layers, 8, 2, config.head_dim, width) and keys.dtype == vals.dtype == dtype
    cache = [(keys[i], vals[i]) for i in range(config.num_hidden_layers)]
    weights, results = decode_weights(params, config, dtype), []
    for step in range(NEW + 1):
        read = LENGTHS - 1 + step
        token = tokens[np.arange(len(LENGTHS)), read]
        logits, cache = decode(weights, config, token, read, prompt_width + step, cache, dtype=dtype)
        results.append(logits)
    return np.stack(results, 1)


def given_tokens():
    """[8, 24]: prompt and continuation of each row from column 0, and something behind them."""
    return np.random.default_rng(0).integers(0, 64, (len(LENGTHS), LENGTH)).astype(np.int32)


def after_prompts(logits):
    """[8, NEW + 1, V] of [8, 24, V]: from the last token of the prompt on."""
    return np.stack([row[length - 1 : length + NEW] for row, length in zip(logits, LENGTHS, strict=True)])


def test_cached_decoding_is_the_full_forward(model):
    """Prompts of mixed length in one batch, up to the last column of the cache."""
    params, config, _ = model
    tokens = given_tokens()
    expected = after_prompts(np.concatenate([full(params, config, tokens[i : i + ROWS]) for i in range(0, 8, ROWS)]))
    assert error(decoded(params, config, tokens, 12, 12 + NEW + 1), expected) < LIMIT


def test_wider_batch_and_cache_change_nothing(untied):
    tokens = given_tokens()
    tight, wide = (decoded(*untied, tokens, prompts, width) for prompts, width in ((12, 12 + NEW + 1), (16, 32)))
    assert error(wide, tight) < LIMIT


def test_bfloat16_decoding_is_close_to_the_bfloat16_forward(untied):
    params, config = untied
    tokens = given_tokens()
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    positions = np.tile(np.arange(LENGTH), (len(LENGTHS), 1))
    run = partial(qwen.hidden_states, config=config, dtype=jnp.bfloat16)
    hidden, _ = jax.jit(run)(narrow, tokens=tokens, positions=positions, segment_ids=np.ones_like(tokens))
    expected = after_prompts(np.asarray(hidden.astype(jnp.float32) @ qwen.unembedding(narrow).astype(jnp.float32)))
    result = decoded(narrow, config, tokens, 12, 12 + NEW + 1, jnp.bfloat16)
    assert result.dtype == np.float32
    assert np.sqrt(np.mean((result - expected) ** 2)) < 0.05 * expected.std()


def test_decode_weights_are_cast_layers_and_a_tied_head_stays_one_array(golden):
    config = hf.load_config(golden("qwen2_tied"))
    params = hf.load_params(golden("qwen2_tied"), config, dtype="float32")
    weights = qwen.decode_weights(params, config, jnp.bfloat16)
    assert set(weights) == {"model"}
    assert len(weights["model"]["layers"]) == config.num_hidden_layers
    for i, layer in enumerate(weights["model"]["layers"]):
        expected = jax.tree.map(lambda x, i=i: np.asarray(x[i].astype(jnp.bfloat16)), params["model"]["layers"])
        jax.tree.map(np.testing.assert_array_equal, layer, expected)
    assert {x.dtype for x in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("tied", [True, False])
def test_prefill_builds_no_logits_of_the_prompt(golden, tied):
    batch, length, vocabulary = 4, 64, 8192
    config = dataclasses.replace(hf.load_config(golden("qwen2_tied")), vocab_size=vocabulary, tie_word_embeddings=tied)
    params = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    compiled = prefill.lower(params, config, ids, lengths, dtype=jnp.float32).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < batch * length * vocabulary * 4 / 2


# --- Fresh models and the critic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "head"), [("qwen2_untied", "lm_head"), ("qwen3", "score")])
def test_fresh_parameters(golden, name, head):
    config = hf.load_config(golden(name))
    params = init(jax.random.key(0), config, head=head)
    loaded = hf.load_params(golden(name), config, dtype="float32", head=head)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, loaded)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        key, values = jax.tree_util.keystr(path), np.asarray(leaf)
        if "norm" in key or "bias" in key or "score" in key:
            assert np.all(values == ("norm" in key)), key
        else:
            # 1 / sqrt(inputs): kernels are [in, out], the embedding [V, D] is also the head of a tied model.
            inputs = config.hidden_size if "embed" in key else values.shape[-2]
            assert values.std() == pytest.approx(inputs**-0.5, rel=0.1), key
    kernels = np.asarray(params["model"]["layers"]["mlp"]["up_proj"]["kernel"])
    assert not np.array_equal(kernels[0], kernels[1]), "the layers were drawn from one key"
    other = init(jax.random.key(1), config, head=head)
    assert not np.array_equal(params["model"]["embed_tokens"]["weight"], other["model"]["embed_tokens"]["weight"])


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("qwen2_tied", "lm_head", {"model"}),
        ("qwen2_untied", "lm_head", {"model", "lm_head"}),
        ("qwen2_tied", "score", {"model", "score"}),
        ("qwen2_untied", "score", {"model", "score"}),
    ],
)
def test_heads(golden, name, head, expected):
    config = hf.load_config(golden(name))
    assert set(hf.load_params(golden(name), config, dtype="float32", head=head)) == expected
    assert set(jax.eval_shape(lambda: qwen.init(jax.random.key(0), config, head=head))) == expected


def test_a_tied_head_gets_both_gradients(golden):
    """As a lookup only the rows of the tokens would move; as a head every row does."""
    config = hf.load_config(golden("qwen2_tied"))
    params = hf.load_params(golden("qwen2_tied"), config, dtype="float32")
    tokens = np.array([[3, 5, 7]])
    gradient = jax.jit(jax.grad(lambda p: jax.nn.logsumexp(qwen.logits(p, config, tokens), axis=-1).sum()))(params)
    rows = np.abs(gradient["model"]["embed_tokens"]["weight"]).sum(1)
    assert np.all(rows > 0)
    assert rows[[3, 5, 7]].min() > np.median(rows)


def test_the_value_is_linear_in_the_hidden_state():
    hidden, head = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((2, 5, 32), (32, 1)))
    critic = {"score": {"kernel": jnp.asarray(head)}}
    result = qwen.values(critic, jnp.asarray(hidden))
    np.testing.assert_allclose(result, np.einsum("btd,d->bt", hidden, head[:, 0]), atol=1e-5)
    assert qwen.values(critic, jnp.asarray(hidden, jnp.bfloat16)).dtype == jnp.float32
