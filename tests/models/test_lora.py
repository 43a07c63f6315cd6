"""Adapters against the weights they stand for: the same logits, the gradients of the chain rule, and nothing else that moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jax_ppo.models import lora, qwen

TARGETS = {"q_proj", "o_proj", "up_proj", "down_proj"}
RANK, SCALE = 3, 2.5
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
BASE = tiny.redrawn(1)
SHAPES = lora.trained(jax.eval_shape(lambda: BASE), RANK, TARGETS)

logits = jax.jit(lambda params: qwen.logits(params, tiny.MODEL, TOKENS))


def drawn(seed=2):
    """Adapters of which none is zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), SHAPES)


def test_what_trains_is_adapters_of_the_named_projections_and_the_critics_head():
    layers = SHAPES["model"]["layers"]
    assert {(block, name) for block in layers for name in layers[block]} == {
        ("self_attn", "q_proj"),
        ("self_attn", "o_proj"),
        ("mlp", "up_proj"),
        ("mlp", "down_proj"),
    }
    down = layers["mlp"]["down_proj"]
    assert {name: x.shape for name, x in down.items()} == {"lora_a": (2, 48, 3), "lora_b": (2, 3, 32)}
    assert SHAPES.keys() == {"model"}
    critic = lora.trained(jax.eval_shape(lambda: tiny.redrawn(1, head="score")), RANK, TARGETS)
    assert critic.keys() == {"model", "score"} and critic["score"]["kernel"].shape == (32, 1)


def test_fresh_adapters_change_no_bit_and_can_learn():
    fresh = lora.init(jax.random.key(0), SHAPES)
    np.testing.assert_array_equal(logits(lora.attach(BASE, fresh, SCALE)), logits(BASE))
    leaves = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(fresh)}
    first = {name: x for name, x in leaves.items() if "lora_a" in name}
    assert len(first) == 4 and len({x[0, 0, 0] for x in first.values()}) == 4
    for name, x in first.items():
        bound = x.shape[1] ** -0.5
        assert np.abs(x).max() <= bound and np.abs(x).max() > 0.9 * bound, name
    assert not any(x.any() for name, x in leaves.items() if "lora_b" in name)


def test_beside_the_weights_or_folded_into_them_or_added_by_hand():
    params = drawn()
    whole = lora.attach(BASE, params, SCALE)
    by_hand = jax.tree.map(np.array, BASE)
    for block, modules in params["model"]["layers"].items():
        for name, adapter in modules.items():
            for x in range(2):
                product = np.float64(adapter["lora_a"][x]) @ np.float64(adapter["lora_b"][x])
                by_hand["model"]["layers"][block][name]["kernel"][x] += np.float32(SCALE * product)
    expected = np.asarray(logits(by_hand))
    assert np.max(np.abs(expected - logits(BASE))) > 0.3 * expected.std()
    for ours in (whole, lora.fold(whole)):
        assert np.max(np.abs(logits(ours) - expected)) <= 1e-5 * expected.std()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), lora.fold(whole), by_hand)
    decoded = qwen.decode_weights(whole, tiny.MODEL, jnp.float32)["model"]["layers"][1]["mlp"]["down_proj"]
    np.testing.assert_allclose(
        decoded["kernel"], by_hand["model"]["layers"]["mlp"]["down_proj"]["kernel"][1], rtol=1e-6, atol=1e-6
    )
    assert decoded.keys() == {"kernel"}


def test_attaching_copies_nothing_and_the_trained_weight_wins():
    critic, head = tiny.redrawn(1, head="score"), jnp.ones((32, 1))
    whole = lora.attach(critic, {**drawn(), "score": {"kernel": head}}, SCALE)
    assert whole["score"]["kernel"] is head
    assert whole["model"]["layers"]["mlp"]["up_proj"]["kernel"] is critic["model"]["layers"]["mlp"]["up_proj"]["kernel"]
    assert "lora_a" not in critic["model"]["layers"]["mlp"]["up_proj"]
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, lora.attach({}, BASE, 1.0), BASE))


def test_gradients_follow_from_those_of_the_whole_matrix():
    """With G the gradient of W + s A B: dA = s G B^T and dB = s A^T G."""
    params, direction = drawn(), np.random.default_rng(3).normal(size=(2, 12, 64)).astype(np.float32)
    loss = jax.jit(lambda weights: jnp.sum(qwen.logits(weights, tiny.MODEL, TOKENS) * direction) / 100)
    whole = jax.grad(loss)(lora.fold(lora.attach(BASE, params, SCALE)))
    ours = jax.grad(lambda p: loss(lora.attach(BASE, p, SCALE)))(params)
    for block, modules in params["model"]["layers"].items():
        for name, adapter in modules.items():
            full = np.float64(whole["model"]["layers"][block][name]["kernel"])
            a, b = np.float64(adapter["lora_a"]), np.float64(adapter["lora_b"])
            expected = {"lora_a": SCALE * full @ b.swapaxes(1, 2), "lora_b": SCALE * a.swapaxes(1, 2) @ full}
            for part, x in expected.items():
                got = ours["model"]["layers"][block][name][part]
                assert np.linalg.norm(got - x) <= 1e-5 * np.linalg.norm(x), (name, part)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_folding_adds_in_float32_and_keeps_the_dtype_of_the_base(dtype):
    base = tiny.redrawn(1, dtype=jnp.dtype(dtype))
    folded = lora.fold(lora.attach(base, drawn(), SCALE))
    assert jax.tree.map(lambda x: x.dtype, folded) == jax.tree.map(lambda x: x.dtype, base)
    wide = lora.fold(lora.attach(jax.tree.map(lambda x: x.astype(jnp.float32), base), drawn(), SCALE))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype)), folded, wide)
