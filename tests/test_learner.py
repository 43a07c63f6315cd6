"""The learner on a tiny Qwen: what it computes against a loop over single sequences, and that mesh and micro-batches do not matter."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, Mesh

from jax_ppo import sharding
from jax_ppo.config import Config, DataConfig, ModelConfig, OptimConfig, PPOConfig, RolloutConfig, TrainConfig
from jax_ppo.learner import Learner, row_shape
from jax_ppo.models import qwen
from jax_ppo.steps import Steps
from jax_ppo.types import Experience, InputError, PackedBatch, Params, Problem, Prompts, Rollout, RunError, TrainState

B, LIMIT, VOCAB = 16, 24, 64
TEMPERATURE = 0.8
MODEL = tiny.model(num_attention_heads=8, num_key_value_heads=4, head_dim=4)  # heads for a `tensor` axis of 4
CONFIG = Config(
    model=ModelConfig(compute_dtype="float32"),
    data=DataConfig(max_prompt_tokens=LIMIT),
    rollout=RolloutConfig(batch=B, max_response_tokens=LIMIT, temperature=TEMPERATURE),
    ppo=PPOConfig(minibatches=2, micro_tokens=400, clip_value=0.5, kl_coef=0.05, entropy_coef=0.01, kl_loss_coef=0.02),
    actor_optim=OptimConfig(lr=1e-3),
    critic_optim=OptimConfig(lr=1e-2),
    train=TrainConfig(iterations=10),
)


ACTOR, CRITIC, REFERENCE = tiny.redrawn(1, MODEL), tiny.redrawn(2, MODEL, "score"), tiny.redrawn(3, MODEL)


@jax.jit
def one_sequence(actor: Params, critic: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of all tokens behind every position [T, V], and values [T], of a single sequence [1, T]."""
    z = qwen.logits(actor, MODEL, tokens)[0] / TEMPERATURE
    positions, ones = jnp.arange(tokens.shape[1])[None], jnp.ones(tokens.shape, jnp.int32)
    hidden, _ = qwen.hidden_states(critic, MODEL, tokens, positions, ones, dtype=jnp.float32, remat=False)
    return jax.nn.log_softmax(z), (hidden[0] @ critic["score"]["kernel"])[:, 0]


class Data:
    """16 prompts and responses of 1 to 24 tokens, a third of them truncated, with what a loop says about each.

    logprobs, entropy, values: [B, R] at the response tokens, else 0. after: [B], the value at the last token.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, LIMIT + 1, B).astype(np.int32)
        lengths[:3] = [1, LIMIT, 2]
        tokens = [
            rng.integers(0, VOCAB, n).astype(np.int32) for n in rng.permuted(np.append(rng.integers(1, LIMIT, B - 2), [1, LIMIT]))
        ]
        responses = rng.integers(0, VOCAB, (B, LIMIT)).astype(np.int32)
        self.prompts = Prompts([Problem("", "")] * B, tokens, np.arange(B))
        self.scores = rng.normal(size=B).astype(np.float32)
        self.logprobs, self.entropy, self.values, self.after = (np.zeros(s, np.float32) for s in ((B, LIMIT),) * 3 + ((B,),))
        for b, n in enumerate(lengths):
            sequence = np.zeros((1, 2 * LIMIT), np.int32)
            p = len(tokens[b])
            sequence[0, :p], sequence[0, p : p + n] = tokens[b], responses[b, :n]
            logprobs, values = (np.asarray(x) for x in one_sequence(ACTOR, CRITIC, sequence))
            for t in range(n):
                before = logprobs[p - 1 + t]
                self.logprobs[b, t] = before[responses[b, t]]
                self.entropy[b, t] = -np.sum(np.exp(before) * before)
                self.values[b, t] = values[p - 1 + t]
            self.after[b] = values[p - 1 + n]
        finished = rng.random(B) < 0.7
        self.rollout = Rollout(responses, lengths, self.logprobs, finished)
        self.mask = self.rollout.mask


@pytest.fixture(scope="module")
def data() -> Data:
    return Data()


def changed(config: Config = CONFIG, **sections: dict[str, Any]) -> Config:
    """The configuration with other values: `changed(ppo={"epochs": 2})`."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    )


@dataclasses.dataclass
class Place:
    """Compiled functions on a mesh, from which many learners can start."""

    mesh: Mesh
    steps: Steps
    shape: tuple[int, int]

    @contextmanager
    def learner(
        self, config: Config = CONFIG, steps: Steps | None = None, critic: Params = CRITIC, reference: Params | None = REFERENCE
    ) -> Iterator[Learner]:
        """A learner in its mesh, with states of its own."""
        steps = steps or self.steps
        put = lambda params, network: jax.device_put(jax.tree.map(jnp.array, params), network.shardings)  # noqa: E731
        with jax.set_mesh(self.mesh):
            actor, value = steps.actor.start(put(ACTOR, steps.actor)), steps.critic.start(put(critic, steps.critic))
            there = None if reference is None else put(reference, steps.actor)
            yield Learner(config, steps, self.shape, actor, value, there)

    def with_steps(self, **replaced: Any) -> Steps:
        """The same functions but for some."""
        steps = copy.copy(self.steps)
        vars(steps).update(replaced)
        return steps


def make_place(sizes: tuple[int, int, int], shape: tuple[int, int]) -> Place:
    """On the first devices, as many as the mesh needs; `sharding.make_mesh` insists on all of them."""
    devices = jax.devices()[: np.prod(sizes)]
    mesh = jax.make_mesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    return Place(mesh, Steps(CONFIG, MODEL, MODEL, mesh), shape)


@pytest.fixture(scope="module")
def one() -> Place:
    """One device: the cheapest to compile for."""
    return make_place((1, 1, 1), (3, 56))


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Without most optimisations a program compiles in half the time, and computes the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def iterate(
    learner: Learner, data: Data, iteration: int = 1, scores: np.ndarray | None = None
) -> tuple[Experience, dict[str, Any]]:
    """Experience and update, with all metrics."""
    scores = data.scores if scores is None else scores
    experience, measured = learner.experience(data.prompts, data.rollout, scores, CONFIG.ppo.kl_coef)
    return experience, measured | learner.update(data.prompts, data.rollout, experience, iteration)


def copied(state: TrainState) -> Params:
    """The weights on the host; the originals are donated by the next update."""
    return jax.tree.map(np.array, state.params)


def equal(a: Params, b: Params) -> list[bool]:
    """Leaf by leaf, to the bit."""
    return [
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]


def spied(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Callable[..., Any]:
    """Keeps (batch, rest) of every call of an accumulating function."""

    def call(params: Params, grads: Params, base: Params, batch: Any, *rest: Any) -> Any:
        calls.append((batch, *rest))
        return function(params, grads, base, batch, *rest)

    return call


def test_scores_against_one_sequence_at_a_time(one: Place, data: Data) -> None:
    with one.learner() as learner:
        experience, measured = learner.experience(data.prompts, data.rollout, data.scores, 0.05)
    np.testing.assert_allclose(experience.old_logprobs, data.logprobs, atol=1e-5)
    np.testing.assert_allclose(experience.values, data.values, atol=1e-5)
    np.testing.assert_array_equal(experience.mask, data.mask)
    assert measured["actor/entropy"] == pytest.approx(data.entropy[data.mask].mean(), rel=1e-5)
    # The sampler's log-probabilities are those of the loop here.
    assert measured["training/rollout_probs_diff_max"] <= 1e-5
    assert np.abs(np.asarray(experience.ref_logprobs) - data.logprobs)[data.mask].mean() > 0.1
    real = sum(map(len, data.prompts.tokens)) + data.rollout.lengths.sum()
    micro_batches = real / (measured["perf/packing_fill"] * np.prod(one.shape))
    assert micro_batches == pytest.approx(round(micro_batches))
    assert real / np.prod(one.shape) <= micro_batches <= B / one.shape[0] + 1


def test_a_sampler_that_disagrees_is_seen(one: Place, data: Data) -> None:
    wrong = data.logprobs.copy()
    b, t = np.unravel_index(np.argmax(np.where(data.mask, wrong, -np.inf)), wrong.shape)
    wrong[b, t] -= 1.0
    with one.learner() as learner:
        _, measured = learner.experience(data.prompts, dataclasses.replace(data.rollout, logprobs=wrong), data.scores, 0.0)
    off = np.exp(data.logprobs[b, t]) * (1 - np.exp(-1))
    assert measured["training/rollout_probs_diff_max"] == pytest.approx(off, rel=1e-3)
    assert measured["training/rollout_probs_diff_mean"] == pytest.approx(off / data.mask.sum(), rel=0.05)


def test_a_sampler_that_agrees_is_believed_and_another_is_not(one: Place, data: Data) -> None:
    """One micro-batch is scored to see; where it differs, all are."""
    config = changed(ppo={"old_logprobs": "rollout"})
    calls: list[Any] = []
    steps = one.with_steps(score_policy=lambda *args: calls.append(1) or one.steps.score_policy(*args))
    with one.learner(config, steps, reference=None) as learner:
        count = len(list(learner.packed(data.prompts, data.rollout, np.arange(B))))
        near = dataclasses.replace(data.rollout, logprobs=data.rollout.logprobs + np.float32(1e-3) * data.mask)
        experience, metrics = learner.experience(data.prompts, near, data.scores, 0.0)
        np.testing.assert_array_equal(experience.old_logprobs, near.logprobs)
        assert len(calls) == 1 < count
        assert 0 < metrics["training/scored_frac"] < 1
        far = dataclasses.replace(data.rollout, logprobs=np.where(data.mask, data.rollout.logprobs / 2, 0))
        experience, metrics = learner.experience(data.prompts, far, data.scores, 0.0)
        np.testing.assert_allclose(experience.old_logprobs, data.logprobs, atol=2e-5)
        assert len(calls) == 1 + 1 + count
        assert metrics["training/scored_frac"] == 1.0


def test_kl_to_an_equal_reference_is_exactly_0(one: Place, data: Data) -> None:
    with one.learner(reference=ACTOR) as learner:
        experience, measured = learner.experience(data.prompts, data.rollout, data.scores, 0.05)
    assert measured["actor/reward_kl_penalty"] == 0
    assert measured["critic/rewards/max"] == data.scores.max()
    assert measured["critic/rewards/min"] == data.scores.min()
    np.testing.assert_array_equal(experience.ref_logprobs, experience.old_logprobs)


def test_kl_to_another_reference_is_what_the_loop_says(one: Place, data: Data) -> None:
    with one.learner() as learner:
        experience, measured = learner.experience(data.prompts, data.rollout, data.scores, 0.05)
    kl = np.where(data.mask, data.logprobs - np.asarray(experience.ref_logprobs), 0)
    means = kl.sum(axis=1) / data.rollout.lengths
    assert measured["actor/reward_kl_penalty"] == pytest.approx(means.mean(), rel=1e-4)
    assert measured["actor/reward_kl_penalty_coeff"] == pytest.approx(0.05)
    assert measured["critic/rewards/mean"] == pytest.approx((data.scores - 0.05 * kl.sum(axis=1)).mean(), rel=1e-4)


def test_without_a_reference_there_is_no_kl(one: Place, data: Data) -> None:
    with one.learner(reference=None) as learner:
        _, measured = learner.experience(data.prompts, data.rollout, data.scores, 0.0)
    assert not {"actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"} & measured.keys()
    assert measured["critic/rewards/mean"] == measured["critic/score/mean"]


def test_first_minibatch_has_ratio_1_and_clips_nothing(one: Place, data: Data) -> None:
    with one.learner(changed(ppo={"minibatches": 1})) as learner:
        _, measured = iterate(learner, data)
    assert measured["training/first_ratio_dev_max"] <= 1e-5
    assert abs(measured["actor/ratio/min"] - 1) <= 1e-5
    assert abs(measured["actor/ratio/max"] - 1) <= 1e-5
    assert measured["actor/pg_clipfrac"] == measured["actor/pg_clipfrac_lower"] == 0
    assert abs(measured["actor/ppo_kl"]) <= 1e-6
    # rho = 1 makes the loss -mean(A), and whitened advantages have mean 0.
    assert abs(measured["actor/pg_loss"]) <= 1e-5
    # Values have not moved either: no clipping, and the plain error.
    assert measured["critic/vf_clipfrac"] == 0
    assert measured["critic/vpred_mean"] == pytest.approx(data.values[data.mask].mean(), rel=1e-4)


def test_first_minibatch_in_bfloat16(one: Place, data: Data) -> None:
    """Log-probabilities are float32 over bfloat16 activations: scoring and updating round them in slightly different places."""
    with quick_compilation():
        steps = Steps(changed(model={"compute_dtype": "bfloat16"}), MODEL, MODEL, one.mesh)
        with one.learner(changed(ppo={"minibatches": 1}), steps) as learner:
            _, measured = iterate(learner, data)
            assert learner.actor.params["lm_head"]["kernel"].dtype == jnp.float32
    assert measured["training/first_ratio_dev_max"] <= 2e-2
    assert measured["actor/pg_clipfrac"] == 0
    # The sampler of the loop above computed in float32, which bfloat16 does not reproduce.
    assert 1e-4 < measured["training/rollout_probs_diff_max"] < 0.1


def test_later_minibatches_have_other_ratios(one: Place, data: Data) -> None:
    with one.learner(changed(ppo={"epochs": 2})) as learner:
        _, measured = iterate(learner, data)
    assert measured["training/first_ratio_dev_max"] <= 1e-5
    assert measured["actor/ratio/min"] < 0.99 < 1.01 < measured["actor/ratio/max"]


@pytest.mark.parametrize("still", ["actor", "critic"])
def test_a_learning_rate_of_0_stops_one_network_only(still: str, one: Place, data: Data) -> None:
    frozen = Steps(changed(actor_optim={"lr": 0.0}, critic_optim={"lr": 0.0}), MODEL, MODEL, one.mesh)
    with one.learner(steps=one.with_steps(**{still: getattr(frozen, still)})) as learner:
        _, measured = iterate(learner, data)
        same = {"actor": equal(learner.actor.params, ACTOR), "critic": equal(learner.critic.params, CRITIC)}
        assert [int(s.updates) for s in (learner.actor, learner.critic)] == [2, 2]
    moving = "critic" if still == "actor" else "actor"
    assert all(same[still])
    assert not any(same[moving])
    assert measured[f"{still}/lr"] == 0
    assert measured[f"{still}/grad_norm"] > 0


def test_a_critic_head_of_zeros_starts_to_move(one: Place, data: Data) -> None:
    zero = CRITIC | {"score": {"kernel": np.zeros((MODEL.hidden_size, 1), np.float32)}}
    with one.learner(changed(ppo={"minibatches": 1}), critic=zero) as learner:
        experience, measured = iterate(learner, data)
        head = copied(learner.critic)["score"]["kernel"]
    np.testing.assert_array_equal(experience.values, np.zeros((B, LIMIT)))
    returns = np.asarray(experience.returns)[data.mask]
    assert measured["critic/vf_loss"] == pytest.approx(0.5 * np.mean(returns**2), rel=1e-5)
    assert measured["critic/vf_explained_var"] == pytest.approx(0, abs=1e-5)
    # Adam's first step is the learning rate in every entry that has a gradient.
    np.testing.assert_allclose(np.abs(head), 1e-2, rtol=1e-3)


def masked_advantages(data: Data, experience: Experience, counted: np.ndarray) -> np.ndarray:
    """Whitened advantages from the returns of lambda = 1: A = returns - values, over the counted tokens."""
    advantages = (np.asarray(experience.returns) - np.asarray(experience.values)).astype(np.float64)
    return np.where(counted, (advantages - advantages[counted].mean()) / advantages[counted].std(), 0)


def test_a_head_on_the_actor_learns_from_its_hidden_states(one: Place, data: Data) -> None:
    """Its values are those of a loop over the actor's hidden states, its gradient stops at the head, and the actor never notices."""
    config, head = changed(critic={"trunk": "actor"}), CRITIC["score"]
    with jax.set_mesh(one.mesh):
        steps = Steps(config, MODEL, MODEL, one.mesh)
    with one.learner(config, steps, critic={"score": head}) as learner, one.learner() as usual:
        experience, _ = learner.experience(data.prompts, data.rollout, data.scores, 0.0)
        for b in (0, 5):
            p, n = len(data.prompts.tokens[b]), data.rollout.lengths[b]
            sequence = np.zeros((1, 2 * LIMIT), np.int32)
            sequence[0, :p], sequence[0, p : p + n] = data.prompts.tokens[b], data.rollout.tokens[b, :n]
            _, expected = one_sequence(ACTOR, {**ACTOR, "score": head}, sequence)
            np.testing.assert_allclose(experience.values[b, :n], expected[p - 1 : p - 1 + n], atol=2e-5)
        assert jax.tree.structure(learner.critic.params) == jax.tree.structure({"score": head})
        moved = copied(learner.critic)
        same, _ = usual.experience(data.prompts, data.rollout, data.scores, 0.0)
        for each in (learner, usual):
            each.update(data.prompts, data.rollout, same, 1)
        assert not any(equal(moved, learner.critic.params))
        assert all(equal(learner.actor.params, usual.actor.params))


@pytest.mark.parametrize("estimator", ["reinforce", "rloo", "grpo"])
def test_without_a_critic_only_the_actor_learns(estimator: str, one: Place, data: Data) -> None:
    config = changed(ppo={"estimator": estimator, "clip_value": 0.0}, rollout={"batch": B // 2, "n": 2})
    with jax.set_mesh(one.mesh):
        steps = Steps(config, MODEL, None, one.mesh)
        actor = steps.actor.start(jax.device_put(jax.tree.map(jnp.array, ACTOR), steps.actor.shardings))
        learner = Learner(config, steps, one.shape, actor, None, None)
        before = copied(learner.actor)
        _, metrics = iterate(learner, data)
    assert learner.critic is None
    assert not any(equal(before, learner.actor.params))
    assert not [name for name in metrics if name.startswith(("critic/v", "critic/grad_norm", "critic/lr"))]
    assert metrics["training/first_ratio_dev_max"] <= 1e-5


def test_truncated_responses_end_continue_or_do_not_count(one: Place, data: Data) -> None:
    """With gamma = lambda = 1 the return of every token is what comes after it: the score, and behind a cut the value there."""
    options = {"kl_coef": 0.0, "lam_actor": 1.0}
    finished, mask = data.rollout.finished[:, None], data.mask
    results = {}
    for truncated in ("terminal", "bootstrap", "mask"):
        config = changed(ppo={**options, "truncated": truncated})
        steps = one.with_steps(experience=Steps(config, MODEL, MODEL, one.mesh).experience)
        with one.learner(config, steps) as learner:
            results[truncated], _ = learner.experience(data.prompts, data.rollout, data.scores, 0.0)
    terminal, bootstrap, left_out = results.values()
    score = np.where(mask, data.scores[:, None], 0)
    np.testing.assert_allclose(terminal.returns, score, atol=1e-5)
    np.testing.assert_allclose(bootstrap.returns, np.where(mask & ~finished, score + data.after[:, None], score), atol=1e-5)
    np.testing.assert_array_equal(left_out.returns, terminal.returns)
    np.testing.assert_array_equal(left_out.policy, mask & finished)
    np.testing.assert_array_equal(bootstrap.policy, mask)
    for experience, counted in ((terminal, mask), (bootstrap, mask), (left_out, mask & finished)):
        np.testing.assert_allclose(experience.advantages, masked_advantages(data, experience, counted), atol=1e-4)


def test_masked_responses_are_in_neither_numerator_nor_denominator(one: Place, data: Data) -> None:
    """Whatever score they get, the actor learns the same, and the loss is divided by the tokens of the others."""
    config = changed(ppo={"truncated": "mask"})
    other = np.where(data.rollout.finished, data.scores, 100.0).astype(np.float32)
    after = {}
    for name, scores in (("given", data.scores), ("other", other)):
        calls: list[tuple[Any, ...]] = []
        with one.learner(config, one.with_steps(update_actor=spied(one.steps.update_actor, calls))) as learner:
            iterate(learner, data, scores=scores)
            after[name] = copied(learner.actor), copied(learner.critic)
        for batch, _, total, tokens in calls:
            here = np.unique(np.asarray(batch.last)[np.asarray(batch.last) >= 0])
            assert float(total) == float(tokens) >= data.rollout.lengths[here][data.rollout.finished[here]].sum()
        # Each minibatch has one total, the same in all of its micro-batches; together they are all finished tokens.
        totals = {float(call[2]): None for call in calls}
        assert sum(totals) == data.rollout.lengths[data.rollout.finished].sum()
    assert all(equal(after["given"][0], after["other"][0]))
    assert not any(equal(after["given"][1], after["other"][1]))


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_sequence_means_are_divided_by_sequences(mode: str, one: Place, data: Data) -> None:
    calls: list[tuple[Any, ...]] = []
    config = changed(ppo={"aggregation": mode})
    with one.learner(config, one.with_steps(update_actor=spied(one.steps.update_actor, calls))) as learner:
        experience, _ = iterate(learner, data)
    assert {float(total) for _, _, total, _ in calls} == {B / 2}
    norm = data.rollout.lengths[:, None] if mode == "seq-mean-token-mean" else LIMIT
    np.testing.assert_allclose(experience.policy, data.mask / norm, rtol=1e-6)


def test_target_kl_ends_the_epochs_of_the_actor(one: Place, data: Data) -> None:
    """The update whose minibatch is too far away is the last one of the actor; the critic goes on."""
    kls: list[float] = []

    def real(params: Params, grads: Params, base: Params, batch: Any, *rest: Any) -> Any:
        grads, metrics = one.steps.update_actor(params, grads, base, batch, *rest)
        parts.append(float(metrics["actor/ppo_kl_k3"]))
        return grads, metrics

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "update actor":
            kls.append(sum(parts))
            parts.clear()

    def updates(target: float) -> tuple[int, int]:
        with one.learner(changed(ppo={"epochs": 3, "target_kl": target}), one.with_steps(update_actor=real)) as learner:
            experience, _ = learner.experience(data.prompts, data.rollout, data.scores, 0.0)
            learner.update(data.prompts, data.rollout, experience, 1, progress=progress)
            return int(learner.actor.updates), int(learner.critic.updates)

    parts: list[float] = []
    assert updates(0.0) == (6, 6)
    assert len(kls) == 6
    assert kls[0] == pytest.approx(0, abs=1e-6)
    # The last update but one that went further than all before it: between them and it is a target that ends the actor there.
    end = [i for i in range(1, 5) if kls[i] > max(kls[:i])][-1]
    assert updates((max(kls[:end]) + kls[end]) / 2) == (end + 1, 6)
    assert updates(1.1 * max(kls)) == (6, 6)


def test_critic_warmup_leaves_the_actor_alone(one: Place, data: Data) -> None:
    with one.learner(changed(ppo={"critic_warmup": 2})) as learner:
        for iteration in (1, 2):
            before = copied(learner.critic)
            _, measured = iterate(learner, data, iteration)
            assert all(equal(learner.actor.params, ACTOR))
            assert int(learner.actor.updates) == 0
            assert not any(equal(learner.critic.params, before))
            assert "actor/pg_loss" not in measured
            assert measured["critic/vf_loss"] > 0
        _, measured = iterate(learner, data, 3)
        assert not any(equal(learner.actor.params, ACTOR))
        assert int(learner.actor.updates) == 2
        assert int(learner.critic.updates) == 6
    assert measured["training/first_ratio_dev_max"] <= 1e-5


def test_the_schedule_of_the_actor_is_as_long_as_its_training(one: Place) -> None:
    """10 iterations x 2 updates, of which the actor sits out 4 iterations: linear, it is at half after 6 updates."""
    linear = {"lr": 1.0, "schedule": "linear"}
    steps = Steps(changed(ppo={"critic_warmup": 4}, actor_optim=linear, critic_optim=linear), MODEL, MODEL, one.mesh)
    at = lambda network, count: float(network.rate(jnp.int32(count)))  # noqa: E731
    assert [at(steps.actor, c) for c in (0, 6, 12)] == pytest.approx([1, 0.5, 0])
    assert [at(steps.critic, c) for c in (0, 10, 20)] == pytest.approx([1, 0.5, 0])


def test_gradients_that_are_not_finite_end_the_run(one: Place, data: Data) -> None:
    scores = np.where(np.arange(B) == 5, np.nan, data.scores).astype(np.float32)
    with one.learner(changed(train={"max_skipped": 2})) as learner:
        with pytest.raises(RunError, match="iteration 1: 2 gradients of the actor in a row were not finite"):
            iterate(learner, data, scores=scores)
        assert all(equal(learner.actor.params, ACTOR))


def test_a_run_survives_fewer_gradients_that_are_not_finite(one: Place, data: Data) -> None:
    """One bad token costs the update of its minibatch; the metrics speak of the other, and the next iteration is whole."""
    with one.learner(changed(train={"max_skipped": 2})) as learner:
        experience, _ = learner.experience(data.prompts, data.rollout, data.scores, 0.0)
        bad = experience.replace(advantages=experience.advantages.at[5, 0].set(jnp.nan))
        measured = learner.update(data.prompts, data.rollout, bad, 1)
        assert measured["actor/skipped"] == 1
        assert measured["critic/skipped"] == 0
        assert all(np.isfinite(value) for value in measured.values())
        assert int(learner.actor.updates) == 1
        _, measured = iterate(learner, data, 2)
        assert measured["actor/skipped"] == 0
        assert int(learner.actor.updates) == 3
        assert int(learner.actor.skipped) == 0


def orders(one: Place, data: Data, config: Config, iteration: int) -> dict[str, list[list[int]]]:
    """The sequences of each update of an iteration, sorted, for both networks; nothing is trained."""
    seen: dict[str, list[list[int]]] = {"actor": [], "critic": []}
    counts = [0]

    def record(name: str) -> Callable[..., Any]:
        real = getattr(one.steps, f"update_{name}")

        def call(params: Params, grads: Params, base: Params, batch: Any, *rest: Any) -> Any:
            while len(seen[name]) <= counts[0]:
                seen[name].append([])
            last = np.asarray(batch.last)
            seen[name][counts[0]] += last[last >= 0].tolist()
            return real(params, grads, base, batch, *rest)

        return call

    def progress(stage: str, done: int, total: int) -> None:
        assert stage in ("update actor", "update critic")
        assert total == config.ppo.epochs * config.ppo.minibatches
        counts[0] = done % total

    steps = one.with_steps(update_actor=record("actor"), update_critic=record("critic"))
    with one.learner(config, steps) as learner:
        experience, _ = learner.experience(data.prompts, data.rollout, data.scores, 0.0)
        learner.update(data.prompts, data.rollout, experience, iteration, progress=progress)
    return {name: [sorted(update) for update in updates] for name, updates in seen.items()}


def test_minibatches_are_shuffled_afresh(one: Place, data: Data) -> None:
    config = changed(ppo={"epochs": 2, "minibatches": 4})
    first = orders(one, data, config, 1)
    assert first["actor"] == first["critic"]
    epochs = first["actor"][:4], first["actor"][4:]
    for epoch in epochs:
        assert [len(update) for update in epoch] == [4] * 4
        assert sorted(b for update in epoch for b in update) == list(range(B))
    assert epochs[0] != epochs[1]
    assert orders(one, data, config, 1) == first
    assert orders(one, data, config, 2)["actor"] != first["actor"]
    assert orders(one, data, changed(config, train={"seed": 1}), 1)["actor"] != first["actor"]


def test_stages_are_timed(one: Place, data: Data) -> None:
    stages = []

    @contextmanager
    def clock(stage: str) -> Iterator[None]:
        stages.append(stage)
        yield

    with one.learner() as learner:
        experience, _ = learner.experience(data.prompts, data.rollout, data.scores, 0.0, clock)
        learner.update(data.prompts, data.rollout, experience, 1, clock)
    assert stages == ["old_log_prob", "ref", "values", "adv", "update_actor", "update_critic"]


def gradients(place: Place, data: Data, experience: Experience) -> dict[str, Params]:
    """The gradient of one minibatch of all sequences, of both networks."""
    sums = {}
    with place.learner() as learner:
        for name, count in (("actor", 2), ("critic", 1)):
            network, accumulate = getattr(place.steps, name), getattr(place.steps, f"update_{name}")
            state = getattr(learner, name)
            grads, totals = network.zeros(state.params), [jnp.float32(data.mask.sum()) for _ in range(count)]
            for batch in learner.packed(data.prompts, data.rollout, np.arange(B)):
                grads, _ = accumulate(state.params, grads, {}, batch, experience, *totals)
            sums[name] = jax.tree.map(np.array, grads)
    return sums


@dataclasses.dataclass
class Outcome:
    """What an iteration leaves behind. split: over how many devices a matrix of the actor is spread, and its two moments."""

    experience: Experience
    metrics: dict[str, Any]
    gradients: dict[str, Params]
    weights: dict[str, Params]
    split: list[int]


def outcome(place: Place, data: Data) -> Outcome:
    with place.learner() as learner:
        experience, metrics = iterate(learner, data)
        weights = {"actor": copied(learner.actor), "critic": copied(learner.critic)}
        adam = learner.actor.opt_state[1]
        matrices = [tree["model"]["layers"]["mlp"]["up_proj"]["kernel"] for tree in (learner.actor.params, adam.mu, adam.nu)]
        split = [x.size // x.addressable_shards[0].data.size for x in matrices]
    host = jax.tree.map(np.array, experience)
    # Ratios away from 1, so that clipping takes part.
    moved = host.replace(old_logprobs=host.old_logprobs + 0.3 * np.sin(np.arange(B * LIMIT, dtype=np.float32)).reshape(B, LIMIT))
    moved = jax.device_put(moved, sharding.replicated(place.mesh))
    return Outcome(host, metrics, gradients(place, data, moved), weights, split)


@pytest.fixture(scope="module")
def alone(one: Place, data: Data) -> Outcome:
    return outcome(one, data)


def relative(ours: Params, theirs: Params) -> dict[str, float]:
    """|a - b| / |b| of each leaf."""
    named = jax.tree_util.tree_leaves_with_path(ours)
    size = lambda x: float(np.linalg.norm(np.asarray(x, np.float64)))  # noqa: E731
    return {
        jax.tree_util.keystr(path): size(a - b) / size(b) for (path, a), b in zip(named, jax.tree.leaves(theirs), strict=True)
    }


# The micro-batches are cut in another way on each mesh.
@pytest.mark.parametrize(
    ("sizes", "shape"), [((8, 1, 1), (8, 48)), ((2, 2, 2), (4, 64)), ((1, 8, 1), (16, 51)), ((1, 2, 4), (2, 48))]
)
def test_neither_mesh_nor_micro_batches_matter(
    sizes: tuple[int, int, int], shape: tuple[int, int], alone: Outcome, data: Data
) -> None:
    with quick_compilation():
        result = outcome(make_place(sizes, shape), data)
    # Every parameter is cut over `fsdp` and `tensor`, and stays so when it is updated.
    assert result.split == [sizes[1] * sizes[2]] * 3
    assert alone.split == [1] * 3
    for name in ("actor", "critic"):
        worst = max(relative(result.gradients[name], alone.gradients[name]).items(), key=lambda item: item[1])
        assert worst[1] <= 1e-5, worst
        worst = max(relative(result.weights[name], alone.weights[name]).items(), key=lambda item: item[1])
        assert worst[1] <= 1e-5, worst
    for name, theirs in vars(alone.experience).items():
        np.testing.assert_allclose(getattr(result.experience, name), theirs, atol=2e-5, err_msg=name)
    assert result.metrics.keys() == alone.metrics.keys()
    for name in alone.metrics.keys() - {"perf/packing_fill"}:
        np.testing.assert_allclose(result.metrics[name], alone.metrics[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_an_update_never_holds_tokens_times_vocabulary(one: Place) -> None:
    """Compiled for 16 x 1024 tokens and 65,536 ids, whose logits would be 4 GiB; nothing is run."""
    model = tiny.model(vocab_size=65_536)
    rows, length = 16, 1024
    steps = Steps(CONFIG, model, model, one.mesh)
    packed, array, number = (
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((B, LIMIT), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    with jax.set_mesh(one.mesh):
        shapes = steps.actor.typed_shapes(jnp.float32)
        experience = Experience(*[array] * 7)
        batch = PackedBatch(*[packed] * 6)
        compiled = steps.update_actor.lower(shapes, shapes, {}, batch, experience, number, number).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * length * model.vocab_size * 4 / 3


def test_row_shape_by_hand() -> None:
    """Prompts up to 24 and responses up to 24 make rows of 48; 400 tokens hold 8 of them."""
    assert row_shape(CONFIG, 24, 1) == (8, 48)
    assert row_shape(CONFIG, 24, 8) == (8, 48)
    assert row_shape(CONFIG, 24, 3) == (6, 48)
    # 17 + 24 = 41 is rounded up to a multiple of 8.
    assert row_shape(CONFIG, 17, 1) == (8, 48)
    # Ten rows of 40 would fit, but the 16 sequences of an iteration come in minibatches of 8, or of 4.
    assert row_shape(changed(ppo={"minibatches": 1}), 16, 1) == (10, 40)
    assert row_shape(CONFIG, 16, 1) == (8, 40)
    assert row_shape(changed(ppo={"minibatches": 4}), 16, 3) == (6, 40)
    with pytest.raises(
        InputError, match=r"config.ppo.micro_tokens=400: must hold one row of 48 tokens on each of the 16 row shards .* 768"
    ):
        row_shape(CONFIG, 24, 16)
