"""The optimizer against AdamW written by hand in numpy, the schedule against its definition, and the guard against NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_ppo.ppo import optimizer
from jax_ppo.types import Params, TrainState


def schedule(lr: float = 0.1, *, warmup: int = 0, kind: str = "constant", total: int = 100) -> optax.Schedule:
    return optimizer.schedule(lr, warmup=warmup, kind=kind, total=total)


def rates(counts: list[int], **options: Any) -> list[float]:
    function = schedule(**options)
    return [float(function(jnp.int32(count))) for count in counts]


def test_linear_schedule_counts_updates_not_iterations() -> None:
    """100 iterations x 4 epochs x 2 minibatches."""
    total = 100 * 4 * 2
    result = rates([0, 400, 799, 800, 900], lr=1.0, kind="linear", total=total)
    np.testing.assert_allclose(result, [1, 0.5, 1 / 800, 0, 0], atol=1e-6)


def test_cosine_schedule() -> None:
    result = rates([0, 200, 400, 800], lr=2.0, kind="cosine", total=800)
    np.testing.assert_allclose(result, [2, 1 + np.sqrt(0.5), 1, 0], atol=1e-6)


@pytest.mark.parametrize(("kind", "after"), [("constant", [1, 1, 1]), ("linear", [1, 0.5, 0]), ("cosine", [1, 0.5, 0])])
def test_warmup_rises_in_equal_steps_and_the_rest_of_the_run_follows(kind: str, after: list[float]) -> None:
    result = rates([0, 1, 2, 3, 4, 12, 20], lr=1.0, warmup=4, kind=kind, total=20)
    np.testing.assert_allclose(result, [0.25, 0.5, 0.75, 1, *after], atol=1e-6)


def test_no_update_of_a_warmup_is_wasted() -> None:
    assert rates([0], lr=1.0, warmup=10)[0] == pytest.approx(0.1)
    assert rates([0], lr=1.0, warmup=0)[0] == 1


def tree(seed: int, dtype: Any = jnp.float32) -> Params:
    """A tree with a matrix that decays and two vectors that do not."""
    rng = np.random.default_rng(seed)
    shapes = {"proj": {"kernel": (3, 4), "bias": (4,)}, "norm": {"weight": (4,)}}
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s), dtype), shapes, is_leaf=lambda s: isinstance(s, tuple))


def run(
    params: Params, grads: list[Params], rate: optax.Schedule, *, clip_norm: float = 0.0, weight_decay: float = 0.0
) -> tuple[list[TrainState], list[dict[str, float]]]:
    """The states after 0, 1, 2, ... gradients, and the metrics of each update."""
    transform = optimizer.optimizer(rate, clip_norm=clip_norm, b1=0.8, b2=0.95, weight_decay=weight_decay)
    apply = jax.jit(lambda state, grads: optimizer.apply(state, grads, transform, rate))
    states, metrics = [optimizer.start(params, transform)], []
    for g in grads:
        state, measured = apply(states[-1], g)
        states.append(state)
        metrics.append({name: float(value) for name, value in measured.items()})
    return states, metrics


def by_hand(
    params: Params, grads: list[Params], rate: list[float], clip_norm: float, weight_decay: float
) -> tuple[list[np.ndarray], list[float]]:
    """AdamW (arXiv 1711.05101) in float64, leaf by leaf: the leaves at the end, and the norm of each gradient."""
    named = jax.tree_util.tree_leaves_with_path(params)
    p = [np.asarray(x, np.float64) for _, x in named]
    decays = [path[-1].key == "kernel" for path, _ in named]
    m, v, norms = [np.zeros_like(x) for x in p], [np.zeros_like(x) for x in p], []
    for t, (gradient, lr) in enumerate(zip(grads, rate, strict=True), start=1):
        g = [np.asarray(x, np.float64) for x in jax.tree.leaves(gradient)]
        norms.append(np.sqrt(sum(np.sum(x * x) for x in g)))
        scale = min(1.0, clip_norm / norms[-1]) if clip_norm else 1.0
        for i in range(len(p)):
            m[i] = 0.8 * m[i] + 0.2 * scale * g[i]
            v[i] = 0.95 * v[i] + 0.05 * (scale * g[i]) ** 2
            step = (m[i] / (1 - 0.8**t)) / (np.sqrt(v[i] / (1 - 0.95**t)) + 1e-8)
            p[i] = p[i] - lr * (step + weight_decay * decays[i] * p[i])
    return p, norms


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_against_numpy(clip_norm: float, weight_decay: float) -> None:
    params, grads = tree(0), [tree(seed) for seed in range(1, 8)]
    rate = schedule(0.05, warmup=2, kind="linear", total=10)
    expected, norms = by_hand(params, grads, [0.025, 0.05, *(0.05 * (1 - k / 8) for k in range(5))], clip_norm, weight_decay)
    states, metrics = run(params, grads, rate, clip_norm=clip_norm, weight_decay=weight_decay)
    for ours, theirs in zip(jax.tree.leaves(states[-1].params), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    # The norm that is told is the one before clipping.
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=1e-6)
    np.testing.assert_allclose([m["lr"] for m in metrics][:4], [0.025, 0.05, 0.05, 0.05 * 7 / 8], rtol=1e-6)
    assert int(states[-1].updates) == 7


def test_the_first_update_has_the_size_of_the_learning_rate() -> None:
    """Adam's first step is sign(g) lr, if the epsilon stands outside the root: also for gradients of 1e-6."""
    grads = jax.tree.map(lambda p: jnp.where(p > 0, 1e-6, -1e-6), tree(1))
    states, metrics = run(tree(0), [grads], schedule(0.01))
    for before, after, g in zip(*map(jax.tree.leaves, (states[0].params, states[1].params, grads)), strict=True):
        np.testing.assert_allclose(before - after, 0.01 * np.sign(g), rtol=0.011)
    size = np.sqrt(sum(x.size for x in jax.tree.leaves(grads))) * 0.01
    whole = np.sqrt(sum(float(jnp.sum(p * p)) for p in jax.tree.leaves(states[0].params)))
    assert metrics[0]["update_ratio"] == pytest.approx(size / whole, rel=0.011)


def test_clipping_bounds_the_norm_and_keeps_the_direction() -> None:
    """Adam would hide the scale, so the clip is seen in the first moment: (1 - b1) clip g / |g|."""
    grads = jax.tree.map(lambda g: 1000 * g, tree(1))
    states, _ = run(tree(0), [grads], schedule(), clip_norm=0.5)
    moment = optax.tree_utils.tree_get(states[1].opt_state, "mu")
    norm = np.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))
    for m, g in zip(jax.tree.leaves(moment), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(m, 0.2 * 0.5 * g / norm, rtol=1e-5)


def bits(state: TrainState) -> list[bytes]:
    """The exact bytes of weights and moments."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.opt_state))]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("leaf", [("proj", "kernel"), ("norm", "weight")])
def test_a_gradient_that_is_not_finite_costs_one_update_and_nothing_else(bad: float, leaf: tuple[str, str]) -> None:
    grads = [tree(seed) for seed in range(1, 5)]
    poisoned = tree(9)
    poisoned[leaf[0]][leaf[1]] = poisoned[leaf[0]][leaf[1]].at[..., 1].set(bad)
    rate = schedule(0.05, warmup=2, kind="linear", total=10)
    options = {"clip_norm": 1.0, "weight_decay": 0.1}
    clean, told = run(tree(0), grads, rate, **options)
    states, metrics = run(tree(0), [grads[0], poisoned, poisoned, *grads[1:]], rate, **options)
    assert bits(states[1]) == bits(states[2]) == bits(states[3])
    assert [int(s.skipped) for s in states] == [0, 0, 1, 2, 0, 0, 0]
    assert [int(s.updates) for s in states] == [0, 1, 1, 1, 2, 3, 4]
    assert [m["skipped"] for m in metrics] == [0, 1, 1, 0, 0, 0]
    assert [m["update_ratio"] for m in metrics][1:3] == [0, 0]
    # From then on it is as if nothing had happened, the schedule included.
    assert bits(states[-1]) == bits(clean[-1])
    assert [m["lr"] for m in metrics][3:] == [m["lr"] for m in told][1:]


def test_optax_alone_would_not_recover() -> None:
    """What the guard is for: clip and Adam spread one NaN over every leaf, and the next clean gradient does not help."""
    poisoned = tree(1)
    poisoned["norm"]["weight"] = poisoned["norm"]["weight"].at[0].set(jnp.nan)
    transform = optimizer.optimizer(schedule(), clip_norm=1.0, b1=0.8, b2=0.95, weight_decay=0.0)
    opt_state = transform.init(tree(0))
    for grads in (poisoned, tree(2)):
        updates, opt_state = transform.update(grads, opt_state, tree(0))
    assert all(np.isnan(u).all() for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_weights_and_moments_keep_their_dtype(dtype: Any) -> None:
    """Gradients are summed in float32 whatever the weights are."""
    params = tree(0, dtype)
    states, metrics = run(params, [tree(1), tree(2)], schedule(0.5), clip_norm=1.0, weight_decay=0.1)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and a.shape == b.shape, states[0], states[2])
    assert all(jax.tree.leaves(same))
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), states[0].params, states[2].params)
    assert all(jax.tree.leaves(moved))
    moments = optax.tree_utils.tree_get(states[2].opt_state, "mu"), optax.tree_utils.tree_get(states[2].opt_state, "nu")
    assert {x.dtype for x in jax.tree.leaves((states[2].params, moments))} == {jnp.dtype(dtype)}
    expected, norms = by_hand(params, [tree(1), tree(2)], [0.5, 0.5], 1.0, 0.1)
    tolerance = 0.05 if dtype == jnp.bfloat16 else 1e-5
    for ours, theirs in zip(jax.tree.leaves(states[2].params), expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=tolerance)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=1e-6)


def test_a_learning_rate_of_0_moves_nothing() -> None:
    states, _ = run(tree(0), [tree(1)], schedule(0.0), weight_decay=0.1)
    for before, after in zip(*map(jax.tree.leaves, (states[0].params, states[1].params)), strict=True):
        np.testing.assert_array_equal(before, after)
