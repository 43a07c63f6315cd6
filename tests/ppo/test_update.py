"""Losses and gradients of packed rows against a plain loop that sends one unpacked sequence at a time through the model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jax_ppo.models import qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.ppo import packing, update
from jax_ppo.ppo.losses import aggregation_weights
from jax_ppo.types import Experience, PackedBatch, Params

B, LIMIT, VOCAB = 16, 100, 64
TEMPERATURE = 0.8
OPTIONS = {
    "temperature": TEMPERATURE,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "entropy_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_kind": "k3",
}


def forward(params: Params, batch: PackedBatch, *, config: QwenConfig) -> jax.Array:
    tokens, positions, segments = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids))
    return qwen.hidden_states(params, config, tokens, positions, segments, dtype=jnp.float32)[0]


class Sequences:
    """16 prompts and responses of 1 to 100 tokens, and something to learn from them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.prompt_lengths, self.lengths = rng.integers(1, LIMIT + 1, (2, B)).astype(np.int32)
        self.prompt_lengths[:3], self.lengths[:3] = [1, LIMIT, 2], [LIMIT, LIMIT, 1]
        self.prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in self.prompt_lengths]
        self.responses = rng.integers(0, VOCAB, (B, LIMIT)).astype(np.int32)
        self.mask = np.arange(LIMIT)[None] < self.lengths[:, None]
        # About the log-probabilities and values of the models below, so that ratios lie on both sides of every clip.
        noise = rng.normal(size=(6, B, LIMIT)).astype(np.float32)
        self.noise = np.where(self.mask, noise, np.nan)

    def tokens(self, b: int) -> np.ndarray:
        """[1, 2 LIMIT]: one sequence alone, from the first column on; causality makes the zeros behind it harmless."""
        row = np.zeros((1, 2 * LIMIT), np.int32)
        p, n = self.prompt_lengths[b], self.lengths[b]
        row[0, :p], row[0, p : p + n] = self.prompts[b], self.responses[b, :n]
        return row

    def before(self, b: int) -> np.ndarray:
        """[R]: the position before each response token; somewhere where there is none."""
        return np.minimum(self.prompt_lengths[b] - 1 + np.arange(LIMIT), 2 * LIMIT - 1)

    def packed(self, rows: int, row_length: int, chosen: np.ndarray | None = None) -> list[PackedBatch]:
        chosen = np.arange(B) if chosen is None else chosen
        return packing.layout(self.prompts, self.responses, self.lengths, chosen, rows=rows, row_length=row_length)


@pytest.fixture(scope="module")
def data() -> Sequences:
    return Sequences()


@partial(jax.jit, static_argnames="config")
def alone(
    params: Params, tokens: jax.Array, before: jax.Array, targets: jax.Array, config: QwenConfig
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies [R] of one response, by the definition."""
    z = qwen.logits(params, config, tokens)[0][before] / TEMPERATURE
    p = jax.nn.softmax(z)
    return jnp.log(p)[jnp.arange(LIMIT), targets], -jnp.sum(p * jnp.log(p), axis=-1)


def logprobs_of(data: Sequences, params: Params, config: QwenConfig) -> np.ndarray:
    """[B, R], with something at masked places."""
    return np.stack([alone(params, data.tokens(b), data.before(b), data.responses[b], config)[0] for b in range(B)])


def experience_of(data: Sequences, params: Params, config: QwenConfig, mode: str = "token-mean") -> Experience:
    """NaN wherever no token stands, apart from the masks."""
    logprobs = logprobs_of(data, params, config)
    old, ref, values, advantages, returns, _ = data.noise
    policy = aggregation_weights(jnp.asarray(data.mask), mode, norm=10.0)
    arrays = data.mask, policy, logprobs + 0.3 * old, logprobs + 0.5 * ref, values, advantages, values + returns
    return Experience(*(jnp.float32(x) for x in arrays))


def loop(loss: Callable[..., jax.Array], params: Params, rows: list[tuple[Any, ...]]) -> tuple[float, Params]:
    """Sum of loss(params, *row) and of its gradient, one row at a time."""
    step = jax.jit(jax.value_and_grad(loss))
    results = [step(params, *row) for row in rows]
    return float(sum(value for value, _ in results)), jax.tree.map(lambda *g: sum(g), *[g for _, g in results])


def packed_sum(step: Callable[..., Any], params: Params, batches: list[PackedBatch]) -> tuple[float, Params, update.Metrics]:
    """The same for the value and gradient of an objective of micro-batches, with its metrics combined."""
    results = [step(params, batch) for batch in batches]
    metrics = results[0][0][1]
    for (_, part), _ in results[1:]:
        metrics = update.combine(metrics, part)
    return float(sum(value for (value, _), _ in results)), jax.tree.map(lambda *g: sum(g), *[g for _, g in results]), metrics


def assert_close(ours: Params, theirs: Params) -> None:
    """Every leaf equals the other to 1e-5 of its norm, and is not zero."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        size, error = np.linalg.norm(b), np.linalg.norm(np.asarray(a) - np.asarray(b))
        assert size > 0, path
        assert error <= 1e-5 * size, (jax.tree_util.keystr(path), error / size)


# Rows x columns of a micro-batch: one sequence at a time, and a few with room to spare.
@pytest.mark.parametrize(
    ("options", "mode", "tied", "shapes"),
    [
        ({}, "token-mean", False, [(1, 200), (3, 247)]),
        ({"dual_clip": 1.5, "entropy_coef": 0.3, "kl_loss_coef": 0.2, "kl_kind": "k2"}, "seq-mean-token-mean", False, [(2, 210)]),
        ({"kl_loss_coef": 0.2}, "seq-mean-token-sum-norm", True, [(5, 200)]),
    ],
)
def test_actor_gradient_against_one_sequence_at_a_time(
    options: dict[str, Any], mode: str, tied: bool, shapes: list[tuple[int, int]], data: Sequences
) -> None:
    config = tiny.model(tie_word_embeddings=tied)
    params = tiny.redrawn(1, config)
    experience = experience_of(data, params, config, mode)
    given = OPTIONS | options
    count = data.lengths.sum() if mode == "token-mean" else B
    # What an item of the loss is worth, from the definition of each mode.
    worth = {
        "token-mean": lambda n: 1 / count,
        "seq-mean-token-mean": lambda n: 1 / (B * n),
        "seq-mean-token-sum-norm": lambda n: 1 / (B * 10),
    }[mode]

    def plain(params: Params, b: jax.Array, tokens: jax.Array, before: jax.Array, n: jax.Array) -> jax.Array:
        logprobs, entropy = alone(params, tokens, before, jnp.asarray(data.responses)[b], config)
        real = jnp.arange(LIMIT) < n
        old, ref, a = (
            jnp.where(real, jnp.asarray(x)[b], 0)
            for x in (experience.old_logprobs, experience.ref_logprobs, experience.advantages)
        )
        logprobs = jnp.where(real, logprobs, 0)
        rho = jnp.exp(logprobs - old)
        item = jnp.maximum(-a * rho, -a * jnp.minimum(jnp.maximum(rho, 0.8), 1.28))
        if given["dual_clip"]:
            item = jnp.where(a < 0, jnp.minimum(item, -a * given["dual_clip"]), item)
        d = logprobs - ref
        kl = 0.5 * d**2 if given["kl_kind"] == "k2" else jnp.exp(-d) - 1 + d
        item = item - given["entropy_coef"] * entropy + given["kl_loss_coef"] * kl
        return jnp.sum(jnp.where(real, item, 0)) * worth(n)

    expected, gradient = loop(plain, params, [(b, data.tokens(b), data.before(b), data.lengths[b]) for b in range(B)])
    objective = lambda params, batch: update.actor_objective(  # noqa: E731
        params, partial(forward, config=config), batch, experience, jnp.float32(count), jnp.float32(data.lengths.sum()), **given
    )
    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    for rows, row_length in shapes:
        value, ours, metrics = packed_sum(step, params, data.packed(rows, row_length))
        assert value == pytest.approx(expected, rel=1e-5)
        assert_close(ours, gradient)
        check_policy_metrics({k: float(v) for k, v in metrics.items()}, data, params, config, experience, given)


def check_policy_metrics(
    metrics: dict[str, float], data: Sequences, params: Params, config: QwenConfig, experience: Experience, given: dict[str, Any]
) -> None:
    """Metrics of a minibatch are those of all its tokens, from numpy."""
    new = logprobs_of(data, params, config)
    old, a = (np.asarray(x)[data.mask] for x in (experience.old_logprobs, experience.advantages))
    rho = np.exp(new[data.mask] - old)
    clipped = ((a > 0) & (rho > 1.28)) | ((a < 0) & (rho < 0.8))
    assert 0.1 < clipped.mean() < 0.5
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped.mean(), rel=1e-5)
    bounded = (a < 0) & (rho > (given["dual_clip"] or np.inf))
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(bounded.mean(), rel=1e-5)
    assert metrics["actor/ppo_kl"] == pytest.approx(-np.log(rho).mean(), rel=1e-4)
    assert metrics["actor/ppo_kl_k3"] == pytest.approx((rho - 1 - np.log(rho)).mean(), rel=1e-4)
    assert metrics["actor/ratio/min"] == pytest.approx(rho.min(), rel=1e-5)
    assert metrics["actor/ratio/max"] == pytest.approx(rho.max(), rel=1e-5)


def test_critic_gradient_against_one_sequence_at_a_time(data: Sequences) -> None:
    config = tiny.MODEL
    params = tiny.redrawn(2, config, "score")
    experience = experience_of(data, tiny.redrawn(1, config), config)

    def plain(params: Params, b: jax.Array, tokens: jax.Array, before: jax.Array, n: jax.Array) -> jax.Array:
        ones = jnp.ones(tokens.shape, jnp.int32)
        positions = jnp.arange(2 * LIMIT)[None]
        hidden, _ = qwen.hidden_states(params, config, tokens, positions, ones, dtype=jnp.float32, remat=False)
        values = (hidden[0] @ params["score"]["kernel"])[before, 0]
        old, returns = (jnp.asarray(x)[b] for x in (experience.values, experience.returns))
        near = old + jnp.minimum(jnp.maximum(values - old, -0.5), 0.5)
        item = jnp.maximum((values - returns) ** 2, (near - returns) ** 2)
        return 0.5 * jnp.sum(jnp.where(jnp.arange(LIMIT) < n, item, 0)) / data.lengths.sum()

    # The loop is given zeros instead of NaN: it does not select before it computes.
    rows = [(b, data.tokens(b), data.before(b), data.lengths[b]) for b in range(B)]
    dirty, experience = experience, jax.tree.map(jnp.nan_to_num, experience)
    expected, gradient = loop(plain, params, rows)
    objective = lambda params, batch: update.critic_objective(  # noqa: E731
        params, partial(forward, config=config), batch, dirty, jnp.float32(data.lengths.sum()), clip=0.5
    )
    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    value, ours, metrics = packed_sum(step, params, data.packed(3, 231))
    assert value == pytest.approx(expected, rel=1e-5)
    assert float(metrics["critic/vf_loss"]) == pytest.approx(expected, rel=1e-5)
    assert 0 < float(metrics["critic/vf_clipfrac"]) < 1
    assert_close(ours, gradient)


def test_supervised_gradient_against_one_sequence_at_a_time(data: Sequences) -> None:
    config = tiny.MODEL
    params = tiny.redrawn(3, config)

    def plain(params: Params, tokens: jax.Array, before: jax.Array, targets: jax.Array, n: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(qwen.logits(params, config, tokens)[0])[before, targets]
        return -jnp.sum(jnp.where(jnp.arange(LIMIT) < n, logprobs, 0)) / data.lengths.sum()

    rows = [(data.tokens(b), data.before(b), data.responses[b], data.lengths[b]) for b in range(B)]
    expected, gradient = loop(plain, params, rows)
    objective = lambda params, batch: update.supervised_objective(  # noqa: E731
        params, partial(forward, config=config), batch, jnp.float32(data.lengths.sum())
    )
    value, ours, _ = packed_sum(jax.jit(jax.value_and_grad(objective, has_aux=True)), params, data.packed(3, 231))
    assert value == pytest.approx(expected, rel=1e-5)
    assert_close(ours, gradient)


def test_rows_without_policy_tokens_change_nothing(data: Sequences) -> None:
    """A micro-batch of masked sequences only: no loss, no gradient, and no metric that a minimum or a mean would notice."""
    config = tiny.MODEL
    params = tiny.redrawn(1, config)
    experience = experience_of(data, params, config)
    experience = experience.replace(policy=experience.policy.at[:8].set(0.0))
    counted = float(data.lengths[8:].sum())
    objective = lambda params, batch: update.actor_objective(  # noqa: E731
        params, partial(forward, config=config), batch, experience, jnp.float32(counted), jnp.float32(counted), **OPTIONS
    )
    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    without = packed_sum(step, params, data.packed(16, 200, np.arange(8, 16)))
    batches = [data.packed(16, 200, chosen)[0] for chosen in (np.arange(8), np.arange(8, 16), np.array([], int))]
    for with_empty in (batches, batches[::-1]):
        value, gradient, metrics = packed_sum(step, params, with_empty)
        assert value == without[0]
        jax.tree.map(np.testing.assert_array_equal, gradient, without[1])
        assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in without[2].items()}


def test_scatter_writes_only_where_it_is_told() -> None:
    """-1 neither means the last entry nor the first."""
    out = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    result = update.scatter(out, jnp.array([[10.0, 20, 30], [40, 50, 60]]), jnp.array([[-1, 4, -1], [0, -1, -1]]))
    np.testing.assert_array_equal(result, [[40, 1, 2], [3, 20, 5]])
    np.testing.assert_array_equal(update.gather(result, np.array([[4, -1, 0, 5]])), [[20, 0, 40, 5]])


def test_combine_adds_but_keeps_extremes() -> None:
    parts = [{"a/loss": 1.0, "a/min": 3.0, "a/max": -1.0}, {"a/loss": 2.5, "a/min": 5.0, "a/max": 4.0}]
    total = update.combine(*[{k: jnp.float32(v) for k, v in part.items()} for part in parts])
    assert {k: float(v) for k, v in total.items()} == {"a/loss": 3.5, "a/min": 3, "a/max": 4}


def by_definition(
    data: Sequences,
    scores: np.ndarray,
    kl: np.ndarray,
    values: np.ndarray,
    last: np.ndarray,
    kl_coef: float,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Token rewards and advantages, one response and one token at a time in float64; NaN where no token stands."""
    rewards, advantages = np.full((2, B, LIMIT), np.nan)
    for b, n in enumerate(data.lengths):
        rewards[b, :n] = -kl_coef * kl[b, :n]
        rewards[b, n - 1] += scores[b]
        carried, following = 0.0, last[b]
        for t in reversed(range(n)):
            carried = rewards[b, t] + gamma * following - values[b, t] + gamma * lam * carried
            advantages[b, t], following = carried, values[b, t]
    return rewards, advantages


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("lam_critic", [1.0, 0.9])
def test_experience_against_a_loop(bootstrap: bool, lam_critic: float, data: Sequences) -> None:
    rng = np.random.default_rng(5)
    scores, after, finished = rng.normal(size=B), rng.normal(size=B), rng.random(B) < 0.6
    old, ref, values = data.noise[:3]
    policy = np.where(data.mask & finished[:, None], 0.5, 0.0)
    experience, metrics = jax.jit(
        partial(
            update.make_experience,
            estimator="gae",
            samples=1,
            gamma=0.98,
            lam_actor=0.9,
            lam_critic=lam_critic,
            lam_length=0.0,
            clip_advantage=0.0,
            kl_kind="k2",
            bootstrap_truncated=bootstrap,
        )
    )(
        *map(jnp.float32, (scores, data.mask)),
        jnp.asarray(finished),
        *map(jnp.float32, (policy, old, ref, values, after)),
        jnp.float32(0.3),
    )
    kl = 0.5 * (old.astype(np.float64) - ref) ** 2
    last = np.where(finished, 0, after) if bootstrap else np.zeros(B)
    rewards, advantages = by_definition(data, scores, kl, values, last, 0.3, 0.98, 0.9)
    targets = by_definition(data, scores, kl, values, last, 0.3, 0.98, lam_critic)[1] + values
    counted = advantages[policy > 0]
    white = np.where(policy > 0, (advantages - counted.mean()) / counted.std(), 0)
    np.testing.assert_allclose(experience.advantages, white, atol=1e-5)
    np.testing.assert_allclose(experience.returns, np.nan_to_num(targets), atol=1e-5)
    np.testing.assert_array_equal(experience.policy, policy)
    real = data.mask
    expected = {
        "actor/reward_kl_penalty": np.nanmean(kl, axis=1).mean(),
        "actor/reward_kl_penalty_coeff": 0.3,
        "critic/vf_explained_var": 1 - np.var((targets - values)[real]) / np.var(targets[real]),
    }
    for name, x in {
        "score": scores,
        "rewards": np.nansum(rewards, axis=1),
        "advantages": white[real],
        "returns": targets[real],
        "values": values[real],
    }.items():
        expected |= {f"critic/{name}/mean": x.mean(), f"critic/{name}/max": x.max(), f"critic/{name}/min": x.min()}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "rloo", "grpo"])
@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_estimators_against_a_loop(estimator: str, clip: float, data: Sequences) -> None:
    """Four responses a prompt; lambda of each response from its length, where there is one."""
    rng = np.random.default_rng(6)
    scores, (old, ref, values) = rng.normal(size=B), data.noise[:3]
    if estimator != "gae":
        values = np.zeros_like(values)
    kwargs = {"gamma": 0.97, "lam_actor": 0.9, "lam_critic": 0.8, "lam_length": 0.5 if estimator == "gae" else 0.0}
    made = partial(
        update.make_experience, estimator=estimator, samples=4, clip_advantage=clip, kl_kind="k1", bootstrap_truncated=False
    )
    experience, metrics = jax.jit(partial(made, **kwargs))(
        *map(jnp.float32, (scores, data.mask)),
        jnp.ones(B, bool),
        *map(jnp.float32, (data.mask, old, ref, values, np.zeros(B))),
        jnp.float32(0.3),
    )
    kl, none = old.astype(np.float64) - ref, np.zeros(B)
    rewards, returns_to_go = by_definition(data, scores, kl, np.zeros_like(values), none, 0.3, 0.97, 1.0)
    if estimator == "gae":
        advantages = np.full((B, LIMIT), np.nan)
        for b, n in enumerate(data.lengths):
            lam = max(0.0, 1 - 1 / (0.5 * n))
            advantages[b] = by_definition(data, scores, kl, values, none, 0.3, 0.97, lam)[1][b]
        targets = by_definition(data, scores, kl, values, none, 0.3, 0.97, 0.8)[1] + values
        np.testing.assert_allclose(experience.returns, np.nan_to_num(targets), atol=1e-5)
    elif estimator == "reinforce":
        advantages = returns_to_go
    else:
        total = np.nansum(rewards, axis=1)
        advantages = np.full((B, LIMIT), np.nan)
        for b, n in enumerate(data.lengths):
            group = [total[i] for i in range(B) if i // 4 == b // 4]
            others = [total[i] for i in range(B) if i // 4 == b // 4 and i != b]
            spread = np.std(group) + 1e-6
            advantages[b, :n] = total[b] - np.mean(others) if estimator == "rloo" else (total[b] - np.mean(group)) / spread
    if estimator in ("gae", "reinforce"):
        counted = advantages[data.mask]
        advantages = (advantages - counted.mean()) / counted.std()
    if clip:
        assert np.nanmax(np.abs(advantages)) > clip
        advantages = np.clip(advantages, -clip, clip)
    np.testing.assert_allclose(experience.advantages, np.nan_to_num(advantages), atol=2e-5)
    assert ("critic/values/mean" in metrics) == (estimator == "gae")
